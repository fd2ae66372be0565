"""Seconds of the micro-batch loop that the runtime executes: the ticks of `jhpt.core.schedule`, priced.

Every device (pipeline position) walks through the ticks of the table.  If a tick has both passes, the forward pass
comes first.  v = 1 is the eager form of 1F1B: a device is up to 2 (S-1-d) micro-batches ahead, twice as many as it
needs to be, so that a transfer hides behind a whole tick (Zhuang et al. 2022, arXiv 2211.05322, section 3.3).  v > 1 is
the schedule of Narayanan et al. 2021, arXiv 2104.04473, section 2.2, with the same look-ahead.

A device waits only for what it reads: a pass starts when the device's previous pass has ended and its input has
arrived.  A transfer starts when its producer has ended and its link is free (each direction has a link); computation
goes on meanwhile.

Without overlap transfers are part of the program.  In every tick from the first backward pass on, devices exchange
errors before the forward pass, and until the last forward pass they exchange activations after it.  An exchange between
two neighbours begins when both have reached it, whether they have anything to send or not, and occupies both.
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
    """Seconds of a step: the longest path through the passes and transfers.

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
    loop = (_Loop if overlap else _InLine)(schedule, micro_batches, forward, backward, cut)
    return loop.run(sync, update)


class _Loop:
    """The loop with overlapped transfers.  Between two ticks its state consists of end times, [S, ...] seconds."""

    def __init__(self, schedule: Schedule, micro_batches: int, forward: Array, backward: Array, cut: Array) -> None:
        stages, chunks = forward.shape[-2:]
        self.ops = micro_batches * chunks
        self.delay = delay(schedule, stages, chunks, micro_batches)
        self.period = 1 if chunks == 1 else stages * chunks
        shape = forward.shape[:-2]
        none = np.zeros(shape + (1,))
        # A chunk's output crosses the cut after its virtual stage, and its error the cut before it.
        ahead = np.concatenate([cut, none], axis=-1).reshape(shape + (chunks, stages)).swapaxes(-1, -2)
        behind = np.concatenate([none, cut], axis=-1).reshape(shape + (chunks, stages)).swapaxes(-1, -2)
        self.forward, self.backward, self.ahead, self.behind = (
            np.moveaxis(a, (-2, -1), (0, 1)) for a in (forward, backward, ahead, behind)
        )  # [S, v, ...]
        self.device = np.arange(stages)
        self.stages, self.chunks = stages, chunks
        self.free = np.zeros((stages,) + shape)
        self.down = np.zeros((stages,) + shape)  # end of the last transfer d -> d + 1
        self.up = np.zeros((stages,) + shape)  # end of the last transfer d -> d - 1
        self.last_start = np.zeros((stages,) + shape)

    def run(self, sync: Array, update: Array) -> Array:
        tick, last = 0, self.delay + self.stages - 1 + self.ops - 1
        steady, drain = self.delay + self.stages - 1, self.ops - 1
        memory: dict[int, Array] = {}
        skipped = False
        while tick <= last:
            self._tick(tick)
            if steady <= tick <= drain and not skipped and (tick - steady) % self.period == 0:
                state = np.stack([self.free, self.down, self.up])
                before = memory.get(tick - self.period)
                memory = {tick: state}
                if before is not None and (periods := (drain - tick) // self.period):
                    skipped = self._skip(state - before, periods)
                    tick += self.period * periods * skipped
            tick += 1
        sync, update = (np.moveaxis(a, -1, 0) for a in (sync, update))
        return (np.maximum(self.free, self.last_start + sync) + update).max(axis=0)

    def _skip(self, growth: Array, periods: int) -> bool:
        """Skips periods once all ends grow equally over one: as the loop is linear in (max, +), they always will."""
        wrap = self.chunks > 1
        used = [growth[0], growth[1] if wrap else growth[1][:-1], growth[2] if wrap else growth[2][1:]]
        low, high = (f([f(part, axis=0) for part in used], axis=0) for f in (np.min, np.max))
        if np.any(high - low > 1e-13 * np.max(np.abs(self.free), axis=0)):
            return False
        for ends in (self.free, self.down, self.up):
            ends += periods * high
        return True

    def _tick(self, tick: int) -> None:
        arrived_down, arrived_up = np.roll(self.down, 1, axis=0), np.roll(self.up, -1, axis=0)
        self.down, self.up = self.down.copy(), self.up.copy()
        for index, arrived, reverse in (
            (tick - self.device, arrived_down, False),
            (tick - self.delay - (self.stages - 1 - self.device), arrived_up, True),
        ):
            on = self.device[(index >= 0) & (index < self.ops)]
            if on.size:
                self._ops(on, index[on], arrived[on], reverse)

    def _ops(self, on: npt.NDArray[Any], index: npt.NDArray[Any], arrived: Array, reverse: bool) -> None:
        chunk = chunk_of(index, self.stages, self.chunks)
        chunk = self.chunks - 1 - chunk if reverse else chunk
        virtual = chunk * self.stages + on
        source = virtual == (self.stages * self.chunks - 1 if reverse else 0)
        sink = virtual == (0 if reverse else self.stages * self.chunks - 1)
        arrived[source] = 0.0
        start = np.maximum(self.free[on], arrived)
        end = start + (self.backward if reverse else self.forward)[on, chunk]
        self.free[on] = end
        if reverse:
            finishing = index == self.ops - 1
            self.last_start[on[finishing]] = start[finishing]
        link, transfer = (self.up, self.behind) if reverse else (self.down, self.ahead)
        send = ~sink
        link[on[send]] = np.maximum(link[on[send]], end[send]) + transfer[on[send], chunk[send]]


class _InLine:
    """The loop without overlap, in which transfers are part of the program."""

    def __init__(self, schedule: Schedule, micro_batches: int, forward: Array, backward: Array, cut: Array) -> None:
        self.stages, self.chunks = forward.shape[-2:]
        self.ops = micro_batches * self.chunks
        self.delay = delay(schedule, self.stages, self.chunks, micro_batches)
        self.forward, self.backward = (np.moveaxis(a, (-2, -1), (0, 1)) for a in (forward, backward))
        # Every exchange takes as long as the largest transfer that the edge d -> d + 1 ever carries.
        edges = np.concatenate([cut, np.zeros(cut.shape[:-1] + (1,))], axis=-1)
        edges = edges.reshape(cut.shape[:-1] + (self.chunks, self.stages)).max(axis=-2)
        self.edges = np.moveaxis(edges, -1, 0)
        self.free = np.zeros((self.stages,) + forward.shape[:-2])
        self.last_start = np.zeros_like(self.free)

    def run(self, sync: Array, update: Array) -> Array:
        last_forward = self.stages - 1 + self.ops - 1
        for tick in range(self.delay + self.stages - 1 + self.ops):
            if tick >= self.delay:
                self._exchange()
            if tick <= last_forward:
                self._passes(tick, reverse=False)
                self._exchange()
            if tick >= self.delay:
                self._passes(tick, reverse=True)
        sync, update = (np.moveaxis(a, -1, 0) for a in (sync, update))
        return (np.maximum(self.free, self.last_start + sync) + update).max(axis=0)

    def _exchange(self) -> None:
        ahead = np.roll(self.free, -1, axis=0)
        done = np.maximum(self.free, ahead) + self.edges  # of the edge d -> d + 1, for both its devices
        if self.chunks == 1:
            done[-1] = 0.0
        self.free = np.maximum.reduce([self.free, done, np.roll(done, 1, axis=0)])

    def _passes(self, tick: int, reverse: bool) -> None:
        for device in range(self.stages):
            n = tick - self.delay - (self.stages - 1 - device) if reverse else tick - device
            if 0 <= n < self.ops:
                chunk = chunk_of(n, self.stages, self.chunks)
                if reverse:
                    self.last_start[device] = self.free[device]
                    self.free[device] = self.free[device] + self.backward[device, self.chunks - 1 - chunk]
                else:
                    self.free[device] = self.free[device] + self.forward[device, chunk]
