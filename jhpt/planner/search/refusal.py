"""Why no plan fits, and what would have to change: more memory, more devices, CPU offload or float32 state."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from jhpt.core.amounts import enough_gib, gib
from jhpt.core.cluster import Cluster
from jhpt.core.plan import OffloadKind
from jhpt.core.state import FLOAT32, State
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.layers import Space
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.general.search import search_general
from jhpt.planner.search.offload import nearest_offloaded, offloaded_plans
from jhpt.planner.search.request import Incumbent, Request
from jhpt.planner.search.spaces import offer_equal_stages
from jhpt.planner.search.spmd import search_spmd

MOST_MEMORY = 2.0**60
"""Bytes per device.  Advice never asks for more."""

MOST_NODES = 128
"""Factor on the number of nodes.  Advice never asks for more."""


def refusal(request: Request, model: CostModel, space: Space) -> str:
    """The message for a request that no plan fits: what is needed, and the nearest changes that would make it fit."""
    cluster, profile = model.cluster, model.profile
    weight_bytes = profile.bytes_per_weight
    parameter_bytes = max(profile.state_bytes - weight_bytes * (1 if profile.used_as_stored else 2), weight_bytes)
    smallest = min((node.device for node in cluster.nodes), key=lambda device: device.usable)
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
    memory = min(node.device.memory for node in model.cluster.nodes)
    factor = _least_factor(
        lambda factor: _fits(request, _with_memory(model.cluster, factor), model, space), 1.0, MOST_MEMORY / memory
    )
    if factor is not None:
        changes.append(f"it would fit with {enough_gib(memory * factor)} per device")
    if nodes := _least_nodes(request, model, space):
        per_node = "" if model.cluster.mixed else f", {model.cluster.nodes[0].devices} to a node"
        changes.append(f"it would fit on {model.cluster.num_devices * nodes} such devices{per_node}")
    return changes or ["no amount of memory or devices would do: the batch or the model has to change"]


def _least_nodes(request: Request, model: CostModel, space: Space) -> int | None:
    """The least factor on the nodes that fits, up to `MOST_NODES`: doubled until one fits, then bisected."""

    def fits(nodes: int) -> bool:
        return _fits(request, _with_nodes(model.cluster, nodes), model, space, offloaded=True)

    low, high = 1, 2
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST_NODES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _least_factor(fits: Callable[[float], bool], low: float, high: float) -> float | None:
    """The least factor that fits, to 1 %; None if even `high` does not."""
    if not fits(high):
        return None
    while high / low > 1.01:
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
    """Whether any plan fits another cluster.  offloaded: plans of space="spmd" with CPU offload count, too."""
    costs, incumbent = CostModel(model.profile, cluster, model.gradient_compression, model.saved), Incumbent()
    if space == "spmd":
        search_spmd(request, costs, incumbent)
        plans = offloaded_plans(request, costs) if offloaded else ()
        return incumbent.plan is not None or any(price(plan, costs).fits for plan in plans)
    offer_equal_stages(request, costs, incumbent)
    if incumbent.plan is None:
        search_general(request, costs, incumbent)
    return incumbent.plan is not None
