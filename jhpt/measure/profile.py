"""Seconds of a model's layers, from whole training steps of shallow models.

A layer alone runs differently than inside a step: XLA fuses across layers, a step's buffers do not fit the caches, and
a separate program costs a launch.  So as little as possible is timed alone.  The model is cut to `shallow` and to
`deep` blocks, without other changes, and its forward pass F and its whole training step T (forward, backward, update)
are timed for both, in turn:

    block      forward  = (F[deep] - F[shallow]) / (deep - shallow)                         the slope
               backward = (T[deep] - T[shallow]) / (deep - shallow) - forward - own parameters x u
    the rest   forward  = F[deep] - deep x block, likewise backward: embedding, head, loss, launch
    embedding  timed alone (it is small), at most the rest;   head = the rest - embedding
    u          the step's tail on given gradients / parameters: norm, clipping, AdamW, the choice to skip

A step of L blocks is then predicted by a straight line through two measured steps; only the division into parts depends
on smaller timings.  No part is below zero: a slope is limited by the deep model's time.

One rank of a tensor axis t is a model with heads / t, MLP width / t and vocabulary / t, without its communication.

Not measured: gradient accumulation over micro-batches, and the memory bandwidth that a block loses to communication
beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.profile import ModelProfile, Timing
from jhpt.measure.timer import interleaved, steady

Call = Callable[[], Any]
Samples = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Shallow:
    """A model of few blocks at one micro-batch size and tensor degree, ready to run.

    parameters: of the whole model.
    forward: the loss.  step: one training step.
    embedding, embedding_both: forward, and forward and backward, of the embedding alone.
    update: the step's tail on given gradients.
    """

    parameters: int
    forward: Call
    step: Call
    embedding: Call
    embedding_both: Call
    update: Call


Build = Callable[[int, int, int], Shallow | None]
"""(blocks, tensor degree, batch) -> the model, or None where the device cannot hold it."""


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Timings by kind of layer, seconds of the update per parameter, and all raw samples by tensor degree."""

    timings: Mapping[str, tuple[Timing, ...]]
    update: float
    samples: Mapping[int, Samples]


def depths(num_layers: int) -> tuple[int, int]:
    """Blocks of the two models.

    They differ enough to keep the noise of the slope small when it is extended to the whole depth: the deep one is the
    whole model if that has four blocks or fewer, otherwise two thirds of it, at most 8.
    """
    if num_layers <= 2:
        return 1, 2
    return min(2, num_layers - 2), min(num_layers, max(4, 2 * num_layers // 3), 8)


def layer_seconds(
    build: Build,
    num_layers: int,
    batches: Sequence[int],
    tensors: Sequence[int],
    rounds: int,
    beside: Mapping[str, Call] | None = None,
) -> LayerSeconds:
    """Times `embedding`, `block` and `head` over micro-batch sizes and tensor degrees.

    Args:
      build: makes the shallow models; all models of one degree exist at the same time.
      batches, tensors: ascending; larger batches than the first that does not fit the device are left out.
      beside: further calls, timed in turn with those of the first degree; their samples have the same names.

    Raises:
      InputError: not even the smallest batch fits.
    """
    timings: dict[str, list[Timing]] = {"embedding": [], "block": [], "head": []}
    update, samples = 0.0, {}
    for tensor in tensors:
        models = _models(build, depths(num_layers), tensor, batches)
        calls = _calls(models) | (dict(beside or {}) if tensor == tensors[0] else {})
        samples[tensor] = interleaved(calls, rounds)
        seconds = steady(samples[tensor])
        if tensor == tensors[0]:
            update = seconds["update"] / list(models.values())[-1].parameters
        for kind, timing in _split(models, seconds, tensor, update).items():
            timings[kind].append(timing)
        del models, calls
    return LayerSeconds(
        timings={kind: tuple(timing) for kind, timing in timings.items()}, update=update, samples=samples
    )


def _models(build: Build, pair: tuple[int, int], tensor: int, batches: Sequence[int]) -> dict[tuple[int, int], Shallow]:
    """{(blocks, batch): model}, batch by batch."""
    models: dict[tuple[int, int], Shallow] = {}
    for batch in batches:
        made = {(depth, batch): build(depth, tensor, batch) for depth in pair}
        fitting = {key: model for key, model in made.items() if model is not None}
        if len(fitting) < len(made):
            break
        models |= fitting
    if not models:
        raise InputError(
            f"{max(pair)} blocks of this model do not fit the device at batch {batches[0]}, tensor degree {tensor}; "
            "profile a smaller batch or a larger tensor degree"
        )
    return models


def _calls(models: Mapping[tuple[int, int], Shallow]) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for (depth, batch), model in models.items():
        calls[f"forward {depth} {batch}"], calls[f"step {depth} {batch}"] = model.forward, model.step
        calls[f"embedding {batch}"], calls[f"embedding both {batch}"] = model.embedding, model.embedding_both
        calls["update"] = model.update
    return calls


def _split(
    models: Mapping[tuple[int, int], Shallow], seconds: Mapping[str, float], tensor: int, update: float
) -> dict[str, Timing]:
    """The seconds of the parts from those of the models, by the equations above."""
    batches = sorted({batch for _, batch in models})
    shallow, deep = sorted({depth for depth, _ in models})
    rows: dict[str, list[tuple[float, float]]] = {"embedding": [], "block": [], "head": []}
    for batch in batches:
        steps = {depth: seconds[f"step {depth} {batch}"] for depth in (shallow, deep)}
        forward = {depth: seconds[f"forward {depth} {batch}"] for depth in (shallow, deep)}
        both = {depth: steps[depth] - models[depth, batch].parameters * update for depth in (shallow, deep)}

        block_both = _slope(both, shallow, deep)
        block_forward = min(_slope(forward, shallow, deep), block_both)
        rest_both = max(both[deep], 0.0) - deep * block_both
        rest_forward = min(max(forward[deep] - deep * block_forward, 0.0), rest_both)
        embedding_forward = min(seconds[f"embedding {batch}"], rest_forward)
        embedding_backward = max(seconds[f"embedding both {batch}"] - seconds[f"embedding {batch}"], 0.0)
        embedding_backward = min(embedding_backward, rest_both - rest_forward)

        rows["embedding"].append((embedding_forward, embedding_backward))
        rows["block"].append((block_forward, block_both - block_forward))
        rows["head"].append((rest_forward - embedding_forward, rest_both - rest_forward - embedding_backward))
    return {
        kind: Timing(
            tensor=tensor,
            batches=tuple(map(float, batches)),
            forward=tuple(forward for forward, _ in row),
            backward=tuple(backward for _, backward in row),
        )
        for kind, row in rows.items()
    }


def _slope(seconds: Mapping[int, float], shallow: int, deep: int) -> float:
    """Seconds of one block, at most the deep model's seconds divided by its blocks."""
    slope = (seconds[deep] - seconds[shallow]) / (deep - shallow)
    return max(min(slope, seconds[deep] / deep), 0.0)


def predict_step(profile: ModelProfile, config: Config) -> float:
    """Seconds of one training step on one device: micro_batches x (forward + backward of all layers) + update."""
    pieces = config.parallel.micro_batches
    batch = config.data.batch_size / pieces
    layers = sum(sum(profile.kinds[name].seconds(batch, 1)) for name in profile.layers)
    return pieces * layers + profile.parameters * profile.update_seconds
