"""Inside a stage: which layers use its devices as data, which as tensor ranks; exact over all assignments.

Layers are visited from last to first, as gradients appear.  A label is what a partial assignment costs,

    (forward, backward, errors, reduced, update, kept bytes, working bytes)

all of which only grow, and a step's time grows in each.  So a label that is nowhere better than another of the same
degree at its front can be dropped (Hansen's label setting; exact), and what remains at the first layer is every
assignment that can be part of an optimal plan.  `errors` and `reduced` carry the gradient stream of `estimate.sync_seconds`:
reduced = max(reduced, errors) + gradients of the layer.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jhpt.planner.costs import CostModel, LayerCosts, Treatment
from jhpt.planner.placement import Place
from jhpt.planner.schedule import Array

FORWARD, BACKWARD, ERRORS, REDUCED, UPDATE, KEPT, WORKING = range(7)


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
    """One stage: layers [first, stop) at a place, with so many micro-batches in flight."""

    place: Place
    treatment: Treatment
    first: int
    stop: int
    slots: int
    micro_batches: int
    even: bool
    """Whether the data degree must divide the micro-batch."""
    piped: bool


def options(question: Question, model: CostModel, cap: int) -> tuple[list[Option], bool]:
    """Undominated options that fit, and whether all are there (no more than `cap` labels had to be kept)."""
    place, treatment = question.place, question.treatment
    degrees = [
        t
        for t in model.degrees(place.devices)
        if not question.even or treatment.micro_batch % (place.devices // t) == 0
    ]
    costs = {t: model.layer_costs(place, t, treatment) for t in degrees}
    complete = True
    fronts: dict[int, Array] = {}
    history: list[dict[int, npt.NDArray[np.int64]]] = []
    for layer in reversed(range(question.first, question.stop)):
        grown: dict[int, Array] = {}
        came: dict[int, npt.NDArray[np.int64]] = {}
        for t in (t for t in degrees if model.allowed(layer, t)):
            labels, origin = _extended(fronts, layer, t, costs[t], question, model)
            keep = _undominated(labels)
            labels, origin = labels[keep], origin[keep]
            labels, origin = _fitting(labels, origin, place.memory)
            if len(labels) > cap:
                complete = False
                best = np.argsort(_rank(labels, question.micro_batches), kind="stable")[:cap]
                labels, origin = labels[best], origin[best]
            if len(labels):
                grown[t], came[t] = labels, origin
        fronts = grown
        history.append(came)
    return _collect(fronts, history, degrees), complete


def _extended(
    fronts: dict[int, Array], layer: int, t: int, costs: LayerCosts, question: Question, model: CostModel
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Labels with `layer` at degree t put before them; origin: (degree, index) of the label each came from."""
    if layer == question.stop - 1:
        start, origin = np.zeros((1, 7)), np.array([[0, 0]])
    elif not fronts:
        return np.zeros((0, 7)), np.zeros((0, 2), np.int64)
    else:
        parts, origins = [], []
        for after, labels in fronts.items():
            moved = labels.copy()
            reshard = model.reshard_seconds(question.place, layer, t, after, question.treatment.micro_batch) / 2
            moved[:, [FORWARD, BACKWARD]] += reshard
            parts.append(moved)
            origins.append(np.stack([np.full(len(labels), after), np.arange(len(labels))], axis=1))
        start, origin = np.concatenate(parts), np.concatenate(origins)
    errors = costs.backward[layer] + costs.backward_tensor[layer]
    start[:, FORWARD] += costs.forward[layer] + costs.forward_tensor[layer]
    start[:, BACKWARD] += errors
    start[:, ERRORS] += errors
    start[:, REDUCED] = np.maximum(start[:, REDUCED], start[:, ERRORS]) + costs.gradients[layer]
    start[:, UPDATE] += costs.update[layer]
    start[:, KEPT] += costs.state[layer] + question.slots * costs.activations[layer]
    start[:, WORKING] = np.maximum(start[:, WORKING], costs.working[layer])
    if question.piped:
        _add_ends(start, layer, t, costs, question, model)
    return start, origin


def _add_ends(start: Array, layer: int, t: int, costs: LayerCosts, question: Question, model: CostModel) -> None:
    """Transfer buffers, counted at the first layer's degree; a tied parameter's second copy and its sum."""
    last = model.num_layers - 1
    if layer == last:
        start[:, KEPT] += costs.tied_bytes[last]
        start[:, UPDATE] += costs.tied[last]
    if layer == 0:
        start[:, UPDATE] += costs.tied[last]
    if layer == question.first:
        local = -(-question.treatment.micro_batch * t // question.place.devices)
        come = model.boundary[layer - 1] if layer else 0.0
        leave = model.boundary[question.stop - 1] if question.stop <= last else 0.0
        start[:, KEPT] += 2 * local * (come + leave)


def _undominated(labels: Array) -> npt.NDArray[np.int64]:
    """Indices of labels that no other is at least as good as in everything; of equal ones the first."""
    order = np.lexsort(labels.T[::-1])
    kept: list[int] = []
    for index in order:
        if not kept or not (labels[kept] <= labels[index]).all(axis=1).any():
            kept.append(int(index))
    return np.array(sorted(kept), dtype=np.int64)


def _fitting(labels: Array, origin: npt.NDArray[np.int64], memory: float) -> tuple[Array, npt.NDArray[np.int64]]:
    fits = (labels[:, KEPT] + labels[:, WORKING] <= memory) & np.isfinite(labels[:, FORWARD])
    return labels[fits], origin[fits]


def _rank(labels: Array, micro_batches: int) -> Array:
    steps = micro_batches * labels[:, FORWARD] + (micro_batches - 1) * labels[:, BACKWARD]
    return steps + labels[:, REDUCED] + labels[:, UPDATE]


def _collect(
    fronts: dict[int, Array], history: list[dict[int, npt.NDArray[np.int64]]], degrees: list[int]
) -> list[Option]:
    entries = [(t, index) for t in fronts for index in range(len(fronts[t]))]
    if not entries:
        return []
    labels = np.array([fronts[t][index] for t, index in entries])
    found = []
    for at in _undominated(labels):
        t, index = entries[at]
        path = []
        for came in reversed(history):
            path.append(t)
            t, index = (int(x) for x in came[t][index])
        label = labels[at]
        sync = max(label[BACKWARD], label[REDUCED] + (label[BACKWARD] - label[ERRORS]))
        found.append(Option(*(float(x) for x in (label[FORWARD], label[BACKWARD], sync, label[UPDATE])), tuple(path)))
    return found
