"""The walk of a process through a step: which programs of its devices it runs, and in which order.

Processes agree on the order without talking to each other, because all of them walk through the same table of ticks:

    tick    forward pass of every stage that has one; then what they pass on goes to the next chunks
            backward pass of every stage that has one; then what they pass on goes to the chunks before

What they pass on moves in two turns (`in_two_turns`): a stage takes part in two transfers, one with each neighbour, and
one after the other down the pipeline the last stage would wait for all of them.

Programs and transfers of stages elsewhere are left out.  Of any two programs that several processes take part in, all
of them run the same one first, so that none waits for another in vain.  Nothing waits for results here, except on
several CPU devices of one process (`settled`): a device runs what it is given in this order, as soon as what it needs
has come.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jhpt.core.schedule import Table, Timetable
from jhpt.sharding.stages.layout import PlacedChunk
from jhpt.sharding.stages.passes import ChunkPrograms
from jhpt.sharding.stages.settled import settled
from jhpt.sharding.stages.transfer import Transfer


@dataclass(frozen=True, eq=False, kw_only=True)
class Route:
    """Chunks in the order in which a sample passes them, and transfers from each but the last to the next, and back."""

    chunks: Sequence[PlacedChunk]
    programs: Sequence[ChunkPrograms]
    up: Sequence[Transfer]
    down: Sequence[Transfer]


@dataclass(eq=False, kw_only=True)
class Walk:
    """One step of this process.

    params, batches, keys: of every chunk; None of those that have no device here.  totals: gradients so far.
    sums: of the micro-batches whose loss is known.
    inputs: x by (chunk, micro-batch).  errors: the gradient of y; of the last chunk y itself.
    """

    route: Route
    params: Sequence[Any]
    batches: Sequence[Any]
    keys: Sequence[Any]
    totals: list[Any] = field(default_factory=list)
    sums: list[Any] = field(default_factory=list)
    inputs: dict[tuple[int, int], Any] = field(default_factory=dict)
    saved: dict[tuple[int, int], Any] = field(default_factory=dict)
    errors: dict[tuple[int, int], Any] = field(default_factory=dict)

    def step(self, table: Timetable) -> None:
        """All passes of a step."""
        for tick in range(table.ticks):
            done = {one: self._forward(*one) for one in passes_of(table.forward, tick)}
            for at, micro_batch in in_two_turns(done, len(self.route.up)):
                self._pass_up(at, micro_batch, done[at, micro_batch])
            done = {one: self._backward(*one, table.micro_batches) for one in passes_of(table.backward, tick)}
            for at, micro_batch in in_two_turns(done, len(self.route.up)):
                self._pass_down(at, micro_batch, done[at, micro_batch])

    def evaluation(self, micro_batches: int) -> None:
        """Forward passes of all micro-batches, which save nothing."""
        for micro_batch in range(micro_batches):
            for at, chunk in enumerate(self.route.chunks):
                y = self._evaluated(at, micro_batch) if chunk.here else None
                if not chunk.heads:
                    self._pass_up(at, micro_batch, y)
                elif chunk.here:
                    self.sums.append(y)

    def _forward(self, at: int, micro_batch: int) -> Any:
        if not self.route.chunks[at].here:
            return None
        x = self.inputs.pop((at, micro_batch), None)
        y, self.saved[at, micro_batch] = settled(
            self.route.programs[at].forward(self.params[at], x, *self._given(at, micro_batch))
        )
        return y

    def _evaluated(self, at: int, micro_batch: int) -> Any:
        x = self.inputs.pop((at, micro_batch), None)
        return settled(self.route.programs[at].evaluate(self.params[at], x, *self._given(at, micro_batch)))

    def _backward(self, at: int, micro_batch: int, count: int) -> Any:
        """The error for the chunk before.  Backward passes of a chunk take its `count` micro-batches in order."""
        if not self.route.chunks[at].here:
            return None
        programs = self.route.programs[at]
        backward = programs.last_backward if micro_batch == count - 1 else programs.backward
        saved, error = self.saved.pop((at, micro_batch)), self.errors.pop((at, micro_batch))
        self.totals[at], error, sums = settled(
            backward(self.totals[at], self.params[at], saved, error, *self._given(at, micro_batch))
        )
        if sums is not None:
            self.sums.append(sums)
        return error

    def _pass_up(self, at: int, micro_batch: int, y: Any) -> None:
        if at < len(self.route.up):
            self._keep(self.inputs, at + 1, micro_batch, self.route.up[at](y))
        else:
            self._keep(self.errors, at, micro_batch, y)

    def _pass_down(self, at: int, micro_batch: int, error: Any) -> None:
        if at > 0:
            self._keep(self.errors, at - 1, micro_batch, self.route.down[at - 1](error))

    def _keep(self, where: dict[tuple[int, int], Any], at: int, micro_batch: int, x: Any) -> None:
        if self.route.chunks[at].here:
            where[at, micro_batch] = x

    def _given(self, at: int, micro_batch: int) -> tuple[Any, Any, np.int32]:
        return self.batches[at], self.keys[at], np.int32(micro_batch)


def in_two_turns(passes: Iterable[tuple[int, int]], last: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of passes, in the order in which their results move on; the last chunk is number `last`.

    First those of the chunk before the last one and of every second chunk before it, then those of the others.  So the
    last chunk, which may be the slowest because of its head, gets its input in the first turn.  It sends its error in
    the second, and until then the chunk before serves the one before that.
    """
    return sorted(passes, key=lambda one: ((last - one[0] + 1) % 2, one))


def passes_of(table: Table, tick: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of all passes of a tick, in order."""
    stages = table.shape[1]
    entries = ((stage, *map(int, table[tick, stage])) for stage in range(stages))
    return [(chunk * stages + stage, micro_batch) for stage, micro_batch, chunk, _ in entries if micro_batch >= 0]
