"""A residual perceptron that is wide inside its blocks: plain matrices, for studying how a step is parallelized.

x = inputs W + b;   L times: x += down(gelu(up(x)));   logits = x W + b
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jhpt.models.dense import biased, class_logits, columns, kernel_and_bias
from jhpt.models.hooks import Hooks

NAMED_TENSORS = ("x", "hidden")
"""Names inside a block: the tensors that its backward pass cannot compute again without a matrix product."""


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Pure functions over `{"embedding": ..., "blocks": [L, ...], "head": ...}`.

    inputs, width, hidden, classes: numbers in a row of inputs, of x, inside a block, and of logits.
    """

    inputs: int
    width: int
    hidden: int
    num_blocks: int
    classes: int
    dtype: Any = jnp.float32
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def alike(self) -> bool:
        """True, because blocks are stacked."""
        return True

    def init(self, key: jax.Array) -> Any:
        """Fresh float32 parameters, of the whole model."""
        first, last, *keys = jax.random.split(key, 2 + self.num_blocks)
        return {
            "embedding": {"dense": kernel_and_bias(first, (self.inputs, self.width), 1.0)},
            "blocks": jax.vmap(self._init_block)(jnp.stack(keys)),
            "head": {"dense": kernel_and_bias(last, (self.width, self.classes), 1.0)},
        }

    def _init_block(self, key: jax.Array) -> Any:
        up, down = jax.random.split(key)
        return {
            "mlp": {
                "up": kernel_and_bias(up, (self.width, self.hidden), 2.0),
                # As in GPT-2, so that the sum of what all blocks add is about as large as x.
                "down": kernel_and_bias(down, (self.hidden, self.width), 1.0 / self.num_blocks),
            }
        }

    def embed(self, params: Any, inputs: jax.Array) -> jax.Array:
        """inputs[B, I] -> x[B, D]."""
        x = inputs.astype(self.dtype)
        return self.hooks.join(columns(params["embedding"]["dense"], x, self.hooks, self.dtype))

    def block(self, layer_params: Any, x: jax.Array) -> jax.Array:
        """x[B, D] -> x[B, D]."""
        mlp = layer_params["mlp"]
        hidden = checkpoint_name(columns(mlp["up"], checkpoint_name(x, "x"), self.hooks, self.dtype), "hidden")
        kernel = mlp["down"]["kernel"].astype(self.dtype)
        out = self.hooks.reduce_over_tensor_axis(jnp.einsum("...f,fd->...d", jax.nn.gelu(hidden), kernel))
        return x + biased(out, mlp["down"], self.dtype)

    def logits(self, params: Any, x: jax.Array) -> jax.Array:
        """x[B, D] -> logits[B, C], float32."""
        return class_logits(params["head"]["dense"], x, self.hooks, self.dtype)
