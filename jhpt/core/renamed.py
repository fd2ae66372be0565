"""Keys that were renamed: files of earlier versions are still read, and a message names the new key for an old one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jhpt.core.errors import InputError

RENAMED_KEYS: Mapping[str, str] = {"parallel.recompute": "memory.recompute"}
"""Settings of a configuration, before and now."""

RENAMED_PLAN_KEYS: Mapping[str, str] = {
    "kept": "saved",
    "offload.what": "offload.kind",
    "offload.at_once": "offload.update_in_backward",
}
"""Keys of a plan, before and now; their values mean the same."""


def with_plan_keys_of_today(tree: Any, path: str | Path) -> Any:
    """The tree of a plan file with the keys that plans have now.

    Raises:
      InputError: the file has a key under both of its names; the message names the file.
    """
    if not isinstance(tree, dict):
        return tree
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for before, now in RENAMED_PLAN_KEYS.items():
        *sections, old = before.split(".")
        section = tree.get(sections[0]) if sections else tree
        new = now.rpartition(".")[2]
        if not isinstance(section, dict) or old not in section:
            continue
        if new in section:
            raise InputError(f"{path}: {before} is now called {now}, and both are there; leave out {before}")
        section[new] = section.pop(old)
    return tree


def with_settings_of_today(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a configuration with the settings of today, where the translation is exact.

    Earlier versions had recomputation as true or false in the section `parallel`.
    """
    parallel, memory = tree.get("parallel"), tree.get("memory")
    memory = {} if memory in (None, "auto") else memory
    if not isinstance(parallel, dict) or not isinstance(before := parallel.get("recompute"), bool):
        return dict(tree)
    rest = {name: value for name, value in parallel.items() if name != "recompute"}
    moved = {"recompute": "full"} | memory if before and isinstance(memory, dict) else memory
    return {**tree, "parallel": rest, "memory": moved}


def new_name(setting: str) -> str | None:
    """What a setting of an earlier version is called now; None: it is no such setting."""
    return RENAMED_KEYS.get(setting)
