"""The cases that are made by hand, by name."""

import random
from collections.abc import Callable
from pathlib import Path

from tests.malformed.case import Case, Valid, command

Make = Callable[[random.Random, Path, Valid], Case]

BY_HAND: dict[str, Make] = {}


def case(make: Make) -> Make:
    BY_HAND[make.__name__] = make
    return make


def file_case(name: str, file: str, content: bytes | str | Callable[[], str], words: str, *copied: str) -> None:
    """A file with this content, which is made when it is needed if it is large, and a command that reads it."""

    def case_of(rng: random.Random, here: Path, valid: Valid) -> Case:
        for each in copied:
            valid.copied(each, here)
        made = content() if callable(content) else content
        (here / file).write_bytes(made if isinstance(made, bytes) else made.encode())
        return command(words)

    BY_HAND[name] = case_of


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
)
