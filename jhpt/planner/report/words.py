"""Plans and amounts in words."""

from collections.abc import Iterable, Sequence

from jhpt.core.config import Compression, GradientCompression
from jhpt.core.plan import Plan, Stage

NAMES = 4
"""Most names in the text of a run of layers; of more, the first and the last."""


def percent(ratio: float) -> str:
    """`+12.0 %` for 1.12; `14.8 times` for what is no longer a matter of percents."""
    return f"{100 * (ratio - 1):+.1f} %" if ratio < 2 else f"{ratio:.3g} times"


def duration(seconds: float, sign: bool = False) -> str:
    """`263.4 ms`, `1.23 s`, `85 us`."""
    size = abs(seconds)
    factor, unit, digits = (1, "s", 3) if size >= 1 else (1e3, "ms", 1) if size >= 1e-4 else (1e6, "us", 1)
    return f"{seconds * factor:{'+' if sign else ''},.{digits}f} {unit}"


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
        ("recomputation" + (f" but for {plan.saved.text()}" if plan.saved else "")) if plan.recompute else "",
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


def gradients_text(how: GradientCompression) -> str:
    """`gradients in 8 bits`, `gradients top 0.1`; empty: they are summed as they are."""
    if how.kind == "topk":
        return f"gradients top {how.share:.3g}" + (f" with momentum {how.momentum:g}" if how.momentum else "")
    return f"gradients in {how.bits} bits" if how.on else ""


OFFLOADED = {"parameters": "weights and gradients", "optimizer": "optimizer state", "both": "all state"}
"""Of blocks, by what lives on the host."""


def offload_text(plan: Plan) -> str:
    """`all state of every block on the host`, `optimizer state of 1 block in 4 on the host`; empty without offload."""
    if plan.offload is None:
        return ""
    size = 1 + plan.offload.resident
    return f"{OFFLOADED[plan.offload.kind]} of {f'1 block in {size}' if size > 1 else 'every block'} on the host"
