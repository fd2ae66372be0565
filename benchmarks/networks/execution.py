"""Image and perceptron networks as the runtime executes them: inputs in, softmax cross-entropy out."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.networks.mlp import MLP, NAMED_TENSORS
from benchmarks.networks.vgg import VGG
from jhpt.models.family import Sums
from jhpt.models.vocabulary import token_nll
from jhpt.sharding.layout import Layout
from jhpt.sharding.model_parts import ModelParts
from jhpt.sharding.step import Execution
from jhpt.sharding.types import LayerContext, Params
from jhpt.training.parts import tensor_hooks
from jhpt.training.setup import MOST_UNROLLED_LAYERS, layer_policy

Network = MLP | VGG


class Examples(NamedTuple):
    """Rows of a batch: inputs [B, ...], the number of each one's class, targets [B], and, for rows that count less,
    weights [B]."""

    inputs: jax.Array
    targets: jax.Array
    weights: jax.Array | None = None


def class_parts(network: Network) -> ModelParts:
    """loss = sum over rows of -weight log p(target); `Sums.tokens` adds up the weights, 1 by default."""

    def embed(embedding_and_head: Params, rows: Examples, keys: jax.Array) -> jax.Array:
        return network.embed(embedding_and_head, rows.inputs)

    def block(params: Params, x: jax.Array, at: LayerContext) -> jax.Array:
        return network.block(params, x)

    def head_loss(embedding_and_head: Params, x: jax.Array, rows: Examples, keys: jax.Array) -> Sums:
        nll, _ = token_nll(network.logits(embedding_and_head, x), rows.targets, network.hooks)
        if rows.weights is None:
            total = jnp.sum(nll)
            return Sums(total, total, jnp.float32(len(nll)))
        total = jnp.sum(nll * rows.weights)
        return Sums(total, total, jnp.sum(rows.weights))

    return ModelParts(
        embed=embed,
        block=block,
        head_loss=head_loss,
        embed_reads=("embedding",),
        head_reads=("head",),
        weighted=lambda rows, weights: rows._replace(weights=weights),
    )


def class_execution(network: Network, layout: Layout) -> Execution:
    """The network, laid out and ready to be traced.  Only blocks that are alike can be a pipeline's."""
    assert not layout.plan.sequence, "no sequence to cut"
    device_mesh, plan = layout.device_mesh, layout.plan
    assert plan.saved is None, "named tensors are those of model families"
    policy = layer_policy(plan, few=layout.stages > 1, loop=layout.stages > 1, names=NAMED_TENSORS)

    def parts_at(degree: int) -> ModelParts:
        axes = device_mesh.axes(degree).tensor
        return class_parts(replace(network, hooks=tensor_hooks(axes, device_mesh.size(axes))))

    return Execution(
        layout=layout,
        parts={degree: parts_at(degree) for degree in device_mesh.degrees},
        dtype=network.dtype,
        tied=None,
        unroll=not network.alike or network.num_blocks <= MOST_UNROLLED_LAYERS,
        recompute=policy,
    )
