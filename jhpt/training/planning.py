"""Which plan a run executes: one it is given, its own from before, one made for the devices at hand, or by hand.

--plan FILE        that plan
otherwise          the run's own plan.json, where it was given or planned and the sections `parallel` and `memory` are
                   as they were; else
parallel: auto     the planner's, for this machine as measured (`jhpt profile`; kept from run to run) or for
                   `parallel.cluster`
by hand            what the sections `parallel` and `memory` say; where that does not fit a known device, with what
                   `memory` leaves open decided
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jhpt.core.amounts import gib
from jhpt.core.catalogue import cluster_named, find_cluster, kind_by_driver, known_to_differ
from jhpt.core.cluster import Cluster
from jhpt.core.config import Config, MemoryConfig, ParallelConfig
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.load import load_config
from jhpt.core.plan import Plan, SavedTensors, check_plan, plan_by_hand
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.measure.network import spanning
from jhpt.planner.api import budgeted, capped, dtype_of
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.choice import plan_to_run
from jhpt.planner.search.fitted import fitted
from jhpt.planner.search.request import SAMPLE_CHUNKS, compressions, offload_kinds, recomputations, request
from jhpt.planner.search.solve import solve
from jhpt.sharding.mesh import check_runnable
from jhpt.training.processes import is_main, processes_here, raise_on_all_processes, text_from_main
from jhpt.training.profiling import cached_cluster, cached_profile, planning_grid
from jhpt.training.run_dir import CONFIG_FILE, PLAN_FILE
from jhpt.training.runtime import host_budget
from jhpt.training.setup import budgeted as budgeted_device
from jhpt.training.setup import check_data


@dataclass(frozen=True, kw_only=True)
class Past:
    """How a run directory's run shared its work; None: it does not say.  The same on every process."""

    run_dir: Path
    plan: Plan | None = None
    parallel: ParallelConfig | None = None
    memory: MemoryConfig | None = None


def read_past(run_dir: Path, say: Callable[[str], None]) -> Past:
    """What was executed in `run_dir` so far; `say` hears of a plan that cannot be read."""
    plan, parallel, memory = "", "", ""
    with raise_on_all_processes():
        if is_main() and (run_dir / PLAN_FILE).is_file():
            try:
                plan = Plan.load(run_dir / PLAN_FILE).model_dump_json()
                config = load_config(run_dir / CONFIG_FILE)
                parallel, memory = config.parallel.model_dump_json(), config.memory.model_dump_json()
            except InputError as error:
                say(f"note: {str(error).replace(chr(10), ' ')}; what it says is left aside")
    plan, parallel, memory = map(text_from_main, (plan, parallel, memory))
    return Past(
        run_dir=run_dir,
        plan=Plan.model_validate_json(plan) if plan else None,
        parallel=ParallelConfig.model_validate_json(parallel) if parallel else None,
        memory=MemoryConfig.model_validate_json(memory) if memory else None,
    )


def choose_plan(config: Config, given: Plan | None, past: Past, say: Callable[[str], None]) -> Plan:
    """The plan that a run with this past executes.

    Raises:
      InputError: a plan that is none, or is not for this model, batch or hardware, with the difference; or what
        planning refuses.
    """
    if given is not None:
        with raise_on_all_processes():
            check_fits(given, config)
        if unread := _unread(given, config):
            say(f"note: what lives on the host and what is computed again follows the plan, not {' and '.join(unread)}")
        return given.model_copy(update={"origin": "given"})
    if (own := _own_plan(config, past, say)) is not None:
        return own
    if config.parallel.auto:
        return _planned(config, say)
    return within_memory(plan_by_hand(config, jax.device_count()), config, device_info(), say)


def within_memory(plan: Plan, config: Config, device: DeviceInfo, say: Callable[[str], None]) -> Plan:
    """A plan by hand; where the device is known, and too small for it, with what `memory` leaves open decided."""
    kind, limit = kind_by_driver(device.kind), budgeted_device(device, config.memory).memory
    is_open = "auto" in (config.memory.offload, config.memory.recompute)
    if kind is None or limit is None or not is_open:
        return plan
    room = host_budget(config.memory) / processes_here()  # of what the planner takes for a host
    found = Plan.model_validate_json(text_from_main(_fitted(plan, config, kind, limit, room).model_dump_json()))
    if same_work(found, plan):
        return plan
    say(f"memory: auto: a step needs more than {gib(limit)}, so it is {shape_text(found)}")
    return found


def _fitted(plan: Plan, config: Config, kind: str, limit: float, room: float) -> Plan:
    hosts = jax.process_count()
    try:
        named = cluster_named(f"{kind}x{-(-plan.devices // hosts)}x{hosts}")
        cluster = capped(named, limit, room)
        device = cluster.nodes[0].device
        profile = analytic_profile(config, device, dtype_of(config.model.dtype, device))
        return fitted(plan, CostModel(profile, cluster, plan.gradient_compression), config)
    except InputError:  # nothing that the planner knows; the compiler will say whether it fits
        return plan


def _own_plan(config: Config, past: Past, say: Callable[[str], None]) -> Plan | None:
    """The run's plan, where that is not what the sections `parallel` and `memory` say now."""
    own, file = past.plan, past.run_dir / PLAN_FILE
    if (
        own is None
        or own.origin not in ("given", "auto")
        or (past.parallel, past.memory) != (config.parallel, config.memory)
    ):
        return None
    found = text_from_main("\n".join(differences(own, config))).splitlines()
    if found and own.origin == "given":
        raise _refusal(
            f"{file}, the plan that this run was given, does not fit any more",
            found,
            "give another one with --plan, or change the section parallel or memory and it is laid out by those",
        )
    if found:
        say(f"{file} is for something else, so a new plan is made: {'; '.join(found)}")
        return None
    if own.origin == "given":
        say(f"going on with the plan that this run was given, {file}")
    return own


def _unread(plan: Plan, config: Config) -> list[str]:
    """What the section `memory` says otherwise than a plan that takes its place."""
    memory, saved = config.memory, plan.saved or SavedTensors()
    names = {name for name in (*saved.device, *saved.host) if name != BLOCK_INPUT}
    offload = plan.offload.kind if plan.offload else "off"
    how = "none" if not plan.recompute else names or "full"
    wanted = memory.recompute if isinstance(memory.recompute, str) else set(memory.recompute)
    recompute = memory.recompute if isinstance(memory.recompute, str) else ",".join(memory.recompute)
    unread = [f"memory.offload={memory.offload}"] if memory.offload not in ("auto", offload) else []
    return unread + ([f"memory.recompute={recompute}"] if wanted not in ("auto", how) else [])


def check_fits(plan: Plan, config: Config) -> None:
    """Refuses what is no plan, or one for other layers, another batch or other hardware."""
    if found := differences(plan, config):
        raise _refusal("the plan does not fit", found, "make one with `jhpt plan` for what is here")


def check_fits_model(plan: Plan, config: Config) -> None:
    """`check_fits`, wherever the plan is to run."""
    if found := model_differences(plan, config):
        raise _refusal("the plan does not fit", found, f"make one with `jhpt plan` for {config.name}")


def _refusal(what: str, found: list[str], remedy: str) -> InputError:
    lines = "\n".join(f"  {line}" for line in found)
    return InputError(f"{what}:\n{lines}\n{remedy}")


def differences(plan: Plan, config: Config) -> list[str]:
    """Where a plan is for something else than this configuration on these devices; a line each."""
    found = model_differences(plan, config)
    kind, count = device_info().kind, jax.device_count()
    if plan.device is not None and plan.device != kind:
        found.append(f"the plan is for {plan.devices} x {plan.device}, here are {count} x {kind}")
    elif plan.devices > count or (plan.devices < count and jax.process_count() > 1):
        found.append(f"the plan uses {plan.devices} devices, here are {count}")
    return found


def model_differences(plan: Plan, config: Config) -> list[str]:
    """Where a plan is none, or is for something else than this model and batch; a line each."""
    model, found = config.model, list[str]()
    layers = max(chunk.stop for stage in plan.stages for chunk in stage.chunks)
    if layers != model.num_layers + 2:
        found.append(f"the plan has {layers} layers with embedding and head, {config.name} has {model.num_layers + 2}")
    if plan.batch != config.data.batch_size:
        found.append(f"the plan is for a batch of {plan.batch}, data.batch_size is {config.data.batch_size}")
    try:
        check_plan(plan, layers)
        check_runnable(plan)
    except InputError as error:
        found.append(str(error))
    optimizer = config.optimizer
    if (
        plan.offload
        and optimizer.clip_norm is not None
        and plan.offload.update_in_backward != optimizer.update_in_backward
    ):
        found.append(
            f"the plan has offload.at_once={str(plan.offload.update_in_backward).lower()}, which is not how "
            f"optimizer.clip={optimizer.clip} takes a step"
        )
    names = {"num_heads": "heads", "num_kv_heads": "key/value heads", "d_ff": "MLP width"}
    sizes = {names.get(name, name): size for name, size in model.tensor_sizes.items()}
    sizes["rows of the padded vocabulary"] = model.padded_vocab
    for tensor in plan.degrees:
        uneven = [f"{size} {name}" for name, size in sizes.items() if size % tensor]
        if uneven:
            found.append(f"the plan has tensor degree {tensor}, which does not divide {one_of(uneven)}")
    tied = model.tied_table
    embedding_and_head = plan.stages[0].chunks[0].tensor[0], plan.stages[-1].chunks[-1].tensor[-1]
    if tied and embedding_and_head[0] != embedding_and_head[1]:
        found.append(
            f"embedding and head share a table, and the plan gives them tensor degrees {embedding_and_head[0]} and {embedding_and_head[1]}"
        )
    return found


UNEXECUTED = {"model", "cluster", "device", "origin", "seconds", "lower_bound"}
"""What a plan says of itself, which changes nothing in what is computed where."""


def same_work(first: Plan, second: Plan) -> bool:
    """Whether two plans make the devices do the same."""
    return first.model_dump(exclude=UNEXECUTED) == second.model_dump(exclude=UNEXECUTED)


def _planned(config: Config, say: Callable[[str], None]) -> Plan:
    """The planner's.  Measuring takes minutes, so what is refused whatever the plan is refused before."""
    with raise_on_all_processes():
        check_data(config)
        named = _named_cluster(config)
    device_mesh = planning_grid(config, jax.device_count())
    if named is None:
        say("parallel: auto: measuring this machine (kept for the next time)")
        with raise_on_all_processes():
            own = cached_cluster(device_mesh.rounds)[0]
        cluster = spanning(own)
    else:
        cluster = named
    say(f"parallel: auto: measuring the layers of {config.name} (kept for the next time)")
    text, processes = "", processes_here()
    with raise_on_all_processes():
        profile = cached_profile(config, device_mesh)[0]
        if is_main():
            asked = request(
                config.data.batch_size,
                sample_chunks=SAMPLE_CHUNKS,
                compression=compressions(config),
                gradient_compression=config.parallel.gradient_compression,
                offload=offload_kinds(config),
                update_in_backward=config.optimizer.update_in_backward,
                **recomputations(config),
            )
            room = budgeted(_with_kind(cluster), config, host_budget(config.memory) / processes)
            answer = solve(profile, room, asked, "spmd")
            everyone = jax.device_count() if jax.process_count() > 1 else None
            text = plan_to_run(answer, asked, everyone).model_dump_json()
    return Plan.model_validate_json(text_from_main(text)).model_copy(update={"origin": "auto"})


def _named_cluster(config: Config) -> Cluster | None:
    """The cluster of `parallel.cluster`; InputError where this is known to be another one."""
    if config.parallel.cluster is None:
        return None
    cluster, kind, count = find_cluster(config.parallel.cluster), device_info().kind, jax.device_count()
    names = [node.device.name for node in cluster.nodes]
    other = next((name for name in names if known_to_differ(name, kind)), None)
    if other is not None:
        has = f"is of {other}, here are {count} x {kind}"
    elif cluster.num_devices != count:
        has = f"has {cluster.num_devices} devices, here are {count}"
    else:
        return cluster
    raise InputError(
        f"parallel.cluster={cluster.name} {has}; name the cluster that this is, or leave it out to have it measured"
    )


def _with_kind(cluster: Cluster) -> Cluster:
    """The cluster with its devices named as the driver names them: the catalogue's may be shorter."""
    kind = device_info().kind
    nodes = tuple(
        node.model_copy(update={"device": node.device.model_copy(update={"name": kind})}) for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes})
