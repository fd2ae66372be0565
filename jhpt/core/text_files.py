"""YAML and JSON that people and programs write: read with limits, so that no file can take all memory or time.

Refused beside what is malformed: a key that is given twice, of which YAML would silently take the last; and files that
are far larger, or nested far deeper, than anything that jhpt reads, aliases of YAML written out ("billion laughs").
"""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from jhpt.core.errors import InputError

LARGEST = 1 << 28
"""Bytes of a file; the profile of a model with a thousand layers has a few MB."""

MOST_VALUES = 5_000_000
"""Values in a file, with those that aliases repeat."""

DEEPEST = 100
"""Levels of nesting."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, Hashable) and key in seen:
                raise InputError(f"line {line}: {key!r} is given twice, first in line {seen[key]}; leave one out")
            if isinstance(key, Hashable):
                seen[key] = line
        return super().construct_mapping(node, deep)


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
      InputError: it is no regular file, is larger than `LARGEST`, cannot be read, or is not UTF-8.
      FileNotFoundError: it does not exist.
    """
    place = Path(path)
    try:
        if place.exists() and not place.is_file():
            kind = "a folder" if place.is_dir() else "no regular file"
            raise InputError(f"{path}: cannot be read: it is {kind}; give a YAML or JSON file")
        if (size := place.stat().st_size) > LARGEST:
            raise InputError(
                f"{path}: has {size:,} bytes, and more than {LARGEST:,} are not read; is it the right file?"
            )
        return place.read_text(encoding="utf-8")
    except (FileNotFoundError, InputError):
        raise
    except (OSError, ValueError) as error:  # ValueError: UTF-8, and a path with a zero byte
        raise InputError(f"{path}: cannot be read: {error}; give a readable file of UTF-8 text") from None


def tree_of(text: str) -> Any:
    """The tree in JSON or YAML.

    JSON has a parser of its own because it is faster, and because YAML 1.1 reads 1e-05 as text.

    Raises:
      InputError: malformed, a key twice, too many values or too deep.
    """
    is_json = text.lstrip().startswith("{")
    try:
        tree = json.loads(text) if is_json else yaml.load(text, _Loader)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"nested deeper than {DEEPEST} levels") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:  # dates such as 2026-13-01 among them
        raise InputError(f"not valid {'JSON' if is_json else 'YAML'}: {error}") from None
    values, depth = _extent(tree, {}, 0)
    if depth > DEEPEST:
        raise InputError(f"nested deeper than {DEEPEST} levels")
    if values > MOST_VALUES:
        raise InputError(f"{values:.1e} values, aliases written out, and more than {MOST_VALUES:,} are not read")
    return tree


def _extent(tree: Any, known: dict[int, tuple[int, int]], level: int) -> tuple[int, int]:
    """(values, levels) of a tree; what is shared counts each time, and is looked at once."""
    if not isinstance(tree, dict | list):
        return 1, 0
    if level > 2 * DEEPEST:  # a list that holds itself, too
        return 1, level
    if id(tree) not in known:
        parts = [_extent(part, known, level + 1) for part in (tree.values() if isinstance(tree, dict) else tree)]
        known[id(tree)] = 1 + sum(count for count, _ in parts), 1 + max((deep for _, deep in parts), default=0)
    return known[id(tree)]
