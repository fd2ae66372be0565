"""Reads profiles of other tools as `ModelProfile`: PipeDream's `graph.txt`, Piper's JSON, and jhpt's own files.

`graph` turns profiled graphs into rows of layers; `pipedream` and `piper` document what is read from a file, in which
units, and what is dropped.
"""

import json
from pathlib import Path
from typing import Any

from jhpt.core.cluster import parse, read_tree
from jhpt.core.errors import InputError
from jhpt.core.profile import ModelProfile
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not text.strip():
        raise InputError(f"{path} is empty; expected {FORMATS}")
    return text


def _tree(text: str, path: Path) -> Any:
    # JSON first: YAML 1.1 takes 1e-05, which JSON writers print, for a string, and is far slower.
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return read_tree(path)
