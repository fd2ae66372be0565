"""The JSON input of Piper (Tarnawski, Narayanan and Phanishayee, NeurIPS 2021; github.com/msr-fiddle/piper).

    {"nodes": [{"id": 3, "name": "ParallelTransformerLayer",
                "TMPCs": {"1": [{"id": "vanilla", "timePerSample": s, "parameterSize": bytes,
                                 "memoryUsageA": bytes, "memoryUsageB": bytes, ...}, ...], "2": [...]}}, ...],
     "edges": [{"sourceId": 1, "destId": 3, "communicationCost": bytes}, ...], ...}

A node lists, for each tensor degree t, the configurations it can run in (TMPCs).  A sample is what one forward pass of
the file takes: a micro-batch.

Taken from the configuration called `vanilla`, or from the first one if none is called so:
- seconds p(t), forward and backward together.  The configuration called `activation recomp` runs the forward pass
  twice, so the forward pass takes p_recomp - p.  If it is missing, the forward pass takes a third of p (the backward
  pass has two matrix products for each one of the forward pass).  p includes what a node sends between its t devices,
  so `tensor_*_bytes` are 0.
- parameters w(1) / 4 (float32; other widths keep their bytes), the state a parameter needs as
  4 sum b(1) / sum w(1), which is 8 bytes in the published files: weight and gradient, no optimizer.
- memory a(t) of each micro-batch in flight, as  a(t) = split / t + replicated,  exact at degree 1 and at the largest
  (within 1 % between, for the published transformer layers).
- the bytes of each edge, from which `graph` computes cuts.  In Piper stages do not pass tensors on: it charges an edge
  to its two ends only, and charges it again for each reader of a tensor.
- tensor degrees: the divisors of the largest degree all of whose divisors are listed.

Dropped: w(t) and b(t) for t > 1 (a sharded layer is priced as w(1) / t: without the biases and norms each rank holds);
`syncTimeFw`, `syncTimeBw` (bytes, in spite of the name, that t devices exchange where an edge leaves or enters their
stage: nothing at t = 1, about as much again as the edge at each end for t > 1 in the published files; no field of a
layer says that without charging it inside stages too); the cluster (`bandwidth`, `maxDevices`, `maxMemoryPerDevice`)
and the batch (`mbsInBatch`, `maxBatchSize`).

Piper adds p to bytes / bandwidth, so p is seconds.  Its published resnet.json and gnmt.json hold PipeDream's
milliseconds as they are: divide those by 1000 before use.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from jhpt.core.cluster import parse
from jhpt.core.errors import InputError
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.core.section import NonNegative, Section
from jhpt.planner.profiles.importers.graph import Graph, check, layers

BYTES_PER_WEIGHT = 4

Degree = Annotated[int, Field(ge=1, le=1 << 16)]


class _Open(Section):
    """Fields that are not listed are ignored: files hold more than is read here, such as notes for debugging."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Configuration(_Open):
    """A TMPC: one way to run a node on so many devices."""

    id: str = ""
    timePerSample: NonNegative
    parameterSize: NonNegative
    memoryUsageA: NonNegative
    memoryUsageB: NonNegative


class _Node(_Open):
    id: int
    name: str = ""
    TMPCs: dict[Degree, tuple[_Configuration, ...]]


class _Edge(_Open):
    sourceId: int
    destId: int
    communicationCost: NonNegative


class Piper(_Open):
    """The part of a file that is read."""

    nodes: Annotated[tuple[_Node, ...], Field(min_length=1)]
    edges: tuple[_Edge, ...]


def read(tree: Any, path: Path) -> ModelProfile:
    """The profile in the JSON `tree`, which `path` holds."""
    file = parse(Piper, tree, path)
    graph = _graph(file, path)
    check(graph, path)
    kinds, row = layers(graph, path)
    profile = {
        "name": path.name.split(".")[0],
        "device": "as profiled",
        "source": f"input of Piper, read from {path.name}",
        "sample": "one micro-batch, as profiled",
        "dtype": "float32",
        "bytes_per_weight": BYTES_PER_WEIGHT,
        "state_bytes": _state_bytes(file),
        "kinds": kinds,
        "layers": row,
    }
    return parse(ModelProfile, profile, path)


def _graph(file: Piper, path: Path) -> Graph:
    nodes: dict[str, LayerKind] = {}
    for node in file.nodes:
        if str(node.id) in nodes:
            raise InputError(f"{path}: two nodes have the id {node.id}; number them apart")
        if not node.TMPCs.get(1):
            raise InputError(f"{path}: node {node.id} has no TMPC for 1 device; add one")
        nodes[str(node.id)] = _kind(node)
    edges: dict[tuple[str, str], float] = {}
    for edge in file.edges:
        nodes_of_edge = str(edge.sourceId), str(edge.destId)
        if nodes_of_edge in edges:
            raise InputError(
                f"{path}: the edge from {nodes_of_edge[0]} to {nodes_of_edge[1]} is listed twice; keep one"
            )
        edges[nodes_of_edge] = edge.communicationCost
    return Graph(nodes=nodes, edges=edges, labels={str(node.id): node.name for node in file.nodes})


def _kind(node: _Node) -> LayerKind:
    listed = {degree for degree, configurations in node.TMPCs.items() if configurations}
    usable = [degree for degree in listed if _divisors(degree) <= listed]
    largest = max(usable)
    plain = _plain(node, 1)
    split, replicated = _memory(plain.memoryUsageA, _plain(node, largest).memoryUsageA, largest)
    return LayerKind(
        parameters=round(plain.parameterSize / BYTES_PER_WEIGHT),
        boundary_bytes=0.0,
        activation_bytes=split,
        replicated_bytes=replicated,
        max_tensor=largest,
        timings=tuple(_timing(node, degree) for degree in sorted(_divisors(largest))),
    )


def _divisors(degree: int) -> set[int]:
    return {divisor for divisor in range(1, degree + 1) if degree % divisor == 0}


def _plain(node: _Node, degree: int) -> _Configuration:
    """The configuration that saves all activations."""
    return _named(node, degree, "vanilla") or node.TMPCs[degree][0]


def _named(node: _Node, degree: int, name: str) -> _Configuration | None:
    return next((one for one in node.TMPCs[degree] if one.id == name), None)


def _timing(node: _Node, degree: int) -> Timing:
    seconds = _plain(node, degree).timePerSample
    recomputing = _named(node, degree, "activation recomp")
    forward = min(max(recomputing.timePerSample - seconds, 0.0), seconds) if recomputing else seconds / 3
    return Timing(tensor=degree, batches=(1.0,), forward=(forward,), backward=(seconds - forward,))


def _memory(one: float, many: float, degree: int) -> tuple[float, float]:
    """(split, replicated) with  one = split + replicated,  many = split / degree + replicated;  neither below 0."""
    split = (one - many) / (1 - 1 / degree) if degree > 1 else one
    split = min(max(split, 0.0), one)
    return split, one - split


def _state_bytes(file: Piper) -> float:
    """Bytes of a parameter for any batch: 4 sum b / sum w, or those of weight, gradient and Adam's moments."""
    plain = [_plain(node, 1) for node in file.nodes]
    fixed, weights = sum(one.memoryUsageB for one in plain), sum(one.parameterSize for one in plain)
    return BYTES_PER_WEIGHT * fixed / weights if fixed and weights else 4.0 * BYTES_PER_WEIGHT
