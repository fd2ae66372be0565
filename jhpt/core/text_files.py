"""Text, YAML and JSON that people and programs write: read with limits, so that no file can take all memory or time.

Refused beside what is malformed: a key that is given twice, of which both formats would silently take the last; and
files that are far larger, or nested far deeper, than anything that jhpt reads, aliases of YAML written out ("billion
laughs"); and what is no file at all, such as a pipe, on which reading would wait for ever.
"""

import importlib.resources
import json
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, TextIO

import yaml

from jhpt.core.errors import InputError

LARGEST = 1 << 26
"""Bytes of a file; the profile of a model with a thousand layers has a few MB, the largest tokenizers 35."""

LARGEST_YAML = 1 << 20
"""Characters of YAML, of which a second reads about 100,000."""

LONGEST_LINE = 1 << 27
"""Characters of a line of data."""

MOST_VALUES = 5_000_000
"""Values in a file, with those that aliases repeat."""

DEEPEST = 100
"""Levels of nesting."""

MALFORMED = (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError)
"""What parsers raise; dates such as 2026-13-01 are a ValueError."""


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


def check_file(path: str | Path, wanted: str = "a file") -> None:
    """Refuses what is there and is no file: reading would fail in a folder, and wait for ever on a pipe.

    Raises:
      InputError: it is a folder, a pipe or a device.
      OSError: it cannot be looked at.
    """
    if Path(path).exists() and not Path(path).is_file():
        kind = "a folder" if Path(path).is_dir() else "no regular file"
        raise InputError(f"{path}: cannot be read: it is {kind}; give {wanted}")


def bounded_lines(stream: TextIO) -> Iterator[str]:
    """The lines of a stream, as it gives them itself.

    Raises:
      InputError: a line is longer than `LONGEST_LINE`; no more of it is read.
    """
    while line := stream.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise InputError(f"a line of {getattr(stream, 'name', 'a file')} has {LONGEST_LINE:,} characters or more")
        yield line


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
      InputError: it is no regular file, is larger than `LARGEST`, cannot be read, or is not UTF-8.
      FileNotFoundError: it does not exist.
    """
    place = Path(path)
    try:
        check_file(place, "a YAML or JSON file")
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
    if text.count(",") > MOST_VALUES:  # before they take a hundred bytes each
        raise InputError(f"more than {MOST_VALUES:,} values are not read")
    try:
        tree = json.loads(text, object_pairs_hook=_once) if is_json else _yaml(text)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"nested deeper than {DEEPEST} levels") from None
    except MALFORMED as error:
        raise InputError(f"not valid {'JSON' if is_json else 'YAML'}: {error}") from None
    return _extent_checked(tree)


def _extent_checked(tree: Any) -> Any:
    values, depth = _extent(tree, {}, 0)
    if depth > DEEPEST:
        raise InputError(f"nested deeper than {DEEPEST} levels")
    if values > MOST_VALUES:
        raise InputError(f"{values:.1e} values, aliases written out, and more than {MOST_VALUES:,} are not read")
    return tree


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys must differ."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in tree if names.count(name) > 1)
        raise InputError(f"{twice!r:.80} is given twice; leave one out")
    return tree


def _yaml(text: str) -> Any:
    if len(text) > LARGEST_YAML:
        raise InputError(f"{len(text):,} characters of YAML, and more than {LARGEST_YAML:,} are not read; write JSON")
    return yaml.load(text, _Loader)


def data_of_package(name: str) -> dict[str, Any]:
    """A YAML file of `jhpt.core`, by libyaml where PyYAML has it, which takes a tenth of the time."""
    text = importlib.resources.files("jhpt.core").joinpath(name).read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tree


def value_in(text: str) -> Any:
    """The value that a flag's text is in YAML; text that is none, or that would be refused in a file, stays text."""
    try:
        return _extent_checked(_yaml(text))
    except MALFORMED:  # InputError is a ValueError
        return text


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
