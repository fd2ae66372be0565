"""What is asked of the planner, and the best answer so far."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from jhpt.core.config import PLAIN_GRADIENTS, Compression, Config, GradientCompression
from jhpt.core.divisors import divisors, one_of
from jhpt.core.errors import InputError
from jhpt.core.optimizers import optimizer_numbers
from jhpt.core.plan import OffloadKind, Plan, SavedTensors, Schedule, Zero, recomputed
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.model import CostModel

SAMPLE_CHUNKS = (1, 2, 4)
"""What the planner chooses from where a model is trained."""

COMPRESSIONS = (Compression(bits=8), Compression(tokens=0.3, bits=8, rest_bits=4, steps=2))
"""What `parallel.compression: auto` chooses from: settings that train as well as none does (docs/compression.md)."""

TOLERANCE = 1e-12
"""Relative; two plans closer than this count as equally fast."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The decisions that are open."""

    batch: int
    micro_batches: tuple[int, ...]
    schedules: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved")
    zero: tuple[Zero, ...] = (0, 1, 3)
    recompute: tuple[bool, ...] = (False, True)
    max_stages: int = 1 << 30
    sample_chunks: tuple[int, ...] = (1,)
    """Into how many chunks layers may cut their samples."""
    compression: tuple[Compression | None, ...] = (None,)
    """How sums over the tensor axis may travel; None: as they are."""
    gradient_compression: GradientCompression = PLAIN_GRADIENTS
    """How gradients do: given, not chosen."""
    offload: tuple[OffloadKind | None, ...] = (None,)
    """What of the blocks may live on the host; None: nothing."""
    update_in_backward: bool = False
    """Whether blocks there take their steps in the backward pass: how gradients are clipped says so."""
    saved: SavedTensors | None = None
    """What plans that recompute keep; None: nothing, or where plans may do either, what is best."""
    host: bool = False
    """Whether blocks' inputs, and what is kept beside them, may wait on the host."""


def request(batch: int, micro_batches: int | Iterable[int] | None = None, **options: Any) -> Request:
    """A request with all divisors of the batch, unless micro_batches says which.

    Raises:
      InputError: a number of micro-batches does not divide the batch.
    """
    if batch < 1:
        raise InputError(f"batch={batch}: a step needs at least one sample")
    if micro_batches is None:
        counts = tuple(divisors(batch))
    else:
        counts = (micro_batches,) if isinstance(micro_batches, int) else tuple(micro_batches)
    for name, choices in (("zero", (0, 1, 3)), ("recompute", (False, True)), ("schedules", get_args(Schedule))):
        given = options.get(name, choices)
        if not given or any(choice not in choices for choice in given):
            raise InputError(f"{name}={given}: choose at least one of {', '.join(map(str, choices))}")
    if options.get("gradient_compression", PLAIN_GRADIENTS).on:
        options["zero"] = tuple(level for level in options.get("zero", (0, 1, 3)) if level < 3)
        if not options["zero"]:
            raise InputError("gradient_compression sums gradients once a step, zero=3 in every micro-batch; use zero=1")
    if not counts:
        raise InputError("micro_batches is empty; give a number that divides the batch, or leave it out")
    for count in counts:
        if count < 1 or batch % count:
            raise InputError(f"micro_batches={count} does not divide batch={batch}; use {one_of(divisors(batch))}")
    return Request(batch=batch, micro_batches=counts, **options)


@dataclass
class Incumbent:
    """The best plan that fits, the best of every shape, and the least bound of what was left unvisited."""

    seconds: float = math.inf
    plan: Plan | None = None
    unvisited: float = math.inf
    shapes: dict[tuple[object, ...], tuple[float, Plan]] = field(default_factory=dict)

    @property
    def cutoff(self) -> float:
        """Plans that cannot be faster than this are not worth a visit."""
        return self.seconds * (1 - TOLERANCE)

    @property
    def lower_bound(self) -> float:
        """No plan of the decision set is faster."""
        return min(self.seconds, self.unvisited)

    def offer(self, plan: Plan, model: CostModel) -> Estimate:
        """Prices a plan and keeps it where it fits and is the fastest, over all or of its shape."""
        estimate = price(plan, model)
        if estimate.fits:
            shape = shape_of(plan)
            if estimate.seconds < self.shapes.get(shape, (math.inf, plan))[0]:
                self.shapes[shape] = (estimate.seconds, plan)
            if estimate.seconds < self.cutoff:
                self.seconds, self.plan = estimate.seconds, plan
        return estimate

    def note_unexplored_bound(self, bound: float) -> None:
        """Notes that plans not faster than `bound` were not visited."""
        self.unvisited = min(self.unvisited, bound)


def compressions(config: Config) -> tuple[Compression | None, ...]:
    """What the section `parallel.compression` leaves to choose from, the rule for tokens written out."""
    section, rule = config.parallel.compression, "own" if config.model.causal else "attention"

    def ruled(how: Compression) -> Compression:
        ruling = how.tokens < 1 and how.importance == "auto"
        return how.model_copy(update={"importance": rule}) if ruling else how

    if section.auto:
        return (None, *map(ruled, COMPRESSIONS))
    return (ruled(section.how) if section.on else None,)


def offload_kinds(config: Config) -> tuple[OffloadKind | None, ...]:
    """What the section `memory` leaves to choose from; state in few bits does not live on the host."""
    how = config.memory.offload
    streams = optimizer_numbers(config.optimizer.name).offloaded
    if how == "off" or config.optimizer.low_precision or not streams:
        return (None,)
    return (None, *get_args(OffloadKind)) if how == "auto" else (how,)


def recomputations(config: Config) -> dict[str, Any]:
    """What the section `memory` says of recomputation, as a request does.

    What blocks keep may wait on the host where the section says how much of that there is, and what is kept is open or
    named.
    """
    room = {"host": True} if config.memory.host_budget_bytes != "auto" else {}
    if config.memory.recompute == "auto":
        return room
    how = recomputed(config.memory)
    return {"recompute": (how["recompute"],), "saved": how["saved"], **(room if how["saved"] else {})}


def shape_of(plan: Plan) -> tuple[object, ...]:
    """What tells alternatives apart: plans of one shape differ in cuts, micro-batches and chunks of samples only."""
    degrees = {run.tensor for stage in plan.stages for chunk in stage.chunks for run in chunk.runs}
    devices = tuple(sorted(stage.devices for stage in plan.stages))
    return (
        len(plan.stages),
        plan.chunks,
        devices,
        tuple(sorted(degrees)),
        plan.schedule,
        plan.compression.on,
        _what(plan),
    )


def _what(plan: Plan) -> OffloadKind | None:
    return plan.offload.kind if plan.offload else None
