"""Who computes what in which tick: schedules as data, which print themselves.

A device walks through ticks; in each it may run one forward and then one backward pass, of one micro-batch through one
of its chunks.  What it sends in a tick its neighbour uses in the next.  With S devices, v chunks each and M
micro-batches, device d runs its n-th forward in tick d + n and its n-th backward in tick delay + (S-1-d) + n, with

    1f1b, interleaved    delay = S-1 + S (v-1)      the first backward follows the first forward of the last chunk
    gpipe                delay = S-1 + M-1          it waits for the last one

The n-th forward is chunk (n mod S v) / S of micro-batch S (n / S v) + n mod S; the n-th backward takes the chunks in
reverse (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; with v = 1 every n is a micro-batch).  `jhpt.planner`
prices this very loop.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jhpt.core.plan import Schedule

Table = npt.NDArray[np.int32]


class Pass(NamedTuple):
    """One entry of a timetable; slot: where what forward keeps lies until backward.  micro_batch -1: nothing to do."""

    micro_batch: int
    chunk: int
    slot: int


IDLE = Pass(-1, 0, 0)


class Phase(NamedTuple):
    """Neighbouring ticks, and whether any device runs a forward, a backward pass in them."""

    ticks: slice
    forward: bool
    backward: bool


@dataclass(frozen=True, eq=False)
class Timetable:
    """forward, backward: [ticks, S, 3], a `Pass` for every tick and device; slots: how many a device needs."""

    forward: Table
    backward: Table
    slots: int

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return len(self.forward)

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


def timetable(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> Timetable:
    """The schedule of this name."""
    delay = stages - 1 + (micro_batches - 1 if schedule == "gpipe" else stages * (chunks - 1))
    passes = micro_batches * chunks
    ticks = delay + stages - 1 + passes
    forward, backward = np.full((2, ticks, stages, 3), IDLE, np.int32)
    slots = 0
    for device in range(stages):
        free, used = list[int](), dict[tuple[int, int], int]()
        for tick in range(ticks):
            if 0 <= (n := tick - device) < passes:
                one = _numbered(n, stages, chunks)
                used[one] = free.pop() if free else len(used)
                forward[tick, device] = Pass(*one, used[one])
            if 0 <= (n := tick - delay - (stages - 1 - device)) < passes:
                micro_batch, chunk = _numbered(n, stages, chunks)
                one = micro_batch, chunks - 1 - chunk
                slot = used.pop(one)
                free.append(slot)
                backward[tick, device] = Pass(*one, slot)
            slots = max(slots, len(used) + len(free))
    return Timetable(forward, backward, slots)


def _numbered(n: int, stages: int, chunks: int) -> tuple[int, int]:
    """(micro-batch, chunk) of the n-th forward pass."""
    if chunks == 1:
        return n, 0
    group, within = divmod(n, stages * chunks)
    return group * stages + within % stages, within // stages
