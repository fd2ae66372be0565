"""Which dimension of which parameter lies on which mesh axis.

Tensor parallelism is Megatron's (Shoeybi et al. 2019, arXiv 1909.08053): qkv and up are split by column (heads, hidden
units), projection and down by row, the vocabulary by rows of its table; the rest is replicated.  ZeRO (Rajbhandari et
al. 2020, arXiv 1910.02054) adds the data axis to one more dimension of every matrix.
"""

import re
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jhpt.core.axes import DATA, TENSOR

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(embedding|head)/tokens$", (TENSOR, None)),
    (r"head/bias$", (TENSOR,)),
    (r"attention/qkv/(kernel|bias)$", (TENSOR, None, None)),
    (r"attention/projection/kernel$", (TENSOR, None)),
    (r"mlp/up/(kernel|bias)$", (TENSOR,)),
    (r"mlp/down/kernel$", (TENSOR, None)),
)
"""(pattern on the parameter's path, axes of its *last* dimensions); first match wins, no match: replicated."""

ACTIVATION_AXES = {"batch": DATA, "heads": TENSOR, "hidden": TENSOR, "vocab": TENSOR}
"""Mesh axis of each named activation dimension; the others are replicated."""

STACKED = "blocks/"
"""Leaves under this path carry a leading layer dimension, which the layer loop slices: it is never sharded."""


def path_name(path: tuple[Any, ...]) -> str:
    """`blocks/mlp/up/kernel` for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_spec(path: str, shape: tuple[int, ...], data_size: int, shard_over_data: bool) -> PartitionSpec:
    """The partition of one parameter, or of a leaf of the optimizer state with the same path ending.

    Args:
      shard_over_data: ZeRO: also put the data axis on the largest free dimension that it divides.  Biases and norm
        scales stay whole: they are a thousandth of the memory and would cost a collective each.
    """
    trailing = next((axes for pattern, axes in RULES if re.search(pattern, path)), ())
    trailing = trailing[-len(shape) :] if shape else ()
    axes = [*(None,) * (len(shape) - len(trailing)), *trailing]
    first = 1 if STACKED in path else 0
    if shard_over_data and len(shape) - first > 1 and not path.endswith("bias"):
        free = [dim for dim in range(first, len(shape)) if axes[dim] is None and shape[dim] % data_size == 0]
        if free:
            axes[max(free, key=lambda dim: shape[dim])] = DATA
    return PartitionSpec(*axes)


def activation_spec(dims: tuple[str | None, ...]) -> PartitionSpec:
    """The partition of an activation whose dimensions carry these names."""
    return PartitionSpec(*(ACTIVATION_AXES.get(dim or "") for dim in dims))
