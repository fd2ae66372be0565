"""A step of one stage: micro-batches one after another, their gradients added up.

Layers of a stage may use its devices differently.  Where a run of layers of degree a meets one of degree b, the rows
of a micro-batch are gathered over the axes that turn from data into tensor axes, or cut the other way round:

    a < b   forward all_gather of x, backward every rank keeps its own rows of the gradient
    a > b   forward every rank keeps its own rows, backward all_gather of the gradient

A stream that is cut along the sequence is made whole before and cut again after.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.sharding.layer_loop import LayerLoop
from jhpt.sharding.mesh import DeviceMesh
from jhpt.sharding.model_parts import ModelParts, added, picked
from jhpt.sharding.ordering import after
from jhpt.sharding.tensor import all_rows, own_rows


def moved(x: Any, device_mesh: DeviceMesh, before: int, after: int) -> Any:
    """Rows as degree `before` holds them -> as degree `after` does; a tree of arrays [b, ...]."""
    low, high = sorted((before, after))
    shared = tuple(name for name in device_mesh.axes(low).data if name not in device_mesh.axes(high).data)
    if not shared or device_mesh.size(shared) == 1:
        return x
    if after > before:
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, shared, axis=0, tiled=True), x)

    def own(leaf: jax.Array) -> jax.Array:
        rows = leaf.shape[0] // device_mesh.size(shared)
        return jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(shared) * rows, rows)

    return jax.tree.map(own, x)


class Gradients(NamedTuple):
    """gradients and sums of a micro-batch; fetched: blocks as they were used, of runs that keep them."""

    gradients: Any
    sums: Any
    fetched: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring blocks of one degree, and where their parameters are."""

    name: str
    degree: int
    loop: LayerLoop


@dataclass(frozen=True, kw_only=True)
class OneStage:
    """All layers on the same devices.

    parts: the model at every degree in use.  runs: its blocks.  sequence: whether the stream between layers of a degree
    above 1 is cut along the sequence.
    """

    device_mesh: DeviceMesh
    parts: Mapping[int, ModelParts]
    runs: tuple[Run, ...]
    entry_degree: int
    exit_degree: int
    sequence: bool

    def gradients(self, params: Any, rows: Any, keys: jax.Array, scale: float, total: Any = None) -> "Gradients":
        """Of one micro-batch's loss x scale, added to `total`; sums are float32.

        params, total: `{"blocks": {run: ...}, ...}`; rows, keys: of the smallest degree.
        """
        least = self.device_mesh.degrees[0]
        x, pull_entry = jax.vjp(
            lambda embedding_and_head: self._entry(embedding_and_head, rows, keys),
            picked(params, self._first.embed_reads),
        )
        degree, passed = self.entry_degree, []
        for run in self.runs:
            x, degree = self._handed(x, degree, run.degree), run.degree
            x, own = run.loop.forward(params["blocks"][run.name], x, moved(keys, self.device_mesh, least, degree))
            passed.append(own)

        def loss(embedding_and_head: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            sums = self._exit(embedding_and_head, x, rows, keys)
            return sums.loss * scale, sums

        x = self._handed(x, degree, self.exit_degree)
        _, pull_exit, sums = jax.vjp(loss, picked(params, self._last.head_reads), x, has_aux=True)
        embedding_and_head, error = pull_exit(jnp.float32(1))
        # Else the compiler computes the table's gradient when it is needed, at the very end, and keeps the logits'
        # until then: 0.8 GB of gpt2-1.5b with two micro-batches of 8, 4.8 instead of 5.4 GB of temporary memory
        # (compiled for an H100).
        error = after(error, embedding_and_head)
        # Not before: beside the logits there is room for a gradient in the compute dtype, and hardly in float32.
        total = jax.tree.map(lambda leaf: _widened(leaf, error), total)

        blocks: dict[str, Any] = {}
        fetched = {run.name: own.fetched for run, own in zip(self.runs, passed, strict=True)}
        degree = self.exit_degree
        for run, own in zip(reversed(self.runs), reversed(passed), strict=True):
            error, degree = self._handed(error, degree, run.degree), run.degree
            used = fetched[run.name] if run.loop.keep else params["blocks"][run.name]
            loop = run.loop.with_fetched() if run.loop.keep else run.loop
            so_far = None if total is None else total["blocks"][run.name]
            blocks[run.name], error = loop.backward(used, own, error, so_far)
        (entry,) = pull_entry(self._handed(error, degree, self.entry_degree))
        embedding_and_head = added(embedding_and_head, entry)
        if total is not None:
            embedding_and_head = added(
                {name: part for name, part in total.items() if name != "blocks"}, embedding_and_head
            )
        return Gradients(embedding_and_head | {"blocks": blocks}, sums, fetched)

    def sums(self, params: Any, rows: Any, keys: jax.Array) -> Any:
        """Sums over one micro-batch, forward only."""
        least, degree = self.device_mesh.degrees[0], self.entry_degree
        x = self._entry(params, rows, keys)
        for run in self.runs:
            x, degree = self._handed(x, degree, run.degree), run.degree
            x, _ = run.loop.forward(params["blocks"][run.name], x, moved(keys, self.device_mesh, least, degree))
        return self._exit(params, self._handed(x, degree, self.exit_degree), rows, keys)

    def _handed(self, x: jax.Array, before: int, after: int) -> jax.Array:
        """The stream, or its gradient, from layers of degree `before` to layers of degree `after`."""
        if before == after:
            return x
        if self.sequence and before > 1:
            x = all_rows(self.device_mesh.axes(before).tensor, x)
        x = moved(x, self.device_mesh, before, after)
        return own_rows(self.device_mesh.axes(after).tensor, x) if self.sequence and after > 1 else x

    @property
    def _first(self) -> ModelParts:
        return self.parts[self.entry_degree]

    @property
    def _last(self) -> ModelParts:
        return self.parts[self.exit_degree]

    def _entry(self, embedding_and_head: Any, rows: Any, keys: jax.Array) -> jax.Array:
        return self._first.embed(
            embedding_and_head, *moved((rows, keys), self.device_mesh, self.device_mesh.degrees[0], self.entry_degree)
        )

    def _exit(self, embedding_and_head: Any, x: jax.Array, rows: Any, keys: jax.Array) -> Any:
        return self._last.head_loss(
            embedding_and_head, x, *moved((rows, keys), self.device_mesh, self.device_mesh.degrees[0], self.exit_degree)
        )


def _widened(leaf: jax.Array, done: jax.Array) -> jax.Array:
    """In float32, and where it was not, once `done` is computed."""
    return leaf if leaf.dtype == jnp.float32 else after(leaf.astype(jnp.float32), done)
