"""The network between the nodes of a cluster, measured by all processes."""

import jax
import numpy as np

from jhpt.core.cluster import Cluster, Curve, Link
from jhpt.measure.probe import ring_link
from jhpt.sharding.gather import gathered

ROUNDS = 5
"""Samples of each size."""


def spanning(node: Cluster) -> Cluster:
    """A cluster of as many nodes like `node` as there are processes, with the network measured between them.

    Every process counts as a node.  All processes must call this, and all get the same cluster.
    """
    count = jax.process_count()
    if count == 1:
        return node
    by_process = [next(d for d in jax.devices() if d.process_index == index) for index in range(count)]
    link = _of_main(ring_link(by_process, ROUNDS))
    nodes = tuple(one.model_copy(update={"count": count}) for one in node.nodes)
    sources = node.sources | {"network": f"measured: all-reduce over {count} processes, read as a ring"}
    return node.model_copy(update={"nodes": nodes, "network": link, "sources": sources})


def _of_main(link: Link) -> Link:
    """The link that the main process has measured, for all processes."""
    assert link.measured is not None
    figures = np.array([link.bandwidth, link.latency, *link.measured.sizes, *link.measured.values], np.float64)
    bandwidth, latency, *curve = gathered(figures)[0].tolist()
    half = len(curve) // 2
    return Link(
        bandwidth=bandwidth, latency=latency, measured=Curve(sizes=tuple(curve[:half]), values=tuple(curve[half:]))
    )
