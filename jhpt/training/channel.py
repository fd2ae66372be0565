"""The connection of every process to process 0, over which they gather, say that they are alive, and stop together.

Process 0 listens at the coordinator's address, and nowhere else (`Hub`).  Over a first connection each process says
every second what it does and hears what process 0 concludes: lines of JSON.  Over others the bytes of jax's own service
pass, which listens on the loopback interface of process 0's host only.  A process's jax client talks to a relay in its
own process: jax ends a process with a stack of C++ when its service vanishes, and a relay never hangs up.

All of it runs in one thread with an event loop.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from jhpt.training.hub import Hub
from jhpt.training.peers import PAUSE, Beat, Seen, Verdict, gone_coordinator, stopped
from jhpt.training.wire import BEAT, CALL, LINE, RELAY, Here, Message, Place, keep_alive, line_of, relay


class Channel(threading.Thread):
    """The thread of the connection; on process 0 also of all that come in.

    relay_port: where this process's jax client finds jax's service, on the loopback interface.
    """

    def __init__(self, here: Here, place: Place) -> None:
        super().__init__(name="jhpt-peers", daemon=True)
        self.relay_port = 0
        self._here, self._place = here, place
        self._ready = threading.Event()
        self._failure: OSError | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._hub: Hub | None = None
        self._first: Beat | None = None  # of process 0
        self._heard = time.monotonic()

    def begin(self) -> None:
        """Starts the thread; returns once it listens.

        Raises:
          OSError: it cannot.
        """
        self.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def others(self) -> bool:
        """On process 0: whether another process is still here."""
        return self._hub is not None and len(self._hub.writers) > 1

    def beat(self) -> None:
        """Says now what this process does; from any thread."""
        self._soon(self._beat)

    def send(self, message: Message) -> None:
        """Sends a message to process 0; from any thread."""
        self._soon(self._write, message)

    def end(self) -> None:
        """Closes all connections and ends the thread."""
        self._soon(self._cancel)
        self.join()

    def _soon(self, action: Callable[..., None], *arguments: Message) -> None:
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(action, *arguments)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def run(self) -> None:
        """The thread."""
        with suppress(asyncio.CancelledError):
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self._place.process == 0:
                self._hub = Hub(self._here, self._place)
                await self._hub.listen()
            relays = await asyncio.start_server(self._relayed, "127.0.0.1", 0)
        except OSError as error:
            self._failure = error
            self._ready.set()
            return
        self.relay_port = relays.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            reader = await self._connected()
            if reader is not None:
                await asyncio.gather(self._beats(), self._listen(reader))
        finally:
            relays.close()
            if self._writer is not None:
                self._writer.close()
            if self._hub is not None:
                await self._hub.close()

    async def _connected(self) -> asyncio.StreamReader | None:
        """Connects to process 0, however long it takes to start, up to the time that is set."""
        place, begun, said = self._place, time.monotonic(), time.monotonic()
        while True:
            try:
                reader, self._writer = await asyncio.open_connection(place.host, place.port, limit=LINE)
                break
            except OSError as error:
                now = time.monotonic()
                if now - begun > place.wait:
                    self._here.conclude(Verdict(text=absent(place, error)))
                    return None
                if now - said > CALL:
                    said = now
                    self._here.say(f"process {place.process} waits for process 0 at {place}")
                await asyncio.sleep(0.2)
        keep_alive(self._writer, place.heartbeat)
        self._write({"processes": place.count, "beat": asdict(self._here.beat())})
        return reader

    def _write(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line_of(message))

    def _beat(self) -> None:
        self._write({"beat": asdict(self._here.beat())})

    async def _beats(self) -> None:
        """Says what this process does, and notices that process 0 says nothing any more."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(BEAT)
            self._beat()
            now = time.monotonic()
            if now - looked > PAUSE:  # this process itself was stopped
                self._heard += now - looked
            looked = now
            if self._first is not None:
                verdict = stopped([Seen(beat=self._first, heard=self._heard, moved=now)], now)
                if verdict is not None:
                    self._here.conclude(verdict)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hears process 0 until it ends."""
        with suppress(OSError):
            async for line in reader:
                self._heard = time.monotonic()
                self._obey(json.loads(line))
        self._here.conclude(gone_coordinator(self._first, str(self._place)))

    def _obey(self, message: Message) -> None:
        """Does what a message of process 0 says."""
        here = self._here
        match message:
            case {"beat": beat}:
                self._first = Beat(**beat)
            case {"joined": _}:
                here.joined()
            case {"verdict": verdict}:
                here.conclude(Verdict(**verdict | {"stacks": tuple(verdict["stacks"])}))
            case {"refused": text, "process": process, "status": status}:
                here.refused(process, text, status)
            case {"stop": reason, "run": run}:
                self._write({"at": here.hold(reason, run), "run": run})
            case {"after": step, "run": run}:
                here.stop_after(step, run)
            case {"close": everyone}:
                here.close(everyone)

    async def _relayed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection of jax's client here."""
        place = self._place
        await relay(reader, writer, place.host, place.port, first=RELAY, hold=True)


def absent(place: Place, error: OSError) -> str:
    """Why a process gives up when process 0 cannot be reached."""
    return (
        f"process {place.process} has waited {place.wait:g} s for process 0 at {place}: {error.strerror or error}; "
        "check that it was started and that the address is its own, or wait longer: --wait SECONDS"
    )
