"""What `jhpt profile` measured on this machine, found again without asking a device, so without jax.

A measured profile is the analytic one with other seconds (`jhpt.training.profiling.assemble`).  It is of the configured
model if everything else agrees.
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
    """This machine as it was last measured, or None."""
    own = f"{platform.node() or 'local'}: "  # a home folder may be that of several machines
    for path in _newest("clusters", "cluster.json"):
        try:
            cluster = load_cluster(path)
        except InputError:  # of another version
            continue
        if cluster.name.startswith(own):
            return cluster
    return None


def local_profile(config: Config, device: str) -> ModelProfile | None:
    """The last measured profile of the configured model on a device of this name, or None."""
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
    own = analytic_profile(config, nominal, profile.dtype)
    alike = ("layers", "state", "products")
    return all(getattr(own, name) == getattr(profile, name) for name in alike) and _untimed(own) == _untimed(profile)


def _untimed(profile: ModelProfile) -> dict[str, LayerKind]:
    return {name: kind.model_copy(update={"timings": ()}) for name, kind in profile.kinds.items()}


def _newest(folder: str, name: str) -> list[Path]:
    return sorted((cache_folder() / folder).glob(f"*/{name}"), key=lambda path: path.stat().st_mtime, reverse=True)
