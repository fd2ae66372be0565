"""Ports of this host for the processes of a run."""

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWN_CHOICES = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: the first and last port that the system chooses from for connections and for whoever asks for any port."""

FIRST = 10_000
"""Below it are the ports of well-known services."""

TRIES = 100


def free_port() -> int:
    """A port of the loopback interface at which nothing listens.

    Some time passes until somebody listens there.  So it lies outside the range from which the system itself chooses:
    a connection that is opened in the meantime cannot take it.
    """
    for _ in range(TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", _outside_the_systems_choices()))
            port: int = probe.getsockname()[1]
            return port
    raise OSError("no port of 127.0.0.1 is free")


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback interface that nothing else takes meanwhile.

    Only a server of the same user that shares its port, as those of gRPC do (`SO_REUSEPORT`), can listen there.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _outside_the_systems_choices() -> int:
    """A random port, or 0 (any) where the system's choices leave none."""
    with suppress(OSError, ValueError, IndexError):
        first_of_system = int(OWN_CHOICES.read_text().split()[0])
        if first_of_system > FIRST:
            return FIRST + secrets.randbelow(first_of_system - FIRST)
    return 0
