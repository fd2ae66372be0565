"""The least time of every suffix of the layers on every suffix of the devices, by dynamic programming.

`Choices` are the stages that can be part of a plan faster than the best known one, each with the least that it can
cost.  Their devices, and the degrees of their layers, are open: of each stage only the least F, B, F + B, g(1) and g(M)
are known (`least`).  Every bound on the time of one stage has the form x (F + B) + y with 1 <= x <= M, where y is what
other stages and transfers take.  The stage's last backward pass ends at x (F + B) + y, and its update at g(x) + y.
x (F + B) and g(x) are bounded together over the degrees of all its layers.  With w micro-batches in flight, M > w, a
transfer of c seconds, the least round trip D of all later stages and D' = D + 2 c:

    x            y
    M            2 (w-1) c              its own work, and exchanges that run beside no other pass
    M - w + 1    2 D'                   the first and the last micro-batch go all the way
    M - w + 1    D' + (w-1)(F or B + c) one of them does, the other waits for the rest of the stage's queue
    2            2 D' + (M-w-1)(c + max(F, B))          as before, the link being slower than a pass
    w + 1        2 (w-1) c + (M-w-1)(c + max(F, B))     the same, no micro-batch goes all the way
    1            (M + 1) c + D          the link alone
    1            2 c + the least time until the next stage's last backward pass ends
    M - 2 j k    (k + 1) R              k + 1 round trips over j later stages (`stages.round_trips`), R the least

Under gpipe every pass but the last in a direction waits for an exchange:

    M            D' + 2 (M-1) c
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from jhpt.core.plan import Schedule
from jhpt.core.schedule import in_flight
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array
from jhpt.planner.search.general.least import Index, Least, Spans, worth
from jhpt.planner.search.stages import NEAR, SLACK, prefix_sums, round_trips


@dataclass(frozen=True)
class Choices:
    """Stages of layers [i, stop) on `devices` devices from one offset: flat arrays, sorted by i."""

    i: Index
    stop: Index
    devices: Index
    forward: Array
    backward: Array
    both: Array
    once: Array
    whole: Array
    transfer: Array
    state: Array
    activations: Array
    memory: Array

    def take(self, chosen: slice | npt.NDArray[np.bool_]) -> "Choices":
        """A selection of the stages."""
        return Choices(*(getattr(self, part.name)[chosen] for part in fields(self)))


@dataclass(frozen=True)
class Needs:
    """[N] least device-seconds of every layer, times the `worth` of its devices, and least bytes."""

    both: Array
    share: Array
    """Of the whole step: `Least.share`."""
    bytes: Array
    worth: Array
    """[K] how much each device counts in `both`."""
    share_worth: Array
    """[K] the same in `share`."""

    def bound(self, m: int) -> float:
        """Least seconds of a step: devices have T device-seconds each, a stage on k takes k times its own."""
        return max(m * float(self.both.sum() / self.worth.sum()), float(self.share.sum() / self.share_worth.sum()))


def device_memory(model: CostModel) -> Array:
    """[K] usable bytes of every device."""
    return np.array([node.device.usable for node in model.places.nodes for _ in range(node.devices)])


def needs(leasts: list[Least], spans: Spans, device_bytes: Array) -> Needs:
    """The needs of every layer alone, where it is cheapest."""
    layers, single = len(spans.number), [least.kinds[0][0] for least in leasts]
    both, share = (np.full((max(single) + 1, layers), np.inf) for _ in range(2))  # [kinds of devices, N]
    for least in {id(least): least for least in leasts}.values():
        devices = np.arange(1, len(least.both) + 1)[:, None]
        busy, whole = devices * least.alone, devices * least.share
        for kind in set(itertools.chain(*least.kinds)):
            rows = [kind in kinds for kinds in least.kinds]
            both[kind] = np.minimum(both[kind], busy[rows].min(axis=0))
            share[kind] = np.minimum(share[kind], whole[rows].min(axis=0))
    (both, worths), (share, share_worths) = (_least_worth(each) for each in (both, share))
    return Needs(both, share, device_bytes, worths[single], share_worths[single])


def _least_worth(seconds: Array) -> tuple[Array, Array]:
    """([N] least device-seconds of every layer times their worth, [kinds of devices] that worth)."""
    worths = worth(seconds)
    return (worths[:, None] * seconds).min(axis=0), worths


def stage_choices(
    offset: int, least: Least, transfers: Array, spans: Spans, needed: Needs, m: int, limit: float, memory: Array
) -> Choices:
    """Stages from `offset` with which `limit` seconds and the memory suffice for the layers before, in and after them.

    Args:
      transfers: [devices, N] least seconds of the transfer to a next stage.
      memory: [K] bytes of every device.
    """
    n, k = len(needed.both), len(memory)
    limit = min(limit * (1 + SLACK), np.finfo(float).max / k)
    seconds, sizes, room = m * prefix_sums(needed.both), prefix_sums(needed.bytes), prefix_sums(memory * (1 + SLACK))
    counts, worths = np.arange(1, k - offset + 1), prefix_sums(needed.worth)
    before = (seconds[:-1] <= limit * worths[offset]) & (sizes[:-1] <= room[offset])
    starts = np.flatnonzero(before) if offset else np.array([0])
    low = np.maximum(
        np.searchsorted(seconds, seconds[-1] - limit * (worths[-1] - worths[offset + counts])),
        np.searchsorted(sizes, sizes[-1] * (1 - SLACK) - (room[-1] - room[offset + counts])),
    )
    low[-1] = n
    high = _reach(least, starts, len(counts), limit / m)
    first = np.maximum(starts[:, None] + 1, low[None, :])  # [starts, devices]
    many = np.maximum(0, high.T - first + 1).ravel()
    at, row = (np.repeat(index.ravel(), many) for index in np.indices(first.shape))
    stop = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first.ravel(), many)
    i = starts[at]
    saved = least.whole[row, spans.number[i, stop]] <= limit
    i, stop, row = i[saved], stop[saved], row[saved]
    which = spans.number[i, stop]
    working = np.maximum(least.working[row, i], least.working[row, stop - 1])
    return Choices(
        i=i,
        stop=stop,
        devices=row + 1,
        forward=least.forward[row, which],
        backward=least.backward[row, which],
        both=least.both[row, which],
        once=least.once[row, which],
        whole=least.whole[row, which],
        transfer=transfers[row, stop - 1],
        state=least.state[row, stop] - least.state[row, i] + working,
        activations=least.activations[row, stop] - least.activations[row, i],
        memory=least.memory[row],
    )


def _reach(least: Least, starts: Index, devices: int, limit: float) -> Index:
    """[devices, starts] the last stop with which the layers from each start stay within the seconds and the memory.

    Each layer is taken at its best degree; no range is faster.
    """
    rows = [
        np.minimum(
            np.searchsorted(seconds, seconds[starts] + limit, side="right"),
            np.searchsorted(sizes, sizes[starts] + memory * (1 + SLACK), side="right"),
        )
        for seconds, sizes, memory in zip(least.summed, least.sizes, least.memory[:devices], strict=False)
    ]
    return np.array(rows) - 1


class Suffixes:
    """Bounds [p, i, o] of suffixes: p stages of the layers from i on the devices from o.

    back: seconds from the start of the first stage to the end of its last backward pass.  done: until all stages are
    updated.  trip: the round trip through all stages.  near[j]: through the first j + 1 stages.

    A stage may begin on one of several devices (`Places.starts`); the bounds are those of the best of them.

    If a plan may have more than `distinct` stages, the last p stands for "so many or more".  Its bounds then lack the
    terms that depend on the number of stages.
    """

    def __init__(
        self,
        choices: list[Choices],
        layers: int,
        m: int,
        schedule: Schedule,
        distinct: int,
        most: int,
        limit: float,
        starts: Callable[[int], Sequence[int]],
        whole: bool = False,
    ) -> None:
        """most: stages that a plan can have.  limit: suffixes that need so many seconds count as impossible.  starts:
        the devices that the next stage may begin on instead of this one.  whole: whether the last stage must end with
        the last device."""
        self.choices, self.m, self.schedule, self.distinct = choices, m, schedule, distinct
        self.open_ended, self.limit = distinct < most, limit
        shape = (distinct + 1, layers + 1, len(choices) + 1)
        self.back, self.done, self.trip, *self.near = (np.full(shape, np.inf) for _ in range(3 + NEAR))
        for table in (self.back, self.done, self.trip, *self.near):
            table[0, layers, -1 if whole else slice(None)] = 0.0
        for offset, row in reversed(list(enumerate(choices))):
            if len(row.i):
                for p in range(1, distinct + 1):
                    self._fill(p, offset, row)
            for start in starts(offset)[1:2]:  # the next one, whose bounds are those of all further ones already
                for table in (self.back, self.done, self.trip, *self.near):
                    np.minimum(table[..., offset], table[..., start], out=table[..., offset])

    def root(self, stages: int) -> float:
        """A bound of the plans with so many stages."""
        return float(max(self.back[stages, 0, 0], self.done[stages, 0, 0]))

    @property
    def size(self) -> int:
        """Number of choices."""
        return sum(len(choices.i) for choices in self.choices)

    @property
    def least(self) -> float:
        """A bound of all plans."""
        return min(self.root(stages) for stages in range(1, self.distinct + 1))

    def window(self, p: int) -> int:
        """Micro-batches in flight with p stages left."""
        return in_flight(self.schedule, p, 0, 1, self.m)

    def next_stages(self, p: int, layer: int, offset: int) -> tuple[Choices, Array, Array] | None:
        """The choices for the first of p stages, with their bounds: (choices, back, done)."""
        if offset == len(self.choices):
            return None
        choices = self.choices[offset]
        low, high = np.searchsorted(choices.i, [layer, layer + 1])
        if low == high:
            return None
        some = choices.take(slice(int(low), int(high)))
        back, done = self._bounds(p, offset, some)[:2]
        return some, back, done

    def _fill(self, p: int, offset: int, c: Choices) -> None:
        to = (c.stop, offset + c.devices)
        possible = self._fits(p, c) & np.isfinite(self.trip[p - 1][to])
        if self._or_more(p):
            possible |= self._fits(p, c) & np.isfinite(self.trip[p][to])
        count = np.count_nonzero(possible)
        if count == 0:
            return
        if 2 * count < len(possible):
            c = c.take(possible)
        bounds = self._bounds(p, offset, c)
        slow = (bounds[0] >= self.limit) | (bounds[1] >= self.limit)
        borders = np.flatnonzero(np.diff(c.i, prepend=-1))
        tables = (self.back, self.done, self.trip, *self.near)
        for table, values in zip(tables, bounds, strict=True):
            values[slow] = np.inf
            table[p, c.i[borders], offset] = np.minimum.reduceat(values, borders)

    def _fits(self, p: int, c: Choices) -> npt.NDArray[np.bool_]:
        return c.state + self.window(p) * c.activations <= c.memory

    def _or_more(self, p: int) -> bool:
        """Whether p stands for "so many stages or more"."""
        return self.open_ended and p == self.distinct

    def _bounds(self, p: int, offset: int, c: Choices) -> list[Array]:
        """(back, done, trip, *near) of every choice as the first of p stages."""
        to = (c.stop, offset + c.devices)
        back, done, trip = (table[p - 1][to] for table in (self.back, self.done, self.trip))
        or_more = self._or_more(p)
        if or_more:
            back, done, trip = (
                np.minimum(a, t[p][to]) for a, t in ((back, self.back), (done, self.done), (trip, self.trip))
            )
        transfer = c.transfer if p > 1 else np.zeros_like(c.transfer)
        terms: list[tuple[int, Array | float]] = [(self.m, 0.0), (1, 2 * transfer + back)]
        if not or_more:
            terms += self._look_ahead_terms(p, c, transfer, trip, to)
        fits = self._fits(p, c)
        both, once, forward = (np.where(fits, a, np.inf) for a in (c.both, c.once, c.forward))
        slope = (c.whole - c.once) / max(1, self.m - 1)
        near = [both] + [both + 2 * transfer + table[p - 1][to] for table in self.near[:-1]]
        return [
            np.maximum.reduce([x * both + y for x, y in terms]),
            np.maximum.reduce([once + (x - 1) * slope + y for x, y in terms] + [forward + transfer + done]),
            both + 2 * transfer + trip,
            *near,
        ]

    def _look_ahead_terms(
        self, p: int, c: Choices, transfer: Array, trip: Array, to: tuple[Index, Index]
    ) -> list[tuple[int, Array | float]]:
        """The (x, y) at the head of this file that depend on the number of later stages."""
        m, w, beyond = self.m, self.window(p), 2 * transfer + trip
        if self.schedule == "gpipe":
            return [(m, beyond + 2 * (m - 1) * transfer)]
        terms: list[tuple[int, Array | float]] = [
            (m, 2 * (w - 1) * transfer),
            (1, (m + 1) * transfer + trip),
            (m - w + 1, (w - 1) * (c.backward + transfer) + beyond),
            (m - w + 1, (w - 1) * (c.forward + transfer) + beyond),
        ]
        if w < m:
            slow = (m - w - 1) * (transfer + np.maximum(c.forward, c.backward))
            terms += [(m - w + 1, 2 * beyond), (2, 2 * beyond + slow), (w + 1, 2 * (w - 1) * transfer + slow)]
        for j in range(1, p):
            if j <= NEAR or j == p - 1:
                count = round_trips(m, p, j)
                ahead = trip if j == p - 1 else self.near[j - 1][p - 1][to]
                if count:
                    terms.append((m - 2 * j * count, (count + 1) * (2 * transfer + ahead)))
        return terms
