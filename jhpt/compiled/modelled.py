"""Modelled seconds of a compiled program, by the planner's formulas for the same cluster.

A matrix product takes max(FLOP / rate at that many FLOP, bytes moved / memory bandwidth).  A collective takes the
seconds of `jhpt.planner.cost.communication` for its group; all-to-all, which no plan has, is priced here.  Only matrix
products and fused attention are counted, and everything between them is left out.
"""

from collections import Counter
from dataclasses import dataclass

from jhpt.compiled.hlo import Array, Computation, Instruction, Module
from jhpt.compiled.replicas import Groups
from jhpt.core.cluster import Cluster, Device
from jhpt.planner.cost.communication import Group, all_gather, all_reduce, transfer_seconds

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""HLO's names of the dtypes for which a device has rates."""

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Products of fused attention (Dao 2023, arXiv 2307.08691, section 3.1); each has 2 x scores x head width FLOP."""


@dataclass(frozen=True)
class Product:
    """Matrix products of one kernel: FLOP, bytes read and written, element type."""

    flops: float
    moved: float
    dtype: str


class Clock:
    """Modelled seconds on one cluster, whose devices are numbered as the program's partitions."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.device: Device = cluster.nodes[0].device
        self.node_of = [
            number
            for number, size in enumerate(node.devices for node in cluster.nodes for _ in range(node.count))
            for _ in range(size)
        ]

    def has_rate(self, product: Product) -> bool:
        """Whether the device's rate for products of this element type is known."""
        return DTYPES.get(product.dtype) in self.device.peak_flops

    def product_seconds(self, product: Product) -> float:
        """Seconds of one kernel's matrix products, at the device's first rate if that of the dtype is not known."""
        dtype = DTYPES[product.dtype] if self.has_rate(product) else next(iter(self.device.peak_flops))
        return self.device.seconds(product.flops, product.moved, dtype)

    def collective_seconds(self, kind: str, groups: Groups, size: float) -> float:
        """Seconds of a collective to which every member contributes `size` bytes (for an all-gather, its share)."""
        if kind == "collective-permute":
            return self._permute_seconds(groups, size)
        group = self._group(groups)
        if kind == "all-reduce":
            return all_reduce(group, size)
        if kind == "all-to-all":
            return all_to_all(group, size)
        return all_gather(group, size * group.size if kind == "all-gather" else size)

    def _permute_seconds(self, pairs: Groups, size: float) -> float:
        crossing = [self.node_of[a] for a, b in pairs if self.node_of[a] != self.node_of[b]]
        if not crossing:
            return transfer_seconds((self.cluster.nodes[0].inside, 1), size)
        return transfer_seconds((self.cluster.network, max(Counter(crossing).values())), size)

    def _group(self, groups: Groups) -> Group:
        """The group that spans most nodes, as in `jhpt.planner.cost.communication` for stages."""
        here = [Counter(self.node_of[device] for device in group) for group in groups]
        inside, network, size = self.cluster.nodes[0].inside, self.cluster.network, len(groups[0])
        leaving = [nodes for nodes in here if len(nodes) > 1]
        if not leaving:
            return Group(size, 1, 1, size, inside, network)
        sharing = Counter(node for nodes in leaving for node in nodes)
        fewest = min(count for nodes in leaving for count in nodes.values())
        return Group(size, max(map(len, leaving)), max(sharing.values()), fewest, inside, network)


def all_to_all(group: Group, size: float) -> float:
    """Seconds until each of n members has sent an nth of its `size` bytes to every other member.

    Messages inside a node and messages through the node's ports are sent at the same time.
    """
    n, here, message = group.size, group.fewest, size / group.size
    inside = (here - 1) * message / group.inside.rate(message)
    across = here * (n - here) * message / group.port_rate(message)
    return max(inside, across) + (n - 1) * (group.inside if group.nodes == 1 else group.network).latency


def products(module: Module, computation: Computation, instruction: Instruction) -> tuple[Product, ...]:
    """The matrix products that an instruction executes, those of a fusion included."""
    if instruction.opcode == "dot":
        return (_dot(computation, instruction),)
    if instruction.opcode == "custom-call":
        return _custom(computation, instruction)
    if instruction.opcode == "fusion":
        inner = module[instruction.called("calls")]
        return tuple(product for one in inner for product in products(module, inner, one))
    return ()


def _dot(computation: Computation, dot: Instruction) -> Product:
    return _product(computation, dot, dot.numbers("lhs_contracting_dims"))


def _product(computation: Computation, one: Instruction, contracting: tuple[int, ...]) -> Product:
    """2 x (entries of the result) x (length of the sums)."""
    left, right = (computation[name].arrays[0] for name in one.operands[:2])
    result, flops = one.arrays[0], 2.0 * one.arrays[0].elements
    for dim in contracting:
        flops *= left.dims[dim]
    return Product(flops, left.bytes + right.bytes + result.bytes, left.dtype)


def _custom(computation: Computation, call: Instruction) -> tuple[Product, ...]:
    target = (call.attribute("custom_call_target") or "").strip('"')
    if target.startswith("__cublas"):
        numbers = call.config["gemm_backend_config"]["dot_dimension_numbers"]
        return (_product(computation, call, tuple(int(dim) for dim in numbers["lhs_contracting_dimensions"])),)
    if target.startswith("__cudnn$fmha"):
        return (_attention(computation, call, backward=target.endswith("Backward")),)
    return ()


def _attention(computation: Computation, call: Instruction, *, backward: bool) -> Product:
    config = call.config["cudnn_fmha_backend_config"]
    batch, heads, queries, keys = (int(size) for size in config["intermediate_tensor_shape"]["dimensions"])
    operands: list[Array] = [computation[name].arrays[0] for name in call.operands]
    width = operands[0].elements / (batch * heads * queries)
    seen = (keys + 1) / 2 if config["mask_type"] == "CAUSAL" else keys
    flops = 2.0 * batch * heads * queries * seen * width
    moved = sum(array.bytes for array in (*operands, *call.arrays))
    return Product(flops * (BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS), moved, operands[0].dtype)
