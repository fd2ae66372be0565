"""Emulated hosts: one command on several network namespaces of this machine, joined by links of a known rate.

    with Lab(hosts=4, bits_per_s=500e6, cpu=0.5) as lab:
        results = lab.run(lambda rank, hosts, coordinator: ["python", "worker.py", str(rank)], timeout_s=60)
        lab.limit(100e6)  # the same hosts on slower links

A host is a namespace with one interface, `eth0`, at 10.77.0.(rank + 1).  The far ends are the ports of a bridge, the
switch, which lives in a namespace of its own; no namespace reaches the machine's own network, so that the addresses
are free in every lab.  A token bucket limits what a host sends, another at its port of the switch what it receives.
A CPU quota keeps a host that waits from lending its time to the others: without one, hosts that share cores hide each
other's idle time, and with it what a plan gains or loses by waiting.

All of a lab's state is the kernel's, found again by names that start with the lab's tag.  So a process that knows the
tag may limit the links, one that runs in a host included (`Lab(hosts=4, tag=tag).limit(100e6)`), and what a killed run
has left is removed when the next lab is entered.  A run that is interrupted, by Ctrl-C, SIGTERM or a terminal that
closes, leaves nothing.

How near it comes to `2 (n - 1) / n bytes / rate`, for 4 MiB of float32 reduced over four hosts of half a core each, on
two cores: 511 ms for 503 at 100 Mbit/s, 104 for 101 at 500, 53 for 50 at 1000, 28 for 25 at 2000.  Without a limit it
takes 10 to 16 ms, the processor's; where other programs want both cores too, 35 at 2000.  Links have no delay of their
own: a message goes and comes back in 50 microseconds.

Rooms: `lab` (entered, and its commands) over `links` (namespaces, rates), `quotas` (control groups), `processes` (what
runs in hosts), `remains` (found by tag, removed) and `signals`.
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
