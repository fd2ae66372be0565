"""Which process of a run is gone, stopped or stuck: the judgement alone, from what processes say of themselves.

Every process says once a second what it does (`Beat`), and process 0 judges (`Members`).  There is no clock in here:
the caller says what time it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jhpt.core.errors import Exit

PAUSE = 3.0
"""Seconds without a beat after which a process is silent.  If the judge has not looked for so long, it was stopped
itself, and nobody's silence counts."""

REMEDY = "look at its own output, then start all processes again with the same --out, which resumes the run"


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a process says of itself.

    doing: what follows "it was": "in step 40".
    position: how many phases and steps it has entered and left; all processes of a run go through the same ones, so
      that the smallest position is that of the process for which the others wait.
    work: grows while the process computes or moves bytes within a phase.
    waits: whether a thread of it waits for other processes.
    allowance: seconds for which position and work may stand still.
    run, ended: how many runs it has begun and ended.
    """

    process: int
    host: str
    pid: int
    doing: str
    position: int
    work: int
    waits: bool
    allowance: float
    run: int
    ended: int

    @property
    def name(self) -> str:
        """`process 1 on node7 (pid 4242)`."""
        return f"process {self.process} on {self.host} (pid {self.pid})"

    @property
    def busy(self) -> bool:
        """Whether it is in a run."""
        return self.run > self.ended


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why all processes have to leave, and with which exit status.  stacks: the processes that show where they are."""

    text: str
    status: int = Exit.PEER
    stacks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A process's last beat, when it was heard, and when one was heard last that differed in position or work."""

    beat: Beat
    heard: float
    moved: float

    def later(self, seconds: float) -> "Seen":
        """As if everything had been heard so much later."""
        return replace(self, heard=self.heard + seconds, moved=self.moved + seconds)

    def followed(self, beat: Beat, now: float) -> "Seen":
        """With the next beat."""
        same = (beat.position, beat.work) == (self.beat.position, self.beat.work)
        return Seen(beat=beat, heard=now, moved=self.moved if same else now)


class Members:
    """The processes that have joined, as process 0 hears them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: dict[int, Seen] = {}
        self._looked: float | None = None

    @property
    def missing(self) -> list[int]:
        """The processes that are not here."""
        return [process for process in range(self.count) if process not in self.seen]

    def hear(self, beat: Beat, now: float) -> None:
        """Notes a beat."""
        before = self.seen.get(beat.process)
        self.seen[beat.process] = (
            Seen(beat=beat, heard=now, moved=now) if before is None else before.followed(beat, now)
        )

    def lost(self, process: int) -> Verdict | None:
        """What the end of a process means: nothing if it has ended its part of what the others are doing."""
        beat = self.seen.pop(process).beat
        if not any(seen.beat.busy and seen.beat.run > beat.ended for seen in self.seen.values()):
            return None
        return Verdict(text=f"{beat.name} is gone; it was {beat.doing}; {REMEDY}")

    def judge(self, now: float) -> Verdict | None:
        """Who is stopped or stuck; call it about once a second."""
        gap = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if gap > PAUSE:
            self.seen = {process: seen.later(gap) for process, seen in self.seen.items()}
        return stopped(self.seen.values(), now) or stuck(self.seen.values(), now)


def stopped(members: Iterable[Seen], now: float) -> Verdict | None:
    """Who is silent, though its connection stands."""
    silent = [seen for seen in members if seen.beat.busy and now - seen.heard > seen.beat.allowance]
    return _no_answer(silent, now) if silent else None


def _no_answer(silent: Sequence[Seen], now: float) -> Verdict:
    return Verdict(text=f"{_said(silent, 'heard')} for {now - silent[0].heard:.0f} s; {REMEDY}")


def stuck(members: Iterable[Seen], now: float) -> Verdict | None:
    """Who makes no progress, so that the others wait.

    Of the processes that are furthest behind all must have stood still for too long, because one of them that is at
    work is what the others wait for.  Those that wait for others themselves are named only if all do.
    """
    members = list(members)
    run = max((seen.beat.run for seen in members), default=0)
    if any(seen.beat.run < run for seen in members):  # somebody has not begun this run, for reasons of his own
        return None
    busy = [seen for seen in members if seen.beat.busy]
    first = min((seen.beat.position for seen in busy), default=0)
    behind = [seen for seen in busy if seen.beat.position == first]
    if not behind or any(now - seen.moved <= seen.beat.allowance for seen in behind):
        return None
    causes = [seen for seen in behind if not seen.beat.waits] or behind
    if silent := [seen for seen in causes if now - seen.heard > PAUSE]:
        return _no_answer(silent, now)
    processes = tuple(seen.beat.process for seen in causes)
    seconds = now - max(seen.moved for seen in causes)
    where = "it has written where it stands" if len(causes) == 1 else "they have written where they stand"
    return Verdict(text=f"{_said(causes, 'moved')} for {seconds:.0f} s; {where}; {REMEDY}", stacks=processes)


def _said(members: Sequence[Seen], what: str) -> str:
    """`process 1 on node7 (pid 4242) was in step 40 and has made no progress`; of many the first."""
    beat, others = members[0].beat, len(members) - 1
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    verb = "have" if others else "has"
    done = f"{verb} not answered" if what == "heard" else f"{verb} made no progress"
    return f"{beat.name}{more} {'were' if others else 'was'} {beat.doing} and {done}"


def gone_coordinator(beat: Beat | None, place: str) -> Verdict:
    """What the end of the connection to process 0 means."""
    name, doing = (beat.name, beat.doing) if beat else (f"process 0 at {place}", "waiting for the others")
    return Verdict(text=f"{name} is gone; it was {doing}; {REMEDY}")


def ranges(numbers: Sequence[int]) -> str:
    """`0, 2-5, 9` for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def roll_call(members: Members) -> str:
    """`12 of 64 processes are here; missing: 12-63`."""
    missing = members.missing
    here = members.count - len(missing)
    return f"{here} of {members.count} processes {'is' if here == 1 else 'are'} here; missing: {ranges(missing)}"
