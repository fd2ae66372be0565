"""The network of a lab: a namespace for each host, a bridge between them, and the rate of every link."""

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.netlab.errors import LabError
from benchmarks.netlab.signals import unbroken
from jhpt.core.errors import InputError

NETWORK = "10.77.0"
MAX_HOSTS = 250
"""As many as one /24 network can hold."""

PORT = 5599
"""The port of the coordinator; every lab has all ports to itself."""

MTU = 9000
"""Bytes, the jumbo frames of clusters: 66 bytes of headers are 0.7 % of a full frame, and 4.4 % of one of 1500."""

FRAME = MTU + 14
"""Bytes of a full frame: the kernel counts the Ethernet header."""

PACKET = 1 << 15
"""Bytes that TCP hands to a link at a time, to be cut into frames, and bytes of a connection that may wait in a link's
queue.  The rest waits in the connection, so that the few bytes with which a peer reports that it is ready do not wait
behind it.  Network cards alternate between connections; here packets of a host to different hosts take turns
(`alternating`), but a switch's queue is first come, first served.  While a host's was, too, with the kernel's defaults,
64 KiB and 4 MiB, passing 1 MiB round a ring at 500 Mbit/s took 24.8 ms instead of 17.2 (16.8 by the rate).  With half
of this size, an all-reduce at 2 Gbit/s took 38 ms instead of 28, because of processor time."""

TCP = {"tcp_congestion_control": "reno", "tcp_limit_output_bytes": PACKET}
"""Reno is in every kernel, and without losses it leaves the rate to the link.  A machine's default may choose a rate
itself: with BBR, passing 1 MiB at 2 Gbit/s took 5.9 ms instead of 4.3."""

BURST_S = 1e-3
"""Seconds of sending that the bucket of a link's rate holds: longer than the delay of a timer on a busy machine, which
would lower the rate."""

PEAK_S = 150e-6
"""Seconds of sending, or one frame if that is longer, that a link sends at once after a pause.  A second bucket, of the
peak rate, sees to that.  With the first one alone, a collective permute of 64 KiB after a pause took 1.0 ms at 500
Mbit/s instead of the 1.05 of the wire and 0.65 besides (now 1.7), and a pipeline of small micro-batches paid almost
nothing for the wire."""

LATE_S = 25e-6
"""Seconds by which the timer of a full second bucket is late, so its rate is that much higher than the link's.  Of the
rate without this, links reached 0.97, 0.84 and 0.65 at 100, 500 and 2,000 Mbit/s.  Where timers are on time, a message
after a pause is up to 20 % faster than the link, and a stream is not."""

QUEUE = 1 << 26
"""Bytes that a link queues before it drops packets: more than the windows of the connections to a host, so that nothing
is lost.  Fabrics of clusters have flow control.  A single packet that is sent again after 200 ms would dominate a
measurement."""

NAMESPACES, SETTINGS = Path("/run/netns"), Path("/etc/netns")
"""Where ip(8) has namespaces, and the files that replace those of /etc inside them."""


def address(rank: int) -> str:
    """The address under which the other hosts reach a host."""
    return f"{NETWORK}.{rank + 1}"


def check_rate(bits_per_s: float | None) -> None:
    """Raises: InputError for a rate that no link can have."""
    if bits_per_s is not None and not 1e4 <= bits_per_s < 1e12:
        raise InputError(f"bits_per_s={bits_per_s:g}: a link's rate is between 1e4 and 1e12 bit/s")


def queue_discipline(bits_per_s: float | None) -> str:
    """The queue discipline of tc(8) for the sending end of a link: token buckets, or none."""
    if bits_per_s is None:
        return "noqueue"
    bytes_per_s = bits_per_s / 8
    burst = max(int(bytes_per_s * BURST_S), 2 * FRAME)
    at_once = max(int(bytes_per_s * PEAK_S), FRAME)
    peak = max(8 * at_once / (at_once / bytes_per_s - LATE_S), 1.01 * bits_per_s)  # the kernel refuses equal rates
    buckets = f"rate {bits_per_s:.0f}bit burst {burst} peakrate {peak:.0f}bit mtu {at_once}"
    return f"tbf {buckets} limit {QUEUE + burst}"


def alternating(hosts: int) -> list[str]:
    """Lines of tc(8) that let packets to different hosts take turns in the queue of a host's link, a frame of each.

    Classes without a limit of their own, one for each host that packets go to, and one for all others.
    """
    lines = ["qdisc add dev eth0 parent 1:1 handle 2: htb default ffff", _class("ffff")]
    for rank in range(hosts):
        to_host = f"u32 match ip dst {address(rank)}/32 flowid 2:{rank + 1:x}"
        lines += [_class(f"{rank + 1:x}"), f"filter add dev eth0 parent 2: protocol ip prio 1 {to_host}"]
    return lines


def _class(number: str) -> str:
    return f"class add dev eth0 parent 2: classid 2:{number} htb rate 100gbit quantum {FRAME}"


def make_network(switch: str, hosts: Sequence[str]) -> None:
    """Makes the namespaces of these names, and links without a limit between them."""
    for name in (switch, *hosts):
        call("ip", "netns", "add", name)
    batch("ip", switch, ["link add switch type bridge", "link set switch up"])
    for rank, host in enumerate(hosts):
        commands = [
            f"link add eth0 mtu {MTU} type veth peer name port{rank} mtu {MTU} netns {switch}",
            f"link set eth0 gso_max_size {PACKET}",
            f"address add {address(rank)}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
        ]
        batch("ip", host, commands)
        tune = " && ".join(f"echo {value} >/proc/sys/net/ipv4/{name}" for name, value in TCP.items())
        call(*inside(host), "sh", "-c", tune)
        # A library that binds the address of the host name, as Gloo does, would bind the machine's loopback.
        settings = SETTINGS / host
        settings.mkdir(parents=True)
        (settings / "hosts").write_text(f"{address(rank)} {socket.gethostname()}\n127.0.0.1 localhost\n")
    batch("ip", switch, [f"link set port{rank} master switch up" for rank in range(len(hosts))])


def limit(switch: str, hosts: Sequence[str], bits_per_s: float | None) -> None:
    """Sets the rate of every link in each direction; None lifts the limit."""
    queue = queue_discipline(bits_per_s)
    lines = ["qdisc replace dev eth0 root noqueue"]  # without the classes of before
    if bits_per_s is not None:
        lines += [f"qdisc replace dev eth0 root handle 1: {queue}", *alternating(len(hosts))]
    for host in hosts:
        batch("tc", host, lines)
    batch("tc", switch, [f"qdisc replace dev port{rank} root {queue}" for rank in range(len(hosts))])


def inside(namespace: str) -> list[str]:
    """The arguments before a command that is to run in a namespace."""
    return ["ip", "netns", "exec", namespace]


def batch(program: str, namespace: str, lines: Sequence[str]) -> None:
    """Runs lines of ip(8) or tc(8) in a namespace, as one process."""
    call(program, "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def call(*line: str, text: str = "") -> None:
    """Runs a program that configures the kernel.

    Raises: LabError with its message, if it fails.
    """
    with unbroken():
        done = subprocess.run(line, input=text, capture_output=True, text=True)
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise LabError(f"`{' '.join([*line, *text.splitlines()])}` failed: {message}")
