"""What a cluster is: nodes of equal devices, the links between them, host memory.  Bytes, seconds, FLOP.

A `Cluster` is a row of nodes; devices are numbered through it, node by node.  Nodes may be of different kinds (a mixed
cluster).  `jhpt.core.catalogue` knows common clusters by name; files hold the same fields as JSON or YAML.
"""

import bisect
import itertools
import json
import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from jhpt.core.errors import InputError
from jhpt.core.section import Count, NonNegative, Positive, Section
from jhpt.core.text_files import read_text, tree_of

SectionT = TypeVar("SectionT", bound=Section)
Samples = Annotated[tuple[Positive, ...], Field(min_length=1)]

HOST_SHARE = 0.9
"""The share of a host's memory that offloaded blocks may take unless a budget is set.  The rest is for data,
checkpoints and the system."""


class Curve(Section):
    """A measured function of size: `values[i]` at `sizes[i]`, linear in log(size) between, constant outside."""

    sizes: Samples
    values: Samples

    @model_validator(mode="after")
    def _ascending(self) -> "Curve":
        if len(self.sizes) != len(self.values):
            raise ValueError(f"a curve needs one value per size, found {len(self.values)} for {len(self.sizes)} sizes")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"the sizes of a curve must ascend, found {list(self.sizes)}")
        return self

    def at(self, size: float) -> float:
        """The value at `size`."""
        index = bisect.bisect_right(self.sizes, size)
        if index == 0 or index == len(self.sizes):
            return self.values[max(index - 1, 0)]
        left, right = self.sizes[index - 1 : index + 1]
        share = math.log(size / left) / math.log(right / left)
        return self.values[index - 1] + share * (self.values[index] - self.values[index - 1])


class Device(Section):
    """One accelerator."""

    name: str = Field(description="what the driver calls it, e.g. NVIDIA H100 80GB HBM3")
    peak_flops: dict[str, Positive] = Field(description="dense FLOP/s by dtype")
    memory: Positive = Field(description="bytes a program can allocate")
    memory_bandwidth: Positive = Field(description="bytes/s")
    efficiency: Curve | None = Field(
        None, description="share of the peak that a matrix multiplication of so many FLOP reaches; null: all of it"
    )
    multiprocessors: Count | None = Field(
        None, description="streaming multiprocessors, which share the tiles of a product; null: tiles are not counted"
    )
    fused_attention: Positive = Field(
        1.0, description="rate of FlashAttention-2 on long sequences, relative to that of large products"
    )
    memory_share: Positive = Field(
        1.0, le=1, description="share of memory_bandwidth that element-wise kernels reach; 1: the bandwidth is measured"
    )
    launch: NonNegative = Field(0.0, description="seconds of a layer's forward pass between its kernels")
    reserve: float = Field(
        0.0, ge=0, lt=1, description="share of the memory that plans leave free; `jhpt.plan` leaves 3 % at least"
    )
    spread: NonNegative | None = Field(
        None, description="largest (q90 - q10) / median of the repetitions behind the rates; null: not measured"
    )

    @property
    def rates(self) -> str:
        """All that its seconds depend on, as text: devices of one kind may differ in memory."""
        return _text(self, "memory", "reserve")

    @property
    def usable(self) -> float:
        """Bytes that a plan may fill."""
        return (1 - self.reserve) * self.memory

    @property
    def stream_rate(self) -> float:
        """Bytes/s that element-wise kernels reach."""
        return self.memory_share * self.memory_bandwidth

    def sustained(self, dtype: str) -> float:
        """FLOP/s of large products."""
        return self.peak_flops[dtype] * (self.efficiency.values[-1] if self.efficiency else 1.0)

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """Roofline of one operation that fills the device: max(flops / (peak * efficiency(flops)), moved / rate)."""
        rate = self.peak_flops[dtype] * (self.efficiency.at(flops) if self.efficiency and flops > 0 else 1.0)
        return max(flops / rate, moved / self.stream_rate)


class Link(Section):
    """One level of the interconnect, one direction (links are full duplex)."""

    bandwidth: Positive = Field(description="bytes/s of one port, one direction")
    latency: NonNegative = Field(description="seconds before the first byte")
    ports: Count = Field(1, description="ports of a node (network) or of a device (inside a node)")
    measured: Curve | None = Field(None, description="bytes/s by message size of one port; null: `bandwidth` at all")
    reached: Positive = Field(
        1.0, le=1, description="share of the rate that collectives reach; 1: the rate is measured"
    )
    decline: NonNegative = Field(
        0.0, description="loss by congestion: collectives over q nodes reach the rate / (1 + decline log2 q)"
    )
    sharing: NonNegative = Field(
        0.0,
        description="loss by sharing: g groups that use a node's ports reach the rate / (1 + sharing log2 g) together",
    )
    spread: NonNegative | None = Field(
        None, description="largest (q90 - q10) / median of the repetitions behind the rates; null: unknown"
    )
    repetitions: Count | None = Field(None, description="how often each size was measured; null: unknown")

    @model_validator(mode="after")
    def _more_takes_longer(self) -> "Link":
        if self.measured:
            seconds = [size / rate for size, rate in zip(self.measured.sizes, self.measured.values, strict=True)]
            if any(later < earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(seconds)):
                raise ValueError(
                    "a measured link moves a larger message in less time than a smaller one; measure again"
                )
        return self

    def rate(self, size: float) -> float:
        """bytes/s of one port for messages of `size` bytes."""
        return self.reached * (self.measured.at(size) if self.measured and size > 0 else self.bandwidth)

    def congested(self, nodes: int, groups: int) -> float:
        """Share of the rate that groups over so many nodes, so many on a node, reach together."""
        return 1 / (1 + self.decline * math.log2(nodes)) / (1 + self.sharing * math.log2(groups))


class Node(Section):
    """Equal devices that share a host."""

    device: Device
    devices: Count
    inside: Link = Field(description="between devices of the node, per device")
    host: Link = Field(description="between a device and the host's memory")
    host_memory: Positive = Field(description="bytes")
    count: Count = Field(1, description="how many such nodes follow each other")

    @property
    def kind(self) -> str:
        """All but the count, as text: nodes with equal text are of one kind."""
        return _text(self, "count")


class Cluster(Section):
    """Nodes joined by one network.  `sources`: where the figures come from."""

    name: str
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]
    network: Link = Field(description="between nodes; `ports` of a node share its traffic")
    overlap: bool = Field(
        True,
        description="whether communication runs beside computation, and both directions of an exchange at the same "
        "time; XLA's CPU backend runs it in line",
    )
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def both_ways(self) -> int:
        """How many times as long as one message two messages take that cross between two devices.

        1: links carry both at the same time.  2 where communication runs in line, as on XLA's CPU backend: there a host
        announces to Gloo that it can receive, behind what it sends itself.  So the host that comes second sends its
        whole message before the first one may begin (docs/reports/hybrid.md has the measurement).
        """
        return 1 if self.overlap else 2

    @property
    def num_devices(self) -> int:
        """All devices."""
        return sum(node.devices * node.count for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        """All nodes."""
        return sum(node.count for node in self.nodes)

    @property
    def mixed(self) -> bool:
        """Whether there are nodes of different kinds."""
        return len({node.kind for node in self.nodes}) > 1

    def save(self, path: str | Path) -> None:
        """Writes JSON, with every null: `efficiency: null` is all of the peak, no `efficiency` the usual one."""
        write_json(path, self.model_dump(mode="json"))


def _text(section: Section, *without: str) -> str:
    """The fields as JSON, in an order that does not depend on how they were given."""
    return json.dumps(section.model_dump(mode="json", exclude=set(without)), sort_keys=True)


def load_cluster(path: str | Path) -> Cluster:
    """Reads a file that `Cluster.save` wrote; InputError names the file and every fault.

    `jhpt.core.cluster_file` reads what people write.
    """
    return parse(Cluster, read_tree(path), path)


def read_tree(path: str | Path) -> Any:
    """The tree in a JSON or YAML file."""
    try:
        return tree_of(read_text(path))
    except FileNotFoundError:
        raise InputError(f"{path}: cannot be read: no such file") from None
    except InputError as error:
        raise InputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def parse(kind: type[SectionT], tree: Any, path: str | Path) -> SectionT:
    """`tree` as a `kind`; InputError names the file and every fault."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}" for fault in error.errors()]
        raise InputError(f"{path} is no {kind.__name__} file:\n" + "\n".join(faults)) from None


def write_json(path: str | Path, tree: Any) -> None:
    """Writes `tree` as readable JSON; InputError where the path cannot be written."""
    try:
        Path(path).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from None
