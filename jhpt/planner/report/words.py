"""Plans and amounts as text, and which layers are on which devices."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jhpt.core.cluster import Cluster
from jhpt.core.config import Compression, GradientCompression
from jhpt.core.plan import Plan, Stage
from jhpt.core.profile import ModelProfile

DAY = 86400.0
"""Seconds."""

NAMES = 4
"""Most names in the text of a run of layers.  Of more names, only the first and the last are shown."""


def percent(ratio: float) -> str:
    """`+12.0 %` for 1.12, and `14.8 times` for 14.8."""
    return f"{100 * (ratio - 1):+.1f} %" if ratio < 2 else f"{ratio:.3g} times"


def duration(seconds: float, sign: bool = False) -> str:
    """Seconds as text: `263.4 ms`, `1.23 s`, `85 us`."""
    size = abs(seconds)
    factor, unit, digits = (1, "s", 3) if size >= 1 else (1e3, "ms", 1) if size >= 1e-4 else (1e6, "us", 1)
    return f"{seconds * factor:{'+' if sign else ''},.{digits}f} {unit}"


def long_duration(seconds: float) -> str:
    """Seconds of a whole run as text: `12.3 days`, `5.4 hours`, `35 minutes`."""
    if seconds >= DAY:
        return f"{seconds / DAY:,.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:,.0f} minutes"


def large(count: float) -> str:
    """A count as people say it: `260 B`, `1.5 T`, `800`."""
    for factor, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= factor:
            return f"{count / factor:.4g}{suffix}"
    return f"{count:.0f}"


def devices_word(cluster: Cluster) -> str:
    """What one of the cluster's devices is called."""
    return "device" if any(node.device.name == "cpu" for node in cluster.nodes) else "GPU"


def names_text(names: Sequence[str]) -> str:
    """`embedding, block x 12`; of many names only the first and the last."""
    return ", ".join(names) if len(names) <= NAMES else f"{names[0]} ... {names[-1]}"


def spans(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as inclusive ranges of neighbours."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def spans_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Inclusive ranges as text: `0-7, 12`."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def devices_text(stage: Stage) -> str:
    """The devices of a stage: `8-15`, in the order of their ranks."""
    return spans_text(spans(stage.members))


ACCUMULATION, CHECKPOINTING = " (gradient accumulation)", " (activation checkpointing)"
ZERO = {1: " (optimizer sharding)", 2: " (gradient sharding)", 3: " (FSDP)"}
"""Other names of what a plan does, for its longest description."""


def shape_text(plan: Plan, *, explained: bool = False) -> str:
    """A plan in one line: `4 stages x 8 devices, tensor 2, 16 micro-batches, 1f1b, ZeRO-1, recomputation`.

    explained: adds the other usual names, such as `ZeRO-1 (optimizer sharding)`.
    """
    accumulation = ACCUMULATION if explained and plan.micro_batches > 1 else ""
    checkpointing = CHECKPOINTING if explained else ""
    sizes = [stage.devices for stage in plan.stages]
    degrees = sorted({run.tensor for stage in plan.stages for chunk in stage.chunks for run in chunk.runs})
    several, count = len(sizes) > 1, plan.micro_batches
    each = f"{sizes[0]} device{'s' if sizes[0] > 1 else ''}" if len(set(sizes)) == 1 else "/".join(map(str, sizes))
    schedule = f"{plan.schedule} x {plan.chunks}" if plan.chunks > 1 else plan.schedule
    parts = [
        f"{len(sizes)} stages x {each}" if several else each,
        f"tensor {'/'.join(map(str, degrees))}",
        "sequence parallelism" if plan.sequence and degrees[-1] > 1 else "",
        samples_text(plan),
        f"{count} micro-batch{'es' if count > 1 else ''}{accumulation}",
        schedule if several else "",
        f"ZeRO-{plan.zero}{ZERO[plan.zero] if explained else ''}{hybrid_text(plan)}" if plan.zero else "",
        recomputation_text(plan, f"recomputation{checkpointing}", "but for"),
        offload_text(plan),
        f"{'/'.join(map(str, plan.sample_chunks))} sample chunks" if plan.sample_chunks != (1,) else "",
        compression_text(plan.compression),
        gradients_text(plan.gradient_compression),
    ]
    return ", ".join(filter(None, parts))


def samples_text(plan: Plan) -> str:
    """`samples by speed (2 x 6, 2 x 3)`: ranks x samples of a micro-batch; empty if all ranks have equally many."""
    samples = plan.stages[0].samples
    if samples is None:
        return ""
    return f"samples by speed ({', '.join(f'{len(list(alike))} x {n}' for n, alike in itertools.groupby(samples))})"


def hybrid_text(plan: Plan) -> str:
    """` over 8 of 16 data ranks` with hybrid sharding; empty without."""
    return f" over {plan.shards} of {plan.replicas} data ranks" if plan.shards < plan.replicas else ""


def recomputation_text(plan: Plan, recomputation: str, but_for: str) -> str:
    """What blocks recompute: `recomputation in 12 of 32 blocks but for qkv`; empty if everything is saved.

    Args:
      recomputation, but_for: the words of this text.
    """
    if not plan.recompute:
        return ""
    text, others = recomputation, plan.other_blocks
    if others:
        text += f" in {others.after} of {plan.stages[0].chunks[0].stop - 2} blocks"
    text += f" {but_for} {plan.saved.text()}" if plan.saved else ""
    return text + (f", in the others {but_for} {others.saved.text()}" if others and others.saved else "")


def compression_text(compression: Compression) -> str:
    """How all-reduces over the tensor axis are compressed; empty if they are not.

    `all-reduce in 8 bits`, or `all-reduce of 30 % of the tokens in 8 bits, of the others in 4`.
    """
    if not compression.on:
        return ""
    if compression.tokens == 1:
        return f"all-reduce in {compression.bits} bits"
    others = f"of the others in {compression.rest_bits}" if compression.rest_bits else "of no others"
    return f"all-reduce of {100 * compression.tokens:.0f} % of the tokens in {compression.bits} bits, {others}"


def gradients_text(compression: GradientCompression) -> str:
    """How gradients are compressed: `gradients in 8 bits` or `gradients top 0.1`; empty if they are not."""
    if compression.kind == "topk":
        momentum = f" with momentum {compression.momentum:g}" if compression.momentum else ""
        return f"gradients top {compression.share:.3g}{momentum}"
    return f"gradients in {compression.bits} bits" if compression.on else ""


OFFLOADED = {"parameters": "weights and gradients", "optimizer": "optimizer state", "both": "all state"}
"""Which state of the blocks is offloaded, by kind of offload."""


def offload_text(plan: Plan) -> str:
    """`CPU offload of all state of every block`, `CPU offload of optimizer state of 1 block in 4`; empty without
    offload.
    """
    if plan.offload is None:
        return ""
    size = 1 + plan.offload.resident
    blocks = f"1 block in {size}" if size > 1 else "every block"
    return f"CPU offload of {OFFLOADED[plan.offload.kind]} of {blocks}"


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


def layer_runs(stage: Stage, profile: ModelProfile) -> tuple[LayerRun, ...]:
    """The layers of a stage, chunk by chunk.  Neighbours with equal degrees are joined."""
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
    """Names with equal neighbours joined: `("embedding", "block x 12")`."""
    groups = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    return tuple(name if count == 1 else f"{name} x {count}" for name, count in groups)


def streamed_layers(plan: Plan) -> tuple[int, ...]:
    """The layers whose state is offloaded to the host."""
    if plan.offload is None:
        return ()
    return tuple(range(1, plan.stages[0].chunks[0].stop - 1, 1 + plan.offload.resident))


def idle_devices(plan: Plan, available: int) -> tuple[int, ...]:
    """Numbers of the devices that the plan does not use."""
    working = {device for stage in plan.stages for device in stage.members}
    return tuple(device for device in range(available) if device not in working)
