"""What a forward pass saves under a memory budget, in the least time: exactly, for a block or for a chain of layers.

A block: an integer programme (`choose`).  Each tensor of the forward pass is saved on the device, offloaded to the
host, or dropped.  The backward pass recomputes the dropped tensors that it reads, and whatever those are computed from.
Tensor i has b bytes and takes c seconds to compute.  The binary variables are saved s, offloaded o and recomputed r:

    minimise    sum c r  +  e_f  +  e_b
    subject to  s + o + r >= 1                   for every tensor that the backward pass reads
                s_i + o_i + r_i >= r_j           for every input i of a recomputed tensor j
                s + o <= 1                       for every tensor
                s = o = 0                        for tensors without a name, which no policy can save
                sum b s <= device budget,  sum b o <= host budget
                e_f >= sum b o / rate - window_f, e_f >= 0       copies that the forward pass does not hide
                e_b >= sum b o / rate - window_b, e_b >= 0       copies that the backward pass does not hide

A tensor may state the seconds of its own copy, which then replace b / rate.

Among the choices that take the least time, the one with the fewest bytes is returned.  A dynamic programme over a chain
(Chen et al. 2016, arXiv 1604.06174) would not do, because a block is not a chain; the integer programme handles
branches without special cases.

A chain: `choose_in_chain`.  Not called by plans yet; it will choose what each layer saves if layers differ.  A dynamic
programme over the layers finds the fastest choice within one budget.  Every option of a layer has saved bytes, working
bytes that its backward pass needs while it recomputes, and seconds.  With f micro-batches in flight a device holds

    f sum of saved  +  max of working

bytes, and the seconds add up.  For each limit on the working bytes (one of the options' values), the labels
(saved, seconds) of the first layers are extended by the options of the next layer.  A label that another one beats in
both is dropped, because no optimum needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # imports its subpackages when they are used
from numpy.typing import NDArray

from jhpt.core.errors import InputError
from jhpt.planner.cost.activations import Copies, Fate, Tensor, seconds_of

TOLERANCE = 1e-9
"""Relative; smaller differences are rounding."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fate of every tensor.

    seconds: recomputation and exposed copies.  bytes: saved on the device between the passes.  host: offloaded bytes.
    """

    fates: tuple[Fate, ...]
    seconds: float
    bytes: float
    host: float


def choose(tensors: Sequence[Tensor], budget: float, copies: Copies | None = None) -> Choice:
    """The choice of least seconds, and among equals that of fewest bytes on the device (or on the host first, if
    `copies.sparing`).

    Args:
      budget: bytes that the block may save on the device.
      copies: None: nothing is offloaded.

    Raises:
      InputError: the budget is negative.
    """
    if budget < 0:
        raise InputError(f"budget={budget:.0f} bytes for a block's saved tensors is negative; use 0 or more")
    if not tensors:
        return Choice(fates=(), seconds=0.0, bytes=0.0, host=0.0)
    programme = _Programme(tensors, budget, copies)
    fastest = programme.least(programme.seconds)
    allowed = float(programme.seconds @ fastest) * (1 + TOLERANCE) + TOLERANCE * programme.shortest
    return programme.choice(programme.least(programme.room, at_most=allowed))


class _Programme:
    """The integer programme.  Its variables are s, o and r of every tensor, followed by e_f and e_b."""

    def __init__(self, tensors: Sequence[Tensor], budget: float, copies: Copies | None) -> None:
        self.tensors, self.copies, count = tensors, copies, len(tensors)
        sizes, host_sizes, costs = (
            np.array([getattr(tensor, name) for tensor in tensors], float) for name in ("bytes", "on_host", "seconds")
        )
        self.seconds = np.concatenate([np.zeros(2 * count), costs, [1.0, 1.0]])
        self.bytes = np.concatenate([sizes, np.zeros(2 * count + 2)])
        self.offloaded = np.concatenate([np.zeros(count), host_sizes, np.zeros(count + 2)])
        self.room = self.bytes
        if copies and copies.sparing:
            smallest = np.min(host_sizes[host_sizes > 0], initial=np.inf)
            self.room = self.bytes + self.offloaded * (1 + sizes.sum() / smallest)
        self.shortest = float(np.min(costs[costs > 0], initial=np.inf)) if np.any(costs > 0) else 1.0
        named = np.array([tensor.name is not None for tensor in tensors], float)
        may_offload = named if copies else np.zeros(count)
        self.bounds = scipy.optimize.Bounds(0, np.concatenate([named, may_offload, np.ones(count), [np.inf, np.inf]]))
        self.integrality = np.concatenate([np.ones(3 * count), [0, 0]])
        self.constraints = [*self._available(), self._in_one_place(), self._within(sizes, budget)]
        if copies:
            self.constraints += self._exposed(copies)
        if copies and np.isfinite(copies.budget):
            unit = self._unit(host_sizes)
            self.constraints.append(
                scipy.optimize.LinearConstraint(self.offloaded[None] / unit, ub=copies.budget / unit)
            )

    def least(self, objective: Array, at_most: float | None = None) -> Array:
        """The point of least objective.  at_most: bound on its seconds."""
        constraints = self.constraints
        if at_most is not None:
            constraints = [
                *constraints,
                scipy.optimize.LinearConstraint(
                    self.seconds / self._unit(self.seconds), ub=at_most / self._unit(self.seconds)
                ),
            ]
        solution = scipy.optimize.milp(
            objective / self._unit(objective),
            constraints=constraints,
            bounds=self.bounds,
            integrality=self.integrality,
            options={"mip_rel_gap": 0.0},
        )
        assert solution.x is not None, solution.message  # saving nothing is always feasible
        return np.where(self.integrality > 0, np.round(solution.x), solution.x)

    def choice(self, point: Array) -> Choice:
        """The choice that the variables describe.  Tensors that nothing needs count as recomputed, at no cost."""
        count = len(self.tensors)
        saved, offloaded = point[:count] > 0.5, point[count : 2 * count] > 0.5
        fates = tuple(Fate(int(s) + 2 * int(o)) for s, o in zip(saved, offloaded, strict=True))
        pairs = list(zip(self.tensors, fates, strict=True))
        return Choice(
            fates=fates,
            seconds=seconds_of(self.tensors, fates, self.copies),
            bytes=sum(tensor.bytes for tensor, fate in pairs if fate == Fate.SAVED),
            host=sum(tensor.on_host for tensor, fate in pairs if fate == Fate.OFFLOADED),
        )

    def _unit(self, values: Array) -> float:
        """The largest value.  Dividing by it makes the solver's absolute tolerances relative."""
        return float(np.abs(values).max()) or 1.0

    def _available(self) -> list["scipy.optimize.LinearConstraint"]:
        """What the backward pass reads, and the inputs of what it recomputes, are saved, offloaded or recomputed."""
        count, rows, least = len(self.tensors), list[Array](), list[float]()
        for position, tensor in enumerate(self.tensors):
            if tensor.read:
                rows.append(self._present(position))
                least.append(1.0)
            for source in tensor.inputs:
                row = self._present(source)
                row[2 * count + position] -= 1
                rows.append(row)
                least.append(0.0)
        return [scipy.optimize.LinearConstraint(np.array(rows), lb=np.array(least))] if rows else []

    def _present(self, position: int) -> Array:
        count = len(self.tensors)
        row = np.zeros(3 * count + 2)
        row[[position, count + position, 2 * count + position]] = 1
        return row

    def _in_one_place(self) -> "scipy.optimize.LinearConstraint":
        count = len(self.tensors)
        return scipy.optimize.LinearConstraint(
            np.hstack([np.eye(count), np.eye(count), np.zeros((count, count + 2))]), ub=1
        )

    def _within(self, sizes: Array, budget: float) -> "scipy.optimize.LinearConstraint":
        unit = self._unit(sizes)
        return scipy.optimize.LinearConstraint(self.bytes[None] / unit, ub=budget / unit)

    def _exposed(self, copies: Copies) -> list["scipy.optimize.LinearConstraint"]:
        count, constraints = len(self.tensors), []
        for exposed, window in ((-2, copies.forward), (-1, copies.backward)):
            row = np.zeros(3 * count + 2)
            row[count : 2 * count], row[exposed] = [copies.seconds(tensor) for tensor in self.tensors], -1
            unit = self._unit(row[:-2])
            constraints.append(scipy.optimize.LinearConstraint(row[None] / unit, ub=window / unit))
        return constraints


@dataclass(frozen=True, kw_only=True)
class LayerOption:
    """What a layer may save.

    saved: bytes from its forward pass until its backward pass.  working: further bytes during its backward pass.
    seconds: of recomputation.
    """

    saved: float
    working: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ChainChoice:
    """options: position of the option of every layer.  bytes: most bytes at a time."""

    options: tuple[int, ...]
    seconds: float
    bytes: float


def choose_in_chain(layers: Sequence[Sequence[LayerOption]], budget: float, in_flight: int = 1) -> ChainChoice | None:
    """The fastest choice that fits, and among equally fast ones the smallest; None if none fits."""
    limits = sorted({option.working for options in layers for option in options}) or [0.0]
    choices = [choice for limit in limits if (choice := _fastest_within(layers, budget, in_flight, limit))]
    return min(choices, key=lambda choice: (choice.seconds, choice.bytes), default=None)


def _fastest_within(
    layers: Sequence[Sequence[LayerOption]], budget: float, in_flight: int, limit: float
) -> ChainChoice | None:
    """The fastest choice among options whose working bytes are at most `limit`."""
    saved, seconds = np.zeros(1), np.zeros(1)
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []  # label before, option
    for options in layers:
        allowed = [at for at, option in enumerate(options) if option.working <= limit]
        if not allowed:
            return None
        sizes, costs = (np.array([getattr(options[at], name) for at in allowed]) for name in ("saved", "seconds"))
        sums, times = (saved[:, None] + in_flight * sizes).ravel(), (seconds[:, None] + costs).ravel()
        best = _undominated(sums, times)
        best = best[sums[best] + limit <= budget * (1 + 1e-12)]
        if not len(best):
            return None
        saved, seconds = sums[best], times[best]
        before, which = np.divmod(best, len(allowed))
        steps.append((before, np.array(allowed)[which]))
    label = int(np.lexsort((saved, seconds))[0])
    end, chosen = label, list[int]()
    for before, option in reversed(steps):
        chosen.append(int(option[label]))
        label = int(before[label])
    chosen.reverse()
    working = max((options[at].working for options, at in zip(layers, chosen, strict=True)), default=0.0)
    return ChainChoice(options=tuple(chosen), seconds=float(seconds[end]), bytes=float(saved[end]) + working)


def _undominated(sizes: Array, times: Array) -> NDArray[np.intp]:
    """Positions of the labels that no other label beats in both."""
    order = np.lexsort((times, sizes))
    sofar = np.minimum.accumulate(times[order])
    better = np.concatenate([[True], times[order][1:] < sofar[:-1] * (1 - 1e-12)])
    return order[better]
