"""Emulated hosts: one command in several network namespaces of this machine, joined by links of a known rate.

    with Lab(hosts=4, bits_per_s=500e6, cpu=0.5) as lab:
        results = lab.run(lambda rank, hosts, coordinator: ["python", "worker.py", str(rank)], timeout_s=60)
        lab.limit(100e6)  # the same hosts on slower links

A host is a namespace with one interface, `eth0`, at 10.77.0.(rank + 1).  The other ends of the links are the ports of a
bridge, the switch, which has a namespace of its own.  No namespace reaches the machine's network, so the addresses are
free in every lab.  Token buckets limit the rate at which a host sends; others, at its port of the switch, limit the
rate at which it receives.  CPU quotas make waiting cost what it costs on real hosts: without them, hosts that share
cores would compute while others wait, and hide each other's idle time.

Hosts have the machine's kernel, host name and memory in common.  `jhpt.core.host` tells them apart by the inodes of
their network namespaces, so `parallel: auto` takes each for a node.

The kernel holds all state of a lab under names that start with the lab's tag.  So every process that knows the tag can
limit the links, also one that runs in a host (`Lab(hosts=4, tag=tag).limit(100e6)`), and the remains of a killed run
are removed when the next lab is entered.  A run that is interrupted by Ctrl-C, SIGTERM or a closed terminal leaves
nothing.

An all-reduce of 4 MiB of float32 over four hosts of half a core each, on two cores, takes these milliseconds (in
brackets `2 (n - 1) / n bytes / rate`): 510 (503) at 100 Mbit/s, 102 (101) at 500, 52 (50) at 1000, 26 (25) at 2000.
Without a limit it takes 10 to 16 ms of computation; if other programs use both cores too, 35 at 2000.  Links add no
delay: a message and its answer take 50 microseconds.

Modules: `lab` (entering, and commands) over `links` (namespaces, rates), `quotas` (control groups), `processes` (the
commands in hosts), `remains` (finding by tag and removing) and `signals`.
"""

from benchmarks.netlab.errors import LabError
from benchmarks.netlab.lab import Command, Lab, why_not
from benchmarks.netlab.links import queue_discipline
from benchmarks.netlab.processes import HostError, HostResult, HostTimeout
from benchmarks.netlab.quotas import CpuController, cpu_controller
from benchmarks.netlab.signals import Ended

__all__ = [
    "Command",
    "CpuController",
    "Ended",
    "HostError",
    "HostResult",
    "HostTimeout",
    "Lab",
    "LabError",
    "cpu_controller",
    "queue_discipline",
    "why_not",
]
