"""Seconds of a model's layers on one device, each timed alone, with the functions that the runtime executes.

    forward     y = layer(parameters, x), and of a block the activations that its backward pass reads
    backward    of a block: from the gradient of y that of x and those of the parameters, added to the sums of earlier
                micro-batches
    both        of embedding and head: forward and backward in one program, as they run;   backward = both - forward

The head's forward pass ends in the loss.  One rank of a tensor axis runs on its shard and uses its part in place of the
other ranks' (`alone`), so that only communication is left out.

They are timed in rows of the same call, as one program runs them, and in rotation, as stages with programs of their own
do (`benchmarks.emulated.timing`).  Blocks are also timed in the passes of a pipeline's stage
(`benchmarks.hybrid.passes`).

This is simpler than `jhpt.measure.profile` and works for any network.  It does not see what XLA fuses across layers.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.hybrid.passes import pass_programs
from benchmarks.hybrid.programs import LayerProgram, Result, accumulating, drawn, program_of
from jhpt.core.axes import TENSOR
from jhpt.core.profile import Timing
from jhpt.models.hooks import Hooks
from jhpt.sharding.layer_vjp import Saved, split_layer
from jhpt.sharding.mesh import Axes
from jhpt.sharding.model_parts import ModelParts, Recompute, picked
from jhpt.sharding.partition import parameter_spec, path_name

PIPED = " piped"
"""What the name of a kind of block ends with whose seconds are those of a pipeline's passes."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes of a pipeline's stage: how many a call has, and what blocks save."""

    count: int
    recompute: Recompute


def alone(shards: int) -> Hooks:
    """The hooks of shard 0 without other ranks."""
    return Hooks(shards=shards, rank=lambda: 0, join=lambda part: jnp.concatenate([part] * shards, axis=-1))


def shard_of(params: Any, tensor: int) -> Any:
    """Parameters or their shapes -> arrays of the shapes that one of `tensor` ranks holds, small random numbers."""
    axes = Axes(data=(), tensor=(TENSOR,) if tensor > 1 else (), degree=tensor)
    rng = np.random.default_rng(0)

    def shard(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        name = path_name(path)
        spec = parameter_spec(name, leaf.shape, axes, stacked="blocks/" in name, pipe=False, over_data=1)
        names = [*spec, *(None,) * (len(leaf.shape) - len(spec))]
        shape = [size // tensor if name else size for size, name in zip(leaf.shape, names, strict=True)]
        return jnp.asarray(0.02 * rng.standard_normal(shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(shard, params)


def layer_programs(
    parts: ModelParts,
    params: Any,
    rows: Any,
    kinds: Sequence[str],
    wanted: Set[str],
    place: NamedSharding,
    passes: Passes | None = None,
) -> dict[str, LayerProgram]:
    """`{"KIND forward": program, "KIND both": program}` for every kind of layer.

    Args:
      params: one rank's, from `shard_of`.  rows: of a micro-batch, a tree of [b, ...].
      kinds: of the embedding, every block and the head, in the order of the forward pass.
      wanted: kinds to time; of several layers of a kind the first is timed.
      place: where a program runs: the same on every device, each of which belongs to another host.
      passes: of a pipeline's stage of such blocks, to be timed, too, as `KIND piped`; None: none.
    """
    batch = len(jax.tree.leaves(rows)[0])
    context = parts.context(rows, jax.random.split(jax.random.key(0), batch))
    programs: dict[str, LayerProgram] = {}

    def add(kind: str, forward: Callable[..., Any], args: tuple[Any, ...], x: int | None) -> jax.ShapeDtypeStruct:
        """Programs of one layer; `x`: which argument is the input that has a gradient too."""
        shape = jax.eval_shape(forward, *args)
        if f"{kind} forward" in programs or kind not in wanted:
            return shape
        moving = (0,) if x is None else (0, x)

        def both(total: Any, error: jax.Array, *args: Any) -> Any:
            def of(*changes: Any) -> Any:
                changed = dict(zip(moving, changes, strict=True))
                return forward(*[changed.get(index, arg) for index, arg in enumerate(args)])

            y, pull = jax.vjp(of, *[args[index] for index in moving])
            gradient, *errors = pull(error)
            return jax.tree.map(jnp.add, total, gradient), y, errors

        programs[f"{kind} forward"] = program_of(place, forward, args)
        programs[f"{kind} both"] = accumulating(place, both, args[0], (drawn(shape), *args))
        return shape

    def add_block(kind: str, layer: Any, x: jax.Array) -> jax.ShapeDtypeStruct:
        at = (context, jnp.int32(0))
        if f"{kind} forward" not in programs and kind in wanted:
            split = split_layer(parts.block, layer, x, at)
            y, saved = jax.eval_shape(split.forward, layer, x, at)

            def backward(total: Any, saved: Saved, error: jax.Array, layer: Any, at: Any) -> Any:
                gradient, down = split.backward(layer, at, saved, error)
                return jax.tree.map(jnp.add, total, gradient), down

            programs[f"{kind} forward"] = program_of(place, split.forward, (layer, x, at))
            saved_before = Result(shapes=saved, of=lambda calls: calls[f"{kind} forward"]()[1])
            programs[f"{kind} backward"] = accumulating(place, backward, layer, (drawn(y), layer, at), saved_before)
            if passes is not None:
                name, recompute, count = f"{kind}{PIPED}", passes.recompute, passes.count
                programs.update(pass_programs(name, parts, recompute, layer, x, context, count, place))
        return jax.eval_shape(parts.block, layer, x, at)

    shape = add(kinds[0], parts.embed, (picked(params, parts.embed_reads), rows, context), None)
    for kind, layer in zip(kinds[1:-1], _each_block(params["blocks"]), strict=True):
        shape = add_block(kind, layer, drawn(shape))
    loss = lambda params, x, rows, context: parts.head_loss(params, x, rows, context).loss  # noqa: E731
    add(kinds[-1], loss, (picked(params, parts.head_reads), drawn(shape), rows, context), 1)
    return programs


def timings(seconds: Mapping[tuple[str, int, int], tuple[float, float]]) -> dict[str, tuple[Timing, ...]]:
    """{(kind, tensor, batch): (forward, both)} -> every kind's timings."""
    by_kind: dict[str, tuple[Timing, ...]] = {}
    for kind in dict.fromkeys(kind for kind, _, _ in seconds):
        degrees = sorted({tensor for name, tensor, _ in seconds if name == kind})
        by_kind[kind] = tuple(
            _timing(tensor, {b: s for (k, t, b), s in seconds.items() if (k, t) == (kind, tensor)})
            for tensor in degrees
        )
    return by_kind


def _timing(tensor: int, seconds: Mapping[int, tuple[float, float]]) -> Timing:
    """The timing of one degree, made monotonic: noise must not let a larger batch take less time than a smaller one."""
    batches = sorted(seconds)
    forward = np.maximum.accumulate([min(seconds[b]) for b in batches])
    both = np.maximum.accumulate([max(seconds[b]) for b in batches])
    return Timing(
        tensor=tensor,
        batches=tuple(map(float, batches)),
        forward=tuple(map(float, forward)),
        backward=tuple(map(float, both - forward)),
    )


def _each_block(blocks: Any) -> list[Any]:
    """Parameters of every block, in order, from one stack of all blocks or from a stack for each."""
    stacks = [blocks[name] for name in sorted(blocks, key=int)] if "0" in blocks else [blocks]
    return [
        jax.tree.map(lambda leaf, at=at: leaf[at], stack)
        for stack in stacks
        for at in range(len(jax.tree.leaves(stack)[0]))
    ]
