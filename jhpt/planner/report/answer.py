"""An answer as text on a console and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jhpt.core.errors import InputError
from jhpt.core.plan import Plan
from jhpt.core.plan_check import check_stages_run
from jhpt.planner.cost.estimate import StageEstimate
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import offloaded_step
from jhpt.planner.cost.paces import notes
from jhpt.planner.report.alternatives import Alternative, alternative, alternatives, changed, savings
from jhpt.planner.report.causes import (
    offload_lines,
    other_profiles,
    profile_lines,
    saved_tensors_lines,
    stage_causes,
    state_lines,
)
from jhpt.planner.report.offload_timeline import offload_timeline
from jhpt.planner.report.rent import Rent, rent_lines
from jhpt.planner.report.simulation import Timeline, simulate
from jhpt.planner.report.speed import headline, seconds_range, speed
from jhpt.planner.report.timeline import MIN_WIDTH, text_timeline
from jhpt.planner.report.words import (
    devices_text,
    duration,
    idle_devices,
    layer_runs,
    names_text,
    percent,
    shape_text,
    spans,
    spans_text,
    streamed_layers,
)
from jhpt.planner.search.baselines import Baseline
from jhpt.planner.search.neighbours import BetterBatch, better_batch
from jhpt.planner.search.solve import Answer

FORMAT = 1
"""Version of the JSON; it is raised when a key changes its meaning."""

OPTIMAL = 1e-9
"""Relative.  A smaller gap is rounding."""

PLAIN_WIDTH = 120
"""Columns if the output is not a terminal."""

WIDEST_TIMELINE = 120
"""Most columns of the timeline."""

SHOWN = 0.5e-4
"""Seconds.  A cause that is below this on every stage (0.0 ms) has no column."""

MOST_SIMULATED = 30_000
"""Most forward passes of a step with a timeline.  Of longer steps it would show only the beginning and the end."""


def verdict(answer: Answer) -> str:
    """How far this plan can be from the fastest plan of the space."""
    if answer.gap <= OPTIMAL:
        return "proven optimal"
    gap = 100 * answer.gap
    return f"at most {gap:.2g} % from optimal" if gap < 10 else f"at most {gap:.0f} % from optimal"


def timeline(answer: Answer) -> Timeline:
    """The simulated step.  Device n of the timeline stands for all devices of stage n."""
    plan, times = answer.plan, answer.estimate.times
    if plan.offload is not None:
        return offload_timeline(plan, offloaded_step(plan, answer.model))
    arrays = times.forward, times.backward, times.cut, times.sync, times.update
    return simulate(plan.schedule, plan.micro_batches, *arrays, overlap=answer.model.cluster.overlap)


def to_json(answer: Answer, baselines: Sequence[Baseline] = (), rent: Rent | None = None) -> dict[str, Any]:
    """Everything that is known about an answer, in bytes and seconds, with JSON types only."""
    plan, model, estimate, found = answer.plan, answer.model, answer.estimate, speed(answer)
    profile = model.profile
    return {
        "format": FORMAT,
        "model": {
            "name": profile.name,
            "layers": profile.num_layers,
            "parameters": profile.parameters,
            "sample": profile.sample,
            "dtype": profile.dtype,
            "profile": {"source": profile.source, "device": profile.device},
            **_others_json(model),
            **({"state": profile.state.model_dump(mode="json")} if profile.state.low_precision else {}),
        },
        "cluster": model.cluster.model_dump(mode="json", exclude_none=True),
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "seconds": estimate.seconds,
        "seconds_range": list(seconds_range(answer) or ()) or None,
        "lower_bound": plan.lower_bound,
        "gap": answer.gap,
        "proven_optimal": answer.gap <= OPTIMAL,
        "samples_per_second": found.samples,
        "tokens_per_second": found.tokens,
        "tokens_per_second_per_device": found.tokens_per_device,
        "mfu": found.mfu,
        "devices": {
            "available": model.cluster.num_devices,
            "working": plan.devices,
            "idle": list(idle_devices(plan, model.cluster.num_devices)),
        },
        **({"rent": rent.to_json()} if rent else {}),
        "savings": [asdict(each) for each in savings(answer)],
        "stages": [_stage_json(answer, position) for position in range(len(plan.stages))],
        "baselines": [_baseline_json(baseline, answer) for baseline in baselines],
        "changes": [_alternative_json(each) for each in changed(answer)],
        "alternatives": [_alternative_json(each) for each in alternatives(answer)],
        "better_batch": _batch_json(better) if (better := better_batch(answer)) else None,
    }


def _others_json(model: CostModel) -> dict[str, Any]:
    """Where the seconds of the cluster's other kinds of devices come from, and what is approximate in them."""
    if len(model.paces) == 1:
        return {}
    others = [{"source": own.source, "device": own.device} for own in other_profiles(model)]
    return {"other_profiles": others, "approximations": list(notes(model.paces))}


def _stage_json(answer: Answer, position: int) -> dict[str, Any]:
    stage, estimate = answer.plan.stages[position], answer.estimate.stages[position]
    runs = layer_runs(stage, answer.model.profile)
    return {
        "stage": position,
        "devices": list(stage.members),
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
        "why": [*offload_lines(answer), *saved_tensors_lines(answer)],
    }


def _baseline_json(baseline: Baseline, answer: Answer) -> dict[str, Any]:
    compared = alternative(baseline.name, baseline.plan, answer) if baseline.plan else None
    return {
        "name": baseline.name,
        "plan": baseline.plan.model_dump(mode="json", exclude_none=True) if baseline.plan else None,
        "seconds": baseline.seconds,
        "ratio": compared.ratio if compared else None,
        "causes": compared.causes if compared else None,
        "why": compared.why if compared else baseline.reason,
    }


def _alternative_json(each: Alternative) -> dict[str, Any]:
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


def _batch_json(better: BetterBatch) -> dict[str, Any]:
    return {
        "batch": better.batch,
        "plan": better.plan.model_dump(mode="json", exclude_none=True),
        "seconds": better.seconds,
        "ratio": better.ratio,
        "why": batch_text(better),
    }


def make_console() -> Console:
    """A console as wide as the terminal.  Output to a file is not folded at 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_answer(
    console: Console, answer: Answer, baselines: Sequence[Baseline] = (), rent: Rent | None = None
) -> None:
    """Prints the plan, its costs and its alternatives."""
    first, *rest = summary(answer)
    for line in (first, *(rent_lines(rent, answer) if rent else ()), *rest):
        console.print(line, markup=False)
    console.print(seconds_table(answer))
    console.print(memory_table(answer))
    if any(stage.host_bytes for stage in answer.estimate.stages):
        console.print(host_table(answer))
    console.print(alternatives_table(answer, baselines))
    if text := _timeline(answer, min(console.width, WIDEST_TIMELINE)):
        console.print("\n" + text, markup=False, soft_wrap=True)


def summary(answer: Answer) -> list[str]:
    """The plan in five lines, and further ones about other profiles, tensor communication, state and offload where
    they matter."""
    plan, profile, cluster = answer.plan, answer.model.profile, answer.model.cluster
    rate, unit = speed(answer).rate
    count = f"{plan.batch} sample{'s' if plan.batch > 1 else ''}"
    idle = idle_devices(plan, cluster.num_devices)
    bound = "" if plan.lower_bound is None else f", lower bound {duration(plan.lower_bound)}"
    return [
        headline(answer),
        f"step: {count}, each {profile.sample}; {rate:,.0f} {unit} in all; {profile.source}",
        f"plan: {shape_text(plan, explained=True)}; {verdict(answer)}{bound}",
        *general_lines(plan),
        *(f"{saving.name}: {saving.why}" for saving in savings(answer)),
        *profile_lines(answer.model),
        *state_lines(profile),
        *offload_lines(answer),
        *saved_tensors_lines(answer),
        f"devices: {plan.devices} of {cluster.num_devices} work{_by_kind(answer)}"
        + (f"; idle: {spans_text(spans(idle))}" if idle else ""),
        *([batch_text(better)] if (better := better_batch(answer)) else []),
    ]


def general_lines(plan: Plan) -> list[str]:
    """Why a plan of space=general can be priced but not trained, if so."""
    if plan.space == "spmd":
        return []
    try:
        check_stages_run(plan)
    except InputError as error:
        return [f"not to be trained: {error}"]
    return []


def batch_text(better: BetterBatch) -> str:
    """`batch 63 would take 33.8 % less time per sample: 7 devices, tensor 1, 1 micro-batch, ZeRO-3`."""
    less = f"{100 * (1 - better.ratio):.1f} % less time per sample"
    return f"batch {better.batch} would take {less}: {shape_text(better.plan)}"


def _by_kind(answer: Answer) -> str:
    """On a cluster of several kinds of devices: how many of each work, `: 8 of 8 NVIDIA H100, 0 of 4 NVIDIA A100`."""
    cluster = answer.model.cluster
    names = [node.device.name for node in cluster.nodes for _ in range(node.devices * node.count)]
    working = Counter(names[device] for stage in answer.plan.stages for device in stage.members)
    parts = [f"{working[name]} of {count} {name}" for name, count in sorted(Counter(names).items())]
    return f": {', '.join(parts)}" if len(parts) > 1 else ""


def seconds_table(answer: Answer) -> Table:
    """For every stage: its layers, how they are sharded, and where the seconds of a step go."""
    plan, model = answer.plan, answer.model
    rows = [stage_causes(plan, position, answer.estimate, model) for position in range(len(plan.stages))]
    causes = [cause for cause in rows[0] if max(row[cause] for row in rows) >= SHOWN]
    table = column_table(
        "stage", "devices", "layers", "data x tensor", *causes, title="milliseconds per step", numbers=4
    )
    table.columns[2].no_wrap = True
    for position, (stage, seconds) in enumerate(zip(plan.stages, rows, strict=True)):
        figures = [f"{max(seconds[cause], 0.0) * 1e3:,.1f}" for cause in causes]
        for run in layer_runs(stage, model.profile):
            layers = (f"chunk {run.chunk}: " if plan.chunks > 1 else "") + names_text(run.names)
            first = run.chunk == 0 and run.first == stage.chunks[0].first
            about = (str(position), devices_text(stage)) if first else ("", "")
            table.add_row(*about, escape(layers), f"{run.data} x {run.tensor}", *(figures if first else ()))
    return table


def memory_table(answer: Answer) -> Table:
    """For every stage: the bytes on each of its devices, by cause."""
    stages = answer.estimate.stages
    causes = [cause for cause in stages[0].bytes if max(stage.bytes[cause] for stage in stages) > 0]
    columns = ("stage", *causes, "in flight", "total", "capacity", "full")
    table = column_table(*columns, title="GiB per device", numbers=1)
    for position, stage in enumerate(stages):
        figures = [f"{stage.bytes[cause] / 2**30:,.2f}" for cause in causes]
        sums = [f"{size / 2**30:,.2f}" for size in (stage.total_bytes, stage.capacity)]
        share = f"{100 * stage.total_bytes / stage.capacity:.0f} %"
        table.add_row(str(position), *figures, str(stage.in_flight), *sums, share)
    return table


def host_table(answer: Answer) -> Table:
    """The bytes on the fullest host, by cause."""
    stage = max(answer.estimate.stages, key=lambda stage: stage.total_host_bytes)
    table = column_table(*stage.host_bytes, "total", "capacity", "full", title="GiB per host", numbers=0)
    sizes = [*stage.host_bytes.values(), stage.total_host_bytes, stage.host_capacity]
    share = f"{100 * stage.total_host_bytes / stage.host_capacity:.0f} %"
    table.add_row(*(f"{size / 2**30:,.2f}" for size in sizes), share)
    return table


def alternatives_table(answer: Answer, baselines: Sequence[Baseline] = ()) -> Table:
    """Baselines, the plan with one decision changed, and other shapes; why each was not chosen."""
    table = column_table(
        "not chosen", "plan", "step", "why", title="compared with this plan, mean over working devices"
    )
    for baseline in baselines:
        if baseline.plan is None:
            table.add_row(baseline.name, "", "", baseline.reason)
        else:
            why = alternative(baseline.name, baseline.plan, answer).why
            same = baseline.plan.stages == answer.plan.stages and why == percent(1.0)
            table.add_row(
                baseline.name,
                shape_text(baseline.plan),
                duration(baseline.seconds or 0.0),
                "the plan itself" if same else why,
            )
    table.add_section()
    for each in changed(answer):
        table.add_row(each.name, "otherwise the same", duration(each.seconds), each.why)
    table.add_section()
    for number, each in enumerate(alternatives(answer), 1):
        table.add_row(f"other shape {number}", each.name, duration(each.seconds), each.why)
    return table


def _timeline(answer: Answer, width: int) -> str:
    """The step as text; empty if there is no pipeline."""
    plan = answer.plan
    if len(plan.stages) == 1 or len(plan.stages) * plan.chunks * plan.micro_batches > MOST_SIMULATED:
        return ""
    return "device n: the devices of stage n\n" + text_timeline(timeline(answer), max(width, MIN_WIDTH))


def column_table(*columns: str, title: str, numbers: int | None = None) -> Table:
    """An empty table.  numbers: the first column that holds figures; None: there is none."""
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
        title=f"\n{title}" if title else None,
        title_justify="left",
    )
    for index, column in enumerate(columns):
        figure = numbers is not None and index >= numbers
        table.add_column(column, overflow="fold", justify="right" if figure else "left")
    return table
