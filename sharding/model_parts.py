"""What the runtime has to know about a model: three functions, and which parameters the ends read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

BlockFunction = Callable[[Any, Any, tuple[jax.Array, Any]], Any]
"""(parameters of one layer, x, (keys [b], layer)) -> x."""

Recompute = Callable[[BlockFunction], BlockFunction]
"""Wraps a layer, to choose what its backward pass finds saved."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A layer, cut before each of its two sums over the tensor axis: other work can begin before they have arrived.

    What the first two leave is a NamedTuple whose field `part` is to be summed and added to its field `x`, the residual
    stream; the next one begins with that.  at: (keys [b], layer).  ticket: of `order`, or None.

    first: (parameters of one layer, x, at, ticket) -> parted.
    second: (parameters of one layer, parted, at, ticket) -> parted.
    finish: (parted, at) -> x.
    """

    first: Callable[[Any, jax.Array, tuple[jax.Array, Any], jax.Array | None], Any]
    second: Callable[[Any, Any, tuple[jax.Array, Any], jax.Array | None], Any]
    finish: Callable[[Any, tuple[jax.Array, Any]], jax.Array]

    def block(self, params: Any, x: jax.Array, at: tuple[jax.Array, Any]) -> jax.Array:
        """The whole layer."""
        return self.finish(self.second(params, self.first(params, x, at, None), at, None), at)


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model with its loss, cut where layers begin, as one rank of a tensor degree computes it.

    Everything acts on some rows of a batch; row r always draws from its own key, so nothing depends on which rows are
    computed together.  Parameters are the model's tree: `blocks` stacked by layer, the rest ends.

    embed: (embedding and head, rows, keys [b]) -> x; rows: a tree of [b, ...].
    block: one layer.  halves: the same, cut before its sums over the tensor axis.
    head_loss: (embedding and head, x, rows, keys) -> sums over the rows: a tree of scalars whose attribute `loss` is minimised.
    embed_reads, head_reads: paths of the ends that the two functions read.
    """

    embed: Callable[[Any, Any, jax.Array], jax.Array]
    block: BlockFunction
    head_loss: Callable[[Any, jax.Array, Any, jax.Array], Any]
    embed_reads: tuple[str, ...]
    head_reads: tuple[str, ...]
    halves: Halves | None = None


def picked(tree: Mapping[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """The subtree of these paths: `("head", "embedding/tokens")`."""
    found: dict[str, Any] = {}
    for path in paths:
        *folders, name = path.split("/")
        source, target = tree, found
        for folder in folders:
            source, target = source[folder], target.setdefault(folder, {})
        target[name] = source[name]
    return found


def added(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`total` plus a subtree of it."""
    result = dict(total)
    for name, value in part.items():
        if name not in result:
            result[name] = value
        elif isinstance(value, Mapping):
            result[name] = added(result[name], value)
        else:
            result[name] = result[name] + value
    return result
