"""Trees as {dotted path: value}, in the old names, as they are recorded, digested and compared."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from renamed import Names

Leaf = str | int | float | bool | None
Flat = dict[str, Leaf]

PROSE = {"why", "name", "names", "source", "sample", "message"}
"""Keys of text for people: only its numbers are recorded, at `path#`."""

LEFT_OUT = {"sources"}
"""Keys of text that is no result."""

LONG = 16
"""Lists of more numbers than this are recorded as one digest."""

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
"""A number on its own: not the digits of 1f1b or h100x8x8."""


def flatten(tree: object, names: Names) -> Flat:
    """The leaves of a tree that was read from JSON, by old path."""
    flat: Flat = {}
    for path, value in leaves(tree):
        old = names.old_key(path)
        keys = [part for part in old.split(".") if not part.isdigit()]
        if LEFT_OUT & set(keys):
            continue
        if keys and keys[-1] in PROSE and isinstance(value, str):
            flat[f"{old}#"] = numbers_in(value)
        else:
            flat[old] = names.old_word(old, value)
    return flat


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """(dotted path, value) of all leaves; empty lists and dicts are leaves, and long lists of numbers are one."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple) and len(tree) > LONG and all(isinstance(each, int | float) for each in tree):
        yield path, f"{len(tree)} numbers, sha256 {digest_of(list(tree))}"
    elif isinstance(tree, list | tuple) and tree:
        for position, value in enumerate(tree):
            yield from leaves(value, f"{path}.{position}" if path else str(position))
    elif isinstance(tree, Mapping | list | tuple):
        yield path, "empty"
    else:
        yield path, tree  # type: ignore[misc]


def plain_leaves(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of all leaves, unchanged; `nested` is the inverse."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from plain_leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and tree:
        for position, value in enumerate(tree):
            yield from plain_leaves(value, f"{path}.{position}")
    else:
        yield path, tree


def nested(flat: Mapping[str, Any]) -> Any:
    """The tree of these leaves; a dict whose keys are all positions becomes a list."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return _with_lists(tree)


def spelled(tree: object, names: Names) -> Any:
    """A tree of JSON in the old names, translated into the names of this tree."""
    return nested({names.key(path): names.word(path, value) for path, value in plain_leaves(tree)})


def numbers_in(text: str) -> str:
    """All numbers of a text, in order."""
    return " ".join(NUMBER.findall(text))


def digest_of(value: object) -> str:
    """A digest of anything that JSON can write, to the last digit of floats."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    return list(values.values()) if values and all(key.isdigit() for key in values) else values
