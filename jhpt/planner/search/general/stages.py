"""Stages that can be part of a plan faster than the best one known, each with the least that it can cost."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array
from jhpt.planner.search.general.chains import Index, Spans
from jhpt.planner.search.general.least import Least
from jhpt.planner.search.ranges import prefix


@dataclass(frozen=True)
class Choices:
    """Stages [i, stop) on `devices` from one offset: flat arrays, sorted by i."""

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
        """Some of them."""
        return Choices(*(getattr(self, part.name)[chosen] for part in fields(self)))


@dataclass(frozen=True)
class Needs:
    """[N] least device-seconds and bytes of every layer, on any devices."""

    both: Array
    share: Array
    """Of the whole step: `Least.share`."""
    bytes: Array

    def bound(self, m: int, devices: int) -> float:
        """K devices together have K T seconds; a stage of k takes k times its own."""
        return max(m * float(self.both.sum()), float(self.share.sum())) / devices


SLACK = 1e-9
"""Relative; sums of the same numbers in other orders."""


def device_memory(model: CostModel) -> Array:
    """[K] bytes of every device that a plan may fill."""
    return np.array([node.device.usable for node in model.places.nodes for _ in range(node.devices)])


def needs(leasts: list[Least], spans: Spans, device_bytes: Array) -> Needs:
    """Every layer alone, wherever it is cheapest."""
    alone = np.diagonal(spans.number, offset=1)
    both = share = np.full(len(alone), np.inf)
    for least in {id(least): least for least in leasts}.values():
        devices = np.arange(1, len(least.both) + 1)[:, None]
        both = np.minimum(both, (devices * least.both[:, alone]).min(axis=0))
        share = np.minimum(share, (devices * least.share).min(axis=0))
    return Needs(both, share, device_bytes)


def stage_choices(
    offset: int, least: Least, transfers: Array, spans: Spans, needed: Needs, m: int, limit: float, memory: Array
) -> Choices:
    """Stages from `offset` where they, what is before and what is after them fit into `limit` seconds and the memory.

    Args:
      transfers: [devices, N] least seconds of the transfer to a next stage.
      memory: [K] bytes of every device.
    """
    n, k = len(needed.both), len(memory)
    limit = min(limit * (1 + SLACK), np.finfo(float).max / k)
    seconds, sizes, room = m * prefix(needed.both), prefix(needed.bytes), prefix(memory * (1 + SLACK))
    counts = np.arange(1, k - offset + 1)
    before = (seconds[:-1] <= limit * offset) & (sizes[:-1] <= room[offset])
    starts = np.flatnonzero(before) if offset else np.array([0])
    low = np.maximum(
        np.searchsorted(seconds, seconds[-1] - limit * (k - offset - counts)),
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
    """[devices, starts] the last stop up to which layers from each start take no more seconds and bytes than there are.

    Layers each at their best: no range is faster.
    """
    rows = [
        np.minimum(
            np.searchsorted(seconds, seconds[starts] + limit, side="right"),
            np.searchsorted(sizes, sizes[starts] + memory * (1 + SLACK), side="right"),
        )
        for seconds, sizes, memory in zip(least.summed, least.sizes, least.memory[:devices], strict=False)
    ]
    return np.array(rows) - 1
