"""Seconds of a model's layers on one device, each timed alone, with the functions that the runtime executes.

    forward     y = layer(parameters, x), and of a block the activations that its backward pass reads
    backward    of a block: from the gradient of y that of x and those of the parameters, added to the sums of earlier
                micro-batches
    both        of embedding and head: forward and backward in one program, as they run;   backward = both - forward

The head's forward pass ends in the loss.  One rank of a tensor axis runs on its shard and uses its part in place of the
other ranks' (`alone`), so that only communication is left out.

They are timed in rows of the same call, as one program runs them, and in rotation, as stages with programs of their own
do (`benchmarks.emulated.timing`).  Pipelines of one program run their blocks in loops, which read parameters from a
stack and copy saved activations into and out of one: with `loops`, blocks are timed in a loop of `LOOPED`, too.

This is simpler than `jhpt.measure.profile` and works for any network.  It does not see what XLA fuses across layers.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.emulated.timing import Call
from jhpt.core.axes import TENSOR
from jhpt.core.profile import Timing
from jhpt.models.hooks import Hooks
from jhpt.sharding.layer_loop import LayerLoop
from jhpt.sharding.layer_vjp import Saved, split_layer
from jhpt.sharding.mesh import Axes
from jhpt.sharding.model_parts import ModelParts, picked
from jhpt.sharding.partition import parameter_spec, path_name
from jhpt.sharding.sample_chunks import streaming

LOOPED = 2
"""Blocks of a loop that is timed, as many as a stage of these models often has."""

LOOP = " looped"
"""What the name of a kind of block ends with whose seconds are those in a loop."""


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


@dataclass(frozen=True, kw_only=True)
class LayerProgram:
    """A program of a layer.  lower: to be compiled.  call: from the compiled program and the calls before it."""

    lower: Callable[[], jax.stages.Lowered]
    call: Callable[[Any, Mapping[str, Call]], Call]


def calls_of(programs: Mapping[str, LayerProgram], compiled: Mapping[str, Any]) -> dict[str, Call]:
    """Calls of the programs of `layer_programs`, in their order."""
    calls: dict[str, Call] = {}
    for name, one in programs.items():
        calls[name] = one.call(compiled[name], calls)
    return calls


def layer_programs(
    parts: ModelParts,
    params: Any,
    rows: Any,
    kinds: Sequence[str],
    wanted: Set[str],
    place: NamedSharding,
    loops: bool = False,
) -> dict[str, LayerProgram]:
    """`{"KIND forward": program, "KIND both": program}` for every kind of layer.

    Args:
      params: one rank's, from `shard_of`.  rows: of a micro-batch, a tree of [b, ...].
      kinds: of the embedding, every block and the head, in the order of the forward pass.
      wanted: kinds to time; of several layers of a kind the first is timed.
      place: where a program runs: the same on every device, each of which belongs to another host.
      loops: whether there are loops of `LOOPED` blocks, too, as `KIND looped`.
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

        programs[f"{kind} forward"] = _program(place, forward, args)
        programs[f"{kind} both"] = _accumulating(place, both, args[0], (_like(shape), *args))
        return shape

    def add_block(kind: str, layer: Any, x: jax.Array) -> jax.ShapeDtypeStruct:
        at = (context, jnp.int32(0))
        if f"{kind} forward" not in programs and kind in wanted:
            split = split_layer(parts.block, layer, x, at)
            y, saved = jax.eval_shape(split.forward, layer, x, at)

            def backward(total: Any, saved: Saved, error: jax.Array, layer: Any, at: Any) -> Any:
                gradient, down = split.backward(layer, at, saved, error)
                return jax.tree.map(jnp.add, total, gradient), down

            programs[f"{kind} forward"] = _program(place, split.forward, (layer, x, at))
            saved_before = _Result(shapes=saved, of=lambda calls: calls[f"{kind} forward"]()[1])
            programs[f"{kind} backward"] = _accumulating(place, backward, layer, (_like(y), layer, at), saved_before)
            if loops:
                programs.update(_looped(f"{kind}{LOOP}", parts, layer, x, context, place))
        return jax.eval_shape(parts.block, layer, x, at)

    shape = add(kinds[0], parts.embed, (picked(params, parts.embed_reads), rows, context), None)
    for kind, layer in zip(kinds[1:-1], _each_block(params["blocks"]), strict=True):
        shape = add_block(kind, layer, _like(shape))
    loss = lambda params, x, rows, context: parts.head_loss(params, x, rows, context).loss  # noqa: E731
    add(kinds[-1], loss, (picked(params, parts.head_reads), _like(shape), rows, context), 1)
    return programs


def _looped(
    name: str, parts: ModelParts, layer: Any, x: jax.Array, context: Any, place: NamedSharding
) -> dict[str, LayerProgram]:
    """Programs of a loop of `LOOPED` blocks like this one."""

    def add(gradient: Any, total: Any, beside: Any) -> Any:
        return jax.tree.map(jnp.add, total, gradient)

    loop = LayerLoop(
        stream=streaming(parts, 1, in_turn=False),
        first=0,
        count=LOOPED,
        unroll=False,
        fetch=lambda layer: layer,
        finish=add,
    )
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf] * LOOPED), layer)

    def forward(layers: Any, x: jax.Array, context: Any) -> tuple[jax.Array, Any]:
        y, passed = loop.forward(layers, x, context)
        return y, passed.saved

    def backward(total: Any, saved: Any, error: jax.Array, layers: Any, context: Any) -> Any:
        return loop.backward(layers, loop.resumed(layers, error, context, saved), error, total)

    y, saved = jax.eval_shape(forward, layers, x, context)
    saved_before = _Result(shapes=saved, of=lambda calls: calls[f"{name} forward"]()[1])
    return {
        f"{name} forward": _program(place, forward, (layers, x, context)),
        f"{name} backward": _accumulating(place, backward, layers, (_like(y), layers, context), saved_before),
    }


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


def _like(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape.shape), shape.dtype)


@dataclass(frozen=True, kw_only=True)
class _Result:
    """An argument that an earlier call returns."""

    shapes: Any
    of: Callable[[Mapping[str, Call]], Any]


def _program(place: NamedSharding, function: Callable[..., Any], args: tuple[Any, ...]) -> LayerProgram:
    def call(program: Any, _: Mapping[str, Call]) -> Call:
        placed = _placed(args, place)
        return lambda: program(*placed)

    return LayerProgram(lower=lambda: jax.jit(function, out_shardings=place).lower(*_described(args, place)), call=call)


def _accumulating(
    place: NamedSharding, function: Callable[..., Any], like: Any, args: tuple[Any, ...], before: _Result | None = None
) -> LayerProgram:
    """`function(total, *args)`, whose first result is the next total, a tree like `like`.

    before: an argument between `total` and `args`.
    """

    def lower() -> jax.stages.Lowered:
        first = (like,) if before is None else (like, before.shapes)
        described = _described((*first, *args), place)
        return jax.jit(function, donate_argnums=0, out_shardings=place).lower(*described)

    def call(program: Any, calls: Mapping[str, Call]) -> Call:
        total = _placed(jax.tree.map(jnp.zeros_like, like), place)
        given = (() if before is None else (before.of(calls),)) + _placed(args, place)

        def run() -> Any:
            nonlocal total
            total, *others = program(total, *given)
            return total, others

        return run

    return LayerProgram(lower=lower, call=call)


def _described(tree: Any, place: NamedSharding) -> Any:
    def described(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(described, tree)


def _placed(tree: Any, place: NamedSharding) -> Any:
    """Arrays of this host as its part of what all hosts have."""

    def placed(leaf: Any) -> jax.Array:
        return jax.make_array_from_single_device_arrays(leaf.shape, place, [jnp.asarray(leaf)])

    return jax.tree.map(placed, tree)
