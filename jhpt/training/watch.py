"""What this process does, for the others to know, and how it leaves when one of them cannot go on.

The loop and what is around it name their phases (`phase`, `stepping`).  A thread (`training.channel`) tells the others,
and hears from process 0 that all have to leave.  The main thread may then be waiting inside a collective that never
ends, so the process prints one line and ends at once, without jax's shutdown, which would wait for the others.
"""

import faulthandler
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jhpt.core.errors import Exit, InputError, JhptError
from jhpt.core.peers_config import PeersConfig
from jhpt.training.channel import Channel
from jhpt.training.peers import Beat, Verdict
from jhpt.training.wire import Place

SHORTEST_STALL, STEPS_PER_STALL = 60.0, 10
"""Without a setting, a process is stuck after the larger of so many seconds and the time of so many steps."""

WORK_SHARE, WORK_BYTES = 0.1, 1 << 16
"""A process is at work if it uses this share of a core, or reads and writes so many bytes in a second."""

SHORTEST_LOOK = 0.5
"""Seconds over which work is measured at least: between two beats in a row only their own work would be seen."""

KNOWN_STEPS = 3
"""Steps after which their time is known; the first ones also compile and connect."""

GRACE = 3.0
"""Seconds that a refusal of another process leaves to the main thread to end in an orderly way."""

SIGNAL_GRACE = 10.0
"""Seconds after a signal within which a process that has nothing to save leaves, whatever it does."""

LINGER = 5.0
"""Seconds that process 0 stays for the others' end."""

ROOM = 10**9
"""Positions of one run."""

WAITING = {"sync_global_processes", "sync_global_devices", "process_allgather", "gathered", "State.initialize"}
"""Functions in which a thread waits for other processes; the last one is jax's, when processes connect."""


class Refused(InputError):
    """Another process cannot go on, and has said why."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = Exit(status)


class PeerLost(JhptError):
    """Another process is gone, stopped, stuck, or never came."""

    status = Exit.PEER


class Watch:
    """The state of this process that others know, and what it knows of theirs.  There is one for each process."""

    def __init__(self) -> None:
        self.stacks: Path | None = None
        self._channel: Channel | None = None
        self._process, self._peers = 0, PeersConfig()
        self._doing, self._position, self._run, self._ended = "starting", 0, 0, 0
        self._steps: deque[float] = deque(maxlen=50)
        self._step, self._step_begun = -1, 0.0
        self._work, self._worked, self._bytes, self._looked = 0, time.process_time(), _bytes_moved(), time.monotonic()
        self._held: dict[int, str] = {}
        self._stops: dict[int, int] = {}
        self._change = threading.Condition()
        self._started, self._closed = threading.Event(), threading.Event()
        self._all_left = True
        self._lost: Verdict | None = None
        self._refusal: tuple[int, str, int] | None = None

    # What the main thread says

    @contextmanager
    def run(self) -> Iterator[None]:
        """A run, which all processes begin.  What ends it here with an error ends it on all of them."""
        self._run += 1
        self._position, self._step, self._refusal = self._run * ROOM, -1, None
        self._doing = "starting"
        self._steps.clear()
        try:
            yield
        except Refused:
            raise
        except JhptError as error:
            self._wait_for_verdict(1.0 if error.__cause__ or error.__context__ else 0.0)
            self.refuse(str(error), error.status)
            raise
        except KeyboardInterrupt:
            self.refuse("interrupted", Exit.INTERRUPTED)
            raise
        except Exception as error:
            self._wait_for_verdict(self._peers.heartbeat_seconds + 2)  # a collective fails when a process ends
            self.refuse(f"{type(error).__name__}: {error}".partition("\n")[0], Exit.CRASH)
            raise
        finally:
            self._ended, self._doing = self._run, "done"
            self._tell()

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Time in which this process does something that all do: `"saving step 40"`."""
        before, self._doing = self._doing, doing
        self._position += 1
        self._tell()
        try:
            yield
        finally:
            self._position += 1
            self._doing = before

    def stepping(self, step: int) -> None:
        """The step begins, and the one before it has ended."""
        now = time.monotonic()
        if self._doing.startswith("in step"):
            self._steps.append(now - self._step_begun)
        self._step_begun, self._doing = now, f"in step {step}"
        self._position += 1

    def stops_after(self, step: int) -> bool:
        """Whether all processes stop after this step; the same answer on every process.

        Call it after every step, and with the number of the last one before the first.
        """
        with self._change:
            self._change.wait_for(lambda: self._run not in self._held or self._run in self._stops)
            self._step = step
            return self._run in self._stops and step >= self._stops[self._run]

    def stop(self, reason: str) -> None:
        """Makes all processes stop after the same step, soon; from any thread."""
        if self._channel is not None and self._started.is_set():
            self._channel.send({"stop": reason, "run": self._run})
        else:
            self.hold(reason, self._run)
            self.stop_after(-1, self._run)

    def refuse(self, text: str, status: int) -> None:
        """Tells the others that this process cannot go on, so that they do not wait for it."""
        if self._channel is None or self._refusal is not None:
            return
        self._channel.send({"refused": text, "status": int(status)})
        with self._change:  # until all have been told, as this process may end next
            self._change.wait_for(lambda: self._refusal is not None, GRACE)

    def refusal(self) -> Refused:
        """Why another process cannot go on, which has said so or is about to."""
        with self._change:
            self._change.wait_for(lambda: self._refusal is not None, GRACE)
            if self._refusal is None:
                return Refused("another process failed; see its own error message", Exit.INPUT)
            process, text, status = self._refusal
        return Refused(f"process {process} failed: {text}", status)

    # Joining and leaving

    def join(self, place: Place, peers: PeersConfig) -> int:
        """Waits until all processes are here; returns the port at which this process's jax client finds the service.

        Raises:
          OSError: process 0 cannot listen there.
          PeerLost: some did not come in time.
        """
        self._process, self._peers = place.process, peers
        self._doing = "waiting for the others"
        channel = Channel(self, place)
        channel.begin()
        self._channel = channel
        while not self._started.wait(0.2):
            if self._run in self._held:  # a signal
                raise KeyboardInterrupt
            if self._refusal is not None:
                raise self.refusal()
        if self._lost is not None:
            raise _error(self._lost)
        self._doing = "connecting"
        return place.jax_port or channel.relay_port

    def leave(self) -> None:
        """Waits at the end of this process until no other needs it; ends it at once if not all have come to their end,
        because jax's shutdown would wait for them."""
        if self._channel is None or not self._started.is_set() or self._lost is not None:
            return
        self._channel.send({"leaving": True})
        while not self._closed.wait(0.2):
            pass
        if not self._all_left:
            sys.stdout.flush()
            os._exit(int(self._refusal[2] if self._refusal else Exit.PEER))

    def linger(self) -> None:
        """On process 0: waits until the others have ended their part of jax's shutdown."""
        deadline = time.monotonic() + LINGER
        while self._channel is not None and self._channel.others and time.monotonic() < deadline:
            time.sleep(0.02)

    # What the channel's thread says

    def beat(self) -> Beat:
        """What this process says of itself."""
        self._measure_work()
        return Beat(
            process=self._process,
            host=socket.gethostname(),
            pid=os.getpid(),
            doing=self._doing,
            position=self._position,
            work=self._work,
            waits=_waits(),
            allowance=self._allowance(),
            run=self._run,
            ended=self._ended,
        )

    def joined(self) -> None:
        """All processes are here."""
        self._started.set()

    def say(self, text: str) -> None:
        """A line for the user."""
        _print(text)

    def conclude(self, verdict: Verdict) -> None:
        """Leaves: by an exception while the main thread waits for the others to come, else at once."""
        text = verdict.text
        if self._process in verdict.stacks:
            text += f"; stacks: {self._write_stacks()}"
        if not self._started.is_set():
            self._lost = verdict
            self._started.set()
        elif self._refusal is not None:
            process, why, status = self._refusal
            _end(f"process {process} failed: {why}" if self._ended < self._run else None, status)
        elif self._run in self._held and self._step < 0:
            self._end_for_signal()
        else:
            _end(text, verdict.status)

    def refused(self, process: int, text: str, status: int) -> None:
        """Gives the main thread a moment to end in an orderly way."""
        with self._change:
            if self._refusal is not None:
                return
            self._refusal = (process, text, status)
            self._change.notify_all()
        run = self._run

        def end() -> None:
            if self._run == run and self._ended < run:
                _end(f"process {process} failed: {text}" if process != self._process else text, status)

        later(GRACE, end)

    def hold(self, reason: str, run: int) -> int:
        """Begins no further step of the run; returns the last one begun."""
        with self._change:
            self._held.setdefault(run, reason)
            step = self._step if run == self._run else -1

        def end() -> None:
            if self._run == run and self._ended < run and self._step < 0 and not hasattr(sys, "ps1"):
                self._end_for_signal()

        later(SIGNAL_GRACE, end)
        return step

    def stop_after(self, step: int, run: int) -> None:
        """The step of the run after which all stop."""
        with self._change:
            self._stops.setdefault(run, step)
            self._change.notify_all()

    def close(self, everyone: bool) -> None:
        """No process needs this one any more; everyone: whether all have come to their end."""
        self._all_left = everyone
        self._closed.set()

    def _end_for_signal(self) -> None:
        _end(f"stopped by {self._held[self._run]} while {self._doing}; there was nothing to save", Exit.INTERRUPTED)

    def _tell(self) -> None:
        if self._channel is not None:
            self._channel.beat()

    def _wait_for_verdict(self, seconds: float) -> None:
        """Does not return if another process is at fault, because the channel's thread ends this one."""
        if self._channel is not None and self._refusal is None:
            time.sleep(seconds)

    def _allowance(self) -> float:
        if self._peers.stall_seconds is not None:
            return self._peers.stall_seconds
        steps = list(self._steps)
        return max(SHORTEST_STALL, STEPS_PER_STALL * statistics.median(steps)) if steps else SHORTEST_STALL

    def _measure_work(self) -> None:
        """Counts up if this process has been at work; in a step only the next step counts, as waiting costs work."""
        worked, moved, now = time.process_time(), _bytes_moved(), time.monotonic()
        seconds = now - self._looked
        if seconds < SHORTEST_LOOK:
            return
        at_work = worked - self._worked > WORK_SHARE * seconds or moved - self._bytes > WORK_BYTES * seconds
        if at_work and not (self._doing.startswith("in step") and len(self._steps) >= KNOWN_STEPS):
            self._work += 1
        self._worked, self._bytes, self._looked = worked, moved, now

    def _write_stacks(self) -> Path:
        """Writes the stacks of all threads into the run directory, or a temporary folder before there is one."""
        folder = self.stacks if self.stacks and self.stacks.is_dir() else Path(tempfile.mkdtemp(prefix="jhpt-"))
        path = folder / f"stacks-{self._process}.log"
        with suppress(OSError), path.open("a") as file:
            faulthandler.dump_traceback(file)
        return path


def _error(verdict: Verdict) -> JhptError:
    return InputError(verdict.text) if verdict.status == Exit.INPUT else PeerLost(verdict.text)


def _waits() -> bool:
    """Whether a thread waits for other processes."""
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            if at.f_code.co_qualname in WAITING:
                return True
            at = at.f_back  # type: ignore[assignment]
    return False


def _bytes_moved() -> int:
    """Bytes that this process has read and written, by files and memory maps; 0 where the kernel does not say."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().split("\n")
        return sum(int(line.partition(":")[2]) for line in lines if line and not line.startswith("sysc"))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 512 * (usage.ru_inblock + usage.ru_oublock)


def later(seconds: float, action: Callable[[], None]) -> None:
    """Calls `action` after so many seconds, in a thread that keeps no process alive."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def _print(text: str) -> None:
    """A line on stderr, also if another thread holds Python's lock on it."""
    with suppress(OSError):
        os.write(2, f"jhpt train: {text}\n".encode())


def _end(text: str | None, status: int) -> None:
    """Prints the line, if it has not been said, and ends this process, after what it has printed so far."""
    flush = threading.Thread(target=lambda: [sys.stdout.flush(), sys.stderr.flush()], daemon=True)
    flush.start()
    flush.join(1.0)
    if text is not None:
        _print(text)
    os._exit(int(status))


watch = Watch()
"""That of this process."""
