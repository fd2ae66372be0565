"""What the planner is asked to decide, and the best plan found so far."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from jhpt.core.config import PLAIN_GRADIENTS, Compression, Config, GradientCompression
from jhpt.core.divisors import divisors, one_of
from jhpt.core.errors import InputError
from jhpt.core.optimizers import optimizer_numbers
from jhpt.core.plan import SEARCHED, OffloadKind, Plan, SavedTensors, Schedule, Space, Zero
from jhpt.core.plan_by_hand import recomputed
from jhpt.core.rules import SETTINGS, Choices, check, conflict
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.model import CostModel

SAMPLE_CHUNKS = (1, 2, 4)
"""Numbers of sample chunks that the planner chooses from for models whose samples are sequences of tokens."""

COMPRESSIONS = (Compression(bits=8), Compression(tokens=0.3, bits=8, rest_bits=4, steps=2))
"""What `parallel.compression: auto` chooses from.

All tokens at 8 bits cost gpt-tiny 0.02 % of its loss (one seed), the other choice 0.77 % (docs/reports/compression.md).
"""

ZERO: tuple[Zero, ...] = get_args(Zero)
"""ZeRO levels that the planner chooses from."""

TOLERANCE = 1e-12
"""Relative difference of seconds.  Two plans that are closer than this count as equally fast."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The decisions that are open: for each, the choices that a plan may make."""

    batch: int
    micro_batches: tuple[int, ...]
    schedules: tuple[Schedule, ...] = SEARCHED
    zero: tuple[Zero, ...] = ZERO
    hybrid: bool = True
    """Whether plans of one stage may shard state over the data ranks of each node alone (hybrid sharding)."""
    recompute: tuple[bool, ...] = (False, True)
    sequence: bool = True
    """Whether plans may use sequence parallelism."""
    max_stages: int = 1 << 30
    fewest_stages: int = 1
    """For space="general" only."""
    whole: bool = False
    """Whether every device of the cluster must take part; for space="general" only."""
    sample_chunks: tuple[int, ...] = (1,)
    """Into how many chunks layers may split their samples."""
    compression: tuple[Compression | None, ...] = (None,)
    """How all-reduces over the tensor axis may be compressed; None: not at all."""
    gradient_compression: GradientCompression = PLAIN_GRADIENTS
    """How the all-reduce of gradients is compressed.  This one is given, not chosen."""
    offload: tuple[OffloadKind | None, ...] = (None,)
    """Which state of the blocks may be offloaded to the host; None: nothing."""
    update_in_backward: bool = False
    """Whether offloaded blocks are updated in the backward pass, which `optimizer.clip` decides."""
    saved: SavedTensors | None = None
    """The activations that plans with recomputation save.

    None: only block inputs; but where recomputation is open, the planner chooses.
    """
    host: bool = False
    """Whether block inputs and other saved activations may be offloaded to the host."""

    def sequences(self, model: CostModel, tensor: int, compression: Compression | None) -> tuple[bool, ...]:
        """Without sequence parallelism and, if plans with this tensor degree and compression may have it, with it."""
        cuts = self.sequence and tensor > 1 and compression is None and model.cuts_sequences(tensor)
        return (False, True) if cuts else (False,)


MOST_SAMPLES = 10**7
"""Of a step.  Neighbouring batches are looked at one by one."""


def request(batch: int, micro_batches: int | Iterable[int] | None = None, **options: Any) -> Request:
    """A checked request.

    Args:
      batch: samples per step.
      micro_batches: numbers of micro-batches to choose from; None: all divisors of the batch.
      options: further fields of `Request`.

    Raises:
      InputError: a number of micro-batches does not divide the batch, or a choice does not exist.
    """
    if batch < 1:
        raise InputError(f"batch={batch}: a step needs at least one sample")
    if batch > MOST_SAMPLES:
        raise InputError(f"batch={batch}: a step of more than {MOST_SAMPLES:,} samples is not planned; give fewer")
    if micro_batches is None:
        counts = tuple(divisors(batch))
    else:
        counts = (micro_batches,) if isinstance(micro_batches, int) else tuple(micro_batches)
    for name, choices in (("zero", ZERO), ("recompute", (False, True)), ("schedules", SEARCHED)):
        requested = options.get(name, choices)
        if not requested or any(choice not in choices for choice in requested):
            raise InputError(f"{name}={requested}: choose at least one of {', '.join(map(str, choices))}")
    if options.get("gradient_compression", PLAIN_GRADIENTS).on:
        levels = options.get("zero", ZERO)
        options["zero"] = tuple(z for z in levels if conflict(Choices(gradient_compression=True, zero=z)) is None)
        if not options["zero"]:
            check(Choices(gradient_compression=True, zero=levels[0]))
    if not counts:
        raise InputError("micro_batches is empty; give a number that divides the batch, or leave it out")
    for count in counts:
        if count < 1:
            raise InputError(f"micro_batches={count} does not divide batch={batch}; use {one_of(divisors(batch))}")
        check(Choices(batch=batch, micro_batches=count))
    return Request(batch=batch, micro_batches=counts, **options)


def choices_of(request: Request, model: CostModel, space: Space) -> Choices:
    """What the request decides for every plan, as the rules see it."""
    return Choices(
        space=space,
        mixed=model.cluster.mixed,
        place=model.cluster.name,
        schedule=None if {"eager-1f1b", "gpipe"} & set(request.schedules) else request.schedules[0],
        sample=model.profile.sample if model.tensor_all_reduce.stream is None else None,
        compression=None not in request.compression,
        gradient_compression=request.gradient_compression.on,
        offload=None if None in request.offload else request.offload[0],
        zero=request.zero[0] if len(request.zero) == 1 else None,
        saved=request.saved is not None,
        names=SETTINGS,
    )


@dataclass
class Incumbent:
    """The best plan that fits, the best plan of every shape, and the least bound of all unvisited plans."""

    seconds: float = math.inf
    plan: Plan | None = None
    unvisited: float = math.inf
    shapes: dict[tuple[object, ...], tuple[float, Plan]] = field(default_factory=dict)
    any_plan: bool = False
    """Whether any plan that fits will do, so that the search ends with the first one."""

    @property
    def settled(self) -> bool:
        """Whether no other plan need be visited."""
        return self.any_plan and self.plan is not None

    @property
    def cutoff(self) -> float:
        """Seconds.  A plan whose bound is not below this need not be visited."""
        return -math.inf if self.settled else self.seconds * (1 - TOLERANCE)

    @property
    def lower_bound(self) -> float:
        """Seconds.  No plan of the decision set is faster."""
        return min(self.seconds, self.unvisited)

    def offer(self, plan: Plan, model: CostModel) -> Estimate:
        """Prices a plan and keeps it if it fits and is the fastest so far, of all plans or of its shape."""
        estimate = price(plan, model)
        if estimate.fits:
            shape = shape_of(plan)
            if estimate.seconds < self.shapes.get(shape, (math.inf, plan))[0]:
                self.shapes[shape] = (estimate.seconds, plan)
            if estimate.seconds < self.cutoff:
                self.seconds, self.plan = estimate.seconds, plan
        return estimate

    def note_unexplored_bound(self, bound: float) -> None:
        """Notes that some plans were not visited, and that none of them is faster than `bound` seconds."""
        self.unvisited = min(self.unvisited, bound)


def compressions(config: Config) -> tuple[Compression | None, ...]:
    """The choices that `parallel.compression` leaves open, with the rule for important tokens filled in."""
    if config.model.reads == "images":
        return (None,)
    section, rule = config.parallel.compression, "own" if config.model.causal else "attention"

    def with_rule(compression: Compression) -> Compression:
        if compression.tokens < 1 and compression.importance == "auto":
            return compression.model_copy(update={"importance": rule})
        return compression

    if section.auto:
        open_choices = () if config.data.packing == "documents" else map(with_rule, COMPRESSIONS)
        return (None, *open_choices)
    return (with_rule(section.settings) if section.on else None,)


def most_stages(config: Config, space: Space) -> dict[str, int]:
    """The field of a `Request` that keeps one SPMD program of unlike blocks to one stage."""
    return {"max_stages": 1} if space == "spmd" and not config.model.alike else {}


def offload_kinds(config: Config) -> tuple[OffloadKind | None, ...]:
    """The choices that `memory.offload` leaves open.  Not every optimizer's state can be offloaded, nor low-precision
    state, nor unlike blocks."""
    kind = config.memory.offload
    offloads = optimizer_numbers(config.optimizer.name).offloaded
    if not config.model.alike or kind == "off" or config.optimizer.low_precision or not offloads:
        return (None,)
    return (None, *get_args(OffloadKind)) if kind == "auto" else (kind,)


def recomputations(config: Config) -> dict[str, Any]:
    """The fields of a `Request` that `memory.recompute` and `memory.host_budget_bytes` decide.

    Saved activations may be offloaded if `host_budget_bytes` is set and the activations to save are open or named.

    Raises:
      InputError: `memory.recompute_blocks`, which the planner chooses, is set.
    """
    if config.memory.recompute_blocks is not None:
        raise InputError(
            f"memory.recompute_blocks={config.memory.recompute_blocks} is for a layout by hand; leave it out, and with "
            "memory.recompute=auto the planner chooses how many blocks recompute"
        )
    host = {"host": True} if config.memory.host_budget_bytes != "auto" else {}
    if config.memory.recompute == "auto":
        return host
    setting = recomputed(config.memory)
    return {"recompute": (setting["recompute"],), "saved": setting["saved"], **(host if setting["saved"] else {})}


def shape_of(plan: Plan) -> tuple[object, ...]:
    """What distinguishes alternatives.

    Plans of one shape may differ in cuts, micro-batches, sample chunks, ZeRO level, sequence parallelism and
    recomputation.
    """
    degrees = {run.tensor for stage in plan.stages for chunk in stage.chunks for run in chunk.runs}
    devices = tuple(sorted(stage.devices for stage in plan.stages))
    return (
        len(plan.stages),
        plan.chunks,
        devices,
        tuple(sorted(degrees)),
        plan.schedule,
        plan.by_speed,
        plan.compression.on,
        plan.offload.kind if plan.offload else None,
    )
