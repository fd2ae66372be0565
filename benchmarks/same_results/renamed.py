"""Names that have changed since the reference was recorded: the only file to edit after a rename.

Requests are written in the old names, and recorded answers are translated back into them.  So both recordings use the
same names, and a rename alone is no difference.  In a dotted name `*` stands for any position in a list, and the
longest entry that matches counts.

Example:
    SETTINGS = {"memory.recompute": "memory.rematerialize"}
    KEYS = {"stages.*.chunks": "stages.*.virtual_stages", "prefetch": "gather_ahead"}
    WORDS = {"recompute": {"full": "all"}}
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SETTINGS: dict[str, str] = {}
"""Configuration, old dotted name -> new one.  The name of a section holds for everything in it."""

FLAGS: dict[str, str] = {"microbatches": "micro_batches"}
"""Options of `jhpt plan`, which are the arguments of `jhpt.plan` too, old -> new, without dashes."""

KEYS: dict[str, str] = {
    "kept": "saved",
    "offload.what": "offload.kind",
    "offload.at_once": "offload.update_in_backward",
    "gradients of the ends": "gradients of embedding and head",
}
"""Keys of JSON (plans, answers, clusters, metrics) and names in a training state, old -> new, anywhere in a tree."""

WORDS: dict[str, dict[str, str]] = {}
"""Values that are words: the end of an old dotted name -> {old word: new word}; for settings and for JSON alike."""

ADDED: dict[str, str] = {"state.optimizer": "adamw", "optimizer.name": "adamw"}
"""Ends of dotted names that only the new tree writes -> the only value that the old one could have meant."""

PLACES: dict[str, str] = {
    "prepare": "jhpt.planner.api:prepare",
    "evaluate": "jhpt.planner.cost.estimate:evaluate",
}
"""The functions that are called and not public: one reads a request, the other prices a plan."""

OLD_PLACES = {
    "prepare": "jhpt.planner.front:prepare",
    "evaluate": "jhpt.planner.estimate:evaluate",
}
"""Where these functions were when the reference was recorded.  Do not edit."""

Spelling = Literal["old", "new"]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of one tree."""

    settings: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def setting(self, name: str) -> str:
        """A setting's name in this tree."""
        return replaced(name, self.settings)

    def flag(self, name: str) -> str:
        """An option's name in this tree."""
        return self.flags.get(name, name)

    def key(self, path: str) -> str:
        """A path of JSON in this tree."""
        return replaced(path, self.keys)

    def old_key(self, path: str) -> str:
        """The inverse of `key`."""
        return replaced(path, {new: old for old, new in self.keys.items()})

    def word(self, path: str, value: object) -> object:
        """A value in this tree.  path: its old name.  Words joined by commas are translated one by one."""
        words = self._words(path)
        if not isinstance(value, str) or not words:
            return value
        return ",".join(words.get(word, word) for word in value.split(","))

    def old_word(self, path: str, value: object) -> object:
        """The inverse of `word`, for a single word."""
        words = {new: old for old, new in self._words(path).items()}
        return words.get(value, value) if isinstance(value, str) else value

    def place(self, name: str) -> Callable[..., Any]:
        """A function of this tree that is not public."""
        module, _, attribute = self.places[name].partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return function

    def _words(self, path: str) -> Mapping[str, str]:
        plain = "." + ".".join(part for part in path.split(".") if not part.isdigit())
        return next((words for end, words in self.words.items() if plain.endswith(f".{end}")), {})


def names_of(spelling: Spelling) -> Names:
    """The names of a tree from before the renames, or of one from after them."""
    if spelling == "old":
        return Names(places=OLD_PLACES)
    return Names(settings=SETTINGS, flags=FLAGS, keys=KEYS, words=WORDS, places=PLACES)


def replaced(path: str, table: Mapping[str, str]) -> str:
    """The path with every part that is in the table replaced, from left to right."""
    parts, path_parts = path.split("."), list[str]()
    entries = sorted(table.items(), key=lambda entry: -len(entry[0].split(".")))
    while parts:
        for pattern, other in entries:
            wanted = pattern.split(".")
            if matches(parts[: len(wanted)], wanted):
                positions = iter([part for part, want in zip(parts, wanted, strict=False) if want == "*"])
                path_parts += [next(positions) if part == "*" else part for part in other.split(".")]
                del parts[: len(wanted)]
                break
        else:
            path_parts.append(parts.pop(0))
    return ".".join(path_parts)


def matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the parts match the pattern."""
    return len(parts) == len(wanted) and all(
        part.isdigit() if want == "*" else part == want for part, want in zip(parts, wanted, strict=True)
    )
