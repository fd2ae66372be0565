"""The parts that tensor-parallel ranks of a GPT would all-reduce, forward and backward, layer by layer."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jhpt.models.gpt import GPT
from jhpt.models.hooks import same
from jhpt.models.vocabulary import token_nll
from jhpt.sharding import tensor
from jhpt.training.parts import tensor_hooks
from jhpt.training.setup import Setup

PLACES = {
    "forward": ("attention projection", "mlp down"),
    "backward": ("error entering attention", "error entering mlp"),
}
"""By direction: the all-reduces of a layer, in the order of the forward pass."""


def partial_sums(setup: Setup, params: Any, windows: np.ndarray) -> dict[tuple[int, str], np.ndarray]:
    """(layer, place) -> the ranks' parts [ranks B S, D], float32, of the mean loss over these windows [B, S + 1].

    Errors, the backward parts, are gradients of zeros that are added after `copy_to_tensor_axis`, where the ranks'
    computations separate.

    Args:
      setup: that of a GPT, uncompressed, on a tensor axis alone.  params: as its plan stores them.
    """
    model = setup.model
    assert isinstance(model, GPT)
    mesh, ranks = setup.layout.device_mesh.mesh, setup.plan.degrees[0]
    axes, layers = setup.layout.device_mesh.axes(ranks).tensor, model.config.num_layers
    width = model.config.d_model
    inputs, targets = jnp.asarray(windows[:, :-1]), jnp.asarray(windows[:, 1:])

    def run(params: Any, inputs: jax.Array, targets: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        def loss(probes: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            parts: list[jax.Array] = []
            waiting = iter(probes)

            def reduce_over_tensor_axis(part: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
                parts.append(part)
                return tensor.reduce_over_tensor_axis(axes, part)

            def copy_to_tensor_axis(x: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
                return tensor.copy_to_tensor_axis(axes, x) + next(waiting)

            hooks = tensor_hooks(axes, ranks)
            plain = replace(model, hooks=hooks)
            probed = replace(
                hooks,
                reduce_over_tensor_axis=reduce_over_tensor_axis,
                copy_to_tensor_axis=copy_to_tensor_axis,
                copy_before_choice=lambda x: (copy_to_tensor_axis(x), same),
            )
            blocks = replace(model, hooks=probed)
            x = plain.embed(params, inputs)
            for layer in range(layers):
                x = blocks.block(jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"]), x)
            return jnp.mean(token_nll(plain.logits(params, x), targets, hooks)[0]), parts

        stream = jnp.zeros((*inputs.shape, width), setup.model.dtype)
        errors, parts = jax.grad(loss, has_aux=True)([stream] * (2 * layers))
        return jax.tree.map(lambda leaf: leaf[None].astype(jnp.float32), (parts, errors))

    specs = (setup.layout.specs(params), PartitionSpec(), PartitionSpec())
    ranked = partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axes), check_vma=False)
    parts_and_errors = jax.jit(ranked(run))(params, inputs, targets)
    return {
        (layer, place): np.asarray(kind[2 * layer + index]).reshape(-1, width)
        for kind, places in zip(parts_and_errors, PLACES.values(), strict=True)
        for layer in range(layers)
        for index, place in enumerate(places)
    }
