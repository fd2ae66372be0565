"""Seconds of the micro-batch loop that the runtime executes: the ticks of `jhpt.core.schedule`, priced.

Every device (pipeline position) walks through the ticks of the table.

**All neighbours exchange in every tick**: eager-1f1b, gpipe and interleaved.  Transfers are exchanges between
neighbours, part of the tick.  An exchange begins when both have reached it, whether they have anything to send or not;
the two directions have links of their own.  A tick, as compiled for H100s (docs/reports/gpu-compile.md):

    errors out;  forward pass;  activations out;  errors in;  backward pass;  activations in

So with equal stages and transfers of h seconds

    both passes            max(f + b, h + max(f, b))
    forward pass alone     f + h                         no activations travel beside it: they are its result
    backward pass alone    h + b

Errors are exchanged in every tick from the first backward pass on, activations until the last forward pass.  Without
overlap a device waits for an exchange where it begins, so that a tick takes f + b + 2 h.

**Neighbours exchange in turn**: 1f1b.  A tick is one pass.  At the end of tick t devices d and d + 1 with even t - d
exchange, both ways at once, and both wait for it; nothing runs beside it.  With equal stages a step takes
(M + S - 1)(f + b) + (2 M + 2 S - 5) h if S > 2, M > 1 and h <= min(f, b).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from jhpt.core.plan import Schedule
from jhpt.core.schedule import chunk_of, delay

Array = npt.NDArray[np.float64]


def step_seconds(
    schedule: Schedule,
    micro_batches: int,
    forward: Array,
    backward: Array,
    cut: Array,
    sync: Array,
    update: Array,
    *,
    overlap: bool = True,
) -> Array:
    """Seconds of a step: the longest path through the passes and exchanges.

    Args:
      forward, backward: [..., S, v] seconds of one micro-batch.
      cut: [..., S v - 1] seconds to move one micro-batch to the next chunk.
      sync: [..., S] seconds from the start of a device's last backward pass until its gradients are reduced.
      update: [..., S] seconds of the update that follows.
      overlap: whether transfers run beside computation.
    Returns:
      [...] seconds.  Leading dims hold different plans.
    """
    stages = forward.shape[-2]
    if stages == 1:
        work = micro_batches * (forward + backward).sum(axis=(-2, -1))
        last = backward[..., 0, 0]
        return work - last + np.maximum(last, sync[..., 0]) + update[..., 0]
    if schedule == "1f1b":
        return _InTurn(micro_batches, forward[..., 0], backward[..., 0], cut).run(sync, update)
    return _Loop(schedule, micro_batches, forward, backward, cut, overlap).run(sync, update)


class _InTurn:
    """The loop whose neighbours exchange in turn, tick by tick.  free: as in `_Loop`."""

    def __init__(self, micro_batches: int, forward: Array, backward: Array, cut: Array) -> None:
        self.micro_batches, self.stages = micro_batches, forward.shape[-1]
        self.forward, self.backward, self.edges = (np.moveaxis(a, -1, 0) for a in (forward, backward, cut))  # [S, ...]
        self.free = np.zeros_like(self.forward)
        self.last_start = np.zeros_like(self.free)

    def run(self, sync: Array, update: Array) -> Array:
        ticks, before = 2 * (self.micro_batches + self.stages - 1), None
        everyone, last = 2 * self.stages - 1, 2 * (self.micro_batches - 1)  # in between every device always has a pass
        tick = 0
        while tick < ticks:
            if everyone <= tick <= last and (tick - everyone) % 2 == 0:
                # Once all devices advance equally in two ticks they always will: the loop is linear in (max, +).
                if before is not None and (pairs := (last + 1 - tick) // 2):
                    growth = self.free - before
                    low, high = growth.min(axis=0), growth.max(axis=0)
                    if np.all(high - low <= 1e-13 * self.free.max(axis=0)):
                        self.free += pairs * high
                        tick, before = tick + 2 * pairs, None
                        continue
                before = self.free.copy()
            self._tick(tick)
            tick += 1
        sync, update = (np.moveaxis(a, -1, 0) for a in (sync, update))
        return (np.maximum(self.free, self.last_start + sync) + update).max(axis=0)

    def _tick(self, tick: int) -> None:
        device = np.arange(self.stages)
        for first, reverse in ((device, False), (2 * self.stages - 1 - device, True)):
            number, between = np.divmod(tick - first, 2)
            on = device[(between == 0) & (number >= 0) & (number < self.micro_batches)]
            if reverse:
                self.last_start[on] = self.free[on]
            self.free[on] += (self.backward if reverse else self.forward)[on]
        one = np.arange(tick % 2, self.stages - 1, 2)
        over = np.maximum(self.free[one], self.free[one + 1]) + self.edges[one]
        self.free[one] = self.free[one + 1] = over


class _Loop:
    """The loop, tick by tick.  Its state between two ticks is when every device is free, [S, ...] seconds."""

    def __init__(
        self, schedule: Schedule, micro_batches: int, forward: Array, backward: Array, cut: Array, overlap: bool
    ) -> None:
        self.stages, self.chunks = forward.shape[-2:]
        self.overlap, self.ops = overlap, micro_batches * self.chunks
        self.delay = delay(schedule, self.stages, self.chunks, micro_batches)
        self.last_forward = self.stages - 1 + self.ops - 1
        self.forward, self.backward = (np.moveaxis(a, (-2, -1), (0, 1)) for a in (forward, backward))  # [S, v, ...]
        # Every exchange takes as long as the largest transfer that the edge d -> d + 1 ever carries.
        edges = np.concatenate([cut, np.zeros(cut.shape[:-1] + (1,))], axis=-1)
        edges = edges.reshape(cut.shape[:-1] + (self.chunks, self.stages)).max(axis=-2)
        self.edges = np.moveaxis(edges, -1, 0)
        self.device = np.arange(self.stages)
        self.before, self.after = np.roll(self.device, 1), np.roll(self.device, -1)  # neighbours in the ring
        self.free = np.zeros((self.stages,) + forward.shape[:-2])
        self.last_start = np.zeros_like(self.free)

    def run(self, sync: Array, update: Array) -> Array:
        period = 1 if self.chunks == 1 else self.stages * self.chunks
        tick, before, skipped = 0, None, -1
        while tick < self.delay + self.stages - 1 + self.ops:
            first, last = self._alike(tick)
            if (tick - first) % period == 0 and first != skipped:
                # Once all devices advance equally in a period they always will: the loop is linear in (max, +).
                if before is not None and tick > first and (periods := (last + 1 - tick) // period):
                    growth = self.free - before
                    low, high = growth.min(axis=0), growth.max(axis=0)
                    if np.all(high - low <= 1e-13 * self.free.max(axis=0)):
                        self.free += periods * high
                        tick, skipped = tick + periods * period, first
                        continue
                before = self.free
            self._tick(tick)
            tick += 1
        sync, update = (np.moveaxis(a, -1, 0) for a in (sync, update))
        return (np.maximum(self.free, self.last_start + sync) + update).max(axis=0)

    def _alike(self, tick: int) -> tuple[int, int]:
        """The first and the last of the ticks around this one in which every device runs the same kinds of passes."""
        everyone_back = self.delay + self.stages - 1
        for first, last in (
            (self.stages - 1, min(self.delay, self.ops) - 1),
            (everyone_back, self.ops - 1),
            (max(everyone_back, self.last_forward + 1), self.delay + self.ops - 2),
        ):
            if first <= tick <= last:
                return first, last
        return tick, tick

    def _tick(self, tick: int) -> None:
        errors, activations = tick >= self.delay, tick <= self.last_forward
        received = returned = self.free
        if errors:
            returned = self._exchanged()
        if activations:
            self._passes(tick - self.device, reverse=False)
            received = self._exchanged()
        if errors:
            self.free = np.maximum(self.free, returned)
            self._passes(tick - self.delay - (self.stages - 1 - self.device), reverse=True)
        self.free = np.maximum(self.free, received)

    def _exchanged(self) -> Array:
        """When every device's exchange with its neighbours is over that it begins now; without overlap it waits."""
        done = np.maximum(self.free, self.free[self.after]) + self.edges  # of the edge d -> d + 1
        if self.chunks == 1:
            done[-1] = 0.0
        over = np.maximum(done, done[self.before])
        if not self.overlap:
            self.free = np.maximum(self.free, over)
        return over

    def _passes(self, index: npt.NDArray[Any], reverse: bool) -> None:
        """Passes of these numbers, by device; a number that does not exist is none."""
        on = self.device[(index >= 0) & (index < self.ops)]
        chunk = chunk_of(index[on], self.stages, self.chunks)
        self.free = self.free.copy()
        if reverse:
            self.last_start[on] = self.free[on]
            self.free[on] += self.backward[on, self.chunks - 1 - chunk]
        else:
            self.free[on] += self.forward[on, chunk]
