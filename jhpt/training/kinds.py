"""The kinds of devices of a cluster, and the seconds that the processes of a run have measured on each.

Device j of the cluster is device j of jax.  Every process measures the first of its devices.
"""

import itertools

import jax

from jhpt.core.cluster import Cluster, Device
from jhpt.core.profile import ModelProfile
from jhpt.training.processes import texts_of_all


def device_here(cluster: Cluster) -> Device:
    """The cluster's entry for the first device of this process."""
    return _numbered(cluster)[jax.devices().index(jax.local_devices()[0])]


def named_by_driver(cluster: Cluster) -> Cluster:
    """The cluster with its devices named as the driver names them; the catalogue's names may be shorter."""
    first = itertools.accumulate((node.devices * node.count for node in cluster.nodes), initial=0)
    nodes = tuple(
        node.model_copy(
            update={
                "device": node.device.model_copy(
                    update={"name": jax.devices()[number % jax.device_count()].device_kind}
                )
            }
        )
        for node, number in zip(cluster.nodes, first, strict=False)
    )
    return cluster.model_copy(update={"nodes": nodes})


def profiles_by_kind(profile: ModelProfile, cluster: Cluster) -> tuple[ModelProfile, dict[str, ModelProfile]]:
    """(the profile of one kind, those of the others by `Device.rates`), as the planner takes them.

    A kind has the profile of the first process whose first device is of it.  Kinds that are no process's first device
    have none, and the planner scales another's by their figures.  All processes must call this.

    Args:
      profile: what this process has measured.
      cluster: of all devices, named by their drivers.
    """
    texts, numbered, devices = texts_of_all(profile.model_dump_json()), _numbered(cluster), jax.devices()
    found: dict[str, ModelProfile] = {}
    for process, text in enumerate(texts):
        number = next(at for at, device in enumerate(devices) if device.process_index == process)
        kind = numbered[number]
        if kind.rates not in found:
            found[kind.rates] = ModelProfile.model_validate_json(text).model_copy(update={"device": kind.name})
    known = next(iter(found))
    return found.pop(known), found


def _numbered(cluster: Cluster) -> list[Device]:
    """The device of every number."""
    return [node.device for node in cluster.nodes for _ in range(node.devices * node.count)]
