"""What the runtime has to know about a model: embedding, block and head as functions, and the parameters they read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jhpt.core.errors import InputError
from jhpt.sharding.types import LayerContext, Params, RowContext, Tree

BlockFunction = Callable[[Any, Any, LayerContext], Any]
"""(parameters of one layer, x, (context, layer)) -> x."""

Recompute = Callable[[BlockFunction], BlockFunction]
"""Wraps a layer to choose which activations are saved for its backward pass."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A layer in two halves, each of which ends before its all-reduce over the tensor axis.

    Other work can begin while that all-reduce is under way.  Each half returns a NamedTuple whose field `part` is to be
    all-reduced and added to its field `x`, the residual stream.  The next half, or `finish`, begins by doing so.

    first: (parameters of one layer, x, (context, layer), ordering token or None) -> parted.
    second: (parameters of one layer, parted, (context, layer), ordering token or None) -> parted.
    finish: (parted, (context, layer)) -> x.
    """

    first: Callable[[Any, jax.Array, LayerContext, jax.Array | None], Any]
    second: Callable[[Any, Any, LayerContext, jax.Array | None], Any]
    finish: Callable[[Any, LayerContext], jax.Array]

    def block(self, params: Params, x: jax.Array, at: LayerContext) -> jax.Array:
        """The whole layer."""
        return self.finish(self.second(params, self.first(params, x, at, None), at, None), at)


def refuse_weights(batch: Any, weights: Any) -> Any:
    """For a model whose rows all count the same.

    Raises:
      InputError: always.
    """
    raise InputError(
        "rows of this model have no weights, so that no replica can have fewer than others; use micro-batches that the "
        "replicas of every stage divide"
    )


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model with its loss, as one rank of a tensor degree computes it: embedding, blocks, head.

    Everything acts on some rows of a batch.  Row r always draws from its own key, so the result does not depend on
    which rows are computed together.  Parameters are the model's tree: `blocks` stacked by layer, and the rest, which
    is the embedding and the head.

    context: (batch, keys [b]) -> what the other functions may read of these rows beside them: a tree of arrays
      [b, ...].  Every stage computes it; the runtime cuts, gathers and picks its rows as it does those of x.
    embed: (embedding and head, batch, context) -> x[b, ...]; batch: a tree of [b, ...].
    block: one layer.  halves: the same layer, cut before its all-reduces over the tensor axis.
    head_loss: (embedding and head, x, batch, context) -> sums over the rows (`types.LossSums`).
    embed_reads, head_reads: paths of the parameters that the two functions read.
    weighted: (batch, weights like its rows) -> the batch whose rows count so much.
    """

    embed: Callable[[Any, Any, Any], jax.Array]
    block: BlockFunction
    head_loss: Callable[[Any, jax.Array, Any, Any], Any]
    embed_reads: tuple[str, ...]
    head_reads: tuple[str, ...]
    halves: Halves | None = None
    context: Callable[[Any, jax.Array], RowContext] = lambda batch, keys: keys
    weighted: Callable[[Any, Any], Any] = refuse_weights


def picked(tree: Mapping[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """The subtree of these paths: `("head", "embedding/tokens")`."""
    subtree: dict[str, Any] = {}
    for path in paths:
        *folders, name = path.split("/")
        source, target = tree, subtree
        for folder in folders:
            source, target = source[folder], target.setdefault(folder, {})
        target[name] = source[name]
    return subtree


def added(total: Mapping[str, Tree], part: Mapping[str, Tree]) -> dict[str, Any]:
    """`total` plus a subtree of it."""
    result: dict[str, Any] = dict(total)
    for name, value in part.items():
        if name not in result:
            result[name] = value
        elif isinstance(value, Mapping):
            result[name] = added(result[name], value)
        else:
            result[name] = result[name] + value
    return result
