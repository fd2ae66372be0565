"""The planner's public functions: they turn what a user names (a preset, a cluster, a batch) into a `Request`.

`jhpt.plan` is `plan`; the command `jhpt plan` uses `prepare` and explains the answer.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

from jhpt.core.amounts import parse_bytes
from jhpt.core.calibration import ours
from jhpt.core.catalogue import FLOAT8_CAPABILITY, capability_by_driver
from jhpt.core.cluster import HOST_SHARE, Cluster, Device, Node
from jhpt.core.cluster_file import find_cluster
from jhpt.core.config import Config
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.load import Source, load_config
from jhpt.core.plan import Schedule, Space
from jhpt.core.presets import PRESETS
from jhpt.core.profile import ModelProfile
from jhpt.core.rules import SETTINGS, Choices, check
from jhpt.planner.profiles.analytic import ELEMENT_BYTES, analytic_profile, check_dtype
from jhpt.planner.profiles.importers import local_cluster, local_profile, read_profile
from jhpt.planner.profiles.networks import TABLES, network_profile
from jhpt.planner.report.clusters import Option
from jhpt.planner.report.planned import Planned
from jhpt.planner.search.request import (
    SAMPLE_CHUNKS,
    Request,
    compressions,
    most_stages,
    offload_kinds,
    recomputations,
)
from jhpt.planner.search.request import request as request_of
from jhpt.planner.search.solve import Answer, solve

RESERVE = 0.03
"""Share of the usable device memory that plans leave free.

Predicted bytes are up to 2.3 % too low (`jhpt bench memory`), and XLA stops hiding communication where a program nearly
fills a device: for gpt-13b on h100x8x8 it hides 42 % of the communication at 98 % full, and 97 % at 87 % (compiled
without GPUs, jax 0.10.2)."""

EXAMPLES = ("h100x8x8", "a100x8x4", "v100x4x4-10gbe")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question that the planner can answer."""

    profile: ModelProfile
    cluster: Cluster
    request: Request
    space: Space
    others: Mapping[str, ModelProfile] = field(default_factory=dict)
    """Profiles of the cluster's other kinds of devices, by `Device.rates`."""

    def solve(self) -> Answer:
        """The answer.  Raises InputError if no plan fits."""
        return solve(self.profile, self.cluster, self.request, self.space, self.others)


class Options(TypedDict, total=False):
    """The keyword arguments of `plan`, which documents each of them."""

    cluster: Cluster | str | os.PathLike[str] | None
    profile: ModelProfile | str | os.PathLike[str] | None
    batch: int | None
    micro_batches: int | None
    space: Space
    schedule: Schedule | None
    budget: float | str | None
    overrides: Mapping[str, Any] | None


def plan(config: Source = None, **options: Unpack[Options]) -> Planned:
    """The fastest plan for one training step, with its explanation: `print` it.

    Args:
      config: as for `jhpt.train`, or the name of a classic network (vgg16, resnet50, gnmt).  Of the section `parallel`
        only `compression` and `gradient_compression` count; `compression: auto` leaves the choice to the planner.  The
        section `memory` says how much memory plans may use, what they may recompute and what they may offload.
      cluster: a name such as h100x8x8, a file, or a `Cluster`; None (default): this machine, as `jhpt profile` measured
        it.
      profile: the costs of the layers, or a file of them.  None (default): as `jhpt profile` measured them if the
        cluster is this machine, else from the datasheet of the cluster's devices.  A profile holds for the devices of
        one name.  Other kinds of devices in the cluster have those that `jhpt profile` measured here for their name, or
        else its seconds times a ratio of datasheet figures, and the answer says so.
      batch: samples per step; None (default): data.batch_size.
      micro_batches: number of micro-batches (gradient accumulation); None (default): the planner decides.
      space: "spmd" (default), plans that one program can run, or "general", stages of any size.
      schedule: of the pipeline; None (default): the planner decides.
      budget: bytes that a plan may use per device, or text such as 24GiB; None (default): memory.budget_bytes.  Plans
        leave 3 % of it free.
      overrides: settings by dotted name, `{"data.sequence_length": 4096}`.

    Raises:
      InputError: a name is unknown, settings contradict each other, or no plan fits; the message says what would fit.
      TypeError: a keyword argument is none of these.
    """
    task = prepare(config, **options)
    return Planned.of(task.solve(), task.request)


def compare(config: Source, clusters: Iterable[Cluster], **options: Unpack[Options]) -> tuple[Option, ...]:
    """The answers of several clusters to one question; for each, `options` are those of `plan`.

    Raises:
      InputError: no plan fits any of the clusters; the message has the reason of each.
    """

    def option(cluster: Cluster) -> Option:
        asked: Options = {**options, "cluster": cluster}
        try:
            return Option(cluster=cluster, answer=prepare(config, **asked).solve())
        except InputError as error:
            return Option(cluster=cluster, answer=None, reason=str(error))

    found = tuple(map(option, clusters))
    if not any(each.answer for each in found):
        raise InputError("\n\n".join(dict.fromkeys(each.reason for each in found)))
    return found


def prepare(config: Source = None, **options: Unpack[Options]) -> Task:
    """The arguments of `plan`, read and checked."""
    _check_names(options)
    space, schedule = options.get("space", "spmd"), options.get("schedule")
    _check_choices(space, schedule)
    profile, overrides = options.get("profile"), options.get("overrides")
    network = network_of(config)
    configured = network is None and (config is not None or profile is None)
    settings = load_config(config, overrides) if configured else None
    if network and overrides:
        raise InputError(f"{network} is a fixed table of layers and takes no settings; leave out {one_of(overrides)}")
    cluster = resolve_cluster(options.get("cluster"))
    if settings:
        _check_settings(settings, cluster, space)
    memory = _device_budget(options.get("budget"), settings)
    here = options.get("cluster") is None
    costs, others = resolve_profiles(profile, settings, network, cluster, measured=here)
    request = request_of(
        _batch(options.get("batch"), settings, network),
        options.get("micro_batches"),
        sample_chunks=SAMPLE_CHUNKS if costs.sample_tokens else (1,),
        **(_open_decisions(settings, space) if settings else {}),
    )
    return Task(
        profile=costs,
        others=others,
        cluster=capped(cluster, memory, _host_budget(settings)),
        request=replace(request, schedules=(schedule,)) if schedule else request,
        space=space,
    )


def _check_names(options: Iterable[str]) -> None:
    """Refuses keyword arguments that `plan` does not have, which a call through `**options` would accept."""
    names = tuple(Options.__annotations__)
    lines = [
        f"plan() got an unexpected keyword argument {name!r}{did_you_mean(name, names) or f'; use {one_of(names)}'}"
        for name in options
        if name not in names
    ]
    if lines:
        raise TypeError("\n".join(lines))


def _check_choices(space: Space, schedule: Schedule | None) -> None:
    if space not in get_args(Space):
        raise InputError(f"space={space!r}: use {one_of(get_args(Space))}")
    if schedule is not None and schedule not in get_args(Schedule):
        raise InputError(f"schedule={schedule!r}: use {one_of(get_args(Schedule))}")
    check(Choices(space=space, schedule=schedule))


def _open_decisions(config: Config, space: Space) -> dict[str, Any]:
    """The fields of a `Request` that a configuration decides."""
    decisions = {
        "compression": compressions(config),
        "gradient_compression": config.parallel.gradient_compression,
        **recomputations(config),
        **most_stages(config, space),
    }
    if space == "spmd":
        decisions["offload"] = offload_kinds(config)
        decisions["update_in_backward"] = config.optimizer.update_in_backward
    return decisions


def _check_settings(config: Config, cluster: Cluster, space: Space) -> None:
    """Refuses settings that no plan of the space, or no device of the cluster, can follow."""
    offload = config.memory.offload
    check(Choices(space=space, offload=None if offload in ("auto", "off") else offload, names=SETTINGS))
    for node in cluster.nodes:
        capability = capability_by_driver(node.device.name)
        if config.model.matmul_dtype == "float8" and capability is not None and capability < FLOAT8_CAPABILITY:
            raise InputError(
                f"model.matmul_dtype=float8 needs GPUs of compute capability {FLOAT8_CAPABILITY} or more, and "
                f"{node.device.name} has {capability}; use model.matmul_dtype=same, or a cluster of newer GPUs"
            )


def network_of(config: Source) -> str | None:
    """The classic network that `config` names, or None.

    Raises:
      InputError: `config` is text that names neither a file, a preset nor a network.
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


def resolve_profiles(
    profile: ModelProfile | str | os.PathLike[str] | None,
    config: Config | None,
    network: str | None,
    cluster: Cluster,
    *,
    measured: bool,
) -> tuple[ModelProfile, dict[str, ModelProfile]]:
    """The profile of the fastest kind of device, and those of the other kinds by `Device.rates`.

    A profile that is given, itself or as a file, is the only one, beside those that were measured on this machine for
    the other devices' names.  Otherwise every kind has one, measured or from its datasheet.
    """
    if profile is not None:
        costs = profile if isinstance(profile, ModelProfile) else read_profile(Path(profile))
        if config is None:
            return costs, {}
        if len(costs.layers) != config.model.num_layers + 2:
            raise InputError(
                f"the profile {costs.name} has {costs.num_layers} layers, {config.name} has "
                f"{config.model.num_layers + 2} with embedding and head; leave out the configuration and give --batch"
            )
        _check_state(costs, config)
        others = {
            device.rates: own
            for device in (device_kinds(cluster) if cluster.mixed else ())
            if device.name != costs.device and (own := local_profile(config, device.name)) and own.dtype == costs.dtype
        }
        return costs, others
    devices = device_kinds(cluster)
    dtype = common_dtype("auto" if config is None else config.model.dtype, devices)

    def costs_on(device: Device) -> ModelProfile:
        if network is not None:
            return network_profile(network, device, dtype)
        assert config is not None
        local = local_profile(config, device.name) if measured else None
        return local or analytic_profile(config, device, dtype, ours(alone=cluster.num_devices == 1))

    for device in devices:
        check_dtype(device, dtype)
    fastest, *slower = sorted(devices, key=lambda device: (-device.peak_flops[dtype], device.rates))
    return costs_on(fastest), {device.rates: costs_on(device) for device in slower}


def device_kinds(cluster: Cluster) -> list[Device]:
    """One device of every kind (`Device.rates`)."""
    return list({node.device.rates: node.device for node in cluster.nodes}.values())


def _check_state(profile: ModelProfile, config: Config) -> None:
    """Refuses a profile whose state or matrix products have other dtypes than the configuration says."""
    if profile.products != config.model.matmul_dtype:
        raise InputError(
            f"the profile {profile.name} is of model.matmul_dtype={profile.products}, {config.name} has "
            f"{config.model.matmul_dtype}; set model.matmul_dtype={profile.products}, or make a profile with that of "
            f"{config.name}"
        )
    if profile.bytes_per_logit != (stored := config.model.bytes_per_logit(round(profile.bytes_per_weight))):
        raise InputError(
            f"the profile {profile.name} stores a logit in {profile.bytes_per_logit:g} bytes, {config.name} in "
            f"{stored} (model.logits_dtype); change that, or make a profile with that of {config.name}"
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


def dtype_of(dtype: str, device: Device) -> str:
    """`model.dtype`, with "auto" resolved as training does: float32 on a CPU, else 16 bits if the device has them."""
    return common_dtype(dtype, [device])


def common_dtype(dtype: str, devices: Sequence[Device]) -> str:
    """`dtype_of` for devices that train one model together: "auto" is the first dtype that all of them have.

    Raises:
      InputError: a device has no rate for the dtype, or there is none that all of them have.
    """
    order = ("float32", "bfloat16") if all(device.name == "cpu" for device in devices) else tuple(ELEMENT_BYTES)
    common = [name for name in order if all(name in device.peak_flops for device in devices)]
    if dtype == "auto" and (common or len(devices) == 1):
        return common[0] if common else order[0]
    lacking = [device for device in devices if dtype not in device.peak_flops]
    if lacking and len(devices) > 1:
        names = " and ".join(device.name for device in lacking)
        each = "; ".join(f"{device.name} has {one_of(device.peak_flops)}" for device in devices)
        what = f"no dtype that all devices of the cluster have a rate for ({each})"
        if dtype != "auto":
            what = f"model.dtype={dtype}: {names} has no rate for it"
        use = f"use model.dtype={one_of(common)}, or " if common else ""
        raise InputError(f"{what}; {use}plan a cluster without {names if dtype != 'auto' else 'one of them'}")
    return dtype


def _batch(batch: int | None, config: Config | None, network: str | None) -> int:
    if batch is not None:
        return batch
    if config is None:
        raise InputError(f"{network or 'a profile alone'} has no batch size; give --batch, e.g. --batch 256")
    return config.data.batch_size


def _device_budget(budget: float | str | None, config: Config | None) -> float | None:
    """Bytes that a plan may use per device, by argument or by configuration; None: all."""
    if budget is None:
        setting = config.memory.budget_bytes if config else "auto"
        return None if setting == "auto" else setting
    try:
        return parse_bytes(budget)
    except ValueError as error:
        raise InputError(f"budget={error}") from None


def budgeted(cluster: Cluster, config: Config, host: float) -> Cluster:
    """The cluster with the device memory that the section `memory` allows.  host: usable bytes of each host."""
    return capped(cluster, _device_budget(None, config), host)


def _host_budget(config: Config | None) -> float | None:
    """Bytes that a plan may use per host; None: `HOST_SHARE` of its memory."""
    setting = config.memory.host_budget_bytes if config else "auto"
    return None if setting == "auto" else setting


def capped(cluster: Cluster, memory: float | None, host: float | None = None) -> Cluster:
    """The cluster with only so many usable bytes per device and per host.

    Plans leave `RESERVE` of a device's bytes free, or more if the cluster says so.

    Args:
      memory: bytes per device; None: all.
      host: bytes per host; None: `HOST_SHARE` of its memory.
    """

    def capped_node(node: Node) -> Node:
        limit = min(memory or math.inf, node.device.memory)
        reserve = max(RESERVE, node.device.reserve)
        device = node.device.model_copy(update={"memory": limit, "reserve": reserve})
        host_memory = min(host, node.host_memory) if host else HOST_SHARE * node.host_memory
        return node.model_copy(update={"device": device, "host_memory": host_memory})

    return cluster.model_copy(update={"nodes": tuple(map(capped_node, cluster.nodes))})
