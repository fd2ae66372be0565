"""Schedules of a pipeline as tables of ticks: which device runs which pass in which tick.  Tables print themselves.

This is the one place that decides the order.  The runtime walks through the table (`jhpt.sharding.pipeline`), and the
planner prices the same ticks (`jhpt.planner.cost.schedule`).  The simulation takes the order of passes from the table
and computes the times itself (`jhpt.planner.report.simulation`).

A device walks through ticks; in each it may run one forward pass and then one backward pass, of one micro-batch through
one of its chunks.  What it sends in a tick its neighbour uses in the next.  With S devices, v chunks each and M
micro-batches, device d runs its n-th forward pass in tick d + stride n and its n-th backward pass in tick
delay + (S-1-d) + stride n, with

    eager-1f1b, interleaved  stride 1, delay = S-1 + S (v-1)  the first backward follows the first forward of the last
                                                              chunk in the same tick
    gpipe                    stride 1, delay = S-1 + M-1      it follows the forward of the last micro-batch
    1f1b                     stride 2, delay = S              every tick is one pass, forward and backward in turn

So device d has up to S-d micro-batches in flight with 1f1b (Narayanan et al. 2019, PipeDream; Fan et al. 2021, DAPPLE,
arXiv 2007.01045), and 2 (S-d) - 1 with eager-1f1b, which leaves a tick for every transfer (Zhuang et al. 2022, arXiv
2211.05322, section 3.3).  With 1f1b nothing is left: a device's forward pass ends when its successor's backward pass
does, and both need at once what the other sends.  So in tick t only devices d and d + 1 with even t - d exchange, both
ways, and no device waits for another one than its partner: ticks of neighbours need not begin together.

The n-th forward is chunk (n mod S v) / S of micro-batch S (n / S v) + n mod S; the n-th backward takes the chunks in
reverse (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; with v = 1 every n is a micro-batch).
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from jhpt.core.plan import Schedule

Table = npt.NDArray[np.int32]
Index = TypeVar("Index", int, npt.NDArray[Any])


class Pass(NamedTuple):
    """One entry of a timetable.  slot: where its saved activations lie.  micro_batch -1: nothing to do."""

    micro_batch: int
    chunk: int
    slot: int


IDLE = Pass(-1, 0, 0)


class Phase(NamedTuple):
    """Consecutive ticks, and whether any device runs a forward pass, or a backward pass, in them."""

    ticks: slice
    forward: bool
    backward: bool


@dataclass(frozen=True, eq=False)
class Timetable:
    """forward, backward: [ticks, S, 3], a `Pass` for every tick and device.  slots: how many a device needs.

    in_turn: in tick t only devices d and d + 1 with even t - d exchange, at its end; otherwise all neighbours do, from
      the tick of the first backward pass on also errors.
    """

    forward: Table
    backward: Table
    slots: int
    in_turn: bool = False

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return len(self.forward)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 1 + int(self.forward[..., 0].max())

    def phases(self) -> list[Phase]:
        """Spans of ticks in which the same kinds of passes are run by any device."""
        busy = [
            tuple(bool((table[tick, :, 0] >= 0).any()) for table in (self.forward, self.backward))
            for tick in range(self.ticks)
        ]
        phases = []
        for kinds, group in itertools.groupby(range(self.ticks), key=lambda tick: busy[tick]):
            ticks = list(group)
            phases.append(Phase(slice(ticks[0], ticks[-1] + 1), *kinds))
        return phases

    def __str__(self) -> str:
        """A row per device: `3` forward of micro-batch 3, `(3)` backward; letters tell chunks apart."""
        chunks = 1 + max(int(self.forward[..., 1].max()), 0)

        def cell(tick: int, device: int) -> str:
            texts = []
            for table, form in ((self.forward, "{}"), (self.backward, "({})")):
                micro_batch, chunk, _ = table[tick, device]
                if micro_batch >= 0:
                    texts.append(form.format(f"{micro_batch}{_letters(chunk)}" if chunks > 1 else micro_batch))
            return "".join(texts) or "."

        cells = [[cell(tick, device) for tick in range(self.ticks)] for device in range(self.forward.shape[1])]
        width = max(len(text) for row in cells for text in row)
        return "\n".join(f"device {d}  " + " ".join(text.center(width) for text in row) for d, row in enumerate(cells))


def _letters(number: int) -> str:
    """a, b, ... z, aa, ab, ..."""
    more, last = divmod(number, 26)
    return (_letters(more - 1) if more else "") + chr(ord("a") + last)


def delay(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> int:
    """The tick of the first backward pass, on the last device."""
    if schedule == "1f1b":
        return stages
    return stages - 1 + (micro_batches - 1 if schedule == "gpipe" else stages * (chunks - 1))


def stride(schedule: Schedule) -> int:
    """Ticks from one forward pass of a device to its next."""
    return 2 if schedule == "1f1b" else 1


def in_flight(schedule: Schedule, stages: int, stage: int, chunks: int, micro_batches: int) -> int:
    """Number of micro-batches in flight: the most (micro-batch, chunk) pairs that device `stage` has saved at a time.

    It follows from the table of ticks: the first backward pass of the device follows its forward pass number
    (delay + (S-1) - 2 stage) / stride, counted from zero.
    """
    ahead = delay(schedule, stages, chunks, micro_batches) + stages - 1 - 2 * stage
    return min(micro_batches * chunks, ahead // stride(schedule) + 1)


def chunk_of(n: Index, stages: int, chunks: int) -> Index:
    """The chunk of the n-th forward pass, or of an array of them; backward passes take the chunks in reverse."""
    return n % (stages * chunks) // stages


def timetable(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> Timetable:
    """The ticks of a step: [ticks, S] forward and backward passes of S devices with v chunks and M micro-batches."""
    first_backward, passes = delay(schedule, stages, chunks, micro_batches), micro_batches * chunks
    step = stride(schedule)
    ticks = first_backward + stages + step * (passes - 1)
    forward, backward = np.full((2, ticks, stages, 3), IDLE, np.int32)
    slots = 0
    for device in range(stages):
        free, used = list[int](), dict[tuple[int, int], int]()
        for tick in range(ticks):
            if (n := _number(tick - device, step, passes)) is not None:
                pair = _numbered(n, stages, chunks)
                used[pair] = free.pop() if free else len(used)
                forward[tick, device] = Pass(*pair, used[pair])
            if (n := _number(tick - first_backward - (stages - 1 - device), step, passes)) is not None:
                micro_batch, chunk = _numbered(n, stages, chunks)
                pair = micro_batch, chunks - 1 - chunk
                slot = used.pop(pair)
                free.append(slot)
                backward[tick, device] = Pass(*pair, slot)
            slots = max(slots, len(used) + len(free))
    return Timetable(forward, backward, slots, in_turn=schedule == "1f1b")


def _number(ticks: int, step: int, passes: int) -> int | None:
    """The number of the pass that comes so many ticks after the first one; None: there is none."""
    number, between = divmod(ticks, step)
    return number if not between and 0 <= number < passes else None


def _numbered(n: int, stages: int, chunks: int) -> tuple[int, int]:
    """(micro-batch, chunk) of the n-th forward pass."""
    return n // (stages * chunks) * stages + n % stages, chunk_of(n, stages, chunks)
