"""The least seconds from a stage to a next one of which only the first device is known.

A receiver of k' devices takes ceil(b / min(d, k')) samples from each of min(k, k') senders, which share the ports of a
node: few receivers make large messages, many make for a crowd at the ports.  All k' that there are devices for count.
"""

import numpy as np

from jhpt.core.cluster import Link
from jhpt.planner.cost.communication import transfer_seconds
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array


class Transfers:
    """Least transfer seconds between stages, for one micro-batch size."""

    def __init__(self, model: CostModel, micro_batch: int) -> None:
        self.model, self.micro_batch = model, micro_batch
        self.places, self.k = model.places, model.cluster.num_devices
        self.sizes, self.which = np.unique(model.boundary, return_inverse=True)
        self._inside: dict[int, Array] = {}
        self._across: dict[int, Array] = {}
        self._known: dict[tuple[int, int, int, int], float] = {}

    def rows(self, offset: int) -> Array:
        """[devices, N] after every layer of stages of 1, 2, ... data parallel devices from `offset`; 0 for the last."""
        index = self.places.node_of[offset]
        node, devices = self.places.nodes[index], np.arange(1, self.k - offset)
        room = self.places.first_device[index] + node.devices - offset - devices
        found = np.zeros((self.k - offset, self.model.num_layers))
        # With d = k everything depends on min(k, k') alone; beyond the node k' may be 1.
        table = np.minimum.accumulate(self._across_table(node.devices))
        found[:-1] = table[np.minimum(devices, self.k - offset - devices) - 1][:, self.which]
        for at in np.flatnonzero(room > 0):
            found[at] = self._within(index, int(devices[at]), int(room[at]), self.k - offset - int(devices[at]))
        found[:, -1] = 0.0
        return found

    def least(self, offset: int, devices: int, data: int, layer: int) -> float:
        """After `layer` at data degree `data`."""
        size = int(self.which[layer])
        key = (offset, devices, data, size)
        if key not in self._known:
            links = (
                (self.places.transfer(offset, devices, offset + devices, to), -(-self.micro_batch // min(data, to)))
                for to in range(1, self.k - offset - devices + 1)
            )
            self._known[key] = min(transfer_seconds(link, float(self.sizes[size]) * local) for link, local in links)
        return self._known[key]

    def _within(self, index: int, devices: int, room: int, left: int) -> Array:
        """[N] where the next stage may lie in the node that this one ends in: on up to `room` devices."""
        best = self._inside_table(index)[: min(devices, room)].min(axis=0)
        if room < left:
            across = self._across_table(self.places.nodes[index].devices)
            best = np.minimum(best, across[min(devices, room + 1) - 1 : min(devices, left)].min(axis=0))
        return best[self.which]

    def _inside_table(self, node: int) -> Array:
        """[min(k, k'), sizes] inside a node."""
        if node not in self._inside:
            inside = self.places.nodes[node]
            self._inside[node] = np.array([self._seconds(inside.inside, 1, q) for q in range(1, inside.devices + 1)])
        return self._inside[node]

    def _across_table(self, per_node: int) -> Array:
        """[min(k, k'), sizes] between nodes."""
        if per_node not in self._across:
            network = self.model.cluster.network
            rows = [self._seconds(network, min(q, per_node), q) for q in range(1, self.k + 1)]
            self._across[per_node] = np.array(rows)
        return self._across[per_node]

    def _seconds(self, link: Link, senders: int, data: int) -> list[float]:
        local = -(-self.micro_batch // data)
        return [transfer_seconds((link, senders), float(size) * local) for size in self.sizes]
