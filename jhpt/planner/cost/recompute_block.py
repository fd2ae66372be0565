"""What a block keeps of its forward pass under a budget, in the least time: an integer programme, solved exactly.

A tensor of the forward pass is kept on the device, kept on the host, or not at all.  The backward pass computes again
what it reads and does not find, and what that is computed from.  For tensors i with b bytes and c seconds, decided by
saved s, offloaded o and recomputed r, all 0 or 1:

    minimise    sum c r  +  e_f  +  e_b
    where       s + o + r >= 1                   of every tensor that the backward pass reads
                s_i + o_i + r_i >= r_j           of every input i of a tensor j that is computed again
                s + o <= 1,  s = o = 0           the second of tensors without a name, which no policy can keep
                sum b s <= budget,  sum b o <= budget of the host
                e_f >= sum b o / rate - window_f, e_f >= 0       copies that the forward pass does not hide
                e_b >= sum b o / rate - window_b, e_b >= 0       and the backward pass

where a tensor may say how long its copy takes, instead of b / rate.

Of several such choices the one with the fewest bytes counts.  Branches of the graph are nothing special here: a chain
would allow a dynamic programme (Chen et al. 2016), a block is none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from jhpt.core.errors import InputError

TOLERANCE = 1e-9
"""Relative; what is less is rounding."""


class Fate(IntEnum):
    """Of a tensor between the passes."""

    RECOMPUTED = 0
    SAVED = 1
    OFFLOADED = 2


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A value of a block's forward pass.

    bytes, seconds: its size; to compute it from its inputs.  inputs: positions of earlier tensors; the block's own
    input, which is always kept, is none of them.  read: whether the backward pass reads it.  there: its size on the
    host, where that is another.
    """

    name: str | None
    bytes: float
    seconds: float
    inputs: tuple[int, ...] = ()
    read: bool = True
    travel: float | None = None
    """Seconds of a copy to the host, or back; None: by the rate of all."""
    there: float | None = None

    @property
    def on_host(self) -> float:
        """Bytes."""
        return self.bytes if self.there is None else self.there


@dataclass(frozen=True, kw_only=True)
class Copies:
    """To the host and back.  rate: bytes/s in either direction; forward, backward: seconds of computation beside which
    a block's copies run; budget: bytes on the host; sparing: of equally fast choices that with fewest bytes there
    counts, and then that with fewest on the device."""

    rate: float
    forward: float
    backward: float
    budget: float = np.inf
    sparing: bool = False

    def seconds(self, tensor: Tensor) -> float:
        """Of one copy."""
        return tensor.on_host / self.rate if tensor.travel is None else tensor.travel


@dataclass(frozen=True, kw_only=True)
class Choice:
    """fates: of every tensor.  seconds: of what is computed again, and of copies that nothing hides.  bytes: on the
    device between the passes, host: there."""

    fates: tuple[Fate, ...]
    seconds: float
    bytes: float
    host: float


def choose(tensors: Sequence[Tensor], budget: float, copies: Copies | None = None) -> Choice:
    """The choice of least seconds, and then of fewest bytes on the device, or first on the host (`Copies.sparing`).

    Args:
      budget: bytes that the block may keep on the device.
      copies: None: nothing goes to the host.

    Raises:
      InputError: a negative budget.
    """
    if budget < 0:
        raise InputError(f"{budget:.0f} bytes are no budget for what a block keeps")
    if not tensors:
        return Choice(fates=(), seconds=0.0, bytes=0.0, host=0.0)
    programme = _Programme(tensors, budget, copies)
    fastest = programme.least(programme.seconds)
    allowed = float(programme.seconds @ fastest) * (1 + TOLERANCE) + TOLERANCE * programme.shortest
    return programme.choice(programme.least(programme.room, at_most=allowed))


def front(tensors: Sequence[Tensor], copies: Copies | None = None) -> Iterator[Choice]:
    """Every choice that none is better than in seconds and bytes alike, the fastest first."""
    found = choose(tensors, sum(tensor.bytes for tensor in tensors), copies)
    yield found
    while found.bytes > 0:
        # Sizes are whole bytes: the next choice is one byte smaller at least.
        found = choose(tensors, found.bytes - 1, copies)
        yield found


class _Programme:
    """Variables s, o, r of every tensor, then e_f and e_b."""

    def __init__(self, tensors: Sequence[Tensor], budget: float, copies: Copies | None) -> None:
        self.tensors, self.copies, count = tensors, copies, len(tensors)
        sizes, there, costs = (
            np.array([getattr(one, name) for one in tensors], float) for name in ("bytes", "on_host", "seconds")
        )
        self.seconds = np.concatenate([np.zeros(2 * count), costs, [1.0, 1.0]])
        self.bytes = np.concatenate([sizes, np.zeros(2 * count + 2)])
        self.offloaded = np.concatenate([np.zeros(count), there, np.zeros(count + 2)])
        self.room = self.bytes
        if copies and copies.sparing:
            self.room = self.bytes + self.offloaded * (1 + sizes.sum() / (np.min(there[there > 0], initial=np.inf)))
        self.shortest = float(np.min(costs[costs > 0], initial=np.inf)) if np.any(costs > 0) else 1.0
        named = np.array([tensor.name is not None for tensor in tensors], float)
        offloaded = named if copies else np.zeros(count)
        self.bounds = Bounds(0, np.concatenate([named, offloaded, np.ones(count), [np.inf, np.inf]]))
        self.integrality = np.concatenate([np.ones(3 * count), [0, 0]])
        self.constraints = [*self._kept_or_computed(), self._once(), self._within(sizes, budget)]
        if copies:
            self.constraints += self._exposed(copies)
        if copies and np.isfinite(copies.budget):
            unit = self._unit(there)
            self.constraints.append(LinearConstraint(self.offloaded[None] / unit, ub=copies.budget / unit))

    def least(self, objective: NDArray[np.float64], at_most: float | None = None) -> NDArray[np.float64]:
        """The point of least objective.  at_most: seconds."""
        constraints = self.constraints
        if at_most is not None:
            constraints = [
                *constraints,
                LinearConstraint(self.seconds / self._unit(self.seconds), ub=at_most / self._unit(self.seconds)),
            ]
        found = milp(
            objective / self._unit(objective),
            constraints=constraints,
            bounds=self.bounds,
            integrality=self.integrality,
            options={"mip_rel_gap": 0.0},
        )
        assert found.x is not None, found.message  # to keep nothing is always possible
        return np.where(self.integrality > 0, np.round(found.x), found.x)

    def choice(self, point: NDArray[np.float64]) -> Choice:
        """What the variables say; tensors that are not needed again are recomputed, at no cost."""
        count = len(self.tensors)
        saved, offloaded = point[:count] > 0.5, point[count : 2 * count] > 0.5
        fates = tuple(Fate(int(s) + 2 * int(o)) for s, o in zip(saved, offloaded, strict=True))
        return Choice(
            fates=fates,
            seconds=seconds_of(self.tensors, fates, self.copies),
            bytes=sum(one.bytes for one, fate in zip(self.tensors, fates, strict=True) if fate == Fate.SAVED),
            host=sum(one.on_host for one, fate in zip(self.tensors, fates, strict=True) if fate == Fate.OFFLOADED),
        )

    def _unit(self, values: NDArray[np.float64]) -> float:
        """The largest, by which the solver's tolerances count."""
        return float(np.abs(values).max()) or 1.0

    def _kept_or_computed(self) -> list[LinearConstraint]:
        count, rows, least = len(self.tensors), list[NDArray[np.float64]](), list[float]()
        for at, tensor in enumerate(self.tensors):
            if tensor.read:
                rows.append(self._at_hand(at))
                least.append(1.0)
            for source in tensor.inputs:
                row = self._at_hand(source)
                row[2 * count + at] -= 1
                rows.append(row)
                least.append(0.0)
        return [LinearConstraint(np.array(rows), lb=np.array(least))] if rows else []

    def _at_hand(self, at: int) -> NDArray[np.float64]:
        count = len(self.tensors)
        row = np.zeros(3 * count + 2)
        row[[at, count + at, 2 * count + at]] = 1
        return row

    def _once(self) -> LinearConstraint:
        count = len(self.tensors)
        return LinearConstraint(np.hstack([np.eye(count), np.eye(count), np.zeros((count, count + 2))]), ub=1)

    def _within(self, sizes: NDArray[np.float64], budget: float) -> LinearConstraint:
        unit = self._unit(sizes)
        return LinearConstraint(self.bytes[None] / unit, ub=budget / unit)

    def _exposed(self, copies: Copies) -> list[LinearConstraint]:
        count, found = len(self.tensors), []
        for exposed, window in ((-2, copies.forward), (-1, copies.backward)):
            row = np.zeros(3 * count + 2)
            row[count : 2 * count], row[exposed] = [copies.seconds(tensor) for tensor in self.tensors], -1
            unit = self._unit(row[:-2])
            found.append(LinearConstraint(row[None] / unit, ub=window / unit))
        return found


def seconds_of(tensors: Sequence[Tensor], fates: Sequence[Fate], copies: Copies | None = None) -> float:
    """Seconds that a choice costs: what is needed and not kept is computed again, once."""
    needed = [tensor.read for tensor in tensors]
    total = 0.0
    for at in reversed(range(len(tensors))):  # inputs come before
        if needed[at] and fates[at] == Fate.RECOMPUTED:
            total += tensors[at].seconds
            for source in tensors[at].inputs:
                needed[source] = True
    if copies:
        away = (tensor for tensor, own in zip(tensors, fates, strict=True) if own == Fate.OFFLOADED)
        travel = sum(map(copies.seconds, away))
        total += max(travel - copies.forward, 0.0) + max(travel - copies.backward, 0.0)
    return total
