"""From what a user names (a preset, a cluster, a batch) to what the planner is asked: `jhpt.plan` and `jhpt plan`."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from jhpt.core.amounts import parse_bytes
from jhpt.core.catalogue import FLOAT8_CAPABILITY, capability_by_driver, find_cluster
from jhpt.core.cluster import HOST_SHARE, Cluster, Device, Node
from jhpt.core.config import Config
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.load import Source, load_config
from jhpt.core.plan import Plan, Schedule
from jhpt.core.presets import PRESETS
from jhpt.core.profile import ModelProfile
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.importers import read_profile
from jhpt.planner.profiles.measured import local_cluster, local_profile
from jhpt.planner.profiles.networks import TABLES, network_profile
from jhpt.planner.profiles.roofline import ELEMENT_BYTES
from jhpt.planner.search.request import SAMPLE_CHUNKS, Request, compressions, offload_kinds, recomputations, request
from jhpt.planner.search.solve import Answer, Space, solve

RESERVE = 0.03
"""Of what may be used of a device, left free.  Predictions fall short by up to 2.3 % (`jhpt bench memory`), and XLA
gives up hiding communication where a program fills a device: of gpt-13b's on h100x8x8 it hides 42 % at 98 % full, and
97 % at 87 % (compiled without GPUs, jax 0.10.2)."""

EXAMPLES = ("h100x8x8", "a100x8x4", "v100x4x4-10gbe")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question that the planner can answer."""

    profile: ModelProfile
    cluster: Cluster
    asked: Request
    space: Space

    def solve(self) -> Answer:
        """The answer; InputError where nothing fits."""
        return solve(self.profile, self.cluster, self.asked, self.space)


def plan(
    config: Source = None,
    *,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    profile: ModelProfile | str | os.PathLike[str] | None = None,
    batch: int | None = None,
    micro_batches: int | None = None,
    space: Space = "spmd",
    schedule: Schedule | None = None,
    budget: float | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """The fastest plan for one training step.

    Args:
      config: as for `jhpt.train`, or the name of a classic network (vgg16, resnet50, gnmt).  Of its section `parallel`
        only `compression` counts, as it says, or with `auto` as the planner chooses, and `gradient_compression`; of
        `memory`, how much there is, what is recomputed and what may live on the host.
      cluster: a name such as h100x8x8, a file, or a `Cluster`; None: this machine, as `jhpt profile` measured it.
      profile: the layers' costs, or a file of them; None: measured by `jhpt profile` where the cluster is this machine,
        else from the datasheet of the cluster's devices.
      batch: samples in a step; None: data.batch_size.
      micro_batches: into how many pieces the batch is cut; None: the planner decides.
      space: "spmd", what one program can run, or "general", stages of any size.
      schedule: None: the planner decides.
      budget: bytes a device may use, or text such as 24GiB; None: memory.budget_bytes.  Plans leave 3 % of it.
      overrides: settings by dotted name, `{"data.sequence_length": 4096}`.

    Raises:
      InputError: something is unknown or contradictory, or nothing fits; the message says what would.
    """
    asked = prepare(
        config,
        cluster=cluster,
        profile=profile,
        batch=batch,
        micro_batches=micro_batches,
        space=space,
        schedule=schedule,
        budget=budget,
        overrides=overrides,
    )
    return asked.solve().plan


def prepare(
    config: Source = None,
    *,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    profile: ModelProfile | str | os.PathLike[str] | None = None,
    batch: int | None = None,
    micro_batches: int | None = None,
    space: Space = "spmd",
    schedule: Schedule | None = None,
    budget: float | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Task:
    """The arguments of `plan`, read and checked."""
    if space not in get_args(Space):
        raise InputError(f"space={space!r}: use {one_of(get_args(Space))}")
    if schedule is not None and schedule not in get_args(Schedule):
        raise InputError(f"schedule={schedule!r}: use {one_of(get_args(Schedule))}")
    if schedule == "interleaved" and space == "general":
        raise InputError("space=general has no interleaved schedule; use space=spmd, or gpipe or 1f1b")
    network = network_of(config)
    named = load_config(config, overrides) if network is None and (config is not None or profile is None) else None
    if network and overrides:
        raise InputError(f"{network} is a fixed table of layers and takes no settings; leave out {one_of(overrides)}")
    machine = resolve_cluster(cluster)
    if named:
        _check_for(named, machine, space)
    memory = _budget(budget, named)
    costs = resolve_profile(profile, named, network, machine, measured=cluster is None)
    asked = request(
        _batch(batch, named, network),
        micro_batches,
        sample_chunks=SAMPLE_CHUNKS if costs.sample_tokens else (1,),
        compression=compressions(named) if named else (None,),
        **({"gradient_compression": named.parallel.gradient_compression, **recomputations(named)} if named else {}),
        **(
            {"offload": offload_kinds(named), "update_in_backward": named.optimizer.update_in_backward}
            if named and space == "spmd"
            else {}
        ),
    )
    return Task(
        profile=costs,
        cluster=capped(machine, memory, _host_budget(named)),
        asked=replace(asked, schedules=(schedule,)) if schedule else asked,
        space=space,
    )


def _check_for(config: Config, cluster: Cluster, space: Space) -> None:
    """Refuses what no plan of the space does, or no such device."""
    if space == "general" and config.memory.offload not in ("auto", "off"):
        raise InputError(
            f"space=general has no program with blocks on the host; memory.offload={config.memory.offload} needs "
            "space=spmd"
        )
    for node in cluster.nodes:
        capability = capability_by_driver(node.device.name)
        if config.model.matmul_dtype == "float8" and capability is not None and capability < FLOAT8_CAPABILITY:
            raise InputError(
                f"model.matmul_dtype=float8 needs GPUs of compute capability {FLOAT8_CAPABILITY} or more, and "
                f"{node.device.name} has {capability}; use model.matmul_dtype=same, or a cluster of newer ones"
            )


def network_of(config: Source) -> str | None:
    """The classic network that `config` names, if it does.

    Raises:
      InputError: the name of nothing at all.
    """
    if not isinstance(config, str | Path):
        return None
    name = str(config)
    if name in TABLES:
        return name
    if name not in PRESETS and not Path(name).exists():
        raise InputError(
            f"{name}: neither a file, a preset nor a network{did_you_mean(name, [*PRESETS, *TABLES])}; "
            f"presets: {', '.join(PRESETS)}; networks: {', '.join(TABLES)}"
        )
    return None


def resolve_cluster(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster:
    """The cluster itself, by name, from a file, or the local machine."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None:
        return find_cluster(os.fspath(cluster))
    if (local := local_cluster()) is None:
        raise InputError(
            "this machine has not been measured: run `jhpt profile` first, or name a cluster with --cluster, such as "
            f"{one_of(EXAMPLES)}, or a JSON or YAML file"
        )
    return local


def resolve_profile(
    profile: ModelProfile | str | os.PathLike[str] | None,
    config: Config | None,
    network: str | None,
    cluster: Cluster,
    *,
    measured: bool,
) -> ModelProfile:
    """The profile itself, from a file, measured on this machine, or from the datasheet of the first node's device."""
    device = cluster.nodes[0].device
    if profile is not None:
        given = profile if isinstance(profile, ModelProfile) else read_profile(Path(profile))
        if config is not None and len(given.layers) != config.model.num_layers + 2:
            raise InputError(
                f"the profile {given.name} has {given.num_layers} layers, {config.name} has "
                f"{config.model.num_layers + 2} with embedding and head; leave out the configuration and give --batch"
            )
        if config is not None:
            _check_state(given, config)
        return given
    if network is not None:
        return network_profile(network, device, dtype_of("auto", device))
    assert config is not None
    known = local_profile(config, device.name) if measured else None
    return known or analytic_profile(config, device, dtype_of(config.model.dtype, device))


def _check_state(profile: ModelProfile, config: Config) -> None:
    """Refuses a profile whose state is kept, or whose products are made, otherwise than the configuration says."""
    if profile.products != config.model.matmul_dtype:
        raise InputError(
            f"the profile {profile.name} is of model.matmul_dtype={profile.products}, {config.name} has "
            f"{config.model.matmul_dtype}; set that, or make a profile with the one of {config.name}"
        )
    state, optimizer = profile.state, config.optimizer
    if state.optimizer != optimizer.name:
        raise InputError(
            f"the profile {profile.name} is of optimizer.name={state.optimizer}, {config.name} has {optimizer.name}; "
            f"set that, or make a profile with the one of {config.name}"
        )
    if (state.weights, state.moments) != (optimizer.weights, optimizer.moments):
        raise InputError(
            f"the profile {profile.name} keeps weights in {state.weights} and moments in {state.moments}, "
            f"{config.name} in {optimizer.weights} and {optimizer.moments}; set optimizer.weights={state.weights} and "
            f"optimizer.moments={state.moments}, or make a profile with those of {config.name}"
        )


def dtype_of(wanted: str, device: Device) -> str:
    """`model.dtype`, with "auto" resolved as training does: float32 on a CPU, else 16 bits if it has them."""
    if wanted != "auto":
        return wanted
    order = ("float32", "bfloat16") if device.name == "cpu" else tuple(ELEMENT_BYTES)
    return next((dtype for dtype in order if dtype in device.peak_flops), order[0])


def _batch(batch: int | None, config: Config | None, network: str | None) -> int:
    if batch is not None:
        return batch
    if config is None:
        raise InputError(f"{network or 'a profile alone'} has no batch of its own; give --batch, e.g. --batch 256")
    return config.data.batch_size


def _budget(budget: float | str | None, config: Config | None) -> float | None:
    """Bytes of a device that a plan may take, of what is said here or in the configuration; None: all."""
    if budget is None:
        own = config.memory.budget_bytes if config else "auto"
        return None if own == "auto" else own
    try:
        return parse_bytes(budget)
    except ValueError as error:
        raise InputError(f"budget={error}") from None


def budgeted(cluster: Cluster, config: Config, host: float) -> Cluster:
    """The cluster, of whose devices only what the section `memory` says may be used.  host: bytes of each host."""
    return capped(cluster, _budget(None, config), host)


def _host_budget(config: Config | None) -> float | None:
    """Bytes of a host that blocks may take; None: `HOST_SHARE` of all."""
    own = config.memory.host_budget_bytes if config else "auto"
    return None if own == "auto" else own


def capped(cluster: Cluster, memory: float | None, host: float | None = None) -> Cluster:
    """The cluster, of whose devices and hosts only so many bytes may be used; None: all, of hosts `HOST_SHARE`.  Plans
    leave `RESERVE` of a device's free, or more where the cluster says so."""

    def less(node: Node) -> Node:
        limit = min(memory or math.inf, node.device.memory)
        reserve = max(RESERVE, node.device.reserve)
        device = node.device.model_copy(update={"memory": limit, "reserve": reserve})
        room = min(host, node.host_memory) if host else HOST_SHARE * node.host_memory
        return node.model_copy(update={"device": device, "host_memory": room})

    return cluster.model_copy(update={"nodes": tuple(map(less, cluster.nodes))})
