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
from functools import partial
from itertools import accumulate
from typing import Any

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.plausible import timing_faults
from jhpt.core.profile import ModelProfile, Timing
from jhpt.measure.repeated import until_plausible
from jhpt.measure.timer import interleaved, relative_spread, steady

REMEDY = " or, if blocks are so small that their seconds drown in noise, take larger batches, sequences or blocks"

Call = Callable[[], Any]
Calls = Mapping[str, Call]
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

Models = Mapping[tuple[int, int], Shallow]
"""By (blocks, batch)."""

Measured = tuple[tuple[Samples, float, dict[str, Timing]], list[str]]
"""((samples, seconds of the update per parameter, timings of one tensor degree by kind of layer), faults)."""


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Timings by kind of layer, seconds of the update per parameter with their spread, and all raw samples by tensor
    degree."""

    timings: Mapping[str, tuple[Timing, ...]]
    update: float
    samples: Mapping[int, Samples]
    update_spread: float | None = None


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
      InputError: not even the smallest batch fits; or what is measured cannot be right, time and again.
    """
    timings: dict[str, list[Timing]] = {"embedding": [], "block": [], "head": []}
    update, samples = 0.0, {}
    for tensor in tensors:
        models = _models(build, depths(num_layers), tensor, batches)
        calls = _calls(models) | (dict(beside or {}) if tensor == tensors[0] else {})
        known = None if tensor == tensors[0] else update
        what = f"layers at tensor degree {tensor}"
        measure = partial(_measure, models, calls, tensor, known)
        samples[tensor], update, parts = until_plausible(what, measure, rounds, REMEDY)
        for kind, timing in parts.items():
            timings[kind].append(timing)
        del models, calls, measure
    return LayerSeconds(
        timings={kind: tuple(timing) for kind, timing in timings.items()},
        update=update,
        samples=samples,
        update_spread=relative_spread(samples[tensors[0]]["update"]),
    )


def whole_seconds(
    build: Callable[[int], Shallow | None],
    shares: Callable[[int], Mapping[str, tuple[float, float]]],
    batches: Sequence[int],
    rounds: int,
    beside: Mapping[str, Call] | None = None,
) -> LayerSeconds:
    """`layer_seconds` of a model whose layers differ: whole steps are timed, and divided among the layers.

    Only their sum is measured.  Tensor degrees above 1 take a share of the seconds of 1.

    Args:
      build: batch -> the whole model.  shares: batch -> (forward, backward) of every kind of layer, in any unit.

    Raises:
      InputError: as `layer_seconds`.
    """
    made = {batch: build(batch) for batch in batches}
    models = {batch: model for batch, model in made.items() if model is not None}
    if not models:
        raise InputError(f"the model does not fit the device at batch {batches[0]}; profile a smaller batch")
    calls: dict[str, Call] = dict(beside or {})
    for batch, model in models.items():
        calls |= {f"forward {batch}": model.forward, f"step {batch}": model.step, "update": model.update}

    def measure(rounds: int) -> tuple[tuple[Samples, float, dict[str, Timing]], list[str]]:
        samples = interleaved(calls, rounds)
        seconds = steady(samples)
        parameters = next(iter(models.values())).parameters
        update = seconds["update"] / parameters
        timings = _divided(seconds, update * parameters, shares, list(models), len(samples["update"]))
        return (samples, update, timings), timing_faults({kind: (one,) for kind, one in timings.items()}, update)

    samples, update, timings = until_plausible("whole steps", measure, rounds, REMEDY)
    spread = relative_spread(samples["update"])
    each = {kind: (timing,) for kind, timing in timings.items()}
    return LayerSeconds(timings=each, update=update, samples={1: samples}, update_spread=spread)


def _divided(
    seconds: Mapping[str, float],
    update: float,
    shares: Callable[[int], Mapping[str, tuple[float, float]]],
    batches: Sequence[int],
    repetitions: int,
) -> dict[str, Timing]:
    """The seconds of whole models, divided among their layers."""
    rows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in shares(batches[0])}
    for batch in batches:
        parts = shares(batch)
        total = [sum(share[way] for share in parts.values()) for way in (0, 1)]
        forward = min(seconds[f"forward {batch}"], seconds[f"step {batch}"])
        backward = max(seconds[f"step {batch}"] - forward - update, 0.0)
        for kind, (ahead, back) in parts.items():
            rows[kind].append((forward * ahead / total[0], backward * back / total[1]))
    # A larger batch is never faster.
    ascending = {kind: [tuple(accumulate(way, max)) for way in zip(*row, strict=True)] for kind, row in rows.items()}
    return {
        kind: Timing(batches=tuple(map(float, batches)), forward=forward, backward=backward, repetitions=repetitions)
        for kind, (forward, backward) in ascending.items()
    }


def _measure(models: Models, calls: Calls, tensor: int, update: float | None, rounds: int) -> Measured:
    """Times the calls.  update: seconds per parameter; None: from these calls."""
    samples = interleaved(calls, rounds)
    seconds = steady(samples)
    if update is None:
        update = seconds["update"] / list(models.values())[-1].parameters
    timings = _split(models, seconds, tensor, update, samples)
    return (samples, update, timings), timing_faults({kind: (timing,) for kind, timing in timings.items()}, update)


def _models(build: Build, pair: tuple[int, int], tensor: int, batches: Sequence[int]) -> Models:
    """The models, batch by batch."""
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


def _calls(models: Models) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for (depth, batch), model in models.items():
        calls[f"forward {depth} {batch}"], calls[f"step {depth} {batch}"] = model.forward, model.step
        calls[f"embedding {batch}"], calls[f"embedding both {batch}"] = model.embedding, model.embedding_both
        calls["update"] = model.update
    return calls


def _split(
    models: Models, seconds: Mapping[str, float], tensor: int, update: float, samples: Samples
) -> dict[str, Timing]:
    """The seconds of the parts from those of the models, by the equations above.  samples: for their spread."""
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
            spread=_spreads(kind, samples, (shallow, deep), batches),
            repetitions=len(samples["update"]),
        )
        for kind, row in rows.items()
    }


def _spreads(kind: str, samples: Samples, pair: tuple[int, int], batches: Sequence[int]) -> tuple[float, ...] | None:
    """For every batch, the largest spread of the programs that the seconds of such a layer come from.

    A block's seconds are differences of these programs, which vary more than the programs themselves do.
    """
    alone = ("embedding", "embedding both")
    whole = [f"{program} {depth}" for program in ("forward", "step") for depth in pair]
    names = {"embedding": alone, "block": whole, "head": (*whole, *alone)}[kind]
    spreads = [[relative_spread(samples[f"{name} {batch}"]) for name in names] for batch in batches]
    if any(spread is None for row in spreads for spread in row):
        return None
    return tuple(max(spread for spread in row if spread is not None) for row in spreads)


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
