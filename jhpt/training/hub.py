"""Process 0's side of the connections: who is here, who has to leave, where all stop."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import asdict

from jhpt.core.errors import Exit
from jhpt.training.peers import Beat, Members, Verdict, roll_call
from jhpt.training.wire import BEAT, CALL, FLUSH, LINE, RELAY, Here, Message, Place, keep_alive, line_of, relay, sent


class Hub:
    """Process 0's side of all connections."""

    def __init__(self, here: Here, place: Place) -> None:
        self._here, self._place = here, place
        self._members = Members(place.count)
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self._joined, self._concluded, self._closed = False, False, False
        self._begun = time.monotonic()
        self._begun_steps: dict[int, dict[int, int]] = {}
        self._leaving: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def listen(self) -> None:
        """Takes connections from now on.

        Raises:
          OSError: the address is not one of this host, or taken.
        """
        place = self._place
        self._server = await asyncio.start_server(self._accepted, place.listen, place.port, limit=LINE)
        self._tasks = [asyncio.ensure_future(self._look()), asyncio.ensure_future(self._call())]

    async def close(self) -> None:
        """Ends all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self.writers.values():
            writer.close()
        await asyncio.sleep(0.01)  # until they are closed

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer, self._place.heartbeat)
        try:
            line = await asyncio.wait_for(reader.readline(), self._place.heartbeat)
            if line == RELAY:
                await relay(reader, writer, "127.0.0.1", self._place.jax_port)
                return
            hello = json.loads(line)
            beat, count = Beat(**hello["beat"]), int(hello["processes"])
            if not isinstance(beat.process, int):
                raise TypeError
        except (OSError, ValueError, TypeError, KeyError, TimeoutError):  # no process of ours
            writer.close()
            return
        if self._welcome(beat, count, writer):
            await self._hear(beat.process, reader)

    def _welcome(self, beat: Beat, count: int, writer: asyncio.StreamWriter) -> bool:
        twin = self._members.seen.get(beat.process)
        if twin is not None:
            text = f"process {beat.process} is here already: {twin.beat.name}; give each a --process-id of its own"
            writer.write(line_of({"verdict": asdict(Verdict(text=text, status=Exit.INPUT))}))
            writer.close()
            return False
        self._members.hear(beat, time.monotonic())
        self.writers[beat.process] = writer
        if count != self._place.count or not 0 <= beat.process < count:
            text = f"{beat.name} was told of {count} processes, and process 0 of {self._place.count}; start all alike"
            self._tasks.append(asyncio.ensure_future(self._conclude(Verdict(text=text, status=Exit.INPUT))))
        elif not self._members.missing:
            self._joined = True
            self._tell_all({"joined": True})
        return True

    async def _hear(self, process: int, reader: asyncio.StreamReader) -> None:
        """What a process says, until it ends."""
        with suppress(OSError, ValueError, TypeError):
            async for line in reader:
                self._obey(process, json.loads(line))
        self.writers.pop(process).close()
        verdict = self._members.lost(process)
        if verdict is not None:
            await self._conclude(verdict)
        self._close()

    def _close(self) -> None:
        """Lets all go once each has come to its end or is gone."""
        if self._joined and not self._closed and self._leaving >= self.writers.keys():
            self._closed = True
            self._tell_all({"close": len(self._leaving) == self._place.count})

    def _obey(self, process: int, message: Message) -> None:
        match message:
            case {"beat": beat}:
                self._members.hear(Beat(**beat), time.monotonic())
            case {"refused": text, "status": status}:
                self._tell_all({"refused": text, "process": process, "status": status})
            case {"stop": reason, "run": run} if run not in self._begun_steps:
                # All hold, say which step they have begun, and hear which is the last: one that nobody has begun.
                self._begun_steps[run] = {}
                self._tell_all({"stop": reason, "run": run})
            case {"at": step, "run": run}:
                begun = self._begun_steps[run]
                begun[process] = step
                if len(begun) == self._place.count:
                    self._tell_all({"after": max(begun.values()) + 1, "run": run})
            case {"leaving": _}:
                self._leaving.add(process)
                self._close()

    async def _look(self) -> None:
        """Once a second: tells all that process 0 lives, and looks whether all others do."""
        while True:
            await asyncio.sleep(BEAT)
            self._tell_all({"beat": asdict(self._here.beat())})
            verdict = self._members.judge(time.monotonic()) if self._joined else None
            if verdict is not None:
                await self._conclude(verdict)

    async def _call(self) -> None:
        """Says who is missing, and gives up after a while."""
        place = self._place
        while not self._joined:
            left = self._begun + place.wait - time.monotonic()
            if left <= 0:
                await self._conclude(Verdict(text=never_came(self._members, place)))
                return
            await asyncio.sleep(min(CALL, left))
            if self._members.missing:
                self._here.say(roll_call(self._members))

    def _tell_all(self, message: Message) -> None:
        for writer in self.writers.values():
            if not writer.is_closing() and writer.transport.get_write_buffer_size() < LINE:
                writer.write(line_of(message))

    async def _conclude(self, verdict: Verdict) -> None:
        """Tells all others, then leaves."""
        if self._concluded:
            return
        self._concluded = True
        self._tell_all({"verdict": asdict(verdict)})
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*map(sent, self.writers.values())), FLUSH)
        self._here.conclude(verdict)


def never_came(members: Members, place: Place) -> str:
    """Why all give up when some have not come."""
    return (
        f"after {place.wait:g} s {roll_call(members)}; check that they were started with --coordinator {place} and "
        "that they reach it, or wait longer: --wait SECONDS"
    )
