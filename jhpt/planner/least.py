"""The least that layers can cost on any number of devices, whatever their neighbours do: bounds for `general`."""

from dataclasses import dataclass

import numpy as np

from jhpt.planner.costs import CostModel, Treatment
from jhpt.planner.placement import Place
from jhpt.planner.schedule import Array


@dataclass(frozen=True)
class Least:
    """The least that a layer can cost on 1, 2, ... devices from one offset; [devices, N + 1] sums over first layers."""

    forward: Array
    backward: Array
    both: Array
    until_reduced: Array
    """M forward + (M-1) backward + gradients + update: all of a device's work but the last backward."""
    update: Array
    state: Array
    activations: Array
    working: Array
    """[devices, N], not summed."""
    memory: Array
    """[devices] of the smallest device."""


class Minima:
    """`Least` of every offset, computed once for each class of offsets."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._rows: dict[tuple[Place, Treatment, int], list[Array]] = {}

    def at(self, offset: int, treatment: Treatment, m: int) -> Least:
        """Least costs from `offset` on."""
        model = self.model
        places = [model.places.at(offset, k) for k in range(1, model.cluster.num_devices - offset + 1)]
        rows = [self._row(place, treatment, m) for place in places]
        *summed, kept, working = (np.array(columns)[:, model.index] for columns in zip(*rows, strict=True))
        if treatment.recompute:
            local = np.array([-(-treatment.micro_batch // place.devices) for place in places])
            kept = local[:, None] * model.inputs
        forward, backward, both, until_reduced, update, state, activations = (
            np.pad(np.cumsum(a, axis=1), ((0, 0), (1, 0))) for a in (*summed, kept)
        )
        return Least(
            forward=forward,
            backward=backward,
            both=both,
            until_reduced=until_reduced,
            update=update,
            state=state,
            activations=activations,
            working=working,
            memory=np.array([place.memory for place in places]),
        )

    def _row(self, place: Place, treatment: Treatment, m: int) -> list[Array]:
        """[kinds] of each quantity, in the order of `Least`."""
        key = (place, treatment, m)
        if key not in self._rows:
            tables = [self.model.kind_costs(place, t, treatment) for t in self.model.degrees(place.devices)]
            c = {name: np.array([table[name] for table in tables]) for name in tables[0]}
            f, b = c["forward"] + c["forward_tensor"], c["backward"] + c["backward_tensor"]
            until = m * f + (m - 1) * b + c["gradients"] + c["update"]
            state = c["weights"] + c["optimizer"]
            quantities = (f, b, f + b, until, c["update"], state, c["activations"], c["working"])
            self._rows[key] = [quantity.min(axis=0) for quantity in quantities]
        return self._rows[key]

    def device_seconds(self, treatment: Treatment) -> Array:
        """[N] least k x seconds of computing a layer's micro-batch on any number k of devices."""
        model, least = self.model, np.full(len(self.model.kinds), np.inf)
        fastest = min(model.places.slow)
        for devices in range(1, model.cluster.num_devices + 1):
            for t in model.degrees(devices):
                forward, backward = model.compute_seconds(-(-treatment.micro_batch * t // devices), t)
                busy = fastest * devices * (forward * (2 if treatment.recompute else 1) + backward)
                least = np.minimum(least, busy)
        return least[model.index]
