"""Reads profiles from files: those of other tools, jhpt's own, and what `jhpt profile` measured on this machine.

`pipedream` and `piper` document what is read from a file of these tools, in which units, and what is dropped.  `graph`
turns their graphs into rows of layers.

A measured profile is the analytic one with measured seconds (`jhpt.training.profiling.assemble`).  It is a profile of
the configured model if everything else agrees.  No jax is needed to read it from the cache.
"""

import platform
from pathlib import Path
from typing import Any

from jhpt.core.cluster import Cluster, Device, load_cluster, parse
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.folders import cache_folder
from jhpt.core.plausible import cluster_faults, profile_faults
from jhpt.core.profile import LayerKind, ModelProfile, load_profile
from jhpt.core.text_files import read_text, tree_of
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.importers import pipedream, piper

FORMATS = (
    "a jhpt profile (JSON or YAML with `kinds` and `layers`), a PipeDream graph.txt (lines `node1 -- description -- "
    "forward_compute_time=...`) or a Piper input (JSON with `nodes` and `edges`)"
)


def read_profile(path: str | Path) -> ModelProfile:
    """The profile in a file of any known format, recognized by its content.

    Raises:
      InputError: the file is not a valid profile; the message names the fault.
    """
    path = Path(path)
    text = _read(path)
    if pipedream.looks_like(text):
        return pipedream.read(text, path)
    tree = _tree(text, path)
    keys = set(tree) if isinstance(tree, dict) else set()
    ours, theirs = bool(keys & {"kinds", "layers"}), keys >= {"nodes", "edges"}
    if ours and theirs:
        raise InputError(f"{path} mixes a jhpt profile (kinds, layers) with a Piper input (nodes, edges); keep one")
    if ours:
        return parse(ModelProfile, tree, path)
    if theirs:
        return piper.read(tree, path)
    content = f"the keys {sorted(map(str, keys))}" if keys else f"a {type(tree).__name__}"
    raise InputError(f"{path} is not a profile: it holds {content}; expected {FORMATS}")


def _read(path: Path) -> str:
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not text.strip():
        raise InputError(f"{path} is empty; expected {FORMATS}")
    return text


def _tree(text: str, path: Path) -> Any:
    try:
        return tree_of(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def local_cluster() -> Cluster | None:
    """This machine as last measured; None if it never was, or only with results that cannot be right."""
    prefix = f"{platform.node() or 'local'}: "  # several machines may share a home folder
    for path in _newest("clusters", "cluster.json"):
        try:
            cluster = load_cluster(path)
        except InputError:  # written by another version
            continue
        if cluster.name.startswith(prefix) and not cluster_faults(cluster):
            return cluster
    return None


def local_profile(config: Config, device: str) -> ModelProfile | None:
    """The most recent measured profile of the configured model on a device of this name; None if there is none.

    One that cannot be right counts as none.
    """
    for path in _newest("profiles", "profile.json"):
        try:
            profile = load_profile(path)
        except InputError:
            continue
        if profile.device == device and is_of(profile, config) and not profile_faults(profile):
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
