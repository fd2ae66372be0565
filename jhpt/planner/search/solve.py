"""From a request to the fastest plan, or to a message that says why no plan fits and what would have to change: more
memory, more devices, CPU offload or float32 state.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from jhpt.core.amounts import enough_gib, gib
from jhpt.core.cluster import Cluster
from jhpt.core.errors import InputError
from jhpt.core.plan import SEARCHED, OffloadKind, Plan, Schedule, Space, Zero
from jhpt.core.profile import ModelProfile
from jhpt.core.rules import check
from jhpt.core.state import FLOAT32, State
from jhpt.planner.cost.basis import NO_OTHERS
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import check_blocks
from jhpt.planner.search.general import offer_equal_stages, search_general
from jhpt.planner.search.offload import nearest_offloaded, offloaded_plans, search_offloaded
from jhpt.planner.search.request import ZERO, Incumbent, Request, choices_of
from jhpt.planner.search.request import request as request_of
from jhpt.planner.search.spmd import search_spmd

MOST_MEMORY = 2.0**60
"""Bytes per device.  Advice never asks for more."""

MOST_NODES = 128
"""Factor on the number of nodes.  Advice never asks for more."""

ADVICE_SECONDS = 10.0
"""After which advice is given up: it takes about twenty searches, which may be slow where nothing fits."""

MOST_MIXED_DEVICES = 32
"""Devices of a mixed cluster.  Advice never asks for more: a search takes time in proportion to their square at least,
and once for every order of their kinds."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The fastest plan, its estimate, and the fastest plan of every other shape that the search priced.

    on_devices: seconds of the fastest plan without CPU offload.  Infinite if none fits; None if none was requested.
    request: what was asked; None: unknown.
    """

    plan: Plan
    estimate: Estimate
    alternatives: tuple[Plan, ...]
    model: CostModel
    on_devices: float | None = None
    request: Request | None = None

    @property
    def gap(self) -> float:
        """By how much a plan of the space could be faster at most, relative to the bound; 0: proven optimal."""
        if not self.plan.lower_bound:
            return 0.0 if not self.estimate.seconds else math.inf
        return self.estimate.seconds / self.plan.lower_bound - 1


def plan(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    micro_batches: int | Iterable[int] | None = None,
    space: Space = "spmd",
    schedules: tuple[Schedule, ...] = SEARCHED,
    zero: tuple[Zero, ...] = ZERO,
    recompute: tuple[bool, ...] = (False, True),
) -> Plan:
    """The fastest plan of `space` for a step of `batch` samples.  `solve` takes all other decisions of a `Request`.

    Args:
      batch: samples per step.
      micro_batches: into how many micro-batches the batch may be split; None: any divisor of the batch.
      schedules, zero, recompute: the choices that plans may make.

    Raises:
      InputError: no plan fits (the message gives the figures and the nearest change that would make one fit), or the
        request is impossible.
    """
    request = request_of(batch, micro_batches, schedules=schedules, zero=zero, recompute=recompute)
    return solve(profile, cluster, request, space).plan


def solve(
    profile: ModelProfile,
    cluster: Cluster,
    request: Request,
    space: Space = "spmd",
    others: Mapping[str, ModelProfile] = NO_OTHERS,
) -> Answer:
    """The fastest plan, with everything that explains it.

    others: profiles of the cluster's other kinds of devices, by `Device.rates`.

    Raises:
      InputError: as for `plan`.
    """
    model = CostModel(profile, cluster, request.gradient_compression, request.saved, others)
    check(choices_of(request, model, space))
    if space == "general" or model.tensor_all_reduce.stream is None:
        request = replace(request, compression=(None,))
    resident = None in request.offload
    best = search(request, model, space) if resident else Incumbent()
    on_devices = best.seconds if resident else None
    if space == "spmd":
        if not resident:
            check_blocks(model)
        search_offloaded(request, model, best)
    if best.plan is None:
        raise InputError(refusal(request, model, space))
    return _answer(best, best.plan, model, on_devices, request)


def search(request: Request, model: CostModel, space: Space) -> Incumbent:
    """The best plan of a space.

    `general` starts from the best plan that one SPMD program can run without interleaving, priced with a program for
    each stage.  One SPMD program may cost more or less (`estimate`), so neither space is always at least as fast.
    """
    best = Incumbent()
    if space == "spmd":
        search_spmd(request, model, best)
        return best
    offer_equal_stages(request, model, best)
    search_general(request, model, best)
    return best


def _answer(best: Incumbent, plan: Plan, model: CostModel, on_devices: float | None, request: Request) -> Answer:
    device = None if model.cluster.mixed else model.cluster.nodes[0].device.name
    gradients = {"gradient_compression": model.gradient_compression}
    winner = plan.model_copy(
        update={"device": device, "seconds": best.seconds, "lower_bound": best.lower_bound, **gradients}
    )
    priced = [p.model_copy(update={"seconds": s, **gradients}) for s, p in best.shapes.values()]
    order = sorted((seconds, index) for index, (seconds, _) in enumerate(best.shapes.values()))
    alternatives = tuple(priced[index] for _, index in order if _differs(priced[index], winner))
    return Answer(
        plan=winner,
        estimate=price(winner, model),
        alternatives=alternatives,
        model=model,
        on_devices=on_devices,
        request=request,
    )


def _differs(one: Plan, other: Plan) -> bool:
    return (one.stages, one.compression, one.offload) != (other.stages, other.compression, other.offload)


def refusal(request: Request, model: CostModel, space: Space) -> str:
    """The message for a request that no plan fits: what is needed, and the nearest changes that would make it fit."""
    cluster, profile = model.cluster, model.profile
    weight_bytes = profile.bytes_per_weight
    parameter_bytes = max(profile.state_bytes - weight_bytes * (1 if profile.used_as_stored else 2), weight_bytes)
    smallest = min((node.device for node in cluster.nodes), key=lambda device: (device.usable, device.memory))
    reserve = f", of which plans leave {100 * smallest.reserve:.0f} % free" if smallest.reserve else ""
    count = cluster.num_devices
    lines = [
        f"{profile.name} with batch {request.batch} fits no plan on {cluster.name}: "
        f"{count} device{'s' if count > 1 else ''} of {gib(smallest.memory)}{reserve}; "
        f"weights and optimizer of {profile.parameters / 1e9:.2f} G parameters alone "
        f"take {gib(profile.parameters * parameter_bytes)}, {parameter_bytes:.3g} bytes each",
        *(_nearest(request, model, space) if None in request.offload else []),
        *(nearest_offloaded(request, model) if space == "spmd" else []),
        *(_with_float32_state(request, model) if space == "spmd" else []),
    ]
    return "\n".join(lines)


def _with_float32_state(request: Request, model: CostModel) -> list[str]:
    """Whether CPU offload would fit if the state were float32: low-precision state cannot be offloaded."""
    if not model.profile.state.low_precision:
        return []
    # Offloaded state takes no device memory, so float32 state can fit there.  The host has to hold it.
    weight_bytes = model.profile.bytes_per_weight
    state_bytes = State().bytes + weight_bytes * (1 if weight_bytes == FLOAT32 else 2)
    plain = CostModel(model.profile.model_copy(update={"state": State(), "state_bytes": state_bytes}), model.cluster)
    any_kind = replace(request, offload=get_args(OffloadKind))
    if not any(price(plan, plain).fits for plan in offloaded_plans(any_kind, plain)):
        return []
    return [
        "with CPU offload it would fit, but only with state in float32: optimizer.weights=float32, "
        "optimizer.moments=float32 and memory.offload=auto"
    ]


def _nearest(request: Request, model: CostModel, space: Space) -> list[str]:
    """The least memory per device, and the least number of devices, that would fit."""
    changes = []
    until = time.monotonic() + ADVICE_SECONDS
    memory = min(node.device.memory for node in model.cluster.nodes)
    factor = _least_factor(
        lambda factor: _fits(request, _with_memory(model.cluster, factor), model, space),
        1.0,
        MOST_MEMORY / memory,
        until,
    )
    if factor is not None:
        changes.append(f"it would fit with {enough_gib(memory * factor)} per device")
    if nodes := _least_nodes(request, model, space, until):
        per_node = "" if model.cluster.mixed else f", {model.cluster.nodes[0].devices} to a node"
        changes.append(f"it would fit on {model.cluster.num_devices * nodes} such devices{per_node}")
    devices = f"up to {MOST_MIXED_DEVICES} such devices" if model.cluster.mixed else "devices"
    if changes:
        return changes
    if time.monotonic() > until:
        return [f"what would fit was searched for {ADVICE_SECONDS:.0f} s, and not found"]
    return [f"no amount of memory or {devices} would do: the batch or the model has to change"]


def _least_nodes(request: Request, model: CostModel, space: Space, until: float) -> int | None:
    """The least factor on the nodes that fits, at most `MOST_NODES`: doubled until one fits, then bisected; None also
    if it is not found until the clock says `until`."""

    def fits(nodes: int) -> bool:
        return _fits(request, _with_nodes(model.cluster, nodes), model, space, offloaded=True)

    cluster = model.cluster
    most = min(MOST_NODES, MOST_MIXED_DEVICES // cluster.num_devices) if cluster.mixed else MOST_NODES
    low, high = 1, 2
    while high <= most and (time.monotonic() > until or not fits(high)):
        low, high = high, 2 * high
    if high > most:
        return None
    while high - low > 1:
        if time.monotonic() > until:
            return None
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _least_factor(fits: Callable[[float], bool], low: float, high: float, until: float) -> float | None:
    """The least factor that fits, to 1 %; None if even `high` does not, or the clock says `until` before."""
    if not fits(high):
        return None
    while high / low > 1.01:
        if time.monotonic() > until:
            return None
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    nodes = tuple(
        node.model_copy(update={"device": node.device.model_copy(update={"memory": node.device.memory * factor})})
        for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes})


def _with_nodes(cluster: Cluster, factor: int) -> Cluster:
    nodes = tuple(node.model_copy(update={"count": node.count * factor}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def _fits(request: Request, cluster: Cluster, model: CostModel, space: Space, *, offloaded: bool = False) -> bool:
    """Whether any plan fits this cluster.  offloaded: whether plans of space="spmd" with CPU offload count, too."""
    costs, incumbent = model.on(cluster), Incumbent(any_plan=True)
    if space == "spmd":
        for recompute in request.recompute:  # one at a time: what blocks save is of no interest
            search_spmd(replace(request, recompute=(recompute,)), costs, incumbent)
        plans = offloaded_plans(request, costs) if offloaded else ()
        return incumbent.plan is not None or any(price(plan, costs).fits for plan in plans)
    offer_equal_stages(request, costs, incumbent)
    if not incumbent.settled:
        search_general(request, costs, incumbent)
    return incumbent.settled
