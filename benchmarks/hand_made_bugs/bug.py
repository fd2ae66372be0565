"""What a hand-made bug is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bug:
    """`right` stands once in `file`, and `wrong` takes its place.  tests: arguments of pytest."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
