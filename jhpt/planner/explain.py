"""Why this plan: an answer as words, rows and JSON.  Pure functions; `report` prints what they return.

Seconds.  What a device of a stage does and how long it waits add up to the step.  A plan as a whole is described by the
mean over its working devices, so the differences between two plans' causes add up to the difference of their steps;
uneven stages and the pipeline's ramps both show as waiting.  Compute and update are split further than in `estimate`:
the forward pass done again is recomputation; what no work hides of activations on their way to the host and back is
copies, and of ZeRO-3's traffic, and of the weights that are gathered once a step, is weights gathered.

Runners-up.  The answer's alternatives are the best plans of other shapes, as far as the search had to price them, and
all fit; shapes whose bound was too high are not among them.  `changed` adds plans of the
winner's own shape with one decision changed; of those some are faster and do not fit, which says why the planner had to
decide as it did.

Tensor communication is what sums cost: what nothing hides of them, and what chunks and codes cost on top.  `savings`
says what chunks of samples and compression spare a step, or why they were left out.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from jhpt.core.axes import TENSOR
from jhpt.core.config import BLOCK_INPUT, PLAIN_GRADIENTS, Compression, GradientCompression
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Kept, Plan, Stage, What, runs_of
from jhpt.core.profile import ModelProfile
from jhpt.core.state import State
from jhpt.planner.baselines import Baseline
from jhpt.planner.costs import CostModel
from jhpt.planner.estimate import Estimate, StageEstimate, price, slot_of, stage_layers
from jhpt.planner.offload.hosted import hosted_step, offloads
from jhpt.planner.offload.played import hosted_timeline
from jhpt.planner.recompute.host import waiting
from jhpt.planner.request import COMPRESSIONS
from jhpt.planner.simulation import Timeline, simulate
from jhpt.planner.solve import Answer
from jhpt.planner.tables import Treatment, treatment_of
from jhpt.planner.traffic import traffic

FORMAT = 1
"""Of the JSON; raised when a key changes its meaning."""

OPTIMAL = 1e-9
"""A relative gap below this is rounding."""

MINOR = 0.05
"""Differences below this share of the largest one are not told."""

ALTERNATIVES = 5
NAMES = 4
"""Most names in the text of a run of layers; of more, the first and the last."""


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers `[first, stop)` of one chunk at one degree."""

    chunk: int
    first: int
    stop: int
    names: tuple[str, ...]
    data: int
    tensor: int
    sample_chunks: int


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A plan that was not chosen.

    ratio: its step over the winner's.  missing: bytes per device that it lacks, at most 0 where it fits.
    causes: seconds that it spends more than the winner, by cause; they sum to the difference of the steps.
    """

    name: str
    plan: Plan
    seconds: float
    ratio: float
    missing: float
    causes: dict[str, float]

    @property
    def why(self) -> str:
        """`+12.0 %: gradients exposed +80 ms, waiting +35 ms; compute -20 ms`, or by how much it does not fit."""
        faster = f"; it would take {percent(self.ratio)}" if self.ratio < 1 else ""
        if self.missing > 0:
            return f"does not fit by {gib(self.missing)}{faster}"
        largest = max(map(abs, self.causes.values()), default=0.0)
        told = [(value, cause) for cause, value in self.causes.items() if abs(value) > max(MINOR * largest, 1e-9)]
        signs = (sorted((v, c) for v, c in told if v > 0)[::-1], sorted((v, c) for v, c in told if v < 0))
        parts = [", ".join(f"{cause} {duration(value, sign=True)}" for value, cause in part) for part in signs if part]
        return ": ".join(filter(None, (percent(self.ratio), "; ".join(parts))))


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a way to spare tensor communication is worth.

    seconds: of a step that it saves; negative: that it would cost.  sent, plain: bytes that a device sends over the
    tensor axis in a step, with it and without.
    """

    name: str
    taken: bool
    seconds: float
    sent: float
    plain: float
    why: str


def layer_runs(stage: Stage, profile: ModelProfile) -> tuple[LayerRun, ...]:
    """The layers of a stage, chunk by chunk, equal treatment joined."""
    runs = []
    for number, chunk in enumerate(stage.chunks):
        first = chunk.first
        for run in chunk.runs:
            stop = first + run.layers
            names = compressed(profile.layers[first:stop])
            data = stage.devices // run.tensor
            runs.append(LayerRun(number, first, stop, names, data, run.tensor, run.sample_chunks))
            first = stop
    return tuple(runs)


def compressed(names: Iterable[str]) -> tuple[str, ...]:
    """Equal neighbours joined: `("embedding", "block x 12")`."""
    groups = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    return tuple(name if count == 1 else f"{name} x {count}" for name, count in groups)


def names_text(names: Sequence[str]) -> str:
    """`embedding, block x 12`; of many names the first and the last."""
    return ", ".join(names) if len(names) <= NAMES else f"{names[0]} ... {names[-1]}"


def spans(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as inclusive ranges."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def spans_text(ranges: Iterable[tuple[int, int]]) -> str:
    """`0-7, 12`."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def devices_text(stage: Stage) -> str:
    """`8-15`."""
    return spans_text([(stage.device, stage.device + stage.devices - 1)])


def idle_devices(plan: Plan, available: int) -> tuple[int, ...]:
    """Numbers of the devices without work."""
    working = {device for stage in plan.stages for device in range(stage.device, stage.device + stage.devices)}
    return tuple(device for device in range(available) if device not in working)


def shape_text(plan: Plan) -> str:
    """A plan in one line: `4 stages x 8 devices, tensor 2, 16 micro-batches, 1f1b, ZeRO-1, recomputation`."""
    sizes = [stage.devices for stage in plan.stages]
    degrees = sorted({run.tensor for stage in plan.stages for chunk in stage.chunks for run in chunk.runs})
    several, count = len(sizes) > 1, plan.micro_batches
    each = f"{sizes[0]} device{'s' if sizes[0] > 1 else ''}" if len(set(sizes)) == 1 else "/".join(map(str, sizes))
    schedule = f"{plan.schedule} x {plan.chunks}" if plan.chunks > 1 else plan.schedule
    parts = [
        f"{len(sizes)} stages x {each}" if several else each,
        f"tensor {'/'.join(map(str, degrees))}",
        f"{count} micro-batch{'es' if count > 1 else ''}",
        schedule if several else "",
        f"ZeRO-{plan.zero}" if plan.zero else "",
        ("recomputation" + (f" but for {plan.kept.text()}" if plan.kept else "")) if plan.recompute else "",
        offload_text(plan),
        f"{'/'.join(map(str, plan.sample_chunks))} sample chunks" if plan.sample_chunks != (1,) else "",
        compression_text(plan.compression),
        gradients_text(plan.gradient_compression),
    ]
    return ", ".join(filter(None, parts))


def compression_text(how: Compression) -> str:
    """`sums in 8 bits`, `sums of 30 % of the tokens in 8 bits, of the others in 4`; nothing where it is off."""
    if not how.on:
        return ""
    if how.tokens == 1:
        return f"sums in {how.bits} bits"
    others = f"of the others in {how.rest_bits}" if how.rest_bits else "of no others"
    return f"sums of {100 * how.tokens:.0f} % of the tokens in {how.bits} bits, {others}"


OFFLOADED = {"parameters": "weights and gradients", "optimizer": "optimizer state", "both": "all state"}
"""Of blocks, by what lives on the host."""


def offload_text(plan: Plan) -> str:
    """`all state of every block on the host`, `optimizer state of 1 block in 4 on the host`; empty without offload."""
    if plan.offload is None:
        return ""
    size = 1 + plan.offload.resident
    return f"{OFFLOADED[plan.offload.what]} of {f'1 block in {size}' if size > 1 else 'every block'} on the host"


def streamed_layers(plan: Plan) -> tuple[int, ...]:
    """The layers that come from the host."""
    if plan.offload is None:
        return ()
    return tuple(range(1, plan.stages[0].chunks[0].stop - 1, 1 + plan.offload.resident))


def offload_lines(answer: Answer) -> tuple[str, ...]:
    """Which blocks live where, and why."""
    plan, offload = answer.plan, answer.plan.offload
    if offload is None:
        return ()
    stage, step = answer.estimate.stages[0], hosted_step(plan, answer.model)
    layers, every = streamed_layers(plan), 1 + offload.resident
    which = spans_text([(layers[0], layers[-1])])
    if every > 1 and len(layers) > 1:
        which = f"{layers[0]}, {layers[1]}" + (f" ... {layers[-1]}" if len(layers) > 2 else "")
    stay = "the blocks between and both ends" if every > 1 else "both ends"
    room = f"{gib(stage.total_host_bytes)} of {gib(stage.host_capacity)} on each host"
    forward, backward = map(duration, step.passes)
    return (
        f"on the host: {OFFLOADED[offload.what]} of layers {which}, {room}; on the devices: {stay}",
        f"why: {_why_on_host(answer)}",
        f"passes: forward {forward}, backward {backward}, of which {duration(stage.seconds['copies'])} wait for copies",
    )


def _why_on_host(answer: Answer) -> str:
    plan, model = answer.plan.model_copy(update={"offload": None}), answer.model
    levels = model.levels((0, 1, 3), plan.replicas, plan.space)
    bare = [price(plan.model_copy(update={"zero": zero}), model).stages[0] for zero in levels]
    least, usable = min(stage.total_bytes for stage in bare), bare[0].capacity
    if least <= usable:
        return "memory.offload asks for it, all would fit the devices"
    return f"with all state on it a device would hold {gib(least)}, and {gib(usable)} may be filled"


def kept_lines(answer: Answer) -> tuple[str, ...]:
    """What blocks keep on the host, and why."""
    plan, kept = answer.plan, waiting(answer.plan)
    if not kept.host or plan.offload is not None:
        return ()
    stage = max(answer.estimate.stages, key=lambda stage: stage.total_host_bytes)
    means = mean_causes(plan, answer.estimate, answer.model)
    room = f"{gib(stage.total_host_bytes)} of {gib(stage.host_capacity)} on each host"
    return (
        f"on the host: {' and '.join(kept.host)} of every block, {room}; {duration(means['copies'])} of a step wait "
        f"for copies, {duration(means['recomputation'])} compute again",
    )


def state_lines(profile: ModelProfile) -> tuple[str, ...]:
    """What is kept of a parameter from step to step, where that is not float32."""
    if not profile.state.in_few_bits:
        return ()
    total, parts = profile.state.bytes, (f"{cause} {size:.2f}" for cause, size in profile.state.causes.items())
    instead = "as many as" if total == State().bytes else f"instead of {State().bytes:.0f}"
    return (f"state: {total:.2f} bytes of a parameter, {instead} in float32: {', '.join(parts)}",)


def gradients_text(how: GradientCompression) -> str:
    """`gradients in 8 bits`, `gradients top 0.1`; empty: they are summed as they are."""
    if how.kind == "topk":
        return f"gradients top {how.share:.3g}" + (f" with momentum {how.momentum:g}" if how.momentum else "")
    return f"gradients in {how.bits} bits" if how.on else ""


def verdict(answer: Answer) -> str:
    """How far from the fastest plan of the space this one can be."""
    if answer.gap <= OPTIMAL:
        return "proven optimal"
    gap = 100 * answer.gap
    return f"at most {gap:.2g} % from optimal" if gap < 10 else f"at most {gap:.0f} % from optimal"


def throughput(answer: Answer) -> tuple[float, str]:
    """(samples or tokens per second, which of them)."""
    samples = answer.plan.batch / answer.estimate.seconds
    tokens = answer.model.profile.sample_tokens
    return (samples * tokens, "tokens/s") if tokens else (samples, "samples/s")


def stage_causes(plan: Plan, position: int, estimate: Estimate, model: CostModel) -> dict[str, float]:
    """Seconds of one stage by cause; they sum to the step."""
    seconds, treatment = dict(estimate.stages[position].seconds), treatment_of(plan)
    if plan.offload is not None:
        return seconds
    # Over one rank nothing is gathered; what rounding takes is computation.
    ungathered = treatment if plan.replicas == 1 else replace(treatment, zero=0)
    unsharded = plan.micro_batches * _passes(plan, position, ungathered, model)
    bare = plan.micro_batches * _passes(plan, position, replace(ungathered, recompute=False, kept=None), model)
    once = _gathered(plan, position, model)
    seconds["update"] -= once
    gathered = seconds["compute"] - unsharded + once
    copies = _copied(plan, position, model)
    split = {"compute": bare, "recomputation": unsharded - bare - copies, "weights gathered": gathered}
    split |= {"copies": copies} if waiting(plan).host else {}
    return split | {cause: value for cause, value in seconds.items() if cause != "compute"}


def _passes(plan: Plan, position: int, treatment: Treatment, model: CostModel) -> float:
    """Seconds of a micro-batch in both passes, without tensor communication."""
    parts = stage_layers(plan, position, treatment, model)
    return sum(float((part.forward + part.backward).sum()) for part in parts)


def _copied(plan: Plan, position: int, model: CostModel) -> float:
    """Seconds that wait for what blocks keep on the host: beyond those of a plan that keeps it on the devices."""
    kept = waiting(plan)
    if not kept.host:
        return 0.0
    treatment = replace(treatment_of(plan), zero=0)
    there = replace(treatment, kept=Kept(device=(*kept.device, *kept.host)))
    return plan.micro_batches * (_passes(plan, position, treatment, model) - _passes(plan, position, there, model))


def _gathered(plan: Plan, position: int, model: CostModel) -> float:
    """Seconds in which weights are gathered once a step."""
    parts = stage_layers(plan, position, treatment_of(plan), model)
    return sum(float(part.gathered.sum()) for part in parts) + slot_of(plan, position, model).gathered


def mean_causes(plan: Plan, estimate: Estimate, model: CostModel) -> dict[str, float]:
    """Seconds by cause, mean over the working devices; they sum to the step."""
    means: dict[str, float] = {}
    for position, stage in enumerate(plan.stages):
        for cause, seconds in stage_causes(plan, position, estimate, model).items():
            means[cause] = means.get(cause, 0.0) + seconds * stage.devices / plan.devices
    return means


def rival(name: str, plan: Plan, answer: Answer) -> Rival:
    """`plan` against the winner."""
    model = answer.model
    if plan.gradient_compression != model.gradient_compression:
        model = CostModel(model.profile, model.cluster, plan.gradient_compression)
    estimate = price(plan, model)
    own, winner = mean_causes(plan, estimate, model), mean_causes(answer.plan, answer.estimate, answer.model)
    return Rival(
        name=name,
        plan=plan,
        seconds=estimate.seconds,
        ratio=estimate.seconds / answer.estimate.seconds,
        missing=max(stage.missing for stage in estimate.stages),
        causes={cause: own.get(cause, 0.0) - winner.get(cause, 0.0) for cause in {**own, **winner}},
    )


def savings(answer: Answer) -> tuple[Saving, ...]:
    """What chunks of samples and compression spare, where any layer between the ends has sums over tensor ranks."""
    plan, last = answer.plan, answer.model.num_layers - 1
    degrees = (pair for stage in plan.stages for chunk in stage.chunks for pair in enumerate(chunk.tensor, chunk.first))
    if plan.space == "general" or not any(0 < layer < last and tensor > 1 for layer, tensor in degrees):
        return ()
    return (_chunks_saving(answer), *([_compression_saving(answer)] if answer.model.stream else []))


def _chunks_saving(answer: Answer) -> Saving:
    plan, taken = answer.plan, answer.plan.sample_chunks != (1,)
    other = _cut(plan, 1 if taken else 2)
    seconds = price(other, answer.model).seconds - answer.estimate.seconds
    samples = max(plan.batch // plan.micro_batches * t // stage.devices for stage in plan.stages for t in plan.degrees)
    if taken:
        why = f"hide {duration(seconds)} of a step's sums behind other chunks"
    elif not answer.model.cluster.overlap:
        why = "none: communication does not run beside computation here"
    elif samples == 1:
        why = "none: a device has one sample of a micro-batch"
    elif not answer.model.profile.sample_tokens:
        why = "none: only sequences of tokens are cut into chunks"
    elif seconds <= 0:
        why = "none: 2 would not fit"
    else:
        why = f"none: 2 would make the step {duration(seconds)} longer"
    saved = seconds if taken else -seconds
    sent, plain = (_tensor_bytes(one, answer) for one in ((plan, other) if taken else (other, plan)))
    return Saving(name="sample chunks", taken=taken, seconds=saved, sent=sent, plain=plain, why=why)


def _compression_saving(answer: Answer) -> Saving:
    plan, taken = answer.plan, answer.plan.compression.on
    other = plan.model_copy(update={"compression": Compression() if taken else COMPRESSIONS[0]})
    difference = price(other, answer.model).seconds - answer.estimate.seconds
    seconds = difference if taken else -difference
    sent, plain = (_tensor_bytes(one, answer) for one in ((plan, other) if taken else (other, plan)))
    wire = f"{gib(sent)} instead of {gib(plain)} over the tensor axis"
    off = f"off: in {COMPRESSIONS[0].bits} bits a device would send {wire}"
    if taken:
        why = f"{compression_text(plan.compression)}: a device sends {wire}, a step takes {duration(seconds)} less"
    elif seconds > 0:
        choose = "parallel.compression=auto lets the planner choose"
        why = f"{off}, and a step take {duration(seconds)} less; {choose}"
    else:
        why = f"{off}, but a step take {duration(-seconds)} more"
    return Saving(name="compression", taken=taken, seconds=seconds, sent=sent, plain=plain, why=why)


def _cut(plan: Plan, chunks: int) -> Plan:
    """The plan with so many chunks of samples everywhere."""

    def cut(chunk: Chunk) -> Chunk:
        return chunk.model_copy(update={"runs": runs_of(chunk.tensor, (chunks,) * len(chunk.tensor))})

    stages = tuple(
        stage.model_copy(update={"chunks": tuple(cut(chunk) for chunk in stage.chunks)}) for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


def _tensor_bytes(plan: Plan, answer: Answer) -> float:
    """What a device of the stage that sends most sends over the tensor axis."""
    stages = traffic(plan, answer.model.profile, overlap=answer.model.cluster.overlap)
    return max(sum(sent.bytes for (_, axis), sent in stage.items() if axis.startswith(TENSOR)) for stage in stages)


def alternatives(answer: Answer, count: int = ALTERNATIVES) -> tuple[Rival, ...]:
    """The fastest plans of other shapes."""
    return tuple(rival(shape_text(plan), plan, answer) for plan in answer.alternatives[:count])


def changed(answer: Answer) -> tuple[Rival, ...]:
    """The winner with one decision changed, wherever that makes a plan."""
    rivals = []
    for name, update in _changes(answer.plan, answer.model):
        plan = answer.plan.model_copy(update=update | {"seconds": None, "lower_bound": None})
        try:
            rivals.append(rival(name, plan, answer))
        except InputError:  # such as a micro-batch that the replicas cannot share
            continue
    return tuple(rivals)


def _changes(plan: Plan, model: CostModel) -> Iterator[tuple[str, dict[str, Any]]]:
    for zero in model.levels((0, 1, 3), plan.replicas, plan.space) if plan.offload is None else ():
        if zero != plan.zero:
            yield (f"ZeRO-{zero}" if zero else "no ZeRO"), {"zero": zero}
    yield ("no recomputation" if plan.recompute else "recomputation"), {"recompute": not plan.recompute, "kept": None}
    if plan.kept is not None:
        yield "recomputation of everything", {"kept": None}
    if (away := waiting(plan)).host and plan.offload is None:
        named = tuple(name for name in (*away.device, *away.host) if name != BLOCK_INPUT)
        yield "nothing on the host", {"kept": Kept(device=named)}
    if plan.offload is not None:
        yield "everything on the devices", {"offload": None}
        for offload in offloads(plan.stages[0].chunks[0].stop - 2, get_args(What), plan.offload.at_once):
            if (offload.what == plan.offload.what) != (offload.resident == plan.offload.resident):
                yield offload_text(plan.model_copy(update={"offload": offload})), {"offload": offload}
    if plan.degrees[-1] > 1 and plan.space == "spmd":
        if plan.sample_chunks != (1,):
            yield "samples in one piece", {"stages": _cut(plan, 1).stages}
        if plan.compression.on:
            yield "no compression", {"compression": Compression()}
    if plan.gradient_compression.on and plan.replicas > 1:
        yield "gradients as they are", {"gradient_compression": PLAIN_GRADIENTS}
    for count in (plan.micro_batches // 2, plan.micro_batches * 2):
        if count and plan.batch % count == 0:
            yield f"{count} micro-batch{'es' if count > 1 else ''}", {"micro_batches": count}


def timeline(answer: Answer) -> Timeline:
    """The step, played; device n of the timeline is every device of stage n."""
    plan, times = answer.plan, answer.estimate.times
    if plan.offload is not None:
        return hosted_timeline(plan, hosted_step(plan, answer.model))
    arrays = times.forward, times.backward, times.cut, times.sync, times.update
    return simulate(plan.schedule, plan.micro_batches, *arrays, overlap=answer.model.cluster.overlap)


def to_json(answer: Answer, baselines: Sequence[Baseline] = ()) -> dict[str, Any]:
    """Everything that is known about an answer: bytes, seconds, JSON types only."""
    plan, model, estimate = answer.plan, answer.model, answer.estimate
    profile, tokens = model.profile, model.profile.sample_tokens
    samples = plan.batch / estimate.seconds
    return {
        "format": FORMAT,
        "model": {
            "name": profile.name,
            "layers": profile.num_layers,
            "parameters": profile.parameters,
            "sample": profile.sample,
            "dtype": profile.dtype,
            "profile": {"source": profile.source, "device": profile.device},
            **({"state": profile.state.model_dump(mode="json")} if profile.state.in_few_bits else {}),
        },
        "cluster": model.cluster.model_dump(mode="json", exclude_none=True),
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "seconds": estimate.seconds,
        "lower_bound": plan.lower_bound,
        "gap": answer.gap,
        "proven_optimal": answer.gap <= OPTIMAL,
        "samples_per_second": samples,
        "tokens_per_second": samples * tokens if tokens else None,
        "devices": {
            "available": model.cluster.num_devices,
            "working": plan.devices,
            "idle": list(idle_devices(plan, model.cluster.num_devices)),
        },
        "savings": [asdict(each) for each in savings(answer)],
        "stages": [_stage_json(answer, position) for position in range(len(plan.stages))],
        "baselines": [_baseline_json(baseline, answer) for baseline in baselines],
        "changes": [_rival_json(each) for each in changed(answer)],
        "alternatives": [_rival_json(each) for each in alternatives(answer)],
    }


def _stage_json(answer: Answer, position: int) -> dict[str, Any]:
    stage, estimate = answer.plan.stages[position], answer.estimate.stages[position]
    runs = layer_runs(stage, answer.model.profile)
    return {
        "stage": position,
        "devices": list(range(stage.device, stage.device + stage.devices)),
        "layers": [
            {
                "chunk": run.chunk,
                "first": run.first,
                "last": run.stop - 1,
                "names": list(run.names),
                "data": run.data,
                "tensor": run.tensor,
                "sample_chunks": run.sample_chunks,
            }
            for run in runs
        ],
        "seconds": stage_causes(answer.plan, position, answer.estimate, answer.model),
        "bytes": dict(estimate.bytes),
        "total_bytes": estimate.total_bytes,
        "capacity": estimate.capacity,
        "in_flight": estimate.in_flight,
        **({"on_host": _host_json(answer, estimate)} if estimate.host_bytes else {}),
    }


def _host_json(answer: Answer, estimate: StageEstimate) -> dict[str, Any]:
    return {
        "layers": list(streamed_layers(answer.plan)),
        "bytes": dict(estimate.host_bytes),
        "total_bytes": estimate.total_host_bytes,
        "capacity": estimate.host_capacity,
        "why": [*offload_lines(answer), *kept_lines(answer)],
    }


def _baseline_json(baseline: Baseline, answer: Answer) -> dict[str, Any]:
    against = rival(baseline.name, baseline.plan, answer) if baseline.plan else None
    return {
        "name": baseline.name,
        "plan": baseline.plan.model_dump(mode="json", exclude_none=True) if baseline.plan else None,
        "seconds": baseline.seconds,
        "ratio": against.ratio if against else None,
        "causes": against.causes if against else None,
        "why": against.why if against else baseline.reason,
    }


def _rival_json(each: Rival) -> dict[str, Any]:
    return {
        "name": each.name,
        "plan": each.plan.model_dump(mode="json", exclude_none=True),
        "seconds": each.seconds,
        "ratio": each.ratio,
        "fits": each.missing <= 0,
        "missing_bytes": max(each.missing, 0.0),
        "causes": each.causes,
        "why": each.why,
    }


def gib(count: float) -> str:
    """Bytes as `3.2 GiB`; less than a tenth of one in MiB."""
    return f"{count / 2**30:.1f} GiB" if abs(count) >= 0.1 * 2**30 else f"{count / 2**20:.3g} MiB"


def percent(ratio: float) -> str:
    """`+12.0 %` for 1.12; `14.8 times` for what is no longer a matter of percents."""
    return f"{100 * (ratio - 1):+.1f} %" if ratio < 2 else f"{ratio:.3g} times"


def duration(seconds: float, sign: bool = False) -> str:
    """`263.4 ms`, `1.23 s`, `85 us`."""
    size = abs(seconds)
    factor, unit, digits = (1, "s", 3) if size >= 1 else (1e3, "ms", 1) if size >= 1e-4 else (1e6, "us", 1)
    return f"{seconds * factor:{'+' if sign else ''},.{digits}f} {unit}"
