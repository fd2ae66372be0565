"""Which processes share a host, and so are one node of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jhpt.core.host import host_identity, machine_identity
from jhpt.sharding.gather import gathered


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The processes by host, and who shares this machine's memory.

    nodes: the indices of the processes of each node, in a row.  A node is a host; but if the processes of a host do not
      follow each other, so that the devices of a stage or of a tensor group would be spread over hosts, each process
      is a node.
    here: the processes on this machine.  nodes_here: number of nodes on it, more than one if hosts are emulated.
    """

    nodes: tuple[tuple[int, ...], ...]
    here: tuple[int, ...]
    nodes_here: int


def hosts() -> Hosts:
    """The hosts of this run.  All processes must call this."""
    if jax.process_count() == 1:
        return grouped([(0, 0)], 0)
    mine = np.array([machine_identity(), host_identity()], np.uint64)
    return grouped([(int(machine), int(host)) for machine, host in gathered(mine)], jax.process_index())


def grouped(identities: Sequence[tuple[int, int]], rank: int) -> Hosts:
    """The hosts of processes with these identities (machine, host), as process `rank` sees them."""
    by_host: dict[tuple[int, int], list[int]] = {}
    for process, identity in enumerate(identities):
        by_host.setdefault(identity, []).append(process)
    nodes = tuple(map(tuple, by_host.values()))
    if any(node[-1] - node[0] >= len(node) for node in nodes):
        nodes = tuple((process,) for process in range(len(identities)))
    here = tuple(process for process, (machine, _) in enumerate(identities) if machine == identities[rank][0])
    return Hosts(nodes=nodes, here=here, nodes_here=sum(node[0] in here for node in nodes))


def processes_here() -> int:
    """Number of processes that share this machine's memory.  All processes must call this."""
    return len(hosts().here)
