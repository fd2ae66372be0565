"""A profiled graph of operators as a row of layers, between which a linear pipeline may be cut.

Order.  The nodes are put into one topological order.  Every prefix of it is closed under predecessors, so every
position is a legal cut.  Layers are the runs of nodes between cuts.

Price.  The bytes that cross a cut are those of the tensors made before it and read after it, each counted once:

    boundary(P) = sum over u in P of  max { bytes(u, v) : edge (u, v), v not in P }

This is exact for a linear pipeline.  A stage communicates with its neighbours only, so a tensor that a later stage
reads passes through every stage between (PipeDream generates such stages and prices several nodes in this way), and a
tensor with several readers is sent once.  If one node separates all nodes before it from all nodes after it, the sum is
that node's output alone.  Cutting only at such nodes would merge the decoder of GNMT, into whose every layer the
attention feeds, to a single layer.

Free nodes.  A node without time and parameters does not become a layer.  Cuts on either side of it split work and
weights in the same way and differ in bytes only, so of a run of free nodes only the cheapest cut remains (of equal
ones the first).

Sums of seconds, parameters and activation bytes are those of the graph, and each cut has its exact price.  The order is
a choice.  Parallel branches follow each other, the longest first (`sequence`): no cut has a part of the shorter branch
before it and a part of the longer branch after it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import fsum, gcd
from pathlib import Path

from jhpt.core.errors import InputError
from jhpt.core.profile import LayerKind, Timing

MOST_NODES = 5000
"""Cuts are priced in time that grows with the square of the nodes; published graphs have some hundred."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes by name, in the order of the file, and what their edges carry."""

    nodes: Mapping[str, LayerKind]
    """Costs of each node.  Its `boundary_bytes` is not read, since the edges say more."""

    edges: Mapping[tuple[str, str], float]
    """(producer, consumer) -> bytes of the tensor, per sample."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """What a node is, for the names of the layers."""

    @cached_property
    def before(self) -> dict[str, list[str]]:
        """The producers that each node reads."""
        before: dict[str, list[str]] = {node: [] for node in self.nodes}
        for producer, consumer in self.edges:
            before[consumer].append(producer)
        return before

    @cached_property
    def after(self) -> dict[str, list[str]]:
        """The consumers of each node."""
        after: dict[str, list[str]] = {node: [] for node in self.nodes}
        for producer, consumer in self.edges:
            after[producer].append(consumer)
        return after

    def free(self, node: str) -> bool:
        """Whether the node takes no time and has no parameters."""
        kind = self.nodes[node]
        return not kind.parameters and not any(max(t.forward) or max(t.backward) for t in kind.timings)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The nodes of one layer, in order, and the bytes that cross the cut after it."""

    nodes: tuple[str, ...]
    boundary: float


def check(graph: Graph, path: Path) -> None:
    """InputError if `graph` is not a connected acyclic graph."""
    if len(graph.nodes) > MOST_NODES:
        raise InputError(f"{path}: has {len(graph.nodes):,} nodes, and more than {MOST_NODES:,} are not read")
    if dangling := sorted({node for edge in graph.edges for node in edge if node not in graph.nodes}):
        raise InputError(f"{path}: edges name nodes that the file does not describe: {_few(dangling)}; describe them")
    try:
        TopologicalSorter(graph.before).prepare()
    except CycleError as error:
        raise InputError(f"{path}: the graph has a cycle: {' <- '.join(error.args[1])}; remove one edge") from None
    if apart := _apart(graph):
        raise InputError(f"{path}: no edge joins {_few(apart)} to the other nodes; is the file cut short?")


def _apart(graph: Graph) -> list[str]:
    """The nodes that no edges, in either direction, connect to the first node."""
    reached, front = set(), list(graph.nodes)[:1]
    while front:
        node = front.pop()
        if node not in reached:
            reached.add(node)
            front += graph.before[node] + graph.after[node]
    return [node for node in graph.nodes if node not in reached]


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def live_bytes(graph: Graph, done: set[str]) -> float:
    """The price of the cut after `done`: bytes of the tensors made in it and read outside of it, each once."""
    live: dict[str, float] = {}
    for (producer, consumer), size in graph.edges.items():
        if producer in done and consumer not in done:
            live[producer] = max(size, live.get(producer, 0.0))
    return fsum(live.values())


def sequence(graph: Graph) -> list[str]:
    """The topological order in which the nodes run.

    Depth first from the deepest sink, and among several producers the deepest first.  So a chain stays together, and
    what does not belong to a long chain (the embedding of a decoder, the shortcut of a residual block) comes just
    before its reader: it is not carried through stages that do not need it.  What leads to other sinks follows its last
    producer.  Ties go to the node that the file names first.
    """
    depth: dict[str, int] = {}
    for node in TopologicalSorter(graph.before).static_order():
        depth[node] = 1 + max((depth[producer] for producer in graph.before[node]), default=0)
    rank = {node: (-depth[node], index) for index, node in enumerate(graph.nodes)}
    before = {node: sorted(producers, key=rank.__getitem__) for node, producers in graph.before.items()}
    order: list[str] = []
    placed: set[str] = set()
    for sink in sorted((node for node in graph.nodes if not graph.after[node]), key=rank.__getitem__):
        block = _with_ancestors(sink, before, placed)
        needed = {producer for node in block for producer in before[node]}
        start = 1 + max((index for index, node in enumerate(order) if node in needed), default=-1)
        order[start:start] = block
    return _settle(graph, order)


def _with_ancestors(node: str, before: Mapping[str, list[str]], placed: set[str]) -> list[str]:
    """`node` and before it all that it needs and `placed` lacks, depth first.  They are added to `placed`."""
    order, stack = [], [(node, False)]
    while stack:
        current, ready = stack.pop()
        if current in placed:
            continue
        if ready:
            placed.add(current)
            order.append(current)
        else:
            stack.append((current, True))
            stack += [(producer, False) for producer in reversed(before[current])]
    return order


def _settle(graph: Graph, order: list[str]) -> list[str]:
    """`order` with free nodes moved up behind their producers if this does not increase the live bytes.

    For example, selecting two of the five outputs of a node costs nothing and halves the bytes of the next cut.
    """
    settled: list[str] = []
    done: set[str] = set()
    for node in order:
        group = [] if node in done else [node]
        while group:
            settled += group
            done.update(group)
            readers = dict.fromkeys(reader for member in group for reader in graph.after[member])
            ready = [
                one for one in readers if one not in done and graph.free(one) and done.issuperset(graph.before[one])
            ]
            gains = ready and live_bytes(graph, done.union(ready)) <= live_bytes(graph, done)
            group = ready if gains else []
    return settled


def segments(graph: Graph) -> list[Segment]:
    """The layers of `graph`: one for each node that is not free, with the free nodes around it."""
    order = sequence(graph)
    costly = [index for index, node in enumerate(order) if not graph.free(node)]
    price = [live_bytes(graph, set(order[:size])) for size in range(len(order) + 1)]
    cuts = [min(range(here + 1, there + 1), key=price.__getitem__) for here, there in pairwise(costly)]
    starts, stops = [0, *cuts], [*cuts, len(order)]
    return [Segment(nodes=tuple(order[a:b]), boundary=price[b]) for a, b in zip(starts, stops, strict=True)]


def layers(graph: Graph, path: Path) -> tuple[dict[str, LayerKind], tuple[str, ...]]:
    """(kinds, layers) of a `ModelProfile`; equal layers share the kind that is named after the first of them."""
    if all(map(graph.free, graph.nodes)):
        raise InputError(f"{path}: no node takes time or has parameters, so there is nothing to plan; profile it again")
    names: dict[LayerKind, str] = {}
    row = []
    for segment in segments(graph):
        costly = next(node for node in segment.nodes if not graph.free(node))
        kind = merge([graph.nodes[node] for node in segment.nodes], segment.boundary)
        row.append(names.setdefault(kind, f"{costly} {graph.labels.get(costly, '')}".strip()))
    return {name: kind for kind, name in names.items()}, tuple(row)


def merge(kinds: Iterable[LayerKind], boundary: float) -> LayerKind:
    """Several layers as one: their sums, at the tensor degrees that all of them allow."""
    kinds = list(kinds)
    degree = gcd(*(kind.max_tensor for kind in kinds))
    return LayerKind(
        parameters=sum(kind.parameters for kind in kinds),
        boundary_bytes=boundary,
        activation_bytes=fsum(kind.activation_bytes for kind in kinds),
        replicated_bytes=fsum(kind.replicated_bytes for kind in kinds),
        max_tensor=degree,
        timings=tuple(_timing(kinds, tensor) for tensor in range(1, degree + 1) if degree % tensor == 0),
    )


def _timing(kinds: list[LayerKind], tensor: int) -> Timing:
    """Seconds of all `kinds` for the profiled batch of one sample."""
    seconds = [kind.seconds(1, tensor) for kind in kinds]
    forward, backward = (fsum(one) for one in zip(*seconds, strict=True))
    return Timing(tensor=tensor, batches=(1.0,), forward=(forward,), backward=(backward,))
