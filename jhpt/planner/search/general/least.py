"""The least that a stage can cost, whatever degrees its layers choose: bounds for `general`.

Seconds are shortest paths (`chains`), because a layer's best degree may be one that its neighbours cannot share: then
it pays for resharding.  What a stage needs for x micro-batches until its parameters are updated,

    g(x) = min over degrees of  x (F + B) - B + sync + update         sync >= last layer's errors + all gradients

is the minimum of linear functions of x, so it is concave, and between 1 and M it lies above the line through g(1) and
g(M): two shortest paths bound it for every x.  Bytes are sums of every layer's own least.
"""

from dataclasses import dataclass

import numpy as np

from jhpt.planner.cost.communication import Place
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.recompute import NOTHING
from jhpt.planner.cost.schedule import Array
from jhpt.planner.search.general.chains import Index, Spans, shortest, spans

USED = (
    "forward",
    "forward_tensor",
    "backward",
    "backward_tensor",
    "gradients",
    "update",
    "weights",
    "optimizer",
    "activations",
    "working",
)
"""Costs that bounds are made of."""


@dataclass(frozen=True)
class Least:
    """Stages on 1, 2, ... devices from one offset; seconds are [devices, spans]."""

    forward: Array
    backward: Array
    both: Array
    once: Array
    """g(1)"""
    whole: Array
    """g(M)"""
    share: Array
    """[devices, N] what a layer adds to g(M): without errors, behind which other layers' gradients may hide."""
    summed: Array
    """[devices, N + 1] F + B of the first layers, each at its best."""
    state: Array
    """[devices, N + 1], sums over the first layers."""
    activations: Array
    """[devices, N + 1], likewise."""
    working: Array
    """[devices, N]"""
    sizes: Array
    """[devices, N + 1] state and one micro-batch's activations."""
    memory: Array
    """[devices] of the smallest device."""


class Minima:
    """`Least` of every offset, computed once for each class of offsets."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.spans: Spans = spans(model.index)
        sizes = [kind.boundary_bytes for kind in model.kinds]
        self._typical = [int(np.flatnonzero(model.index == kind)[0]) for kind in range(len(sizes))]
        self._sizes = sizes
        self._reshard: dict[tuple[Place, int], Array] = {}

    def of(self, strategy: LayerStrategy, m: int) -> list[Least]:
        """Least costs from every offset on; offsets of one class share them."""
        model, k = self.model, self.model.cluster.num_devices
        kinds = [model.places.offset_class(offset) for offset in range(k)]
        rows = {
            kind: [model.places.at(kind, devices) for devices in range(1, k - offset + 1)]
            for offset, kind in reversed(list(enumerate(kinds)))
        }
        distinct = dict.fromkeys(place for places in rows.values() for place in places)
        tables = {place: self._table(place, strategy) for place in distinct}
        seconds = self._seconds(tables, strategy, m)
        shares = {place: _share(table, m).min(axis=0)[model.index] for place, table in tables.items()}
        sizes = {place: self._bytes(place, table, strategy) for place, table in tables.items()}
        alone = np.diagonal(self.spans.number, offset=1)
        found = {kind: _stack(places, seconds, shares, sizes, alone) for kind, places in rows.items()}
        return [found[kind] for kind in kinds]

    def _table(self, place: Place, strategy: LayerStrategy) -> dict[str, Array]:
        """[T, kinds] costs at every degree."""
        tables = [self.model.kind_costs(place, t, strategy) for t in self.model.degrees(place.devices)]
        return {name: np.array([table[name] for table in tables]) for name in USED}

    def _seconds(self, tables: dict[Place, dict[str, Array]], strategy: LayerStrategy, m: int) -> dict[Place, Array]:
        """[quantities, spans] of every place."""
        groups: dict[tuple[int, ...], list[Place]] = {}
        for place in tables:
            groups.setdefault(tuple(self.model.degrees(place.devices)), []).append(place)
        found: dict[Place, Array] = {}
        for degrees, group in groups.items():
            c = {name: np.array([tables[place][name] for place in group]).swapaxes(1, 2) for name in USED}
            border = np.array([self._border(place, degrees, strategy.micro_batch) for place in group])
            found.update(zip(group, shortest(self.spans, *_graph(c, border, m)), strict=True))
        return found

    def _border(self, place: Place, degrees: tuple[int, ...], micro_batch: int) -> Array:
        """[kinds, T, T] seconds to reshard what a layer of each kind hands on."""
        key = (place, micro_batch)
        if key not in self._reshard:
            shape = (len(self._sizes), len(degrees), len(degrees))
            border = np.zeros(shape)
            for kind, size in enumerate(self._sizes):
                if (same := self._sizes.index(size)) < kind:
                    border[kind] = border[same]
                    continue
                for row, column in zip(*np.triu_indices(len(degrees), 1), strict=True):
                    border[kind, row, column] = border[kind, column, row] = self.model.reshard_seconds(
                        place, self._typical[kind], degrees[row], degrees[column], micro_batch
                    )
            self._reshard[key] = border
        return self._reshard[key]

    def _bytes(self, place: Place, c: dict[str, Array], strategy: LayerStrategy) -> list[Array]:
        """[N] least state, activations and working bytes of every layer."""
        index = self.model.index
        state, activations, working = (
            quantity.min(axis=0)[index] for quantity in (c["weights"] + c["optimizer"], c["activations"], c["working"])
        )
        if strategy.recompute:
            activations = -(-strategy.micro_batch // place.devices) * self.model.inputs
        return [state, activations, working]

    def device_bytes(self, strategy: LayerStrategy) -> Array:
        """[N] least bytes of a layer on all devices of a stage together, with one micro-batch in flight.

        However they are divided, at tensor degree t and over d replicas: nothing is kept less than once.
        """
        one = self.model.places.at(0, 1)
        state, activations, _ = self._bytes(one, self._table(one, strategy), strategy)
        return state + activations

    def device_seconds(self, strategy: LayerStrategy) -> Array:
        """[N] least k x seconds of computing a layer's micro-batch on any number k of devices."""
        model, least = self.model, np.full(len(self.model.kinds), np.inf)
        again = model.activations.repeated(NOTHING)[0] if strategy.recompute else np.zeros(len(model.kinds))
        fastest = min(model.places.slowdowns)
        for devices in range(1, model.cluster.num_devices + 1):
            for t in model.degrees(devices):
                forward, backward = model.compute_seconds(-(-strategy.micro_batch * t // devices), t)
                busy = fastest * devices * (forward * (1 + again) + backward)
                least = np.minimum(least, busy)
        return least[model.index]


def _stack(
    places: list[Place],
    seconds: dict[Place, Array],
    shares: dict[Place, Array],
    sizes: dict[Place, list[Array]],
    alone: Index,
) -> Least:
    forward, backward, both, once, whole = np.array([seconds[place] for place in places]).swapaxes(0, 1)
    state, activations, working = (np.array(rows) for rows in zip(*[sizes[place] for place in places], strict=True))
    summed, state, activations = (
        np.pad(np.cumsum(a, axis=1), ((0, 0), (1, 0))) for a in (both[:, alone], state, activations)
    )
    return Least(
        forward=forward,
        backward=backward,
        both=both,
        once=once,
        whole=whole,
        share=np.array([shares[place] for place in places]),
        summed=summed,
        state=state,
        activations=activations,
        working=working,
        sizes=state + activations,
        memory=np.array([place.memory for place in places]),
    )


def _graph(c: dict[str, Array], border: Array, m: int) -> tuple[Array, Array, Array]:
    """Nodes, edges and ends of F, B, F + B, g(1), g(M); [places, quantities, kinds, T(, T)]."""
    f, b = c["forward"] + c["forward_tensor"], c["backward"] + c["backward_tensor"]
    none = np.zeros_like(b)
    nodes = [f, np.where(np.isfinite(f), b, np.inf), f + b, _share(c, 1), _share(c, m)]
    edges = [border / 2, border / 2, border, border, m * border]
    ends = [none, none, none, b, b]
    return np.stack(nodes, axis=1), np.stack(edges, axis=1), np.stack(ends, axis=1)


def _share(c: dict[str, Array], m: int) -> Array:
    """M F + (M-1) B + gradients + update."""
    f, b = c["forward"] + c["forward_tensor"], c["backward"] + c["backward_tensor"]
    return m * f + (m - 1) * b + c["gradients"] + c["update"]
