"""The plan that a run executes: a given one, the one it had before, one made for the devices here, or one by hand.

--plan FILE        that plan
otherwise          the run's plan.json, if it was given or made by the planner, and the sections `parallel` and
                   `memory` have not changed; else
parallel: auto     the planner's, for this machine as measured (`jhpt profile`; cached between runs) or for
                   `parallel.cluster`; on a mixed cluster every process measures a device of its own kind
by hand            the layout of the sections `parallel` and `memory`; if it does not fit a known device, the planner
                   decides what `memory` leaves open
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jhpt.core.amounts import gib
from jhpt.core.calibration import ours
from jhpt.core.catalogue import cluster_named, kind_by_driver
from jhpt.core.cluster import Device
from jhpt.core.config import Config, MemoryConfig, ParallelConfig
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.load import CONFIG_FILE, load_config
from jhpt.core.plan import Plan, SavedTensors
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.plan_check import check_plan, check_stages_run, with_optimizer
from jhpt.core.rules import Choices, conflict
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.measure.hosts import Hosts, hosts, processes_here
from jhpt.measure.offload import offload_is_right
from jhpt.planner.api import capped, dtype_of
from jhpt.planner.cost.activations import fullest_host, offloaded_activation_bytes, saved_tensors_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.choice import Candidate, fitted
from jhpt.sharding.mesh import check_runnable
from jhpt.training import auto
from jhpt.training.processes import (
    is_main,
    raise_on_all_processes,
    same_everywhere,
    text_from_main,
)
from jhpt.training.run_dir import PLAN_FILE
from jhpt.training.runtime import host_budget
from jhpt.training.setup import budgeted as budgeted_device
from jhpt.training.setup import compute_dtype


@dataclass(frozen=True, kw_only=True)
class Past:
    """The plan and settings of the run in a directory; None if there are none.  The same on every process."""

    run_dir: Path
    plan: Plan | None = None
    parallel: ParallelConfig | None = None
    memory: MemoryConfig | None = None


def read_past(run_dir: Path, say: Callable[[str], None]) -> Past:
    """The plan and settings of the run in `run_dir`.  `say` reports a plan that cannot be read."""
    plan, parallel, memory = "", "", ""
    with raise_on_all_processes():
        if is_main() and (run_dir / PLAN_FILE).is_file():
            try:
                plan = Plan.load(run_dir / PLAN_FILE).model_dump_json()
                config = load_config(run_dir / CONFIG_FILE)
                parallel, memory = config.parallel.model_dump_json(), config.memory.model_dump_json()
            except InputError as error:
                say(f"note: {str(error).replace(chr(10), ' ')}; it is ignored")
    plan, parallel, memory = map(text_from_main, (plan, parallel, memory))
    return Past(
        run_dir=run_dir,
        plan=Plan.model_validate_json(plan) if plan else None,
        parallel=ParallelConfig.model_validate_json(parallel) if parallel else None,
        memory=MemoryConfig.model_validate_json(memory) if memory else None,
    )


def candidates(config: Config, requested: Plan | None, past: Past, say: Callable[[str], None]) -> tuple[Candidate, ...]:
    """The plan that a run with this past executes.  Several with `parallel.trials`: the one measured to be the fastest
    (`training.trials`).

    Raises:
      InputError: the plan is invalid, or not for this model, batch or hardware; or there is no plan.
    """
    if requested is not None:
        with raise_on_all_processes():
            check_fits(requested, config)
        if unread := _unread(requested, config):
            say(f"note: the plan decides, so these settings are not used: {', '.join(unread)}")
        return (Candidate(plan=requested.model_copy(update={"origin": "given"})),)
    if (plan := _previous_plan(config, past, say)) is not None:
        return (Candidate(plan=plan),)
    if config.parallel.auto:
        return auto.planned(config, say)
    by_hand = plan_by_hand(config, jax.device_count())
    return (Candidate(plan=within_memory(by_hand, config, device_info(), say)),)


def within_memory(plan: Plan, config: Config, device: DeviceInfo, say: Callable[[str], None]) -> Plan:
    """A plan by hand.  If the device is known to be too small for it, the planner decides what `memory` leaves open."""
    kind, limit = kind_by_driver(device.kind), budgeted_device(device, config.memory).memory
    is_open = "auto" in (config.memory.offload, config.memory.recompute)
    if kind is None or limit is None or not is_open:
        return plan
    fitting = _fitted(plan, config, kind, limit, hosts())
    smaller = Plan.model_validate_json(text_from_main(fitting.model_dump_json()))
    if same_work(smaller, plan):
        return plan
    say(f"memory: auto: a step needs more than {gib(limit)}, so the plan is {shape_text(smaller)}")
    return smaller


def _fitted(plan: Plan, config: Config, kind: str, limit: float, places: Hosts) -> Plan:
    nodes = len(places.nodes)
    try:
        named = cluster_named(f"{kind}x{-(-plan.devices // nodes)}x{nodes}")
        cluster = capped(named, limit, host_budget(config.memory) / places.nodes_here)
        device = cluster.nodes[0].device
        alone = cluster.num_devices == 1
        profile = analytic_profile(config, device, dtype_of(config.model.dtype, device), ours(alone=alone))
        return fitted(plan, CostModel(profile, cluster, plan.gradient_compression), config)
    except InputError:  # the planner does not know this hardware; the compiler will say whether the plan fits
        return plan


def _previous_plan(config: Config, past: Past, say: Callable[[str], None]) -> Plan | None:
    """The plan that the run had before, if the sections `parallel` and `memory` do not take precedence."""
    plan, file = past.plan, past.run_dir / PLAN_FILE
    if (
        plan is None
        or plan.origin not in ("given", "auto")
        or (past.parallel, past.memory) != (config.parallel, config.memory)
    ):
        return None
    reasons = text_from_main("\n".join(differences(plan, config))).splitlines()
    if reasons and plan.origin == "given":
        raise _refusal(
            f"{file}, the plan that this run was given, does not fit any more",
            reasons,
            "give another one with --plan, or change the section parallel or memory, which then take its place",
        )
    if reasons:
        say(f"{file} does not fit, so a new plan is made: {'; '.join(reasons)}")
        return None
    if plan.origin == "given":
        say(f"resuming with the plan that this run was given, {file}")
    return plan


def _unread(plan: Plan, config: Config) -> list[str]:
    """Settings of the sections `parallel` and `memory` that differ from a plan that takes their place."""
    memory, saved = config.memory, plan.saved or SavedTensors()
    names = {name for name in (*saved.device, *saved.host) if name != BLOCK_INPUT}
    offload = plan.offload.kind if plan.offload else "off"
    planned = "none" if not plan.recompute else names or "full"
    wanted = memory.recompute if isinstance(memory.recompute, str) else set(memory.recompute)
    recompute = memory.recompute if isinstance(memory.recompute, str) else ",".join(memory.recompute)
    unread = [f"parallel.{name}={value}" for name, value in _unread_parallel(plan, config.parallel).items()]
    unread += [f"memory.offload={memory.offload}"] if memory.offload not in ("auto", offload) else []
    after = plan.other_blocks.after if plan.other_blocks else None
    some = memory.recompute_blocks is not None and memory.recompute_blocks != after
    unread += [f"memory.recompute_blocks={memory.recompute_blocks}"] if some else []
    return unread + ([f"memory.recompute={recompute}"] if wanted not in ("auto", planned) else [])


def _unread_parallel(plan: Plan, parallel: ParallelConfig) -> dict[str, Any]:
    """Settings that are neither the default nor those of the plan."""
    planned: dict[str, Any] = {
        "pipe": len(plan.stages),
        "chunks": plan.chunks,
        "zero": plan.zero,
        "zero_ranks": plan.zero_ranks,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "sequence": plan.sequence,
        "tensor": max(plan.degrees),
        "sample_chunks": max(plan.sample_chunks),
    }
    changes = {name: getattr(parallel, name) for name in planned}
    return {
        name: value
        for name, value in changes.items()
        if value not in (ParallelConfig.model_fields[name].default, planned[name])
    }


def check_fits(plan: Plan, config: Config) -> None:
    """Refuses an invalid plan, and one for other layers, another batch or other hardware."""
    if reasons := differences(plan, config):
        raise _refusal("the plan does not fit", reasons, "make one with `jhpt plan` for what is here")


def check_fits_model(plan: Plan, config: Config) -> None:
    """`check_fits` without the hardware."""
    if reasons := model_differences(plan, config):
        raise _refusal("the plan does not fit", reasons, f"make one with `jhpt plan` for {config.name}")


def _refusal(problem: str, reasons: list[str], remedy: str) -> InputError:
    lines = "\n".join(f"  {line}" for line in reasons)
    return InputError(f"{problem}:\n{lines}\n{remedy}")


def differences(plan: Plan, config: Config) -> list[str]:
    """Why a plan does not fit this configuration on these devices; a line for each reason."""
    reasons = model_differences(plan, config)
    kind, count = device_info().kind, jax.device_count()
    if plan.device is not None and plan.device != kind:
        reasons.append(f"the plan is for {plan.devices} x {plan.device}, and this machine has {count} x {kind}")
    elif plan.devices > count or (plan.devices < count and jax.process_count() > 1):
        reasons.append(f"the plan uses {plan.devices} devices, and there are {count} here")
    return reasons


def model_differences(plan: Plan, config: Config) -> list[str]:
    """Why a plan is invalid, or does not fit this model and batch; a line for each reason."""
    model, reasons = config.model, list[str]()
    layers = max(chunk.stop for stage in plan.stages for chunk in stage.chunks)
    if layers != model.num_layers + 2:
        reasons.append(
            f"the plan has {layers} layers with embedding and head, {config.name} has {model.num_layers + 2}"
        )
    if plan.batch != config.data.batch_size:
        reasons.append(f"the plan is for a batch of {plan.batch}, data.batch_size is {config.data.batch_size}")
    try:
        check_plan(plan, layers)
        check_stages_run(plan) if plan.space == "general" else check_runnable(plan)
    except InputError as error:
        reasons.append(str(error))
    embedding_and_head = plan.stages[0].chunks[0].tensor[0], plan.stages[-1].chunks[-1].tensor[-1]
    choices = Choices(space=plan.space, runs=True, clip=config.optimizer.clip)
    if model.choices:
        choices = replace(choices, place=config.name, stages=len(plan.stages), sequence=plan.sequence, **model.choices)
        choices = replace(choices, sample_chunks=plan.sample_chunks, compression=plan.compression.on)
    if plan.space == "spmd" and model.tied_table:
        choices = replace(choices, tied=embedding_and_head)
    if plan.offload:
        choices = with_optimizer(replace(choices, offload=plan.offload.kind), plan.offload, config.optimizer)
    if (message := conflict(choices)) is not None:
        reasons.append(message)
    names = {"num_heads": "heads", "num_kv_heads": "key/value heads", "d_ff": "MLP width"}
    sizes = {names.get(name, name): size for name, size in model.cut_sizes.items()}
    for tensor in plan.degrees:
        uneven = [f"{size} {name}" for name, size in sizes.items() if size % tensor]
        if uneven:
            reasons.append(f"the plan has tensor degree {tensor}, which does not divide {one_of(uneven)}")
    return reasons


UNEXECUTED = {"model", "cluster", "device", "origin", "seconds", "lower_bound"}
"""Fields that describe a plan and do not change what is computed where."""


def same_work(first: Plan, second: Plan) -> bool:
    """Whether devices do the same work under two plans."""
    return first.model_dump(exclude=UNEXECUTED) == second.model_dump(exclude=UNEXECUTED)


def with_tried_offload(plan: Plan, say: Callable[[str], None], right: Callable[[], bool] = offload_is_right) -> Plan:
    """The plan, without its offload of activations if that gives wrong gradients on any device here.

    Those activations are then recomputed, and the inputs of blocks stay on the device, for which there may not be
    enough memory.  All processes must call this.
    """
    if plan.saved is None or not plan.saved.host:
        return plan
    is_right = right()
    if same_everywhere(str(is_right)) and is_right:
        return plan
    say(
        "warning: offloaded activations give wrong gradients on this device, so these are recomputed, which takes "
        f"longer: {', '.join(plan.saved.host)}; another version of jax may help"
    )
    return plan.model_copy(update={"saved": SavedTensors(device=plan.saved.device)})


def check_host_room(plan: Plan, config: Config) -> None:
    """Refuses a plan whose offloaded activations need more host memory than there is.  All processes must call this.

    Raises:
      InputError: with the bytes needed and available, and a remedy.
    """
    saved = saved_tensors_of(plan)
    if not saved.host or plan.offload is not None:
        return
    dtype = compute_dtype(config, device_info()).name
    nominal = Device(name=device_info().kind, peak_flops={dtype: 1.0}, memory=1.0, memory_bandwidth=1.0)
    by_device = offloaded_activation_bytes(plan, analytic_profile(config, nominal, dtype), saved)
    need, room = fullest_host(by_device, jax.local_device_count() * processes_here()), host_budget(config.memory)
    with raise_on_all_processes():
        _refuse(saved, need, room)


def _refuse(saved: SavedTensors, need: float, room: float) -> None:
    if need > room:
        raise InputError(
            f"offloaded activations ({', '.join(saved.host)}) of all blocks need {gib(need)} on each host, which has "
            f"{gib(room)} for them (memory.host_budget_bytes); give a plan that offloads fewer names or "
            "has more micro_batches, such as `jhpt plan` makes with this host budget, or use more hosts"
        )
