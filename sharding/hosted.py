"""A step whose blocks live on the host: each is there as one row of numbers, and comes to the device when its turn has.

    forward    fetch a block, take the step that its last gradient asks for, write it back, compute it
    backward   fetch it again, compute its gradient, sum it over the data ranks, write that to the host

The step that a gradient asks for can only be taken once all gradients are known, for clipping needs their norm and a
gradient that is not finite must leave everything as it was.  So it is taken when a block is fetched the next time, in
the next forward pass: exact, and without another pass over the parameters.

Every data rank holds its share of each row, gathers a block's when it is used and keeps its share of the gradient's
sum, as ZeRO does.  The two ends stay on the devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jhpt.core.errors import InputError
from jhpt.sharding.buckets import Bucket, bucket_of
from jhpt.sharding.execute import Execution, completed
from jhpt.sharding.parts import added, picked
from jhpt.sharding.streamed import DEVICE, RESIDENT, Hosted, Rows, StreamedLoop, apart, joined, over_layers

Update = Callable[[Rows, Any], Rows]
"""(rows of a block, what is to be done) -> rows, after the step that their gradient asks for."""


@dataclass(frozen=True, kw_only=True)
class HostedBlocks:
    """A plan's step over blocks on the host.

    layer: shapes of one block's parameters.  decays: whether weight decay acts on the leaf of this path.  ahead: groups
    of blocks that are fetched before their turn.  resident: after each streamed block so many stay on the device.

    Raises:
      InputError: a plan with pipeline stages, tensor ranks, micro-batches, ZeRO-3, or compressed gradients; groups that
        do not divide the blocks.
    """

    execution: Execution
    layer: Any
    decays: Callable[[str], bool]
    ahead: int = 1
    resident: int = 0

    def __post_init__(self) -> None:
        """Only what is built can run."""
        layout = self.execution.layout
        plan = layout.plan
        refused = {
            "pipeline stages": layout.stages > 1,
            "tensor parallelism": plan.degrees != (1,),
            "several micro-batches": plan.micro_batches > 1,
            "zero=3": plan.zero == 3,
            "compressed gradients": plan.gradient_compression.on,
        }
        if found := [name for name, there in refused.items() if there]:
            raise InputError(f"blocks cannot live on the host under {' and '.join(found)}; leave that out of the plan")
        if layout.num_layers % self.group:
            raise InputError(
                f"{layout.num_layers} blocks do not fall into groups of one that is streamed and {self.resident} that "
                f"stay; choose a divisor of {layout.num_layers}, less one"
            )

    @cached_property
    def bucket(self) -> Bucket:
        """Of a block."""
        return bucket_of(self.layer, self.decays, parts=self.ranks)

    @property
    def ranks(self) -> int:
        """Data ranks."""
        return self.execution.layout.grid.size(self.axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the data ranks."""
        return self.execution.layout.grid.axes(1).data

    @property
    def group(self) -> int:
        """Blocks of a group."""
        return 1 + self.resident

    def sharding(self, name: str) -> NamedSharding:
        """Of rows by name: a share for every data rank, on its host or, of resident blocks, on the device."""
        kind = "device" if name.startswith(RESIDENT) else "pinned_host"
        return NamedSharding(self.execution.layout.grid.mesh, self._spec, memory_kind=kind)

    @property
    def _spec(self) -> PartitionSpec:
        return PartitionSpec(None, self.axes)

    def rows(self, name: str, blocks: Any) -> Hosted:
        """Stacked leaves [L, ...] -> rows of this name: of streamed blocks, and of those that stay."""
        rows = jax.vmap(self.bucket.packed)(blocks)
        groups = rows.reshape(-1, self.group, self.bucket.size)
        stay = {RESIDENT + name: groups[:, 1:].reshape(-1, self.bucket.size)} if self.resident else {}
        return {name: groups[:, 0], **stay}

    def blocks(self, name: str, rows: Hosted) -> Any:
        """`rows` backwards."""
        groups = jax.device_put(rows[name], DEVICE)[:, None]
        if self.resident:
            groups = jnp.concatenate([groups, rows[RESIDENT + name].reshape(-1, self.resident, self.bucket.size)], 1)
        return jax.vmap(self.bucket.unpacked)(groups.reshape(-1, self.bucket.size))

    def gradients(
        self,
        hosted: Hosted,
        ends: Any,
        batch: Any,
        key: jax.Array,
        update: Update,
        pending: Any,
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> tuple[Hosted, Any, Any, jax.Array]:
        """Updates the blocks as `pending` says, then computes the gradient of the mean loss over predicted tokens.

        Args:
          hosted: rows by name; those of the gradient are what the step before has left.
          ends: parameters of the two ends, whole on every device.
          batch: a tree of global [B, ...].  Row r draws from `fold_in(key, r)`.
          reads, writes: names of the rows that the update needs, and changes.

        Returns:
          (rows, gradient of the ends, sums, sum of the squares of all blocks' gradients).
        """
        pieces = max(leaf.size for leaf in jax.tree.leaves(batch))

        def run(hosted: Hosted, ends: Any, batch: Any, key: jax.Array, pending: Any) -> Any:
            parts, storage = self.execution.parts[1], self.execution.storage(1)
            batch, keys = self.execution.micro_batches(batch, key)
            batch, keys = jax.tree.map(lambda leaf: leaf[0], batch), keys[0]
            whole = jax.tree.map(lambda _: PartitionSpec(), ends)
            used = storage.gathered(ends, whole)

            x, pull_entry = jax.vjp(lambda ends: parts.entry(ends, batch, keys), picked(used, parts.entry_reads))
            loop = self._loop
            own = lambda rows: update(rows, pending)  # noqa: E731
            x, passed, hosted = loop.forward(hosted, x, keys, own, reads, writes)

            def loss(ends: Any, x: jax.Array) -> tuple[jax.Array, Any]:
                sums = parts.exit(ends, x, batch, keys)
                return sums.loss / pieces, sums

            _, pull_exit, sums = jax.vjp(loss, picked(used, parts.exit_reads), x, has_aux=True)
            gradient, error = pull_exit(jnp.float32(1))
            sums = self.execution.summed_over_ranks(sums)
            unit = pieces / sums.tokens
            loop = replace(loop, given=lambda gradient: self._share(gradient) * unit)
            error, squares, hosted = loop.backward(hosted, passed, error)
            (entry,) = pull_entry(error)
            gradient = completed(added(gradient, entry), ends)
            gradient = storage.summed(storage.scattered(gradient, whole), whole)
            gradient = jax.tree.map(lambda leaf: leaf * unit, gradient)
            return hosted, gradient, sums, jax.lax.psum(squares, self.axes)

        rows = {name: self._spec for name in hosted}
        everywhere = PartitionSpec()
        mapped = jax.shard_map(
            run,
            mesh=self.execution.layout.grid.mesh,
            in_specs=(rows, everywhere, self.execution.layout.batch.spec, everywhere, everywhere),
            out_specs=(rows, everywhere, everywhere, everywhere),
            check_vma=False,
        )
        return mapped(hosted, ends, batch, key, pending)

    def over_rows(self, update: Update, hosted: Hosted, pending: Any) -> Hosted:
        """Every block updated as `pending` says, without computing anything."""

        def run(hosted: Hosted, pending: Any) -> Hosted:
            def body(_: jax.Array, rows: Rows, carry: None) -> tuple[None, Rows]:
                return carry, {**rows, **update(rows, pending)}

            def updated(hosted: Hosted) -> Hosted:
                return over_layers(hosted, tuple(hosted), tuple(hosted), body, None, ahead=self.ahead)[1]

            streamed, stay = apart(hosted)
            return joined(updated(streamed), updated(stay) if stay else {})

        rows = {name: self._spec for name in hosted}
        mesh = self.execution.layout.grid.mesh
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False)
        return mapped(hosted, pending)

    @property
    def _loop(self) -> StreamedLoop:
        return StreamedLoop(
            function=self.execution.recompute(self.execution.parts[1].block),
            bucket=self.bucket,
            first=0,
            ahead=self.ahead,
            used=self._whole,
            given=self._share,
        )

    def _whole(self, row: jax.Array) -> jax.Array:
        return jax.lax.all_gather(row, self.axes, tiled=True) if self.ranks > 1 else row

    def _share(self, gradient: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(gradient, self.axes, tiled=True) if self.ranks > 1 else gradient


def without_blocks(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The two ends of a model's tree."""
    return {name: part for name, part in tree.items() if name != "blocks"}
