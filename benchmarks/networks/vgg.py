"""VGG: 3 x 3 convolutions in stages that each end in a 2 x 2 maximum, then dense layers that hold most parameters.

Simonyan & Zisserman 2015 (arXiv 1409.1556), table 1, column D, without dropout: thirteen convolutions and three dense
layers, each but the last followed by a ReLU.  Images are [B, H, W, C].  Every layer is split over the tensor axis by
its output channels, and its output is gathered, after the pooling where the layer ends a stage.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.layers import biased, class_logits, columns, kernel_and_bias
from jhpt.models.hooks import Hooks


@dataclass(frozen=True, kw_only=True)
class VGG:
    """Pure functions over `{"embedding": first convolution, "blocks": {"0": ..., "1": ...}, "head": last dense layer}`.

    A block is `{"conv" | "conv_pooled" | "dense": {kernel, bias}}`, each leaf a stack of one.

    size: pixels on a side of the images, of `channels` colours.  stages: output channels of the convolutions.  dense:
    widths of the dense layers before the last.
    """

    size: int = 224
    channels: int = 3
    stages: tuple[tuple[int, ...], ...] = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
    dense: tuple[int, ...] = (4096, 4096)
    classes: int = 1000
    dtype: Any = jnp.float32
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def alike(self) -> bool:
        """False, because every block has a shape of its own."""
        return False

    @property
    def num_blocks(self) -> int:
        """Layers between the first and the last."""
        return len(self.shapes) - 2

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(kind, shape of the kernel) of every layer."""
        layers: list[tuple[str, tuple[int, ...]]] = []
        width = self.channels
        for stage in self.stages:
            for index, outputs in enumerate(stage, 1):
                layers.append(("conv_pooled" if index == len(stage) else "conv", (3, 3, width, outputs)))
                width = outputs
        width *= (self.size // 2 ** len(self.stages)) ** 2
        for outputs in (*self.dense, self.classes):
            layers.append(("dense", (width, outputs)))
            width = outputs
        return layers

    def init(self, key: jax.Array) -> Any:
        """Fresh float32 parameters, of the whole model."""
        keys = jax.random.split(key, len(self.shapes))
        layers = [{kind: kernel_and_bias(k, shape, 2.0)} for k, (kind, shape) in zip(keys, self.shapes, strict=True)]
        first, *blocks, last = layers
        stacks = {str(n): jax.tree.map(lambda leaf: leaf[None], block) for n, block in enumerate(blocks)}
        return {"embedding": first, "blocks": stacks, "head": last}

    def embed(self, params: Any, inputs: jax.Array) -> jax.Array:
        """Images [B, H, W, 3] -> x[B, H, W, C]."""
        return self.block(params["embedding"], inputs.astype(self.dtype))

    def block(self, layer_params: Any, x: jax.Array) -> jax.Array:
        """One layer, ReLU and pooling included."""
        ((kind, layer),) = layer_params.items()
        if kind == "dense":
            y = jax.nn.relu(columns(layer, x.reshape(len(x), -1), self.hooks, self.dtype))
        else:
            y = jax.nn.relu(
                biased(
                    _convolved(self.hooks.copy_to_tensor_axis(x), layer["kernel"].astype(self.dtype)), layer, self.dtype
                )
            )
            y = _pooled(y) if kind == "conv_pooled" else y
        return self.hooks.join(y)

    def logits(self, params: Any, x: jax.Array) -> jax.Array:
        """x[B, F] -> logits[B, C], float32."""
        return class_logits(params["head"]["dense"], x, self.hooks, self.dtype)


def _convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _pooled(x: jax.Array) -> jax.Array:
    """The maximum of every 2 x 2 pixels; its gradient is shared where several are equal."""
    count, height, width, channels = x.shape
    return x.reshape(count, height // 2, 2, width // 2, 2, channels).max((2, 4))
