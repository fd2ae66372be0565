"""The least that a stage can cost, whatever tensor degrees its layers choose: bounds for the general space.

Seconds of ranges.  A layer's best degree may be one that its neighbours cannot share, and then it pays for resharding.
A range [i, j) at degrees t costs, in any quantity that is a sum over its layers and the borders between them,

    q(i, j) = min over t of  sum over l of node[l, t_l]  +  sum over l of edge[l, t_l, t_{l+1}]  +  end[j-1, t_{j-1}]

This is a shortest path through (layer, degree), found by Viterbi's recurrence in O(T^2) per layer.  Ranges that are
equal layer by layer (the same kinds in the same order) count as one: a model of N equal blocks between embedding and
head has O(N) different ranges instead of O(N^2).  All places with the same degrees, all quantities and all ranges of
one length take a step together.

Seconds of stages.  What a stage needs for x micro-batches until its parameters are updated,

    g(x) = min over degrees of  x (F + B) - B + sync + update         sync >= last layer's errors + all gradients

is the minimum of linear functions of x.  So it is concave, and between 1 and M it lies above the line through g(1) and
g(M): two shortest paths bound it for every x.  Bytes are sums over layers, each at its least.

Transfers.  Of the next stage only the first device is known, or which devices may be the first.  A receiver of k'
devices takes ceil(b / min(d, k')) samples from each of min(k, k') senders, which share the ports of a node.  With few
receivers messages are large; with many, the ports are crowded.  Every k' up to the number of devices left counts.

Kinds of devices.  Let a layer l take w_lc device-seconds at least where a device of kind c takes part, and let every
device of kind c count v_c > 0 times.  On d devices, d_c of them of kind c, it takes max over c of w_lc / d seconds or
more, so

    (sum over c of v_c d_c) seconds  >=  sum over c of (d_c / d) v_c w_lc  >=  min over c of v_c w_lc

and this sum bounds every step in the same way.  It is sharpest if every kind does as much as it can (`worth`).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jhpt.core.cluster import Link
from jhpt.planner.cost.activations import NOTHING
from jhpt.planner.cost.communication import transfer_seconds
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.places import Place
from jhpt.planner.cost.schedule import Array

Index = npt.NDArray[np.int64]

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
"""The costs that bounds are computed from."""


@dataclass(frozen=True)
class Level:
    """The distinct ranges of one length.

    parent: the range without its last layer.  last, before: kinds of the last layer and of the layer before it.
    """

    parent: Index
    last: Index
    before: Index


@dataclass(frozen=True)
class Spans:
    """Ranges of layers that differ in kinds or in their order, shortest first."""

    levels: tuple[Level, ...]
    number: Index
    """[N, N + 1] position of the range [i, stop) among them; -1 if stop <= i."""


def spans(kinds: Index) -> Spans:
    """The distinct ranges of a row of layers.  kinds: [N] kind of each layer."""
    n = len(kinds)
    number = np.full((n, n + 1), -1)
    levels: list[Level] = []
    base = 0
    shorter = np.zeros(n, np.int64)  # position of the range that starts at i, among those one layer shorter
    for length in range(1, n + 1):
        starts = np.arange(n - length + 1)
        pairs = shorter[starts] * (kinds.max() + 1) + kinds[starts + length - 1]
        _, first, which = np.unique(pairs, return_index=True, return_inverse=True)
        last = first + length - 1
        levels.append(Level(parent=shorter[first], last=kinds[last], before=kinds[np.maximum(last - 1, 0)]))
        number[starts, starts + length] = base + which
        base += len(first)
        shorter = which
    return Spans(tuple(levels), number)


def shortest(ranges: Spans, nodes: Array, edges: Array, ends: Array) -> Array:
    """[..., spans] the least cost of every range.

    Args:
      nodes: [..., kinds, T] costs of a layer; infinite if it does not allow the degree.
      edges: [..., kinds, T, T] costs of the border after a layer of that kind.
      ends: [..., kinds, T] costs of being the last layer.
    """
    degrees = range(nodes.shape[-1])
    least = []
    path = nodes[..., ranges.levels[0].last, :]
    for length, level in enumerate(ranges.levels):
        if length:
            ahead, border = path[..., level.parent, :], edges[..., level.before, :, :]
            path = ahead[..., 0, None] + border[..., 0, :]
            for t in degrees[1:]:
                path = np.minimum(path, ahead[..., t, None] + border[..., t, :])
            path = path + nodes[..., level.last, :]
        least.append((path + ends[..., level.last, :]).min(axis=-1))
    return np.concatenate(least, axis=-1)


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
    alone: Array
    """[devices, N] F + B of every layer by itself, without dispatch."""
    share: Array
    """[devices, N] what a layer adds to g(M), without its errors: other layers' gradients may hide behind these."""
    summed: Array
    """[devices, N + 1] F + B of the first layers, each at its best degree."""
    state: Array
    """[devices, N + 1] sums over the first layers."""
    activations: Array
    """[devices, N + 1] sums over the first layers."""
    working: Array
    """[devices, N]"""
    sizes: Array
    """[devices, N + 1] state and one micro-batch's activations."""
    memory: Array
    """[devices] usable bytes of the smallest device."""
    kinds: tuple[tuple[int, ...], ...]
    """[devices] kinds of the devices."""


Minimum = tuple[Array, Array, list[Array]]
"""Of a place: [quantities, spans] seconds, [N] shares, and [N] state, activations and working bytes."""


class Minima:
    """`Least` of every offset, computed once for each class of offsets.

    same: minima of the same model on other rows of the cluster, which have many places in common.
    """

    def __init__(self, model: CostModel, same: "Minima | None" = None) -> None:
        self.model = model
        self._known: dict[tuple[LayerStrategy, int], dict[Place, Minimum]] = same._known if same else {}
        self.spans: Spans = spans(model.index)
        sizes = [kind.boundary_bytes for kind in model.kinds]
        self._typical = [int(np.flatnonzero(model.index == kind)[0]) for kind in range(len(sizes))]
        self._sizes = sizes
        self._reshard: dict[tuple[Place, int], Array] = {}

    def of(self, strategy: LayerStrategy, m: int) -> list[Least]:
        """The least costs of stages from every offset; offsets of one class share them."""
        model, k = self.model, self.model.cluster.num_devices
        kinds = [model.places.offset_class(offset) for offset in range(k)]
        rows = {
            kind: [model.places.at(kind, devices) for devices in range(1, k - offset + 1)]
            for offset, kind in reversed(list(enumerate(kinds)))
        }
        found = self._minima(dict.fromkeys(place for places in rows.values() for place in places), strategy, m)
        alone = np.diagonal(self.spans.number, offset=1)
        leasts = {kind: _stack(places, found, alone, model.stage_dispatch) for kind, places in rows.items()}
        return [leasts[kind] for kind in kinds]

    def _minima(self, places: Iterable[Place], strategy: LayerStrategy, m: int) -> dict[Place, Minimum]:
        """The minima of places, those of other rows among them; only those of one strategy are kept."""
        if (strategy, m) not in self._known:
            self._known.clear()
        known = self._known.setdefault((strategy, m), {})
        tables = {place: self._table(place, strategy) for place in places if place not in known}
        seconds = self._seconds(tables, strategy, m)
        for place, table in tables.items():
            share = _share(table, m).min(axis=0)[self.model.index]
            known[place] = seconds[place], share, self._bytes(place, table, strategy)
        return known

    def _table(self, place: Place, strategy: LayerStrategy) -> dict[str, Array]:
        """[T, kinds] costs at every degree."""
        tables = [self.model.kind_costs(place, t, strategy) for t in self.model.degrees(place.devices)]
        return {name: np.array([table[name] for table in tables]) for name in USED}

    def _seconds(self, tables: dict[Place, dict[str, Array]], strategy: LayerStrategy, m: int) -> dict[Place, Array]:
        """[quantities, spans] of every place."""
        groups: dict[tuple[int, ...], list[Place]] = {}
        for place in tables:
            groups.setdefault(tuple(self.model.degrees(place.devices)), []).append(place)
        seconds: dict[Place, Array] = {}
        for degrees, group in groups.items():
            c = {name: np.array([tables[place][name] for place in group]).swapaxes(1, 2) for name in USED}
            border = np.array([self._border(place, degrees, strategy.micro_batch) for place in group])
            graph = _graph(c, border, m, self.model.stage_dispatch)
            seconds.update(zip(group, shortest(self.spans, *graph), strict=True))
        return seconds

    def _border(self, place: Place, degrees: tuple[int, ...], micro_batch: int) -> Array:
        """[kinds, T, T] seconds to reshard the output of a layer of each kind."""
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

        Whatever the tensor degree and the number of replicas, everything exists at least once.
        """
        one = self.model.places.at(0, 1)
        state, activations, _ = self._bytes(one, self._table(one, strategy), strategy)
        return state + activations

    def device_seconds(self, strategy: LayerStrategy) -> Array:
        """[N] least device-seconds to compute a layer's micro-batch on any number of devices, times their `worth`."""
        seconds = self._kind_seconds(strategy)[:, self.model.index]
        return (worth(seconds)[:, None] * seconds).min(axis=0)

    def best_devices(self, strategy: LayerStrategy) -> float:
        """The sum of all devices' `worth`."""
        places, worths = self.model.places, worth(self._kind_seconds(strategy)[:, self.model.index])
        return sum(float(worths[places.at(device, 1).kinds[0]]) for device in range(self.model.cluster.num_devices))

    def _kind_seconds(self, strategy: LayerStrategy) -> Array:
        """[kinds of devices, kinds of layers] least device-seconds to compute a micro-batch on devices of one kind."""
        model = self.model
        least = np.full((len(model.paces), len(model.kinds)), np.inf)
        again = model.activations.repeated(NOTHING)[0] if strategy.recompute else np.zeros(len(model.kinds))
        for devices in range(1, model.cluster.num_devices + 1):
            for t, kind in itertools.product(model.degrees(devices), range(len(model.paces))):
                forward, backward = model.compute_seconds((kind,), -(-strategy.micro_batch * t // devices), t)
                least[kind] = np.minimum(least[kind], devices * (forward * (1 + again) + backward))
        return least


def worth(seconds: Array) -> Array:
    """[kinds of devices] how much of the best kind's work one device of each kind does, by the sum over all layers.

    seconds: [kinds of devices, N] least device-seconds of every layer where a device of the kind takes part.
    """
    total = seconds[:, np.isfinite(seconds).all(axis=0)].sum(axis=1)
    return total.min() / total if total.min() > 0 else np.ones(len(seconds))


def _stack(
    places: list[Place],
    found: dict[Place, Minimum],
    alone: Index,
    dispatch: float,
) -> Least:
    seconds, shares, sizes = zip(*[found[place] for place in places], strict=True)
    forward, backward, both, once, whole = np.array(seconds).swapaxes(0, 1)
    state, activations, working = (np.array(rows) for rows in zip(*sizes, strict=True))
    by_layer = both[:, alone] - 2 * dispatch
    summed, state, activations = (
        np.pad(np.cumsum(a, axis=1), ((0, 0), (1, 0))) for a in (by_layer, state, activations)
    )
    return Least(
        forward=forward,
        backward=backward,
        both=both,
        once=once,
        whole=whole,
        alone=by_layer,
        share=np.array(shares),
        summed=summed,
        state=state,
        activations=activations,
        working=working,
        sizes=state + activations,
        memory=np.array([place.memory for place in places]),
        kinds=tuple(place.kinds for place in places),
    )


def _graph(c: dict[str, Array], border: Array, m: int, dispatch: float) -> tuple[Array, Array, Array]:
    """Nodes, edges and ends of F, B, F + B, g(1), g(M); [places, quantities, kinds, T(, T)].

    dispatch: seconds on top of every pass of a stage, whatever its layers.
    """
    f, b = c["forward"] + c["forward_tensor"], c["backward"] + c["backward_tensor"]
    none = np.zeros_like(b)
    nodes = [f, np.where(np.isfinite(f), b, np.inf), f + b, _share(c, 1), _share(c, m)]
    edges = [border / 2, border / 2, border, border, m * border]
    ends = [none + dispatch, none + dispatch, none + 2 * dispatch, b + 2 * dispatch, b + 2 * m * dispatch]
    return np.stack(nodes, axis=1), np.stack(edges, axis=1), np.stack(ends, axis=1)


def _share(c: dict[str, Array], m: int) -> Array:
    """Of each layer: M F + (M-1) B + gradients + update."""
    f, b = c["forward"] + c["forward_tensor"], c["backward"] + c["backward_tensor"]
    return m * f + (m - 1) * b + c["gradients"] + c["update"]


class Transfers:
    """Least seconds of the transfer to a next stage, for one size of micro-batch."""

    def __init__(self, model: CostModel, micro_batch: int) -> None:
        self.model, self.micro_batch = model, micro_batch
        self.places, self.k = model.places, model.cluster.num_devices
        self.sizes, self.which = np.unique(model.boundary, return_inverse=True)
        self._inside: dict[int, Array] = {}
        self._across: dict[int, Array] = {}
        self._known: dict[tuple[int, int, int, int], float] = {}

    def rows(self, offset: int) -> Array:
        """[devices, N] after every layer, for data parallel stages on 1, 2, ... devices from `offset`.

        0 after the last layer.
        """
        index = self.places.node_of[offset]
        node, devices = self.places.nodes[index], np.arange(1, self.k - offset)
        room = self.places.first_device[index] + node.devices - offset - devices
        seconds = np.zeros((self.k - offset, self.model.num_layers))
        # With d = k everything depends on min(k, k') alone, and a receiver on another node may have a single device.
        table = np.minimum.accumulate(self._across_table(node.devices))
        seconds[:-1] = table[np.minimum(devices, self.k - offset - devices) - 1][:, self.which]
        for at in np.flatnonzero(room > 0):
            seconds[at] = self._within(index, int(devices[at]), int(room[at]), self.k - offset - int(devices[at]))
        seconds[:, -1] = 0.0
        return seconds

    def least(self, offset: int, devices: int, data: int, layer: int) -> float:
        """After `layer`, from a stage whose last layer has data degree `data`."""
        size = int(self.which[layer])
        key = (offset, devices, data, size)
        if key not in self._known:
            links = (
                (self.places.transfer(offset, devices, start, to), -(-self.micro_batch // min(data, to)))
                for start in self.places.starts(offset + devices)[:2]  # what lies further away has fewer devices
                for to in range(1, self.k - start + 1)
            )
            self._known[key] = min(transfer_seconds(link, float(self.sizes[size]) * local) for link, local in links)
        return self._known[key]

    def _within(self, index: int, devices: int, room: int, left: int) -> Array:
        """[N] if the next stage may lie on the node on which this one ends, on up to `room` devices of it."""
        best = self._inside_table(index)[: min(devices, room)].min(axis=0)
        if room < left:
            across = self._across_table(self.places.nodes[index].devices)
            best = np.minimum(best, across[min(devices, room + 1) - 1 : min(devices, left)].min(axis=0))
            if not self.places.uniform:  # the rest of the node may be idle
                best = np.minimum(best, across[: min(devices, left - room)].min(axis=0))
        return best[self.which]

    def _inside_table(self, node: int) -> Array:
        """[min(k, k'), sizes] seconds inside a node."""
        if node not in self._inside:
            inside = self.places.nodes[node]
            self._inside[node] = np.array([self._seconds(inside.inside, 1, q) for q in range(1, inside.devices + 1)])
        return self._inside[node]

    def _across_table(self, per_node: int) -> Array:
        """[min(k, k'), sizes] seconds between nodes."""
        if per_node not in self._across:
            network = self.model.cluster.network
            rows = [self._seconds(network, min(q, per_node), q) for q in range(1, self.k + 1)]
            self._across[per_node] = np.array(rows)
        return self._across[per_node]

    def _seconds(self, link: Link, senders: int, data: int) -> list[float]:
        local = -(-self.micro_batch // data)
        return [transfer_seconds((link, senders), float(size) * local) for size in self.sizes]
