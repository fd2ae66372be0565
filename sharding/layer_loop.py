"""Equal layers one after the other: forward, and backward through what the forward pass saved.

Every loop over layers, this one, the pipeline's and the offloaded one's (`offload.stream`), has the same steps:

    fetch      make a layer's parameters usable: all-gather over the data axes, W[D/dp, F] -> W[D, F], or host copy
    compute    the layer's forward or backward pass
    finish     turn its gradient into what is stored: reduce-scatter, dW[D, F] {U_dp} -> dW[D/dp, F], or host copy

To hide communication a loop fetches and finishes beside the computation of another layer: the iteration of layer l
fetches the parameters of layer l + `prefetch` and, with `finish_late`, finishes the gradient of the iteration before.
Both are part of one iteration and independent of its computation, so the compiler can run them at the same time; it
could run neither beside the computation of the layer that needs them.  The last iterations of the forward pass fetch
what the first ones of the backward pass need.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jhpt.core.plan import Plan
from jhpt.sharding import stacks
from jhpt.sharding.layer_vjp import Saved, SavedOfLayers, SplitLayer, split_layer
from jhpt.sharding.model_parts import Recompute
from jhpt.sharding.ordering import after
from jhpt.sharding.recompute import everything
from jhpt.sharding.sample_chunks import ChunkedSamples, UnchunkedSamples
from jhpt.sharding.types import Activation, LayerIndex, Params, RowContext, Tree

Fetch = Callable[[Any], Any]
"""Parameters of one layer as they are stored -> as the layer uses them."""

Finish = Callable[[Any, Any, Any], Any]
"""(gradient of one layer as it is computed, sum over earlier micro-batches or None, what is computed beside its
collectives or None) -> as it is stored.

With compressed gradients the second argument and the result are pairs of a gradient and the layer's residuals."""

T = TypeVar("T")

MOST_UNROLLED = 50
"""Layers that are unrolled on a GPU at most, embedding and head included.  Compile time grows with them: for gpt2-1.5b,
with 50, from 8 to 59 s on two cores (without autotuning)."""


def unrolled_on_gpu(plan: Plan) -> bool:
    """Whether the layers stand in a GPU's program instead of in a loop.

    A loop copies saved activations in and out of stacks: 6 % of a step of gpt2-124m on an H200 (docs/reports/gpu.md).
    But communication and copies to the host hide behind a loop, and the gradients of a loop take less memory: those of
    several micro-batches are added up layer by layer.  So it is unrolled where one device runs the plan on a single
    micro-batch, keeps everything, and neither recomputes a block nor rounds its weights where they are used (ZeRO-3
    over the one rank) for lack of memory.
    """
    layers = sum(placed.run.layers for placed in plan.placed)
    for_memory = plan.offload is not None or plan.recompute or plan.micro_batches > 1 or plan.zero == 3
    return plan.devices == 1 and not for_memory and layers <= MOST_UNROLLED


BackwardCarry = tuple[Activation, tuple[Params, ...], Tree | None, Tree]
"""(error, parameters that are ready, gradient that is not finished yet, finished gradients)."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The results of a forward pass that the backward pass needs.

    saved: saved activations by layer, in a list or stacked.  fetched: all layers' parameters, with `keep_fetched`.
    ready: fetched parameters of the last layers, last first, with `prefetch`.  close: the backward pass of the
    stream's end.
    """

    split: SplitLayer
    context: RowContext
    saved: SavedOfLayers
    fetched: Any = None
    ready: tuple[Any, ...] = ()
    close: Callable[[jax.Array], tuple[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerLoop:
    """Layers `[first, first + count)` of one kind, treated alike.

    stream: how activations pass from layer to layer.
    unroll: the layers stand in the program instead of in a loop.  A loop copies saved activations in and out of stacked
      buffers; unrolled layers take time to compile.
    prefetch: how many layers ahead a loop fetches.  finish_late: a layer's gradient is finished one iteration later.
    keep_fetched: the forward pass also returns all layers' fetched parameters.
    """

    stream: UnchunkedSamples | ChunkedSamples
    first: int
    count: int
    unroll: bool
    fetch: Fetch
    finish: Finish
    prefetch: int = 0
    finish_late: bool = False
    keep_fetched: bool = False
    recompute: Recompute = everything

    def forward(self, params: Tree, x: jax.Array, context: RowContext) -> tuple[jax.Array, Passed]:
        """params: stacked [count, ...].  Returns (x after the last layer, what `backward` needs)."""
        one, end = jax.eval_shape(self._fetched, params, 0), (context, jnp.int32(self.first + self.count))
        stream, passed = self._forward(params, self.stream.opened(one, x, (context, jnp.int32(self.first))), context)
        x, close = jax.vjp(lambda stream: self.stream.closed(stream, end), stream)
        return x, replace(passed, close=close)

    def resumed(self, params: Tree, x: jax.Array, context: RowContext, saved: SavedOfLayers) -> Passed:
        """What `forward` returned, from what it saved in another program; x: the input, for its shape."""
        assert isinstance(self.stream, UnchunkedSamples), "sample chunks end within one program"
        assert not self.prefetch and not self.keep_fetched, "fetched parameters are not saved"
        split = self._split(params, x, context)
        return Passed(split=split, context=context, saved=saved, close=lambda error: (error,))

    def backward(
        self, params: Tree, passed: Passed, error: jax.Array, total: Tree | None = None
    ) -> tuple[Any, jax.Array]:
        """(gradients stacked [count, ...], gradient of x).  total: the sum over earlier micro-batches."""
        assert passed.close is not None
        gradients, opened = self._backward(params, passed, *passed.close(error), total)
        return gradients, self.stream.opening_error(opened)

    def _forward(self, params: Tree, x: Activation, context: RowContext) -> tuple[Activation, Passed]:
        split = self._split(params, x, context)
        if self.unroll:
            saved, fetched = [], []
            for at in range(self.count):
                layer = self._fetched(params, at)
                x, of_layer = split.forward(layer, x, (context, jnp.int32(self.first + at)))
                saved.append(of_layer)
                fetched.append(layer)
            return x, Passed(
                split=split, context=context, saved=saved, fetched=_stacked(fetched) if self.keep_fetched else None
            )

        def step(at: jax.Array, carry: tuple[Activation, tuple[Params, ...], Tree]) -> tuple[Activation, Any, Tree]:
            x, ready, stacked = carry
            layer, ready = self._next(params, at, ready, at + self.prefetch)
            x, saved = split.forward(layer, x, (context, self.first + at))
            return x, ready, stacks.write(stacked, (at,), (saved, layer if self.keep_fetched else None))

        start = tuple(self._fetched(params, self._mirrored(at)) for at in range(self.prefetch))
        layer = jax.eval_shape(self._fetched, params, 0) if self.keep_fetched else None
        stacked = self._room((split.shapes, layer), x)
        x, ready, (saved, fetched) = jax.lax.fori_loop(0, self.count, step, (x, start, stacked))
        return x, Passed(split=split, context=context, saved=saved, fetched=fetched, ready=ready)

    def _split(self, params: Tree, x: Activation, context: RowContext) -> SplitLayer:
        one = jax.eval_shape(self._fetched, params, 0)
        return split_layer(self.recompute(self.stream.layer), one, x, (context, jnp.int32(0)))

    def _backward(self, params: Tree, passed: Passed, error: Activation, total: Tree | None) -> tuple[Any, Activation]:
        split, context = passed.split, passed.context
        if self.unroll:
            assert isinstance(passed.saved, list), "unrolled layers save one by one"
            gradients = []
            for at in reversed(range(self.count)):
                inputs = self._fetched(params, at), (context, jnp.int32(self.first + at))
                gradient, error = split.backward(*inputs, passed.saved[at], error)
                gradients.append(self.finish(gradient, _row(total, at), None))
            return _stacked(gradients[::-1]), error

        one = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(self._fetched, params, 0))
        shapes = jax.eval_shape(lambda one: self.finish(one, _row(total, 0), None), one)
        added = total is not None and _alike(shapes, jax.eval_shape(_row, total, 0))

        def put(done: Tree, at: LayerIndex, gradient: Tree) -> Tree:
            so_far = _row(done if added else total, at)
            return stacks.write(done, (at,), self.finish(gradient, so_far, None))

        def step(back: jax.Array, carry: BackwardCarry) -> BackwardCarry:
            error, ready, pending, done = carry
            at = self.count - 1 - back
            layer, ready = self._next(params, at, ready, at - self.prefetch)
            saved = stacks.read(passed.saved, (at,))
            if self.count == 1:
                saved = _not_before(error, saved, split.shapes)
            gradient, error = split.backward(layer, (context, self.first + at), saved, error)
            if not self.finish_late:
                return error, ready, None, put(done, at, gradient)
            # No layer follows the last one: its iteration has no gradient to finish, and drops the result.
            behind = jnp.minimum(at + 1, self.count - 1)
            finished = self.finish(pending, _row(done if added else total, behind), error)
            finished = jax.tree.map(lambda new, old: jnp.where(back > 0, new, old), finished, _row(done, behind))
            return error, ready, gradient, stacks.write(done, (behind,), finished)

        done = total if added else self._room(shapes, error)
        start = error, passed.ready if self.prefetch else (), one if self.finish_late else None, done
        error, _, pending, done = jax.lax.fori_loop(0, self.count, step, start)
        return put(done, 0, pending) if self.finish_late else done, error

    def with_fetched(self) -> "LayerLoop":
        """The same loop over parameters that have been fetched."""
        return replace(self, fetch=lambda params: params, prefetch=0, keep_fetched=False)

    def _fetched(self, params: Tree, at: LayerIndex) -> Any:
        return self.fetch(_row(params, at))

    def _next(
        self, params: Tree, at: jax.Array, ready: tuple[Params, ...], later: jax.Array
    ) -> tuple[Params, tuple[Params, ...]]:
        """(parameters of layer `at`, those that are ready for the layers after it); fetches layer `later`."""
        if not self.prefetch:
            return self._fetched(params, at), ()
        return ready[0], (*ready[1:], self._fetched(params, self._mirrored(later)))

    def _mirrored(self, at: LayerIndex) -> LayerIndex:
        """The layer that is used `at` this position: after the last layer they follow in reverse, for the backward
        pass."""
        return jnp.clip(jnp.where(at < self.count, at, 2 * self.count - 1 - at), 0, self.count - 1)

    def _room(self, one: object, x: Activation) -> Any:
        """Stacks of `count` such layers, to be written before they are read, and allocated after x is computed."""
        return stacks.unwritten(one, (self.count,), jax.tree.leaves(x)[0].ravel()[0])


def _alike(one: Tree, other: Tree) -> bool:
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
    return len(leaves) == len(others) and all(map(same, leaves, others))


def _not_before(error: Activation, saved: Saved, shapes: tuple[Any, ...]) -> Saved:
    """Saved activations of these shapes on the device, which are not used before the error is known.

    A loop of one layer becomes part of the program around it.  There the compiler would recompute early what the
    backward pass needs late, and hold it for as long.
    """

    def one(leaf: jax.Array, shape: Any) -> jax.Array:
        waits = jnp.issubdtype(leaf.dtype, jnp.floating) and stacks.space(shape) == stacks.DEVICE
        return after(leaf, error) if waits else leaf

    return tuple(map(one, saved, shapes))


def _row(stacked: Tree | None, at: LayerIndex) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], stacked)


def _stacked(rows: list[T]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
