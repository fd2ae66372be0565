"""Like layers, one after the other: forward, and backward through what forward kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.sharding.parts import BlockFunction
from jhpt.sharding.split import SplitLayer, split_layer

Fetch = Callable[[Any], Any]
"""Parameters of one layer as they are stored -> as the layer uses them."""

Finish = Callable[[Any], Any]
"""Gradient of one layer as it is computed -> as it is stored."""


@dataclass(frozen=True, kw_only=True)
class LayerLoop:
    """Layers `[first, first + count)` of one kind, treated alike.

    unroll: in the program instead of in a loop.  A loop copies what layers keep in and out of stacked buffers, unrolled
      layers take time to compile.
    fetch, finish: what turns a layer's stored parameters into used ones, and its gradient into a stored one.
    """

    block: BlockFunction
    first: int
    count: int
    unroll: bool
    fetch: Fetch
    finish: Finish

    def forward(self, params: Any, x: jax.Array, keys: jax.Array) -> tuple[jax.Array, "Passed"]:
        """params: stacked [count, ...].  Returns (x after the last layer, what `backward` needs)."""
        split = split_layer(self.block, self.fetch(_row(params, 0)), x, (keys, jnp.int32(0)))
        if self.unroll:
            kept = []
            for index in range(self.count):
                x, own = split.forward(self.fetch(_row(params, index)), x, (keys, jnp.int32(self.first + index)))
                kept.append(own)
            return x, Passed(split, keys, kept)

        def step(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
            own, index = layer
            return split.forward(self.fetch(own), x, (keys, index))

        x, stacked = jax.lax.scan(step, x, (params, self._indices()))
        return x, Passed(split, keys, stacked)

    def backward(self, params: Any, passed: "Passed", error: jax.Array) -> tuple[Any, jax.Array]:
        """(gradients stacked [count, ...], gradient of x)."""
        split, keys = passed.split, passed.keys
        if self.unroll:
            gradients = []
            for index in reversed(range(self.count)):
                inputs = self.fetch(_row(params, index)), (keys, jnp.int32(self.first + index))
                own, error = split.backward(*inputs, passed.kept[index], error)
                gradients.append(self.finish(own))
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *reversed(gradients)), error

        def step(error: jax.Array, layer: tuple[Any, Any, jax.Array]) -> tuple[jax.Array, Any]:
            own, kept, index = layer
            gradient, error = split.backward(self.fetch(own), (keys, index), kept, error)
            return error, self.finish(gradient)

        error, gradients = jax.lax.scan(step, error, (params, passed.kept, self._indices()), reverse=True)
        return gradients, error

    def _indices(self) -> jax.Array:
        return self.first + jnp.arange(self.count)


@dataclass(frozen=True)
class Passed:
    """What a forward pass leaves for the backward pass; kept: by layer, in a list or stacked."""

    split: SplitLayer
    keys: jax.Array
    kept: Any


def _row(params: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], params)
