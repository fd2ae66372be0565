"""Where everything lies that a step touches: from the model's tree to what devices hold, and back.

A model's tree is `{"embedding": ..., "blocks": [L, ...], "head": ...}`, on any mesh; so is a checkpoint's.  As it is
stored for a plan,

    one stage, layers alike     it is the same
    one stage, several degrees  `blocks` is `{"0": [l, ...], "1": ...}`, a stack for every run of layers treated alike
    several stages              leaves of `blocks` are [S v l, ...] with l the blocks of the fullest chunk: device after
                                device, chunk after chunk, unused rows zero; other leaves are [S, ...], a slot on every
                                stage.  The slots of `embedding/tokens` also hold the head's table: on the last stage,
                                the copy of a tied one or the untied one itself.

Every leaf is cut over the tensor axes as `partition` says, and with ZeRO over the data axes too, all or (hybrid
sharding) the inner one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jhpt.core.plan import Chunk, Plan
from jhpt.core.plan_check import check_plan
from jhpt.sharding.mesh import DeviceMesh
from jhpt.sharding.partition import Rules, names_of, parameter_spec, path_name
from jhpt.sharding.types import KeyPath, PyTree, StoredParams, Tree

TABLE = ("embedding", "tokens")
"""Where the table of the vocabulary is; `head/tokens` where it is not shared."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A plan on its mesh, for a model of `num_layers` blocks between an embedding and a head."""

    plan: Plan
    device_mesh: DeviceMesh
    num_layers: int
    alike: bool = True
    """Whether blocks can be stacked; if not, the model's own tree has a stack of one for each."""
    rules: Rules = ()
    """Partition rules of the model's family, before those that all share."""

    def __post_init__(self) -> None:
        """Refuses stages and numbers that do not form a plan."""
        check_plan(self.plan, self.num_layers + 2)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the plan."""
        return tuple(self.device_mesh.mesh.devices.flat)

    @property
    def replicated(self) -> NamedSharding:
        """One whole copy on every device."""
        return NamedSharding(self.device_mesh.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Rows over all data axes of the smallest degree; every stage has them."""
        return NamedSharding(
            self.device_mesh.mesh, PartitionSpec(self.device_mesh.axes(self.device_mesh.degrees[0]).data)
        )

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.device_mesh.stages

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The tensor degrees of the embedding, every block, and the head."""
        return tuple(t for chunk in self._in_order for t in chunk.tensor)

    @property
    def _in_order(self) -> list[Chunk]:
        """The chunks of all stages, by layer."""
        return sorted((chunk for stage in self.plan.stages for chunk in stage.chunks), key=lambda chunk: chunk.first)

    @cached_property
    def sample_chunks(self) -> tuple[int, ...]:
        """The number of sample chunks of every block."""
        return tuple(n for chunk in self._in_order for n in chunk.sample_chunks)[1:-1]

    @property
    def other_blocks(self) -> range:
        """The blocks that save more than the first ones (`Plan.other_blocks`)."""
        others = self.plan.other_blocks
        return range(others.after if others else self.num_layers, self.num_layers)

    @cached_property
    def runs(self) -> tuple[tuple[str, int, range], ...]:
        """(name, degree, blocks) of neighbouring blocks that are treated alike."""
        if not self.num_layers:  # a stage of its own may hold only the embedding or the head
            return ()
        save_more = [i in self.other_blocks for i in range(self.num_layers)]
        layer_strategy = list(zip(self.degrees[1:-1], self.sample_chunks, save_more, strict=True))
        apart = [i for i in range(1, self.num_layers) if not self.alike or layer_strategy[i - 1] != layer_strategy[i]]
        edges = [0, *apart]
        stops = [*edges[1:], self.num_layers]
        return tuple(
            (str(n), self.degrees[a + 1], range(a, b)) for n, (a, b) in enumerate(zip(edges, stops, strict=True))
        )

    @property
    def stacked_whole(self) -> bool:
        """Whether `blocks` is one stack, without names of runs."""
        return self.alike and len(self.runs) == 1

    @cached_property
    def chunks(self) -> tuple[np.ndarray, np.ndarray]:
        """[S, v] the first block of every chunk, and how many it has."""
        spans = [[(c.first - 1, c.stop - 1) for c in stage.chunks] for stage in self.plan.stages]
        edges = np.clip(np.array(spans), 0, self.num_layers)
        return edges[..., 0], edges[..., 1] - edges[..., 0]

    @cached_property
    def rows(self) -> np.ndarray:
        """[L] the row of every block in leaves [S v l, ...]."""
        first, count = self.chunks
        depth = int(count.max())
        row = np.zeros(self.num_layers, np.int64)
        for place, (start, many) in enumerate(zip(first.ravel(), count.ravel(), strict=True)):
            row[start : start + many] = place * depth + np.arange(many)
        return row

    def specs(self, tree: PyTree) -> Any:
        """Partitions of stored leaves: of parameters, their gradients or the optimizer's state."""

        def spec(path: KeyPath, leaf: jax.Array) -> PartitionSpec:
            name = path_name(path)
            return self._spec(name, leaf.shape, self.shards(name))

        return jax.tree_util.tree_map_with_path(spec, tree)

    def rank_specs(self, tree: PyTree) -> Any:
        """Partitions of trees that every data rank has one of, whole: leaves [data ranks, *stored shape]."""

        def spec(path: KeyPath, leaf: jax.Array) -> PartitionSpec:
            name = path_name(path)
            return PartitionSpec(self.device_mesh.axes(self.degree(name)).data, *self._spec(name, leaf.shape[1:], 1))

        return jax.tree_util.tree_map_with_path(spec, tree)

    def data_ranks(self, path: str) -> int:
        """The number of ranks over which the gradient of a stored leaf is summed."""
        return self.device_mesh.size(self.device_mesh.axes(self.degree(path)).data)

    def shards(self, path: str) -> int:
        """The number of data ranks over which ZeRO shards a stored leaf; 1 without ZeRO."""
        return self.device_mesh.size(self.device_mesh.axes(self.degree(path)).shard) if self.plan.zero else 1

    def _spec(self, path: str, shape: tuple[int, ...], over_data: int) -> PartitionSpec:
        if not shape:
            return PartitionSpec()
        axes, piped = self.device_mesh.axes(self.degree(path)), self.stages > 1
        stacked = "blocks/" in path or piped
        return parameter_spec(path, shape, axes, stacked=stacked, pipe=piped, over_data=over_data, rules=self.rules)

    def shardings(self, tree: PyTree) -> Any:
        """`specs` on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.device_mesh.mesh, spec), self.specs(tree))

    def on_whole_layers(self, function: Callable[[Any], Any], tree: PyTree) -> Any:
        """`function` of stored leaves of blocks, under `jit`, while no layer is cut: for arithmetic on whole matrices.

        Meanwhile the axes that cut a leaf share out the layers of each stage: an all-to-all for each axis, there and
        back.  Zeros are put behind the layers of a stage, so that every rank has as many.

        Args:
          function: of every layer by itself.
        """

        def there(path: KeyPath, leaf: jax.Array) -> jax.Array:
            moves = self._to_whole_layers(path_name(path), leaf.shape)
            ranks = self.device_mesh.size(moves[-1][0])
            most = -(-leaf.shape[0] // ranks)
            return self._moved(self._with_rows(leaf, most * ranks // self.stages), moves)

        def back(path: KeyPath, leaf: jax.Array, before: jax.Array) -> jax.Array:
            moves = self._to_whole_layers(path_name(path), leaf.shape)
            return self._with_rows(self._moved(leaf, moves[::-1]), before.shape[0] // self.stages)

        results = function(jax.tree_util.tree_map_with_path(there, tree))
        return jax.tree_util.tree_map_with_path(back, results, tree)

    def _moved(self, leaf: jax.Array, moves: Sequence[Sequence[tuple[str, ...]]]) -> jax.Array:
        """A leaf under one partition after the other."""
        for spec in moves:
            sharding = NamedSharding(self.device_mesh.mesh, PartitionSpec(*spec))
            leaf = jax.lax.with_sharding_constraint(leaf, sharding)
        return leaf

    def _with_rows(self, leaf: jax.Array, rows: int) -> jax.Array:
        """A leaf [S n, ...] with so many rows on each of S stages: the first ones, and zeros where there are fewer."""
        apart = leaf.reshape(self.stages, -1, *leaf.shape[1:])[:, :rows]
        more = [(0, rows - apart.shape[1] if dim == 1 else 0) for dim in range(apart.ndim)]
        return jnp.pad(apart, more).reshape(-1, *leaf.shape[1:])

    def _to_whole_layers(self, path: str, shape: tuple[int, ...]) -> list[tuple[tuple[str, ...], ...]]:
        """The axes of every dimension of a leaf as it is stored, and after each axis that has left a layer.

        One axis moves at a time, the innermost of a dimension first: XLA has no exchange for two.
        """
        spec = [names_of(axes) for axes in self._spec(path, shape, self.shards(path))]
        moves, data = [tuple(spec)], self.device_mesh.axes(self.degree(path)).data
        inside = [axis for dims in spec[1:] for axis in reversed(dims)]
        for axis in sorted(inside, key=lambda axis: axis not in data):
            spec[1:] = [tuple(name for name in dims if name != axis) for dims in spec[1:]]
            spec[0] = (*spec[0], axis)
            moves.append(tuple(spec))
        return moves

    def stacks(self, tree: PyTree) -> Any:
        """For every stored leaf the name of the stack of blocks that it is in; empty: none."""

        def stack(path: KeyPath, _: jax.Array) -> str:
            before, blocks, name = path_name(path).partition("blocks/")
            run = "" if self.stacked_whole else name.split("/")[0]
            return before + blocks + run if blocks else ""

        return jax.tree_util.tree_map_with_path(stack, tree)

    def degree(self, path: str) -> int:
        """The tensor degree of a stored leaf."""
        if "blocks/" not in path:
            return self.degrees[0] if "embedding/" in path else self.degrees[-1]
        if self.stacked_whole:
            return self.runs[0][1]
        run = path.split("blocks/")[1].split("/")[0]
        return next(degree for name, degree, _ in self.runs if name == run)

    # From the model's tree to what is stored, and back.

    def model_shardings(self, tree: PyTree) -> Any:
        """Where leaves of the model's tree lie on their way from or to a checkpoint: in shares, whatever the plan."""
        return self.shardings(tree) if self.same else self.model_shares(tree)

    def model_shares(self, tree: PyTree) -> Any:
        """Every leaf of the model's tree cut over all devices, or those of one replica, as far as its dims allow."""
        axes = self.device_mesh.axes(self.device_mesh.degrees[0])

        def sharding(path: KeyPath, leaf: jax.Array) -> NamedSharding:
            name = path_name(path)
            blocks = "blocks/" in name
            pipe = self.stages > 1 and blocks and leaf.shape[0] % self.stages == 0
            over_data = self.device_mesh.size(axes.shard)
            spec = parameter_spec(
                name, leaf.shape, axes, stacked=blocks, pipe=pipe, over_data=over_data, rules=self.rules
            )
            return NamedSharding(self.device_mesh.mesh, spec)

        return jax.tree_util.tree_map_with_path(sharding, tree)

    @property
    def same(self) -> bool:
        """Whether what is stored is the model's tree itself."""
        return self.stages == 1 and (self.stacked_whole or not self.alike)

    def stored(self, tree: Mapping[str, Mapping[str, Tree]]) -> Any:
        """The model's tree as this plan stores it."""
        if self.same:
            return tree
        if self.stages == 1:
            runs = {name: jax.tree.map(lambda x, s=s: x[s.start : s.stop], tree["blocks"]) for name, _, s in self.runs}
            return {**tree, "blocks": runs}
        first, count = self.chunks
        rows = first.size * int(count.max())
        embedding_and_head = {name: dict(part) for name, part in tree.items() if name != "blocks"}
        table = embedding_and_head["head"].pop(TABLE[1], tree[TABLE[0]].get(TABLE[1]))
        stored = {
            name: jax.tree.map(lambda leaf, name=name: self._slots(leaf, 0 if name == TABLE[0] else -1), part)
            for name, part in embedding_and_head.items()
        }
        if table is not None:
            tokens = stored[TABLE[0]]
            tokens[TABLE[1]] = jax.tree.map(lambda slots, last: slots.at[-1].set(last), tokens[TABLE[1]], table)
        blocks = jax.tree.map(
            lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype).at[self.rows].set(leaf), tree["blocks"]
        )
        return {**stored, "blocks": blocks}

    def model_tree(self, stored: StoredParams, tied: bool | None) -> Any:
        """The model's tree of stored parameters."""
        if self.same:
            return stored
        if self.stages == 1:
            parts = [stored["blocks"][name] for name, _, _ in self.runs]
            return {**stored, "blocks": jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)}
        tree = {
            name: jax.tree.map(lambda leaf, name=name: leaf[0 if name == TABLE[0] else -1], part)
            for name, part in stored.items()
            if name != "blocks"
        }
        if tied is False:
            embedding: Any = stored[TABLE[0]]
            tree["head"] = {**tree["head"], TABLE[1]: jax.tree.map(lambda slots: slots[-1], embedding[TABLE[1]])}
        return {**tree, "blocks": jax.tree.map(lambda leaf: leaf[self.rows], stored["blocks"])}

    def _slots(self, leaf: jax.Array, stage: int) -> jax.Array:
        return jnp.zeros((self.stages, *leaf.shape), leaf.dtype).at[stage].set(leaf)

    def own_rows(self, batch_size: int) -> slice:
        """The rows of a global batch that this process has to supply."""
        indices = self.batch.addressable_devices_indices_map((batch_size,)).values()
        spans = [index[0].indices(batch_size) for index in indices if index is not None]
        return slice(min(span[0] for span in spans), max(span[1] for span in spans))
