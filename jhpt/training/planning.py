"""Which plan a run executes: one it is given, its own from before, one made for the devices at hand, or by hand.

--plan FILE        that plan
parallel: auto     the run's own plan.json where there is one; else the planner's, for this machine as measured
                   (`jhpt profile`; kept from run to run) or for `parallel.cluster`
otherwise          what the section `parallel` says
"""

from collections.abc import Callable
from pathlib import Path

import jax

from jhpt.core.catalogue import find_cluster
from jhpt.core.cluster import Cluster
from jhpt.core.config import Config, GPTConfig, one_of
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan, plan_by_hand
from jhpt.measure.device import device_info
from jhpt.measure.network import spanning
from jhpt.planner.choice import plan_to_run
from jhpt.planner.request import request
from jhpt.planner.solve import solve
from jhpt.training.processes import is_main, text_from_main, together
from jhpt.training.profiling import cached_cluster, cached_profile, planning_grid
from jhpt.training.run_dir import PLAN_FILE


def choose_plan(config: Config, given: Plan | None, run_dir: Path, say: Callable[[str], None]) -> Plan:
    """The plan that a run in `run_dir` executes.

    Raises:
      InputError: a plan that is not for this model, batch or hardware, with the difference; or what planning refuses.
    """
    if given is not None:
        check_fits(given, config)
        return given
    if not config.parallel.auto:
        return plan_by_hand(config, jax.device_count())
    own = run_dir / PLAN_FILE
    text = text_from_main(own.read_text(encoding="utf-8") if is_main() and own.is_file() else "")
    if text:
        plan = Plan.model_validate_json(text)
        if not differences(plan, config):
            return plan
        say(f"{own} is for something else, so a new plan is made: {'; '.join(differences(plan, config))}")
    return _planned(config, say)


def check_fits(plan: Plan, config: Config) -> None:
    """Refuses a plan for another model, batch or hardware."""
    if found := differences(plan, config):
        lines = "\n".join(f"  {line}" for line in found)
        raise InputError(f"the plan does not fit:\n{lines}\nmake one with `jhpt plan` for what is here")


def differences(plan: Plan, config: Config) -> list[str]:
    """Where a plan is for something else than this configuration on these devices; a line each."""
    model, found = config.model, list[str]()
    layers = max(chunk.stop for stage in plan.stages for chunk in stage.chunks)
    if layers != model.num_layers + 2:
        found.append(f"the plan has {layers} layers with embedding and head, {config.name} has {model.num_layers + 2}")
    if plan.batch != config.data.batch_size:
        found.append(f"the plan is for a batch of {plan.batch}, data.batch_size is {config.data.batch_size}")
    kind, count = device_info().kind, jax.device_count()
    if plan.device is not None and plan.device != kind:
        found.append(f"the plan is for {plan.devices} x {plan.device}, here are {count} x {kind}")
    elif plan.devices > count or (plan.devices < count and jax.process_count() > 1):
        found.append(f"the plan uses {plan.devices} devices, here are {count}")
    sizes = {"heads": model.num_heads, "key/value heads": model.kv_heads, "MLP width": model.ffn_width}
    for tensor in sorted({t for stage in plan.stages for chunk in stage.chunks for t in chunk.tensor}):
        uneven = [f"{size} {name}" for name, size in sizes.items() if size % tensor]
        if uneven:
            found.append(f"the plan has tensor degree {tensor}, which does not divide {one_of(uneven)}")
    tied = model.tied if isinstance(model, GPTConfig) else True
    ends = plan.stages[0].chunks[0].tensor[0], plan.stages[-1].chunks[-1].tensor[-1]
    if tied and ends[0] != ends[1]:
        found.append(
            f"embedding and head share a table, and the plan gives them tensor degrees {ends[0]} and {ends[1]}"
        )
    return found


def _planned(config: Config, say: Callable[[str], None]) -> Plan:
    grid = planning_grid(config, jax.device_count())
    if config.parallel.cluster is not None:
        cluster = find_cluster(config.parallel.cluster)
    else:
        say("parallel: auto: measuring this machine (kept for the next time)")
        cluster = spanning(cached_cluster(grid.rounds)[0])
    if cluster.num_devices != jax.device_count():
        raise InputError(
            f"parallel.cluster={cluster.name} has {cluster.num_devices} devices, here are {jax.device_count()}; "
            "name the cluster that this is, or leave it out to have it measured"
        )
    say(f"parallel: auto: measuring the layers of {config.name} (kept for the next time)")
    profile = cached_profile(config, grid)[0]
    text = ""
    with together():
        if is_main():
            asked = request(config.data.batch_size)
            answer = solve(profile, _with_kind(cluster), asked, "spmd")
            everyone = jax.device_count() if jax.process_count() > 1 else None
            text = plan_to_run(answer, asked, everyone).model_dump_json()
    return Plan.model_validate_json(text_from_main(text))


def _with_kind(cluster: Cluster) -> Cluster:
    """The cluster with its devices named as the driver names them: the catalogue's may be shorter."""
    kind = device_info().kind
    nodes = tuple(
        node.model_copy(update={"device": node.device.model_copy(update={"name": kind})}) for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes})
