"""`parallel: auto`: measures this machine, asks the planner, and gives every process its answer.

The main process solves.  Every process has to take part in the plan, so with several processes the planner's plans of
fewer devices are left out; where one of them is clearly faster, a note says so.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jhpt.core.calibration import order_error
from jhpt.core.catalogue import known_to_differ
from jhpt.core.cluster import Cluster
from jhpt.core.cluster_file import find_cluster
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan, Space
from jhpt.core.profile import ModelProfile
from jhpt.core.rules import SETTINGS, Choices, check
from jhpt.measure.device import device_info
from jhpt.measure.hosts import hosts
from jhpt.measure.network import spanning
from jhpt.planner.api import budgeted
from jhpt.planner.cost.basis import NO_OTHERS
from jhpt.planner.report.words import duration, shape_text
from jhpt.planner.search.choice import Candidate, plans_to_try, seconds_of
from jhpt.planner.search.request import (
    SAMPLE_CHUNKS,
    Request,
    compressions,
    most_stages,
    offload_kinds,
    recomputations,
    request,
)
from jhpt.planner.search.solve import Answer, solve
from jhpt.training.kinds import device_here, named_by_driver, profiles_by_kind
from jhpt.training.processes import is_main, raise_on_all_processes, text_from_main
from jhpt.training.profiling import cached_cluster, cached_profile, planning_grid
from jhpt.training.runtime import host_budget
from jhpt.training.setup import check_data


def planned(config: Config, say: Callable[[str], None]) -> tuple[Candidate, ...]:
    """The plan to run, or with `parallel.trials` the plans to try, on every process.  All processes must call this.

    Raises:
      InputError: nothing fits, settings exclude each other, or `parallel.cluster` is another than this one.
    """
    profile, cluster = _measured(config, say)
    cluster = named_by_driver(cluster)
    profile, others = profiles_by_kind(profile, cluster) if cluster.mixed else (profile, NO_OTHERS)
    text, nodes_here = "", hosts().nodes_here
    with raise_on_all_processes():
        if is_main():
            found = _solved(config, profile, cluster, nodes_here, others, say)
            text = "\n".join(
                json.dumps([plan.model_dump(mode="json") for plan in (one.plan, *one.nearby)]) for one in found
            )
    return _broadcast(text)


def _measured(config: Config, say: Callable[[str], None]) -> tuple[ModelProfile, Cluster]:
    """Seconds of the layers, and the cluster: the named one, or this machine and its network as measured.

    Measuring takes minutes, so everything that does not depend on the plan is checked before.
    """
    with raise_on_all_processes():
        check_data(config)
        cluster = named_cluster(config)
        _check_space(config, cluster)
    grid = planning_grid(config, jax.device_count())
    if cluster is None:
        say("parallel: auto: measuring this machine (cached for the next time)")
        with raise_on_all_processes():
            machine = cached_cluster(grid.rounds)[0]
        cluster = spanning(machine)
    say(f"parallel: auto: measuring the layers of {config.name} (cached for the next time)")
    with raise_on_all_processes():
        profile = cached_profile(config, grid)[0]
    return profile, cluster


def _request(config: Config, space: Space) -> Request:
    """The request to the planner: what the configuration lets it choose from, and the runtime can run."""
    choices: dict[str, Any] = {
        "compression": compressions(config),
        "gradient_compression": config.parallel.gradient_compression,
        **recomputations(config),
    }
    if space == "general":
        # Every process has to take part.
        return request(config.data.batch_size, zero=(0,), whole=jax.process_count() > 1, **choices)
    return request(
        config.data.batch_size,
        sample_chunks=SAMPLE_CHUNKS if config.model.reads == "text" else (1,),
        offload=offload_kinds(config),
        update_in_backward=config.optimizer.update_in_backward,
        **most_stages(config, "spmd"),
        **choices,
    )


def _check_space(config: Config, cluster: Cluster | None) -> None:
    """Refuses settings, and a cluster, for which no plan of a space can run."""
    for space in config.parallel.spaces:
        check(_choices(config, cluster, space))


def _choices(config: Config, cluster: Cluster | None, space: Space) -> Choices:
    offload, wanted = config.memory.offload, _request(config, space)
    return Choices(
        space=space,
        compression=None not in wanted.compression,
        gradient_compression=wanted.gradient_compression.on,
        saved=wanted.saved is not None,
        runs=True,
        mixed=cluster is not None and cluster.mixed,
        place=cluster.name if cluster else "",
        clip=config.optimizer.clip,
        offload=None if offload in ("auto", "off") else offload,
        names=SETTINGS,
    )


def _solved(
    config: Config,
    profile: ModelProfile,
    cluster: Cluster,
    nodes_here: int,
    others: Mapping[str, ModelProfile],
    say: Callable[[str], None],
) -> tuple[Candidate, ...]:
    """The plan to run, or the plans to try.

    Args:
      profile, others: of the devices of one kind, and of the other kinds by `Device.rates`.
      nodes_here: on this machine, among which its memory is divided.

    Raises:
      InputError: nothing fits, in any of the spaces.
    """
    room = budgeted(cluster, config, host_budget(config.memory) / nodes_here)
    answers, refusals = list[tuple[Answer, Request]](), list[InputError]()
    for space in config.parallel.spaces:
        wanted = _request(config, space)
        if _with_spmd(config, space, room):
            wanted = replace(wanted, fewest_stages=2)
        try:
            answers.append((solve(profile, room, wanted, space, others), wanted))
        except InputError as error:
            refusals.append(error)
    if not answers:
        raise refusals[0]
    devices = jax.device_count() if jax.process_count() > 1 else None
    found = plans_to_try(answers, devices, max(1, config.parallel.trials))
    if note := _fewer_are_faster([answer.plan for answer, _ in answers], [one.plan for one in found]):
        say(note)
    return found


def _with_spmd(config: Config, space: Space, cluster: Cluster) -> bool:
    """Whether plans with a program for each stage are tried beside such of one program, which has all plans of one
    stage.

    A search that stops where nothing is faster than a plan of one stage would find no pipeline to try, although the
    fastest one may be predicted to take only a little longer.
    """
    both = len(config.parallel.spaces) > 1 and config.parallel.trials > 1
    return both and space == "general" and not cluster.mixed and cluster.num_devices > 1


def _fewer_are_faster(best: Sequence[Plan], tried: Sequence[Plan]) -> str:
    """That the best plan of a space, on fewer devices, is predicted to be clearly faster than all that will be tried.

    Empty, if it is not so.
    """
    fewer, whole = min(best, key=seconds_of), min(tried, key=seconds_of)
    if fewer.devices >= whole.devices or (1 + order_error()) * seconds_of(fewer) >= seconds_of(whole):
        return ""
    return (
        f"note: {fewer.devices} of the {whole.devices} devices ({shape_text(fewer)}) are predicted to take "
        f"{duration(seconds_of(fewer))} a step, and all of them {duration(seconds_of(whole))}; start fewer processes"
    )


def _broadcast(text: str) -> tuple[Candidate, ...]:
    """What the main process wants to try, on every process.  text: a line of JSON for each candidate, its plan and
    those nearby; ignored on the others."""

    def candidate(line: str) -> Candidate:
        plan, *near = (Plan.model_validate({**tree, "origin": "auto"}) for tree in json.loads(line))
        return Candidate(plan=plan, nearby=tuple(near))

    return tuple(map(candidate, text_from_main(text).splitlines()))


def named_cluster(config: Config) -> Cluster | None:
    """The cluster named by `parallel.cluster`; InputError if this one is known to be another."""
    if config.parallel.cluster is None:
        return None
    cluster, kind, count = find_cluster(config.parallel.cluster), device_info().kind, jax.device_count()
    devices = [device_here(cluster)] if cluster.num_devices == count else [node.device for node in cluster.nodes]
    names = [device.name for device in devices]
    other = next((name for name in names if known_to_differ(name, kind)), None)
    if other is not None:
        has = f"is of {other}, and this machine has {count} x {kind}"
    elif cluster.num_devices != count:
        has = f"has {cluster.num_devices} devices, and there are {count} here"
    else:
        return cluster
    raise InputError(
        f"parallel.cluster={cluster.name} {has}; name the cluster that this is, or leave it out to have it measured"
    )
