"""The orders in which a pipeline may pass the nodes of a cluster.

Nodes of one kind are interchangeable, so an order of nodes is an order of kinds: a row has all nodes of one kind, then
all nodes of another, and so on.  As stages may leave nodes idle (`Places.starts`), the rows hold every choice of nodes
too.  They do not depend on the order in which the cluster lists its nodes.

A cluster of k kinds has k! rows.  Of more than `MOST_ROWS` only so many count: the one with the fastest kinds first,
the one with the slowest first, and then those that begin with the fastest ones.
"""

import itertools
import math
from dataclasses import dataclass

from jhpt.core.cluster import Node
from jhpt.core.plan import Chunk, Stage
from jhpt.planner.cost.model import CostModel

MOST_ROWS = 24
"""Rows of a cluster at most: all those of 4 kinds of nodes."""


@dataclass(frozen=True)
class Row:
    """The devices of a cluster in the order in which stages take them.

    model: costs on the cluster with its nodes in this order.  listed: costs on the cluster as it is given.  numbers:
    [K] of the devices, in the cluster as it is given.
    """

    model: CostModel
    listed: CostModel
    numbers: tuple[int, ...]

    def stage(self, device: int, devices: int, chunk: Chunk) -> Stage:
        """The stage on `devices` devices of the row, the first of which is `device`, by their numbers."""
        members = self.numbers[device : device + devices]
        neighbours = members == tuple(range(members[0], members[0] + devices))
        return Stage(device=members[0], devices=devices, apart=None if neighbours else members, chunks=(chunk,))


def rows(model: CostModel) -> list[Row]:
    """The rows of a cluster; one if all nodes are of one kind."""
    if not model.cluster.mixed:
        return [Row(model, model, tuple(range(model.cluster.num_devices)))]
    rank = {device.rates: at for at, device in enumerate(model.places.kinds)}
    kinds = sorted(
        {node.kind: rank[node.device.rates] for node in model.cluster.nodes}.items(), key=lambda kind: kind[::-1]
    )
    fastest_first = tuple(kind for kind, _ in kinds)
    orders = dict.fromkeys(
        itertools.chain(
            [fastest_first, fastest_first[::-1]], itertools.islice(itertools.permutations(fastest_first), MOST_ROWS)
        )
    )
    return [_row(model, order) for order in itertools.islice(orders, MOST_ROWS)]


def left_out(model: CostModel) -> int:
    """How many orders of the kinds of nodes have no row."""
    return max(0, math.factorial(len({node.kind for node in model.cluster.nodes})) - MOST_ROWS)


def _row(model: CostModel, order: tuple[str, ...]) -> Row:
    """The row with the kinds of nodes in this order."""
    nodes: dict[str, Node] = {}
    numbers: dict[str, list[int]] = {kind: [] for kind in order}
    for node, first in zip(model.places.nodes, model.places.first_device, strict=True):
        kind = node.kind
        nodes.setdefault(kind, node)
        numbers[kind] += range(first, first + node.devices)
    arranged = tuple(
        nodes[kind].model_copy(update={"count": len(numbers[kind]) // nodes[kind].devices}) for kind in order
    )
    cluster = model.cluster.model_copy(update={"nodes": arranged})
    return Row(model.on(cluster), model, tuple(number for kind in order for number in numbers[kind]))
