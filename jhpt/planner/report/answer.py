"""An answer as a whole: how close to optimal, how fast, as a timeline and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jhpt.planner.cost.estimate import StageEstimate
from jhpt.planner.cost.offload import offloaded_step
from jhpt.planner.report.alternatives import Alternative, alternative, alternatives, changed
from jhpt.planner.report.causes import stage_causes
from jhpt.planner.report.layers import idle_devices, layer_runs, streamed_layers
from jhpt.planner.report.memory import offload_lines, saved_tensors_lines
from jhpt.planner.report.offload_timeline import offload_timeline
from jhpt.planner.report.savings import savings
from jhpt.planner.report.simulation import Timeline, simulate
from jhpt.planner.search.baselines import Baseline
from jhpt.planner.search.solve import Answer

FORMAT = 1
"""Version of the JSON; it is raised when a key changes its meaning."""

OPTIMAL = 1e-9
"""Relative.  A smaller gap is rounding."""


def verdict(answer: Answer) -> str:
    """How far this plan can be from the fastest plan of the space."""
    if answer.gap <= OPTIMAL:
        return "proven optimal"
    gap = 100 * answer.gap
    return f"at most {gap:.2g} % from optimal" if gap < 10 else f"at most {gap:.0f} % from optimal"


def throughput(answer: Answer) -> tuple[float, str]:
    """(rate, unit): tokens per second, or samples per second if samples have no tokens."""
    samples = answer.plan.batch / answer.estimate.seconds
    tokens = answer.model.profile.sample_tokens
    return (samples * tokens, "tokens/s") if tokens else (samples, "samples/s")


def timeline(answer: Answer) -> Timeline:
    """The simulated step.  Device n of the timeline stands for all devices of stage n."""
    plan, times = answer.plan, answer.estimate.times
    if plan.offload is not None:
        return offload_timeline(plan, offloaded_step(plan, answer.model))
    arrays = times.forward, times.backward, times.cut, times.sync, times.update
    return simulate(plan.schedule, plan.micro_batches, *arrays, overlap=answer.model.cluster.overlap)


def to_json(answer: Answer, baselines: Sequence[Baseline] = ()) -> dict[str, Any]:
    """Everything that is known about an answer, in bytes and seconds, with JSON types only."""
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
            **({"state": profile.state.model_dump(mode="json")} if profile.state.low_precision else {}),
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
        "changes": [_alternative_json(each) for each in changed(answer)],
        "alternatives": [_alternative_json(each) for each in alternatives(answer)],
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
