"""Compares two recordings of `record.py`: lists every difference, and exits with 1 if there is one.

    python benchmarks/same_results/compare.py OLD_FOLDER NEW_FOLDER

Runs that the new recording resumed from the old one are compared with the old one's uninterrupted runs.  Paths that end
in # are the numbers of a text for people; --ignore-text leaves them out, for changes that only rewrote texts.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flat import Flat, Leaf
from lines import read_lines
from renamed import ADDED

COMPARED = (("plans.jsonl", "plans.jsonl"), ("training.jsonl", "training.jsonl"), ("training.jsonl", "resumed.jsonl"))
"""Files of the old recording and of the new one."""

MISSING = "nothing"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that differs."""

    name: str
    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"  {self.name}\n    {self.path}: {self.old} -> {self.new}"


def main() -> int:
    """Compares the recordings of both folders; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--common", action="store_true", help="leave out what only one of them has recorded")
    parser.add_argument("--ignore-text", action="store_true", help="leave out numbers in texts for people")
    parser.add_argument("--most", type=int, default=20, help="differences to print of each request, at most")
    arguments = parser.parse_args()
    differing = compared = 0
    for old_file, new_file in COMPARED:
        old, new = arguments.old / old_file, arguments.new / new_file
        if not old.is_file() or not new.is_file():
            if new_file != "resumed.jsonl" and (old.is_file() or new.is_file()) and not arguments.common:
                print(f"{new_file}: recorded in one folder only")
                differing += 1
            continue
        compared += 1
        resumed = old_file != new_file
        differing += _report(read_lines(old), read_lines(new), new_file, arguments, resumed=resumed)
    if not compared:
        print("there is nothing to compare")
    return int(differing > 0 or not compared)


def _report(
    old: Mapping[str, Flat], new: Mapping[str, Flat], title: str, arguments: argparse.Namespace, *, resumed: bool
) -> int:
    """Prints how many records are equal and which differ; returns how many differ."""
    names = [name for name in {**old, **new} if (name in old and name in new) or not (arguments.common or resumed)]
    equal, unlike = 0, []
    for name in names:
        differing = list(
            differences(name, old.get(name), new.get(name), resumed=resumed, text=not arguments.ignore_text)
        )
        if differing:
            unlike.append(differing)
        else:
            equal += 1
    print(f"{title}: {equal} of {len(names)} equal")
    for differing in unlike:
        print(*differing[: arguments.most], sep="\n")
        if len(differing) > arguments.most:
            print(f"    and {len(differing) - arguments.most} more differences of it")
    return len(unlike)


def differences(name: str, old: Flat | None, new: Flat | None, *, resumed: bool, text: bool) -> Iterator[Difference]:
    """The differences between two records.  resumed: the new one lacks the steps before its start, and the plan."""
    if old is None or new is None:
        yield Difference(name=name, path="recorded", old=_yes(old is not None), new=_yes(new is not None))
        return
    # For a resumed run, everything in the new record is compared, and all of the final state.
    paths = [path for path in {**old, **new} if not resumed or path in new or path.startswith("final.")]
    for path in paths:
        if (text or not path.endswith("#")) and not _same(old, new, path):
            yield Difference(name=name, path=path, old=_shown(old, path), new=_shown(new, path))


def _same(old: Flat, new: Flat, path: str) -> bool:
    if path not in old:
        return any(new[path] == value for end, value in ADDED.items() if f".{path}".endswith(f".{end}"))
    if path not in new:
        return False
    return repr(old[path]) == repr(new[path])  # 1 and 1.0 are not the same, nor are 0.0 and -0.0


def _shown(flat: Flat, path: str) -> str:
    value: Leaf | str = flat.get(path, MISSING)
    return repr(value) if path in flat else MISSING


def _yes(there: bool) -> str:
    return "yes" if there else "no"


if __name__ == "__main__":
    sys.exit(main())
