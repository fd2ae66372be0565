"""A step whose blocks live on the host: each is there as one row of numbers, and comes to the device when its turn has.

    forward    fetch a block, let it arrive, compute it
    backward   fetch it again, compute its gradient, sum it over the data ranks, let it leave

What a block does when it arrives and when it leaves, and what is fetched and written for that, are its `BlockUpdateHooks`: of an
optimizer's step, one of the two (`training.offloaded_training`).

Micro-batches go through a block one after the other before the next block comes (`streamed`): what is copied in a step
does not depend on how many they are.

Every data rank holds its share of each row, gathers a block's when it is used and keeps its share of the gradient's
sum, as ZeRO does.  The two ends stay on the devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jhpt.core.plan import Offload
from jhpt.sharding.model_parts import added, picked
from jhpt.sharding.offload.buckets import Bucket, bucket_of
from jhpt.sharding.offload.stream import (
    DEVICE,
    GRADIENT,
    RESIDENT,
    WEIGHTS,
    HostRows,
    Layer,
    Rows,
    StreamedLoop,
    apart,
    joined,
    over_layers,
)
from jhpt.sharding.step import Execution, completed

Update = Callable[[Any, Rows], Rows]
"""(what is to be done, rows of a block) -> rows."""


@dataclass(frozen=True, kw_only=True)
class BlockUpdateHooks:
    """What happens to a block's rows in the two passes of a step.

    arrive: before its forward pass; None: nothing.  It is given rows of `arrive_reads`, weights among them, and those
    of `arrive_writes` are written.
    first: (sums of the whole batch, what is to be done) -> what the last block is told.
    leave: (what is to be done, rows, gradient, what it is told) -> (what it tells the block before it, rows), once the
    gradient is there.  It is given the weights and `leave_reads`; `leave_writes` are written.
    last: what the first block tells -> the same on every rank.
    """

    arrive: Update | None
    arrive_reads: tuple[str, ...]
    arrive_writes: tuple[str, ...]
    first: Callable[[Any, Any], Any]
    leave: Callable[[Any, Rows, jax.Array, Any], tuple[Any, Rows]]
    leave_reads: tuple[str, ...] = ()
    leave_writes: tuple[str, ...]
    last: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class OffloadedBlocks:
    """The step of a plan with `offload` over its blocks.

    execution: the model, training or evaluating.  layer: shapes of one block's parameters.  decays: whether weight
    decay acts on the leaf of this path.
    """

    execution: Execution
    layer: Any
    decays: Callable[[str], bool]

    @property
    def offload(self) -> Offload:
        """What lives on the host."""
        offload = self.execution.layout.plan.offload
        assert offload is not None
        return offload

    @property
    def count(self) -> int:
        """Blocks."""
        return self.execution.layout.num_layers

    @cached_property
    def bucket(self) -> Bucket:
        """Of a block."""
        return bucket_of(self.layer, self.decays, parts=self.ranks)

    @property
    def ranks(self) -> int:
        """Data ranks."""
        return self.execution.layout.device_mesh.size(self.axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the data ranks."""
        return self.execution.layout.device_mesh.axes(1).data

    @property
    def group(self) -> int:
        """Blocks of a group: one that comes and goes, and those that stay."""
        return 1 + self.offload.resident

    def on_host(self, name: str) -> bool:
        """Whether rows of this name live there."""
        parameters = name in (WEIGHTS, GRADIENT)
        return not name.startswith(RESIDENT) and self.offload.kind in (
            "both",
            "parameters" if parameters else "optimizer",
        )

    def sharding(self, name: str) -> NamedSharding:
        """Of rows by name: a share for every data rank, on its host or on the device."""
        kind = "pinned_host" if self.on_host(name) else "device"
        return NamedSharding(self.execution.layout.device_mesh.mesh, self.spec, memory_kind=kind)

    @property
    def spec(self) -> PartitionSpec:
        """Of rows."""
        return PartitionSpec(None, self.axes)

    def shapes(self, names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Of the rows of these names, of blocks that come and go and of those that stay."""
        groups, size = self.count // self.group, self.bucket.size
        stay = {RESIDENT + name: (self.count - groups, size) for name in names} if self.offload.resident else {}
        return {name: (groups, size) for name in names} | stay

    def place(self, block: int) -> tuple[str, int]:
        """(what stands before the names of a block's rows, their index)."""
        group, at = divmod(block, self.group)
        return ("", group) if at == 0 else (RESIDENT, group * self.offload.resident + at - 1)

    def empty(self, names: Sequence[str]) -> HostRows:
        """Zeros, in their places."""

        def zeros(name: str, shape: tuple[int, int]) -> jax.Array:
            make = lambda index: np.zeros(_extent(index, shape), np.float32)  # noqa: E731
            return jax.make_array_from_callback(shape, self.sharding(name), make)

        return {name: zeros(name, shape) for name, shape in self.shapes(names).items()}

    def rows(self, name: str, blocks: Any) -> HostRows:
        """Leaves [L, ...] in the host's memory -> rows of this name, in their places, a rank's share after another."""
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, self.group, *leaf.shape[1:]), blocks)

        def placed(name: str, shape: tuple[int, int]) -> jax.Array:
            members = slice(1, None) if name.startswith(RESIDENT) else slice(1)
            own, place = jax.tree.map(lambda leaf: leaf[:, members], groups), self.sharding(name)
            shares = []
            for device, index in place.addressable_devices_indices_map(shape).items():
                assert index is not None, "of a local device"
                share = self.bucket.stacked(own, index[1]).reshape(shape[0], -1)
                shares.append(jax.device_put(share, SingleDeviceSharding(device, memory_kind=place.memory_kind)))
            return jax.make_array_from_single_device_arrays(shape, place, shares)

        return {own: placed(own, shape) for own, shape in self.shapes([name]).items()}

    def row(self, name: str, rows: HostRows, block: int) -> np.ndarray:
        """A block's row of this name, whole, in the host's memory: through the devices, a call of all processes."""
        prefix, index = self.place(block)
        return np.asarray(_fetched(rows[prefix + name], index, self.execution.layout.replicated))

    def initial(self, offloaded: HostRows, init: Callable[[jax.Array], Any]) -> HostRows:
        """With the weights that `init` gives, layer -> parameters; block by block, on the devices."""

        def run(offloaded: HostRows) -> HostRows:
            return self._loop.filled(offloaded, lambda layer: self._own(self.bucket.packed(init(layer))))

        rows = {name: self.spec for name in offloaded}
        filled: HostRows = self._mapped(run, (rows,), rows)(offloaded)
        return filled

    def gradients(
        self,
        offloaded: HostRows,
        embedding_and_head: Any,
        batch: Any,
        key: jax.Array,
        turns: BlockUpdateHooks,
        pending: Any,
    ) -> tuple[HostRows, Any, Any, Any]:
        """The gradient of the mean loss over predicted tokens, and what the blocks make of theirs.

        Args:
          hosted: rows by name.
          ends: parameters of the two ends, whole on every device.
          batch: a tree of global [B, ...].  Row r draws from `fold_in(key, r)`.
          turns: of the blocks; pending: what they are to do.

        Returns:
          (rows, gradient of the ends, sums, what the blocks told).
        """
        pieces = max(leaf.size for leaf in jax.tree.leaves(batch))

        def run(offloaded: HostRows, embedding_and_head: Any, batch: Any, key: jax.Array, pending: Any) -> Any:
            parts, storage = self.execution.parts[1], self.execution.storage(1)
            batch, keys = self.execution.micro_batches(batch, key)
            whole = jax.tree.map(lambda _: PartitionSpec(), embedding_and_head)
            used = storage.gathered(embedding_and_head, whole)

            x = self._entered(used, batch, keys)
            loop = self._loop
            arrive = None if turns.arrive is None else partial(turns.arrive, pending)
            x, passed, offloaded = loop.forward(offloaded, x, keys, arrive, turns.arrive_reads, turns.arrive_writes)

            def left(piece: Any) -> tuple[Any, Any]:
                x, batch, keys = piece

                def loss(embedding_and_head: Any, x: jax.Array) -> tuple[jax.Array, Any]:
                    sums = parts.exit(embedding_and_head, x, batch, keys)
                    return sums.loss / pieces, sums

                _, pull, sums = jax.vjp(loss, picked(used, parts.exit_reads), x, has_aux=True)
                gradient, error = pull(jnp.float32(1))
                return gradient, (error, sums)

            gradient, (error, sums) = _added_up(left, (x, batch, keys))
            # The gradient of the table first, for it reads that of the logits, which blocks need not wait beside.
            gradient, error = jax.lax.optimization_barrier((gradient, error))
            sums = self.execution.summed_over_ranks(jax.tree.map(lambda leaf: leaf.sum(0), sums))
            unit = pieces / sums.tokens
            loop = replace(loop, given=lambda gradient: self._share(gradient) * unit)
            leave = partial(turns.leave, pending)
            told = turns.first(sums, pending)
            error, told, offloaded = loop.backward(
                offloaded, passed, error, leave, told, turns.leave_reads, turns.leave_writes
            )

            def entered(piece: Any) -> tuple[Any, None]:
                error, batch, keys = piece
                _, pull = jax.vjp(
                    lambda embedding_and_head: parts.entry(embedding_and_head, batch, keys),
                    picked(used, parts.entry_reads),
                )
                return pull(error)[0], None

            gradient = completed(added(gradient, _added_up(entered, (error, batch, keys))[0]), embedding_and_head)
            gradient = storage.summed(storage.scattered(gradient, whole), whole)
            gradient = jax.tree.map(lambda leaf: leaf * unit, gradient)
            return offloaded, gradient, sums, turns.last(told)

        rows = {name: self.spec for name in offloaded}
        everywhere = PartitionSpec()
        return self._mapped(
            run, (rows, everywhere, self._batch, everywhere, everywhere), (rows, everywhere, everywhere, everywhere)
        )(offloaded, embedding_and_head, batch, key, pending)

    def sums(self, offloaded: HostRows, embedding_and_head: Any, batch: Any, key: jax.Array) -> Any:
        """The sums alone, forward only, of blocks for which no step is left to take."""

        def run(offloaded: HostRows, embedding_and_head: Any, batch: Any, key: jax.Array) -> Any:
            batch, keys = self.execution.micro_batches(batch, key)
            used = self.execution.storage(1).gathered(
                embedding_and_head, jax.tree.map(lambda _: PartitionSpec(), embedding_and_head)
            )
            x = self._loop.through(offloaded, self._entered(used, batch, keys), keys)
            each = jax.lax.map(lambda piece: self.execution.parts[1].exit(used, *piece), (x, batch, keys))
            return self.execution.summed_over_ranks(jax.tree.map(lambda leaf: leaf.sum(0), each))

        rows, everywhere = {name: self.spec for name in offloaded}, PartitionSpec()
        return self._mapped(run, (rows, everywhere, self._batch, everywhere), everywhere)(
            offloaded, embedding_and_head, batch, key
        )

    def _entered(self, embedding_and_head: Any, batch: Any, keys: jax.Array) -> Any:
        """x of all micro-batches before the first block."""
        return jax.lax.map(lambda piece: self.execution.parts[1].entry(embedding_and_head, *piece), (batch, keys))

    def over_rows(self, update: Update, offloaded: HostRows, pending: Any) -> HostRows:
        """Every block updated as `pending` says, without computing anything."""

        def run(offloaded: HostRows, pending: Any) -> HostRows:
            one = Layer(
                first=lambda _, rows, carry: (carry, None, {**rows, **update(pending, rows)}),
                second=lambda _, __, carry, ___: (carry, {}),
            )

            def updated(offloaded: HostRows) -> HostRows:
                return over_layers(offloaded, tuple(offloaded), tuple(offloaded), one, None, ahead=self.offload.ahead)[
                    1
                ]

            streamed, stay = apart(offloaded)
            return joined(updated(streamed), updated(stay) if stay else {})

        rows = {name: self.spec for name in offloaded}
        updated: HostRows = self._mapped(run, (rows, PartitionSpec()), rows)(offloaded, pending)
        return updated

    def _mapped(self, run: Any, inputs: Any, outputs: Any) -> Any:
        mesh = self.execution.layout.device_mesh.mesh
        return jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    @property
    def _batch(self) -> PartitionSpec:
        return self.execution.layout.batch.spec

    @property
    def _loop(self) -> StreamedLoop:
        return StreamedLoop(
            function=self.execution.recompute(self.execution.parts[1].block),
            bucket=self.bucket,
            first=0,
            ahead=self.offload.ahead,
            used=self._whole,
            cast=self._cast,
            given=self._share,
        )

    def summed(self, value: jax.Array) -> jax.Array:
        """Over the data ranks; inside a step."""
        return jax.lax.psum(value, self.axes)

    def _whole(self, row: jax.Array) -> jax.Array:
        return jax.lax.all_gather(row, self.axes, tiled=True) if self.ranks > 1 else row

    def _own(self, row: jax.Array) -> jax.Array:
        """This rank's share of a row."""
        size = self.bucket.size // self.ranks
        return jax.lax.dynamic_slice_in_dim(row, jax.lax.axis_index(self.axes) * size, size)

    def _cast(self, params: Any) -> Any:
        """As models use them, once for all micro-batches."""
        return self.execution.storage(1).gathered(params, jax.tree.map(lambda _: PartitionSpec(), params))

    def _share(self, gradient: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(gradient, self.axes, tiled=True) if self.ranks > 1 else gradient


@partial(jax.jit, static_argnums=2)
def _fetched(rows: jax.Array, index: Any, place: NamedSharding) -> jax.Array:
    row = jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False)
    return jax.lax.with_sharding_constraint(jax.device_put(row, DEVICE), place)


def _extent(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(size)[part]) for part, size in zip(index, shape, strict=True))


def _added_up(gradients: Callable[[Any], tuple[Any, Any]], pieces: Any) -> tuple[Any, Any]:
    """(sum of the gradients of all micro-batches, what they come with, stacked).

    Args:
      gradients: micro-batch -> (gradient, more).  pieces: [M, ...].
    """
    first = jax.tree.map(lambda leaf: leaf[0], pieces)
    if len(jax.tree.leaves(pieces)[0]) == 1:
        gradient, more = gradients(first)
        return gradient, jax.tree.map(lambda leaf: leaf[None], more)

    def add(total: Any, piece: Any) -> tuple[Any, Any]:
        gradient, rest = gradients(piece)
        return jax.tree.map(lambda one, own: one + own.astype(jnp.float32), total, gradient), rest

    shapes, _ = jax.eval_shape(gradients, first)
    total, rest = jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes), pieces)
    return total, rest


def without_blocks(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The two ends of a model's tree."""
    return {name: part for name, part in tree.items() if name != "blocks"}
