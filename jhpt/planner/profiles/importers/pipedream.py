"""PipeDream's `graph.txt` (Narayanan et al., SOSP 2019; github.com/msr-fiddle/pipedream), one line per node or edge:

    node4 -- ReLU() -- forward_compute_time=1.2, backward_compute_time=2.4, activation_size=8.0, parameter_size=0.0
    <tab>node4 -- node5

Taken: milliseconds of one mini-batch, which is the sample here; bytes of the output (a list `[a; b]` is summed) and of
the parameters, both float32.  Parameters of other widths, or a mean over runs, may have a size that is no multiple of 4
bytes; it is rounded up to whole float32 numbers, which adds less than 4 bytes to a node.  Larger batches take
proportionally longer, smaller ones no less: one size was profiled.

Dropped: sources described as `Input`, `Input0`, ..., which PipeDream's own optimizer drops as well.  Their time is that
of loading data (18.9 ms of ResNet-50's), which is no work of a device, and every stage can read the batch.  A trailing
`stage_id=` belongs to a plan and not to a profile, and is dropped, too.

Not in the file: how layers split (`max_tensor` is 1); which outputs are saved for the backward pass (all are counted,
those of in-place operators and views included: an upper bound); and the optimizer (Adam in float32 is assumed: 16 bytes
per parameter for weight, gradient and two moments).
"""

import math
import re
from pathlib import Path

from jhpt.core.cluster import parse
from jhpt.core.errors import InputError
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.profiles.importers.graph import Graph, check, layers

BYTES_PER_WEIGHT = 4

_LINE = re.compile(r"^[^\S\n]*\S+ -- \S", re.MULTILINE)
_EDGE = re.compile(r"(\S+) -- (\S+)")
_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<description>.*) -- forward_compute_time=(?P<forward>[^,]*), "
    r"backward_compute_time=(?P<backward>[^,]*), activation_size=(?P<activation>[^,]*), "
    r"parameter_size=(?P<parameters>[^,]*?)(?: -- stage_id=\d+)?"
)
_INPUT = re.compile(r"Input\d*")


def looks_like(text: str) -> bool:
    """Whether `text` holds a node or an edge of a `graph.txt`."""
    return bool(_LINE.search(text))


def read(text: str, path: Path) -> ModelProfile:
    """The profile in `text`, which `path` holds; InputError names the line at fault."""
    whole = parse_graph(text, path)
    check(whole, path)
    kinds, row = layers(without_inputs(whole), path)
    profile = {
        "name": _name(path),
        "device": "V100 (as profiled)",
        "source": f"measured by PipeDream's profiler, read from {path.name}",
        "sample": "one mini-batch, as profiled",
        "dtype": "float32",
        "bytes_per_weight": BYTES_PER_WEIGHT,
        "state_bytes": 4 * BYTES_PER_WEIGHT,
        "kinds": kinds,
        "layers": row,
    }
    return parse(ModelProfile, profile, path)


def _name(path: Path) -> str:
    """vgg16 of vgg16.graph.txt and of vgg16/graph.txt."""
    name = path.name.split(".")[0]
    return path.absolute().parent.name if name == "graph" else name


def parse_graph(text: str, path: Path) -> Graph:
    """All nodes and edges of `text`, inputs included."""
    nodes: dict[str, LayerKind] = {}
    labels: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}, line {number}"
        if edge := _EDGE.fullmatch(line.strip()):
            pairs[edge[1], edge[2]] = None
        elif node := _NODE.fullmatch(line.strip()):
            name = node["name"]
            if name in nodes:
                raise InputError(f"{where}: {name} is described twice; keep one of the lines")
            nodes[name], labels[name] = _kind(node, where), node["description"].split("(")[0]
        elif line.strip():
            raise InputError(
                f"{where}: {line.strip()[:80]!r} is neither an edge (`<tab>node1 -- node2`) nor a node (`node1 -- "
                "description -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
                "parameter_size=bytes`); correct or remove it"
            )
    sizes = {name: kind.activation_bytes for name, kind in nodes.items()}
    # The size of an edge from an unknown node does not matter: `check` refuses it.
    edges = {(producer, consumer): sizes.get(producer, 0.0) for producer, consumer in pairs}
    return Graph(nodes=nodes, edges=edges, labels=labels)


def _kind(node: re.Match[str], where: str) -> LayerKind:
    forward, backward = (_number(node[name], f"{name}_compute_time", where) for name in ("forward", "backward"))
    activation = _number(node["activation"], "activation_size", where)
    size = _number(node["parameters"], "parameter_size", where)
    return LayerKind(
        parameters=math.ceil(size / BYTES_PER_WEIGHT),
        boundary_bytes=activation,
        activation_bytes=activation,
        timings=(Timing(batches=(1.0,), forward=(forward / 1e3,), backward=(backward / 1e3,)),),
    )


def _number(text: str, what: str, where: str) -> float:
    """A finite number from 0, or the sum of such a list `[a; b]`."""
    parts = text.strip()[1:-1].split(";") if re.fullmatch(r"\s*\[.*\]\s*", text) else [text]
    try:
        values = [float(part) for part in parts]
    except ValueError:
        raise InputError(f"{where}: {what}={text} is no number; write one") from None
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise InputError(f"{where}: {what}={text} must be finite and not negative; profile the model again")
    return math.fsum(values)


def without_inputs(graph: Graph) -> Graph:
    """`graph` without the sources that are inputs of the model."""
    inputs = {
        node for node, label in graph.labels.items() if _INPUT.fullmatch(label.strip()) and not graph.before[node]
    }
    return Graph(
        nodes={node: kind for node, kind in graph.nodes.items() if node not in inputs},
        edges={edge: size for edge, size in graph.edges.items() if edge[0] not in inputs},
        labels=graph.labels,
    )
