"""Names for the trees that a step passes around.

A *tree* is a pytree of nested mappings with arrays as leaves.  All trees below share the model's paths, such as
`blocks/mlp/up/kernel`; they differ in what a leaf holds.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import PartitionSpec

Tree: TypeAlias = jax.Array | Mapping[str, "Tree"]
"""An array, or a mapping from names to trees."""

PyTree: TypeAlias = object
"""Any pytree whose leaves have the paths of parameters: parameters themselves, or an optimizer's or training state."""

Params: TypeAlias = Mapping[str, Tree]
"""Parameters as layers use them: gathered, in the compute dtype."""

StoredParams: TypeAlias = Mapping[str, Tree]
"""Parameters as devices hold them between steps: this plan's stacks and shards (`layout`)."""

Gradients: TypeAlias = Mapping[str, Tree]
"""Gradients of parameters, gathered or stored."""

Feedback: TypeAlias = Mapping[str, Mapping[str, Tree]]
"""`residual` and, with momentum, `momentum`: trees like the gradients, without the leaves that are not compressed."""

Specs: TypeAlias = Mapping[str, "PartitionSpec | Specs"]
"""Partitions of the leaves of a tree."""

Batch: TypeAlias = jax.Array | tuple[jax.Array | None, ...]
"""Rows of a batch, in the model's own NamedTuple of arrays [b, ...]."""

RowContext: TypeAlias = jax.Array | tuple[object, ...]
"""What every layer may read of the rows [b] beside activations, such as their random keys: a tree of arrays [b, ...],
in the model's own NamedTuple (`model_parts.ModelParts.context`)."""

LayerIndex: TypeAlias = int | jax.Array
"""The number of a layer in the model, from 0."""

LayerContext: TypeAlias = tuple[Any, LayerIndex]
"""What one layer may read beside activations: (`RowContext`, number of the layer)."""

Activation: TypeAlias = jax.Array | tuple[object, ...]
"""The activations that one layer passes to the next, or their gradient: x[b, ...], or a NamedTuple of arrays
(`sample_chunks`)."""

KeyPath: TypeAlias = tuple[object, ...]
"""A key path of `jax.tree_util`."""


class LossSums(Protocol):
    """Float32 sums over predicted tokens: a NamedTuple of scalars with at least these.

    loss: what is minimised.  nll: negative log likelihood in nats.  tokens: how many tokens were predicted.
    """

    @property
    def loss(self) -> jax.Array:
        """The loss, summed over tokens."""

    @property
    def nll(self) -> jax.Array:
        """The negative log likelihood, summed over tokens."""

    @property
    def tokens(self) -> jax.Array:
        """The number of tokens."""
