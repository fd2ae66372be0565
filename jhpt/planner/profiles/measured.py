"""Profiles and clusters that `jhpt profile` measured on this machine, read from the cache without jax.

A measured profile is the analytic one with measured seconds (`jhpt.training.profiling.assemble`).  It belongs to the
configured model if everything else agrees.
"""

import platform
from pathlib import Path

from jhpt.core.cluster import Cluster, Device, load_cluster
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.folders import cache_folder
from jhpt.core.profile import LayerKind, ModelProfile, load_profile
from jhpt.planner.profiles.analytic import analytic_profile


def local_cluster() -> Cluster | None:
    """This machine as last measured; None if it never was."""
    prefix = f"{platform.node() or 'local'}: "  # several machines may share a home folder
    for path in _newest("clusters", "cluster.json"):
        try:
            cluster = load_cluster(path)
        except InputError:  # written by another version
            continue
        if cluster.name.startswith(prefix):
            return cluster
    return None


def local_profile(config: Config, device: str) -> ModelProfile | None:
    """The most recent measured profile of the configured model on a device of this name; None if there is none."""
    for path in _newest("profiles", "profile.json"):
        try:
            profile = load_profile(path)
        except InputError:
            continue
        if profile.device == device and is_of(profile, config):
            return profile.model_copy(update={"name": config.name})
    return None


def is_of(profile: ModelProfile, config: Config) -> bool:
    """Whether the profile's layers and state are those of the configured model."""
    if config.model.dtype not in ("auto", profile.dtype):
        return False
    nominal = Device(name=profile.device, peak_flops={profile.dtype: 1.0}, memory=1.0, memory_bandwidth=1.0)
    expected = analytic_profile(config, nominal, profile.dtype)
    alike = ("layers", "state", "products")
    return all(getattr(expected, name) == getattr(profile, name) for name in alike) and _untimed(expected) == _untimed(
        profile
    )


def _untimed(profile: ModelProfile) -> dict[str, LayerKind]:
    return {name: kind.model_copy(update={"timings": ()}) for name, kind in profile.kinds.items()}


def _newest(folder: str, name: str) -> list[Path]:
    return sorted((cache_folder() / folder).glob(f"*/{name}"), key=lambda path: path.stat().st_mtime, reverse=True)
