"""What passes between the processes of a run: lines of JSON, and the bytes of jax's own service."""

import asyncio
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from jhpt.training.peers import Beat, Verdict

BEAT = 1.0
"""Seconds between two beats."""

CALL = 5.0
"""Seconds between two lines that say who is missing."""

FLUSH = 1.0
"""Seconds that a last message may take."""

RELAY = b"jax\n"
"""The first line of a connection for jax."""

LINE = 1 << 16
"""Longest message in bytes."""

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the processes gather, and how long they wait.

    host, port: process 0's.  listen: the host name or address that process 0 binds; None: all of them.
    jax_port: of jax's service, on the loopback interface of process 0's host; 0 on all others.
    heartbeat: seconds after which a host that answers nothing is gone.
    """

    host: str
    port: int
    listen: str | None
    process: int
    count: int
    jax_port: int
    wait: float
    heartbeat: float

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Here(Protocol):
    """This process, as the channel sees it; called in the channel's thread."""

    def beat(self) -> Beat:
        """What it says of itself."""

    def joined(self) -> None:
        """All processes are here."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def conclude(self, verdict: Verdict) -> None:
        """Leaves."""

    def refused(self, process: int, text: str, status: int) -> None:
        """A process has refused the run."""

    def hold(self, reason: str, run: int) -> int:
        """A signal has reached a process: begins no further step of the run; returns the last one begun."""

    def stop_after(self, step: int, run: int) -> None:
        """The step of the run after which all stop."""

    def close(self, everyone: bool) -> None:
        """No process needs this one any more; everyone: whether all have come to their end."""


async def relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: str,
    port: int,
    *,
    first: bytes = b"",
    hold: bool = False,
) -> None:
    """Passes bytes on in both directions.  hold: never hangs up on whoever connected here."""
    for _ in range(150):
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
            break
        except OSError:
            await asyncio.sleep(0.2)
    else:
        writer.close()
        return
    there_writer.write(first)
    up = asyncio.ensure_future(_pass_on(reader, there_writer))
    await _pass_on(there_reader, writer, close=not hold)
    await up


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, close: bool = True) -> None:
    with suppress(OSError):
        while data := await reader.read(LINE):
            writer.write(data)
            await writer.drain()
    if close:
        writer.close()


async def sent(writer: asyncio.StreamWriter) -> None:
    """Waits until the kernel has everything."""
    with suppress(OSError):
        while writer.transport.get_write_buffer_size() and not writer.is_closing():
            await asyncio.sleep(0.01)


def line_of(message: Message) -> bytes:
    """The line that is sent."""
    return json.dumps(message).encode() + b"\n"


def keep_alive(writer: asyncio.StreamWriter, heartbeat: float) -> None:
    """Makes the kernel end the connection once the other host has answered nothing for so long."""
    sock: socket.socket = writer.get_extra_info("socket")
    each = max(round(heartbeat / 4), 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", each), ("TCP_KEEPINTVL", each), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(heartbeat * 1000))
