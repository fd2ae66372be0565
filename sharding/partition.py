"""The mesh axes over which the dimensions of parameters are cut.

Tensor parallelism is Megatron's (Shoeybi et al. 2019, arXiv 1909.08053): qkv and up are split by column (heads, hidden
units), projection and down by row, the vocabulary by rows of its table, convolutions and dense layers by their output
channels; the rest is replicated.  ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) adds the data axes to one more
dimension of every matrix.
"""

import re
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from jhpt.core.axes import PIPE, TENSOR
from jhpt.sharding.mesh import Axes
from jhpt.sharding.types import KeyPath

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]

RULES: Rules = (
    (r"(embedding|head)/tokens$", (TENSOR, None)),
    (r"head/bias$", (TENSOR,)),
    (r"attention/qkv/(kernel|bias)$", (TENSOR, None, None)),
    (r"attention/projection/kernel$", (TENSOR, None)),
    (r"mlp/up/(kernel|bias)$", (TENSOR,)),
    (r"mlp/down/kernel$", (TENSOR, None)),
    (r"(conv|conv_pooled|dense)/(kernel|bias)$", (TENSOR,)),
)
"""(pattern on the parameter's path, axes of its *last* dimensions); first match wins, no match: replicated."""

IN_FLOAT32 = re.compile(r"norm/\w+$|head/bias$")
"""Parameters that models use in float32; all others they cast to the compute dtype."""

MATRICES = re.compile(r"(^|/)(kernel|tokens|positions|types)$")
"""Matrices and tables; the others are biases and scales of norms, a thousandth of the numbers."""


def path_name(path: KeyPath) -> str:
    """`blocks/mlp/up/kernel` for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_spec(
    path: str, shape: tuple[int, ...], axes: Axes, *, stacked: bool, pipe: bool, over_data: int, rules: Rules = ()
) -> PartitionSpec:
    """The partition of one parameter, or of a leaf of the optimizer state with the same path ending.

    Args:
      stacked: the first dimension counts layers or stages.  pipe: it lies on the pipe axis; otherwise it is whole,
        because the layer loop slices it.
      over_data: ranks of the axes over which ZeRO shards (`Axes.shard`); 1: no parameter is cut.  They cut the first
        dimension that they divide, inside the tensor axes if those cut it too: shares of the first dimension lie one
        after the other when they are gathered, while those of other dimensions have to be interleaved.  Biases and norm
        scales stay whole: they are a thousandth of the memory and would cost a collective each.
      rules: of a model family, which come before `RULES`.
    """
    trailing = next((dims for pattern, dims in (*rules, *RULES) if re.search(pattern, path)), ())
    first = int(stacked)
    unstacked = len(shape) - first
    named = [*(None,) * (unstacked - len(trailing)), *(trailing[-unstacked:] if unstacked else ())]
    spec: list[tuple[str, ...] | None] = [axes.tensor if name == TENSOR and axes.tensor else None for name in named]
    if over_data > 1 and unstacked > 1 and not path.endswith("bias"):
        ranks = [over_data * (axes.degree if cut else 1) for cut in spec]
        dims = [dim for dim in range(unstacked) if shape[first + dim] % ranks[dim] == 0]
        if dims:
            spec[dims[0]] = (*(spec[dims[0]] or ()), *axes.shard)
    return PartitionSpec(*([PIPE if pipe else None] if stacked else []), *spec)


def names_of(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Mesh axes of one dimension of a partition."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
