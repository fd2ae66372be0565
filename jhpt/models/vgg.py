"""VGG: 3 x 3 convolutions in groups that each end in a 2 x 2 maximum, then dense layers that hold most parameters.

Simonyan & Zisserman 2015 (arXiv 1409.1556), without dropout: each layer but the last is followed by a ReLU.  Images are
[B, H, W, C].  Every layer is split over the tensor axis by its output channels, and its output is gathered, after the
maximum where the layer ends a group; logits stay split.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.core.families.vgg import VGGConfig
from jhpt.models.attention import Implementation
from jhpt.models.dense import biased, class_logits, columns, kernel_and_bias
from jhpt.models.family import Objective, PartitionRules, Rows, Sums
from jhpt.models.hooks import Hooks
from jhpt.models.objective import summed_loss
from jhpt.models.vocabulary import columns as class_of

MIDDLE, SPREAD = 127.5, 64.0
"""Of pixels, whose numbers are 0 to 255: the network reads (pixel - MIDDLE) / SPREAD, which is near -1 to 1."""


@dataclass(frozen=True, kw_only=True)
class VGG:
    """Pure functions over `{"embedding": first convolution, "blocks": {"0": ..., "1": ...}, "head": last dense layer}`.

    A block is `{"conv" | "conv_pooled" | "dense": {kernel, bias}}`, each leaf a stack of one.
    """

    config: VGGConfig
    dtype: Any = jnp.float32
    implementation: Implementation = "xla"
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def head_reads(self) -> tuple[str, ...]:
        """The last dense layer."""
        return ("head",)

    @property
    def partition_rules(self) -> PartitionRules:
        """None but those that all families share."""
        return ()

    def init(self, key: jax.Array) -> Any:
        """Fresh float32 parameters, of the whole model."""
        table = self.config.table
        keys = jax.random.split(key, len(table))
        *shapes, (inputs, _) = (layer.kernel for layer in table)
        shapes.append((inputs, self.config.padded_classes))
        layers = [
            {layer.kind: kernel_and_bias(k, shape, 2.0)} for k, layer, shape in zip(keys, table, shapes, strict=True)
        ]
        first, *blocks, last = layers
        stacks = {str(n): jax.tree.map(lambda leaf: leaf[None], block) for n, block in enumerate(blocks)}
        return {"embedding": first, "blocks": stacks, "head": last}

    def inputs(self, rows: Rows, keys: jax.Array, objective: Objective) -> jax.Array:
        """The images [B, H, W, C] of rows of pixels and a class."""
        size, colours = self.config.image_size, self.config.colours
        pixels = rows.windows[:, :-1].reshape(-1, size, size, colours)
        return (pixels.astype(jnp.float32) - MIDDLE) / SPREAD

    def embed(self, params: Any, images: jax.Array) -> jax.Array:
        """images[B, H, W, C] -> x after the first layer."""
        return self.block(params["embedding"], images.astype(self.dtype))

    def block(self, layer_params: Any, x: jax.Array) -> jax.Array:
        """One layer, ReLU and maximum included."""
        ((kind, layer),) = layer_params.items()
        if kind == "dense":
            y = jax.nn.relu(columns(layer, x.reshape(len(x), -1), self.hooks, self.dtype))
        else:
            y = _convolved(self.hooks.copy_to_tensor_axis(x), layer["kernel"].astype(self.dtype))
            y = jax.nn.relu(biased(y, layer, self.dtype))
            y = _pooled(y) if kind == "conv_pooled" else y
        return self.hooks.join(y)

    def logits(self, params: Any, x: jax.Array) -> jax.Array:
        """x[B, ...] -> this shard's columns of the logits [B, C], float32; those of padding are -inf."""
        logits = class_logits(params["head"]["dense"], x.reshape(len(x), -1), self.hooks, self.dtype)
        if self.config.num_classes == self.config.padded_classes:
            return logits
        return jnp.where(class_of(logits, self.hooks) < self.config.num_classes, logits, -jnp.inf)

    def loss(self, params: Any, x: jax.Array, rows: Rows, keys: jax.Array, objective: Objective) -> Sums:
        """Softmax cross-entropy of the classes of these rows, and how many are right: those whose class has the largest
        logit."""
        labels, logits = rows.windows[:, -1], self.logits(params, x)
        sums = summed_loss(logits[:, None], labels[:, None], rows.weights, objective.z_loss, self.hooks)
        known = jax.lax.stop_gradient(logits)
        chosen = class_of(known, self.hooks) == labels[:, None]
        of_class = self.hooks.total(jnp.sum(jnp.where(chosen, known, 0.0), axis=-1))
        right = (of_class >= self.hooks.largest(jnp.max(known, axis=-1))).astype(jnp.float32)
        return sums._replace(correct=jnp.sum(right if rows.weights is None else right * rows.weights))

    def apply(self, params: Any, images: jax.Array) -> jax.Array:
        """images[B, H, W, C] -> logits[B, padded classes], on one device."""
        x = self.embed(params, images)
        for number in range(self.config.num_layers):
            x = self.block(jax.tree.map(lambda leaf: leaf[0], params["blocks"][str(number)]), x)
        return self.logits(params, x)


def _convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _pooled(x: jax.Array) -> jax.Array:
    """The maximum of every 2 x 2 pixels; its gradient is shared where several are equal."""
    count, height, width, channels = x.shape
    return x.reshape(count, height // 2, 2, width // 2, 2, channels).max((2, 4))


MODEL = VGG
