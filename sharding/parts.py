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
    """A layer in two, so that the next one can begin before its last sum over the tensor axis has arrived.

    begin: (parameters of one layer, x, (keys [b], layer)) -> begun, a NamedTuple whose field x is the residual
      stream, to which the sum is added.
    finish: (begun, (keys [b], layer)) -> x.
    """

    begin: Callable[[Any, jax.Array, tuple[jax.Array, Any]], Any]
    finish: Callable[[Any, tuple[jax.Array, Any]], jax.Array]

    def block(self, params: Any, x: jax.Array, at: tuple[jax.Array, Any]) -> jax.Array:
        """The whole layer."""
        return self.finish(self.begin(params, x, at), at)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model with its loss, cut where layers begin, as one rank of a tensor degree computes it.

    Everything acts on some rows of a batch; row r always draws from its own key, so nothing depends on which rows are
    computed together.  Parameters are the model's tree: `blocks` stacked by layer, the rest ends.

    entry: (ends, rows, keys [b]) -> x; rows: a tree of [b, ...].
    block: one layer.  halves: the same in two, where it has sums over the tensor axis.
    exit: (ends, x, rows, keys) -> sums over the rows: a tree of scalars whose attribute `loss` is minimised.
    entry_reads, exit_reads: paths of the ends that the two functions read.
    """

    entry: Callable[[Any, Any, jax.Array], jax.Array]
    block: BlockFunction
    exit: Callable[[Any, jax.Array, Any, jax.Array], Any]
    entry_reads: tuple[str, ...]
    exit_reads: tuple[str, ...]
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
