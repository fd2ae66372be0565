"""Inside a stage: which layers use its devices as data ranks, and which as tensor ranks; exact over all assignments.

Layers are visited from last to first, as gradients appear.  A label is what a partial assignment costs,

    (forward, backward, errors, reduced, update, saved bytes, working bytes)

A step's time grows in each of these, and they only grow.  So a label that is nowhere better than another one with the
same degree at its first layer can be dropped (Hansen's label setting; exact).  The labels that remain at the first
layer are all assignments that can be part of an optimal plan.  `errors` and `reduced` carry the gradient stream of
`layers.sync_seconds`: reduced = max(reduced, errors) + gradients of the layer.

A `Group` stands for assignments that are nearly alike until it matters which of them a stage takes.  A step's time
grows in every stage's forward, backward, sync and update seconds.  So an assignment with the least of each over a group
stands for all of it: no plan with a member is faster than the one with this stand-in.  In stages that are not the
slowest hardly anything depends on the choice, and most groups are never opened.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jhpt.planner.cost.layers import LayerCosts, LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.places import Place
from jhpt.planner.cost.schedule import Array

PAIRWISE = 256
"""Up to so many labels are compared all with each other, which is faster than one after the other."""

EARLIER = ~np.tri(PAIRWISE, dtype=bool)
"""[i, j] whether i comes before j."""

SHARES, PRICES = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Weights of the first of two bounds, and prices of a byte, in seconds of the whole step per memory of a device."""

FORWARD, BACKWARD, ERRORS, REDUCED, UPDATE, SAVED, WORKING, LEAVING = range(8)


@dataclass(frozen=True)
class Option:
    """One way to run a stage: its terms and the degree of every layer."""

    forward: float
    backward: float
    sync: float
    update: float
    degrees: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """Which degrees the layers [first, stop) of a stage should have.  slots: micro-batches in flight."""

    place: Place
    strategy: LayerStrategy
    first: int
    stop: int
    slots: int
    micro_batches: int
    degrees: tuple[int, ...]
    """What layers choose from."""
    in_pipeline: bool
    shared: int | None = None
    """The degree of the two layers that share a parameter; None: each chooses its own."""


def chains(degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """The largest sets of degrees, ascending, each of which divides the next."""

    def grown(chain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        above = [t for t in degrees if not chain or (t > chain[-1] and t % chain[-1] == 0)]
        nearest = [t for t in above if not any(t % u == 0 and u < t for u in above)]
        if not nearest:
            yield chain
        for t in nearest:
            yield from grown((*chain, t))

    return list(grown(()))


def costs_at(question: Question, model: CostModel) -> dict[int, LayerCosts]:
    """The tables of every degree, infinite where the question rules a degree out."""
    tables = {t: model.layer_costs(question.place, t, question.strategy) for t in question.degrees}
    if question.shared is None or model.tied_layer is None:
        return tables
    one_table = np.isin(np.arange(model.num_layers), [0, model.tied_layer])
    return {
        t: costs if t == question.shared else replace(costs, forward=np.where(one_table, np.inf, costs.forward))
        for t, costs in tables.items()
    }


def options(question: Question, model: CostModel, cap: int, limit: float = np.inf) -> tuple[list[Option], float]:
    """The undominated options that fit, and a lower bound of those that are missing.

    Options are missing, and the bound is finite, if a layer had more than `cap` labels.

    Args:
      limit: options with which the stage takes this many seconds for a step, or more, are left out.
    """
    degrees, costs = question.degrees, costs_at(question, model)
    rest = _Rest(question, list(costs.values()))
    if rest.seconds(np.zeros((1, 8)), question.stop)[0] >= limit:
        return [], np.inf
    missing = np.inf
    fronts: dict[int, Array] = {}
    history: list[dict[int, npt.NDArray[np.int64]]] = []
    for layer in reversed(range(question.first, question.stop)):
        grown: dict[int, Array] = {}
        origins: dict[int, npt.NDArray[np.int64]] = {}
        for t in (t for t in degrees if model.allowed(layer, t)):
            labels, origin = _extended(fronts, layer, t, costs, question, model)
            keep = np.flatnonzero(rest.allows(labels, layer, limit))
            labels, origin = labels[keep], origin[keep]
            keep = _undominated(rest.criteria(labels))
            labels, origin = labels[keep], origin[keep]
            if len(labels) > cap:
                seconds = rest.seconds(labels, layer)
                order = np.argsort(seconds, kind="stable")
                missing = min(missing, float(seconds[order[cap]]))
                labels, origin = labels[order[:cap]], origin[order[:cap]]
            if len(labels):
                grown[t], origins[t] = labels, origin
        fronts = grown
        history.append(origins)
    dispatch = model.stage_dispatch if question.strategy.program == "per_stage" else 0.0
    return _collect(fronts, history, rest, dispatch), missing


class _Rest:
    """The least costs of the layers that have not been visited, and which labels are therefore worth keeping.

    A step takes at least M F + (M-1) B + update + reduced, and at least M (F + B) + update.  So any weighted mean of
    the two is a bound; and what fits takes no less than this mean plus a price for every byte that it takes, minus the
    price of all bytes there are (Lagrange).  Every layer takes its least of such a sum, and the largest bound counts.
    """

    def __init__(self, question: Question, tables: list[LayerCosts]) -> None:
        m, span = question.micro_batches, slice(question.first, question.stop)
        self.question, self.first = question, question.first
        f = np.array([c.forward + c.forward_tensor for c in tables])[:, span]
        b = np.array([c.backward + c.backward_tensor for c in tables])[:, span]
        gradients = np.array([c.gradients for c in tables])[:, span]
        steps = m * f + (m - 1) * b + np.array([c.update for c in tables])[:, span]
        saved = np.array([c.state + question.slots * c.activations for c in tables])[:, span]
        self.saved = _from_first(saved.min(axis=0))
        whole = float((steps + b).min(axis=0).sum())
        price = whole / question.place.memory if np.isfinite(whole) else 0.0
        pairs = [(share, price * times) for share in SHARES for times in PRICES]
        self.share, self.price = (np.array(column) for column in zip(*pairs, strict=True))
        sums = [steps + share * gradients + (1 - share) * b + cost * saved for share, cost in pairs]
        self.least = np.stack([_from_first(total.min(axis=0)) for total in sums], axis=1)  # [layers + 1, pairs]
        most = saved.max(axis=0).sum() + max(c.working[span].max() for c in tables)
        # If there is room for twice the largest assignment (transfers and tied copies included), bytes do not matter.
        self.roomy = 2 * most <= question.place.memory and not question.in_pipeline

    def seconds(self, labels: Array, layer: int) -> Array:
        """Least seconds of a step of the stage, with the layers before `layer` at their best."""
        m = self.question.micro_batches
        steps = m * labels[:, FORWARD] + (m - 1) * labels[:, BACKWARD] + labels[:, UPDATE]
        free = self.question.place.memory - labels[:, SAVED] - labels[:, WORKING]
        means = self.share * labels[:, REDUCED, None] + (1 - self.share) * labels[:, BACKWARD, None]
        totals = means - self.price * free[:, None] + self.least[layer - self.first]
        return steps + totals.max(axis=1)

    def allows(self, labels: Array, layer: int, limit: float) -> npt.NDArray[np.bool_]:
        """Whether a label can still fit its devices and stay below `limit`."""
        seconds = self.seconds(labels, layer)
        room = labels[:, SAVED] + labels[:, WORKING] + self.saved[layer - self.first]
        fits = room <= self.question.place.memory * (1 + 1e-12)
        if layer == self.first:
            fits = labels[:, SAVED] + labels[:, WORKING] <= self.question.place.memory
        return fits & (seconds < limit) & np.isfinite(seconds)

    def criteria(self, labels: Array) -> Array:
        """What decides between labels.

        A stage alone takes M forward + (M-1) backward + update, followed by the stream of gradients.
        """
        if self.question.in_pipeline:
            return labels
        m = self.question.micro_batches
        reshard = labels[:, BACKWARD] - labels[:, ERRORS]
        alone = m * labels[:, FORWARD] + (m - 1) * labels[:, BACKWARD] + labels[:, UPDATE] + reshard
        columns = [alone, labels[:, ERRORS], labels[:, REDUCED]]
        return np.stack(columns if self.roomy else [*columns, labels[:, SAVED], labels[:, WORKING]], axis=1)


def _from_first(values: Array) -> Array:
    """[layers + 1] sums over the first 0, 1, ... layers."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _extended(
    fronts: dict[int, Array], layer: int, t: int, tables: dict[int, LayerCosts], question: Question, model: CostModel
) -> tuple[Array, npt.NDArray[np.int64]]:
    """The labels extended by `layer` at degree t, and for each the (degree, index) of the label it extends."""
    costs = tables[t]
    if layer == question.stop - 1:
        start, origin = np.zeros((1, 8)), np.array([[0, 0]])
        start[:, LEAVING] = t if question.stop < model.num_layers else 0
    elif not fronts:
        return np.zeros((0, 8)), np.zeros((0, 2), np.int64)
    else:
        parts, origins = [], []
        for after, labels in fronts.items():
            moved = labels.copy()
            strategy = question.strategy
            both = model.reshard_seconds(
                question.place, layer, t, after, strategy.micro_batch, sequence=strategy.sequence
            )
            moved[:, [FORWARD, BACKWARD]] += both / 2
            if after != t:  # sample chunks do not continue from one layer to the other
                moved[:, FORWARD] += tables[after].forward_filling[layer + 1]
                moved[:, [BACKWARD, ERRORS]] += costs.backward_filling[layer]
            parts.append(moved)
            origins.append(np.stack([np.full(len(labels), after), np.arange(len(labels))], axis=1))
        start, origin = np.concatenate(parts), np.concatenate(origins)
    errors = costs.backward[layer] + costs.backward_tensor[layer]
    start[:, FORWARD] += costs.forward[layer] + costs.forward_tensor[layer]
    start[:, BACKWARD] += errors
    start[:, ERRORS] += errors
    start[:, REDUCED] = np.maximum(start[:, REDUCED], start[:, ERRORS]) + costs.gradients[layer]
    start[:, UPDATE] += costs.update[layer]
    start[:, SAVED] += costs.state[layer] + question.slots * costs.activations[layer]
    start[:, WORKING] = np.maximum(start[:, WORKING], costs.working[layer])
    if question.in_pipeline:
        _add_ends(start, layer, t, costs, question, model)
    return start, origin


def _add_ends(start: Array, layer: int, t: int, costs: LayerCosts, question: Question, model: CostModel) -> None:
    """Adds transfer buffers, counted at the first layer's degree, and a tied parameter's second copy and its sum."""
    last, tied = model.num_layers - 1, model.tied_layer
    if tied is not None and layer == tied and question.first > 0:
        start[:, SAVED] += costs.tied_bytes[tied]
        start[:, UPDATE] += costs.tied[tied] + costs.tied_update[tied]
    if tied is not None and layer == 0 and question.stop <= tied:
        start[:, UPDATE] += costs.tied[tied]
    if layer == question.first:
        local = -(-question.strategy.micro_batch * t // question.place.devices)
        received = model.boundary[layer - 1] if layer else 0.0
        sent = model.boundary[question.stop - 1] if question.stop <= last else 0.0
        start[:, SAVED] += 2 * local * (received + sent)


def _undominated(labels: Array) -> npt.NDArray[np.int64]:
    """Indices of the labels for which no other label is as good in everything; of equal labels the first."""
    order = np.lexsort(labels.T[::-1])
    if len(labels) <= PAIRWISE:
        ordered = labels[order]
        as_good = EARLIER[: len(order), : len(order)].copy()
        for column in ordered.T:
            as_good &= column[:, None] <= column[None, :]
        return np.sort(order[~as_good.any(axis=0)])
    best, count = np.empty_like(labels), 0
    kept = []
    for index in order:
        if not (best[:count] <= labels[index]).all(axis=1).any():
            best[count] = labels[index]
            count += 1
            kept.append(int(index))
    return np.array(sorted(kept), dtype=np.int64)


def _collect(
    fronts: dict[int, Array], history: list[dict[int, npt.NDArray[np.int64]]], rest: _Rest, dispatch: float
) -> list[Option]:
    entries = [(t, index) for t in fronts for index in range(len(fronts[t]))]
    if not entries:
        return []
    labels = np.array([fronts[t][index] for t, index in entries])
    collected = []
    criteria = rest.criteria(labels)
    if rest.question.first:  # a higher degree of the first layer makes the transfer to this stage slower
        criteria = np.column_stack([criteria, [t for t, _ in entries]])
    for at in _undominated(criteria):
        t, index = entries[at]
        path = []
        for origins in reversed(history):
            path.append(t)
            t, index = (int(x) for x in origins[t][index])
        forward, backward, errors, reduced, update = (float(x) for x in labels[at][: UPDATE + 1])
        sync = max(backward, reduced + (backward - errors))
        collected.append(Option(forward + dispatch, backward + dispatch, sync + dispatch, update, tuple(path)))
    return collected


@dataclass(frozen=True)
class Group:
    """Options of one stage with the same degrees at both ends, on which transfers depend.

    least: the least forward, backward, sync and update seconds of the members.
    """

    least: Option
    members: tuple[Option, ...]


def single(option: Option) -> Group:
    """A group of one."""
    return Group(option, (option,))


def groups(options: list[Option], m: int, tolerance: float) -> list[Group]:
    """The options grouped, in the order of the seconds that the stage alone takes for a step of m micro-batches.

    An option joins the first group whose least seconds differ from its own by at most `tolerance`, relative.
    """
    collected: list[Group] = []
    for option in sorted(options, key=lambda option: _alone(option, m)):
        for at, group in enumerate(collected):
            joined = _joined(group, option)
            if joined and _alone(option, m) - _alone(joined.least, m) <= tolerance * _alone(option, m):
                collected[at] = joined
                break
        else:
            collected.append(single(option))
    return collected


def _alone(option: Option, m: int) -> float:
    return m * option.forward + (m - 1) * option.backward + option.sync + option.update


def _joined(group: Group, option: Option) -> Group | None:
    least = group.least
    if (least.degrees[0], least.degrees[-1]) != (option.degrees[0], option.degrees[-1]):
        return None
    both = Option(
        forward=min(least.forward, option.forward),
        backward=min(least.backward, option.backward),
        sync=min(least.sync, option.sync),
        update=min(least.update, option.update),
        degrees=least.degrees,
    )
    return Group(both, (*group.members, option))
