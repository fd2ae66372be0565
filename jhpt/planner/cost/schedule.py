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
    """The loop with overlapped transfers.  Between two ticks its state consists of end times, seconds.

    free: [S, ...] of the devices.  down: [S + 1, ...] of the last transfer to device d from the device before it; entry
    S is the link from the last device to the first, and entry 0 is what the first device reads.  up: [S + 1, ...] of
    the last transfer from device d to the device before it; entry S is what the last device reads.
    """

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
        device, phase = np.arange(stages), np.arange(self.period)[:, None]
        down_chunk = chunk_of(phase - device, stages, chunks)
        up_chunk = chunks - 1 - chunk_of(phase - (stages - 1 - device), stages, chunks)
        # [period][S, ...] seconds of what the devices do in a tick
        self.forward, self.ahead = (_by_phase(a, device, down_chunk) for a in (forward, ahead))
        self.backward, self.behind = (_by_phase(a, device, up_chunk) for a in (backward, behind))
        # Whether in a phase the first device reads samples, the last one has the last chunk; likewise in reverse.
        self.reads, self.ends = list(down_chunk[:, 0] == 0), list(down_chunk[:, -1] == chunks - 1)
        self.reads_up, self.ends_up = list(up_chunk[:, -1] == chunks - 1), list(up_chunk[:, 0] == 0)
        self.stages, self.chunks = stages, chunks
        self.free, self.last_start = np.zeros((stages,) + shape), np.zeros((stages,) + shape)
        self.down, self.up = np.zeros((stages + 1,) + shape), np.zeros((stages + 1,) + shape)

    def run(self, sync: Array, update: Array) -> Array:
        tick, last = 0, self.delay + self.stages - 1 + self.ops - 1
        steady, drain = self.delay + self.stages - 1, self.ops - 1
        before: tuple[Array, Array, Array] | None = None
        skipped = False
        while tick <= last:
            self._forward(tick)
            self._backward(tick - self.delay)
            if steady <= tick < drain and not skipped and (tick - steady) % self.period == 0:
                periods = (drain - tick) // self.period
                skipped = before is not None and periods > 0 and self._skip(before, periods)
                before = self.free.copy(), self.down.copy(), self.up.copy()
                tick += self.period * periods * skipped
            tick += 1
        sync, update = (np.moveaxis(a, -1, 0) for a in (sync, update))
        return (np.maximum(self.free, self.last_start + sync) + update).max(axis=0)

    def _skip(self, before: tuple[Array, Array, Array], periods: int) -> bool:
        """Skips periods once all ends grow equally over one: as the loop is linear in (max, +), they always will."""
        if self._uneven(before[0]):
            return False
        links = slice(1, None) if self.chunks > 1 else slice(1, -1)
        down, up = self.down - before[1], self.up - before[2]
        used = [self.free - before[0], down[links], up[:-1] if self.chunks > 1 else up[links]]
        low, high = (f([f(part, axis=0) for part in used], axis=0) for f in (np.min, np.max))
        if np.any(high - low > 1e-13 * np.max(np.abs(self.free), axis=0)):
            return False
        for ends in (self.free, self.down[1:], self.up[:-1]):
            ends += periods * high
        return True

    def _uneven(self, before: Array) -> bool:
        """Whether the first and the last device grow differently, which is quick to see."""
        growth = (self.free[0] - before[0]) - (self.free[-1] - before[-1])
        return bool(np.abs(growth).max() > 1e-13 * self.free.max())

    def _forward(self, tick: int) -> None:
        """The forward passes of a tick.  Device d runs pass number tick - d."""
        first, stop = max(0, tick - self.ops + 1), min(self.stages, tick + 1)
        if first >= stop:
            return
        phase = tick % self.period
        if self.chunks > 1 and first == 0:
            self.down[0] = 0.0 if self.reads[phase] else self.down[-1]
        end = np.maximum(self.free[first:stop], self.down[first:stop])
        end += self.forward[phase][first:stop]
        self.free[first:stop] = end
        stop -= self.chunks > 1 and stop == self.stages and self.ends[phase]
        sent = self.down[first + 1 : stop + 1]
        np.maximum(sent, end[: stop - first], out=sent)
        sent += self.ahead[phase][first:stop]

    def _backward(self, tick: int) -> None:
        """The backward passes of the tick so many ticks after the first of them."""
        top = self.stages - 1 + self.ops - tick  # the device after the one that runs its last pass
        first, stop = max(0, self.stages - 1 - tick), min(self.stages, top)
        if first >= stop:
            return
        phase = tick % self.period
        if self.chunks > 1 and stop == self.stages:
            self.up[-1] = 0.0 if self.reads_up[phase] else self.up[0]
        end = np.maximum(self.free[first:stop], self.up[first + 1 : stop + 1])
        if stop == top:
            self.last_start[stop - 1] = end[-1]
        end += self.backward[phase][first:stop]
        self.free[first:stop] = end
        skipped = int(self.chunks > 1 and first == 0 and self.ends_up[phase])
        sent = self.up[first + skipped : stop]
        np.maximum(sent, end[skipped:], out=sent)
        sent += self.behind[phase][first + skipped : stop]


def _by_phase(values: Array, device: npt.NDArray[Any], chunk: npt.NDArray[Any]) -> list[Array]:
    """[phases][S, ...] the values [..., S, v] of the chunks [phases, S] that devices have in each phase."""
    values = np.moveaxis(values, (-2, -1), (0, 1))
    return [np.ascontiguousarray(values[device, chunks]) for chunks in chunk]


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
