"""From a request to the fastest plan, or to what would have to change."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import get_args

from jhpt.core.amounts import enough_gib, gib
from jhpt.core.cluster import Cluster
from jhpt.core.config import PLAIN_GRADIENTS, Compression, GradientCompression
from jhpt.core.errors import InputError
from jhpt.core.plan import OffloadKind, Plan, Schedule, Zero
from jhpt.core.profile import ModelProfile
from jhpt.core.rules import check
from jhpt.core.state import FLOAT32, State
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.layers import Space
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.offload import check_blocks
from jhpt.planner.search.general.search import search_general
from jhpt.planner.search.offload import nearest_offloaded, offloaded_plans, search_offloaded
from jhpt.planner.search.recompute import improve
from jhpt.planner.search.request import Incumbent, Request, choices_of, request
from jhpt.planner.search.spmd import search_spmd


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The fastest plan, its estimate, and the fastest of every other shape that was priced on the way.

    on_devices: seconds of the fastest plan without blocks on the host; infinite where none fits; None: not asked for.
    """

    plan: Plan
    estimate: Estimate
    alternatives: tuple[Plan, ...]
    model: CostModel
    on_devices: float | None = None

    @property
    def gap(self) -> float:
        """How much faster a plan of the space could be at most, relative; 0 is proven optimal."""
        if not self.plan.lower_bound:
            return 0.0 if not self.estimate.seconds else math.inf
        return self.estimate.seconds / self.plan.lower_bound - 1


def plan(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    microbatches: int | Iterable[int] | None = None,
    space: Space = "spmd",
    schedules: tuple[Schedule, ...] | None = None,
    zero: tuple[Zero, ...] = (0, 1, 3),
    recompute: tuple[bool, ...] = (False, True),
    sample_chunks: tuple[int, ...] = (1,),
    compression: tuple[Compression | None, ...] = (None,),
    gradient_compression: GradientCompression = PLAIN_GRADIENTS,
) -> Plan:
    """The fastest plan of `space` for a step of `batch` samples.

    Raises:
      InputError: nothing fits, with the numbers and the nearest change that would; or the request is impossible.
    """
    asked = request(
        batch,
        microbatches,
        zero=zero,
        recompute=recompute,
        sample_chunks=sample_chunks,
        compression=compression,
        gradient_compression=gradient_compression,
    )
    if schedules is not None:
        asked = replace(asked, schedules=schedules)
    return solve(profile, cluster, asked, space).plan


def solve(profile: ModelProfile, cluster: Cluster, asked: Request, space: Space = "spmd") -> Answer:
    """`plan` with everything that the explanation needs."""
    model = CostModel(profile, cluster, asked.gradient_compression, asked.saved)
    check(choices_of(asked, model, space))
    if space == "general" or model.tensor_all_reduce.stream is None:
        asked = replace(asked, compression=(None,))
    best = search(asked, model, space) if None in asked.offload else Incumbent()
    if space == "spmd" and (best.plan is not None or asked.host) and None in asked.offload:
        improve(asked, model, best)
    on_devices = best.seconds if None in asked.offload else None
    if space == "spmd":
        if None not in asked.offload:
            check_blocks(model)
        search_offloaded(asked, model, best)
    if best.plan is None:
        raise InputError(refusal(asked, model, space))
    device = None if cluster.mixed else cluster.nodes[0].device.name
    gradients = {"gradient_compression": asked.gradient_compression}
    found = best.plan.model_copy(
        update={"device": device, "seconds": best.seconds, "lower_bound": best.lower_bound, **gradients}
    )
    others = sorted((seconds, index) for index, (seconds, _) in enumerate(best.shapes.values()))
    priced = [p.model_copy(update={"seconds": s, **gradients}) for s, p in best.shapes.values()]
    alternatives = tuple(priced[index] for _, index in others if _differs(priced[index], found))
    return Answer(
        plan=found, estimate=price(found, model), alternatives=alternatives, model=model, on_devices=on_devices
    )


def _differs(one: Plan, other: Plan) -> bool:
    return (one.stages, one.compression, one.offload) != (other.stages, other.compression, other.offload)


def search(asked: Request, model: CostModel, space: Space) -> Incumbent:
    """The best plan of a space.

    `general` starts from the best of the plans that one SPMD program can run without interleaving, priced as programs
    of the stages' own.  One program may cost more or less (`estimate`): neither space is always at least as fast.
    """
    best = Incumbent()
    if space == "spmd":
        search_spmd(asked, model, best)
        return best
    _start_general(asked, model, best)
    search_general(asked, model, best)
    return best


def _start_general(asked: Request, model: CostModel, best: Incumbent) -> None:
    if not model.cluster.mixed:
        start = Incumbent()
        schedules = tuple(name for name in asked.schedules if name != "interleaved")
        search_spmd(replace(asked, schedules=schedules), model, start, "general")
        if start.plan is not None:
            best.offer(start.plan, model)


MOST_MEMORY = 2.0**60
"""Bytes of a device beyond which more is no advice."""


def refusal(asked: Request, model: CostModel, space: Space) -> str:
    """Why nothing fits, and the nearest change that would: more memory or more devices."""
    cluster, profile = model.cluster, model.profile
    wire = profile.bytes_per_weight
    saved = max(profile.state_bytes - wire * (1 if profile.used_as_stored else 2), wire)
    smallest = min((node.device for node in cluster.nodes), key=lambda device: device.usable)
    free = f", of which plans leave {100 * smallest.reserve:.0f} % free" if smallest.reserve else ""
    lines = [
        f"{profile.name} with batch {asked.batch} fits no plan on {cluster.name}: {cluster.num_devices} devices of "
        f"{gib(smallest.memory)}{free}; weights and optimizer of {profile.parameters / 1e9:.2f} G parameters alone "
        f"take {gib(profile.parameters * saved)}, {saved:.3g} bytes each",
        *(_nearest(asked, model, space) if None in asked.offload else []),
        *(nearest_offloaded(asked, model) if space == "spmd" else []),
        *(_in_float32(asked, model) if space == "spmd" else []),
    ]
    return "\n".join(lines)


def _in_float32(asked: Request, model: CostModel) -> list[str]:
    """What may live on the host; what is kept in few bits may not."""
    if not model.profile.state.low_precision:
        return []
    # Of the devices less is needed: blocks' state is not there.  What the host needs is that of float32.
    wire = model.profile.bytes_per_weight
    saved = State().bytes + wire * (1 if wire == FLOAT32 else 2)
    plain = CostModel(model.profile.model_copy(update={"state": State(), "state_bytes": saved}), model.cluster)
    open_to_all = replace(asked, offload=get_args(OffloadKind))
    if not any(price(plan, plain).fits for plan in offloaded_plans(open_to_all, plain)):
        return []
    return [
        "with blocks on the host it would fit, with state in float32 only: optimizer.weights=float32, "
        "optimizer.moments=float32 and memory.offload=auto"
    ]


def _nearest(asked: Request, model: CostModel, space: Space) -> list[str]:
    changes = []
    have = min(node.device.memory for node in model.cluster.nodes)
    memory = _least(lambda factor: _fits(asked, model, space, memory=factor), 1.0, MOST_MEMORY / have)
    if memory is not None:
        changes.append(f"it would fit with {enough_gib(have * memory)} per device")
    if nodes := _least_nodes(asked, model, space):
        changes.append(f"it would fit on {model.cluster.num_devices * nodes} such devices{_to_a_node(model.cluster)}")
    return changes or ["no amount of memory or devices would do: the batch or the model has to change"]


def _to_a_node(cluster: Cluster) -> str:
    return "" if cluster.mixed else f", {cluster.nodes[0].devices} to a node"


def _least_nodes(asked: Request, model: CostModel, space: Space) -> int | None:
    """Smallest multiple of the nodes that fits, up to 128: doubled until it does, then bisected."""
    low, high = 1, 2
    while not _fits(asked, model, space, nodes=high):
        low, high = high, 2 * high
        if high > 128:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(asked, model, space, nodes=middle) else (middle, high)
    return high


def _least(fits: Callable[[float], bool], low: float, high: float) -> float | None:
    """Smallest factor that fits, to 1 %."""
    if not fits(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _fits(asked: Request, model: CostModel, space: Space, *, memory: float = 1.0, nodes: int = 1) -> bool:
    """Whether anything fits on devices of more memory, or on more nodes, there with blocks on the hosts, too."""
    cluster = model.cluster
    grown = cluster.model_copy(
        update={
            "nodes": tuple(
                node.model_copy(
                    update={
                        "count": node.count * nodes,
                        "device": node.device.model_copy(update={"memory": node.device.memory * memory}),
                    }
                )
                for node in cluster.nodes
            )
        }
    )
    costs, found = CostModel(model.profile, grown, model.gradient_compression, model.saved), Incumbent()
    if space == "spmd":
        search_spmd(asked, costs, found)
        offloaded = offloaded_plans(asked, costs) if nodes > 1 else ()
        return found.plan is not None or any(price(plan, costs).fits for plan in offloaded)
    _start_general(asked, costs, found)
    if found.plan is None:
        search_general(asked, costs, found)
    return found.plan is not None
