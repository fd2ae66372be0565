"""Passes of a pipeline's stage, one for each of several micro-batches, as the one program of all stages runs them.

They differ from those of blocks alone (`benchmarks.hybrid.layer_times`): a pipeline saves the named tensors of a block
in a stack with a row for each micro-batch, and recomputes the others; its blocks read their parameters from a stack and
add gradients to one; and all passes are one program, without a call for each.  On half a core of an AMD EPYC two
blocks of mlp took 0.87 to 0.91 times as long for 64 and 128 rows as in a loop over the blocks that is called for every
pass, and as long as the stages of a real step (processor seconds, docs/reports/hybrid.md).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.hybrid.programs import LayerProgram, Result, accumulating, drawn, program_of
from jhpt.sharding import stacks
from jhpt.sharding.layer_vjp import Saved, split_layer
from jhpt.sharding.model_parts import ModelParts, Recompute
from jhpt.sharding.pipeline import maybe

BLOCKS = 2
"""Of the stage, as many as a stage of these models often has.  They stand in the program one after the other, and a
stage may have fewer, as in most of their pipelines."""

MOST_PASSES = 8
"""Of a call.  More would only take longer to time."""


def pass_programs(
    name: str,
    parts: ModelParts,
    recompute: Recompute,
    layer: Any,
    x: jax.Array,
    context: Any,
    passes: int,
    place: NamedSharding,
) -> dict[str, LayerProgram]:
    """`{"NAME forward": so many passes, "NAME backward": so many}` of a stage of `BLOCKS` blocks like this one.

    Args:
      layer: one rank's parameters of a block.  x: input of a micro-batch, [b, ...].
      recompute: what blocks save.
      place: as of `layer_programs`.
    """
    at = context, jnp.int32(0)
    split = split_layer(recompute(parts.block), layer, x, at)
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf] * BLOCKS), layer)
    xs = drawn(jax.ShapeDtypeStruct((passes, *x.shape), x.dtype))
    slots, count = jnp.arange(passes), jnp.int32(BLOCKS)

    def forward(layers: Any, xs: jax.Array, context: Any, count: jax.Array) -> tuple[jax.Array, Saved]:
        def tick(carry: tuple[jax.Array, Saved], now: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            (_, ring), (slot, x) = carry, now
            for at in range(BLOCKS):

                def block(carry: tuple[jax.Array, Saved], at: int = at) -> tuple[jax.Array, Saved]:
                    y, saved = split.forward(_row(layers, at), carry[0], (context, jnp.int32(at)))
                    return y, stacks.write(carry[1], (slot, at), saved)

                x, ring = maybe(at < count, block, (x, ring))
            return (x, ring), None

        ring = stacks.filled(split.shapes, (passes, BLOCKS), jnp.zeros(()))
        last: tuple[jax.Array, Saved] = jax.lax.scan(tick, (xs[0], ring), (slots, xs))[0]
        return last

    def backward(total: Any, ring: Saved, errors: jax.Array, layers: Any, context: Any, count: jax.Array) -> Any:
        def tick(carry: tuple[jax.Array, Any], now: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            (_, total), (slot, error) = carry, now
            for at in reversed(range(BLOCKS)):

                def block(carry: tuple[jax.Array, Any], at: int = at) -> tuple[jax.Array, Any]:
                    saved = stacks.read(ring, (slot, at))
                    gradient, error = split.backward(_row(layers, at), (context, jnp.int32(at)), saved, carry[0])
                    return error, jax.tree.map(lambda so_far, one: so_far.at[at].add(one), carry[1], gradient)

                error, total = maybe(at < count, block, (error, total))
            return (error, total), None

        error, total = jax.lax.scan(tick, (errors[0], total), (slots, errors), reverse=True)[0]
        return total, error

    ring = jax.eval_shape(forward, layers, xs, context, count)[1]
    before = Result(shapes=ring, of=lambda calls: calls[f"{name} forward"]()[1])
    return {
        f"{name} forward": program_of(place, forward, (layers, xs, context, count)),
        f"{name} backward": accumulating(place, backward, layers, (xs, layers, context, count), before),
    }


def _row(stacked: Any, at: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], stacked)
