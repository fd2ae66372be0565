"""Where the rows of offloaded blocks lie: on host or device, streamed or resident, cut over the data axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jhpt.core.plan import Offload
from jhpt.sharding.offload.buckets import Bucket, bucket_of
from jhpt.sharding.offload.stream import DEVICE, GRADIENT, RESIDENT, WEIGHTS, HostRows
from jhpt.sharding.step import Execution
from jhpt.sharding.types import Params, Tree


@dataclass(frozen=True, kw_only=True)
class OffloadedRows:
    """The blocks of a plan with `offload` as rows: one array [blocks, N] for each name, where N is the size of a block.

    Rows are cut over the data axes, [L, N/dp], as ZeRO cuts parameters.

    execution: the model, training or evaluating.  layer: shapes of one block's parameters.  decays: whether weight
    decay acts on the leaf of this path.
    """

    execution: Execution
    layer: Params
    decays: Callable[[str], bool]

    @property
    def offload(self) -> Offload:
        """What is offloaded, and how."""
        offload = self.execution.layout.plan.offload
        assert offload is not None
        return offload

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self.execution.layout.num_layers

    @cached_property
    def bucket(self) -> Bucket:
        """How a block's leaves lie in its row."""
        return bucket_of(self.layer, self.decays, parts=self.ranks)

    @property
    def ranks(self) -> int:
        """The number of data ranks."""
        return self.execution.layout.device_mesh.size(self.axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the data ranks."""
        return self.execution.layout.device_mesh.axes(1).data

    @property
    def group(self) -> int:
        """The number of blocks of a group: one that is streamed, and those that are resident."""
        return 1 + self.offload.resident

    def on_host(self, name: str) -> bool:
        """Whether rows of this name are in host memory."""
        parameters = name in (WEIGHTS, GRADIENT)
        return not name.startswith(RESIDENT) and self.offload.kind in (
            "both",
            "parameters" if parameters else "optimizer",
        )

    def sharding(self, name: str) -> NamedSharding:
        """Where rows of this name lie: a shard for every data rank, on its host or on the device."""
        kind = "pinned_host" if self.on_host(name) else "device"
        return NamedSharding(self.execution.layout.device_mesh.mesh, self.spec, memory_kind=kind)

    @property
    def spec(self) -> PartitionSpec:
        """The partition of rows."""
        return PartitionSpec(None, self.axes)

    def shapes(self, names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Shapes of the rows of these names, of streamed and of resident blocks."""
        groups, size = self.count // self.group, self.bucket.size
        resident = {RESIDENT + name: (self.count - groups, size) for name in names} if self.offload.resident else {}
        return {name: (groups, size) for name in names} | resident

    def place(self, block: int) -> tuple[str, int]:
        """(prefix of the names of a block's rows, its index in them)."""
        group, at = divmod(block, self.group)
        return ("", group) if at == 0 else (RESIDENT, group * self.offload.resident + at - 1)

    def empty(self, names: Sequence[str]) -> HostRows:
        """Rows of zeros, where they are to lie."""

        def zeros(name: str, shape: tuple[int, int]) -> jax.Array:
            make = lambda index: np.zeros(_extent(index, shape), np.float32)  # noqa: E731
            return jax.make_array_from_callback(shape, self.sharding(name), make)

        return {name: zeros(name, shape) for name, shape in self.shapes(names).items()}

    def rows(self, name: str, blocks: Tree) -> HostRows:
        """Leaves [L, ...] in host memory -> rows of this name, where they are to lie; shard by shard."""
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, self.group, *leaf.shape[1:]), blocks)

        def placed(name: str, shape: tuple[int, int]) -> jax.Array:
            members = slice(1, None) if name.startswith(RESIDENT) else slice(1)
            part, place = jax.tree.map(lambda leaf: leaf[:, members], groups), self.sharding(name)
            shards = []
            for device, index in place.addressable_devices_indices_map(shape).items():
                assert index is not None, "of a local device"
                shard = self.bucket.stacked(part, index[1]).reshape(shape[0], -1)
                shards.append(jax.device_put(shard, SingleDeviceSharding(device, memory_kind=place.memory_kind)))
            return jax.make_array_from_single_device_arrays(shape, place, shards)

        return {key: placed(key, shape) for key, shape in self.shapes([name]).items()}

    def row(self, name: str, rows: HostRows, block: int) -> np.ndarray:
        """A block's whole row of this name in host memory; all processes call it, because devices exchange the row."""
        prefix, index = self.place(block)
        return np.asarray(_fetched(rows[prefix + name], index, self.execution.layout.replicated))


@partial(jax.jit, static_argnums=2)
def _fetched(rows: jax.Array, index: int, place: NamedSharding) -> jax.Array:
    row = jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False)
    return jax.lax.with_sharding_constraint(jax.device_put(row, DEVICE), place)


def _extent(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(size)[part]) for part, size in zip(index, shape, strict=True))
