"""What the documentation says: its blocks of code, its commands, its links and the files that it names."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAMS = (
    "jhpt", "python", "python3", "python3.12", "pip", "pytest", ".ci/run", "ruff", "mypy", "lint-imports", "source",
)  # fmt: skip
"""A text in backticks, or an indented line, that begins with one of these is a command."""

LANGUAGES = ("bash", "yaml", "python", "")
"""Of blocks of code; one without a language is a drawing."""

FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(?P<text>[^`]+)`(?!`)")
LINK = re.compile(r"\[[^][]*\]\((?P<target>[^)\s]+)\)")
INDENTED = re.compile(r"^ {4,}(?P<text>\S.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of code, or a text in backticks, and where it stands."""

    place: str
    """FILE:LINE."""
    language: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command as it is documented, without `.venv/bin/` and its comment."""

    place: str
    text: str


@cache
def pages() -> dict[str, str]:
    """The text of every page of documentation by its path."""
    paths = [ROOT / "README.md", ROOT / "WORKSPACE.md", *(ROOT / "docs").rglob("*.md")]
    paths += (ROOT / "benchmarks").rglob("README.md")
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


@cache
def examples() -> dict[str, str]:
    """The docstring of every example by its path."""
    paths = sorted((ROOT / "examples").glob("*.py"))
    return {f"examples/{path.name}": ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}


@cache
def blocks() -> list[Piece]:
    """The fenced blocks of all pages."""
    return [
        Piece(place=_place(page, text, match.start()), language=match["language"], text=match["text"])
        for page, text in pages().items()
        for match in FENCED.finditer(text)
    ]


@cache
def inline() -> list[Piece]:
    """The texts in backticks of all pages; a line's end inside one is a space."""
    found = []
    for page, text in pages().items():
        prose = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)  # lines keep their numbers
        for match in INLINE.finditer(prose):
            if "\n\n" not in match["text"]:
                place = _place(page, prose, match.start())
                found.append(Piece(place=place, language="", text=" ".join(match["text"].split())))
    return found


def block_commands(block: Piece) -> list[Command]:
    """The commands of a block of the shell, in order."""
    return [
        Command(place=block.place, text=command) for line in block.text.splitlines() for command in commands_of(line)
    ]


@cache
def single_commands() -> list[Command]:
    """Commands in backticks, and those of the examples' docstrings."""
    singles = [piece for piece in inline() if is_command(piece.text)]
    for name, text in examples().items():
        lines = [match["text"] for match in INDENTED.finditer(text)]
        singles += [Piece(place=name, language="", text=line) for line in lines if is_command(line)]
    return [Command(place=piece.place, text=command) for piece in singles for command in commands_of(piece.text)]


@cache
def all_commands() -> list[Command]:
    """Every documented command, as often as it is documented."""
    shell = [block for block in blocks() if block.language == "bash"]
    return [command for block in shell for command in block_commands(block)] + single_commands()


def is_command(text: str) -> bool:
    """Whether a text in backticks is a command and no name."""
    words = without_environment(text).removeprefix(".venv/bin/").split()
    return bool(words) and words[0] in PROGRAMS


def commands_of(line: str) -> list[str]:
    """The commands of a line, which && joins and # ends."""
    line = re.sub(r"(^|\s)#.*$", "", line).strip()
    return [" ".join(part.replace(".venv/bin/", "", 1).split()) if not part.strip().startswith("source ")
            else part.strip() for part in line.split("&&") if part.strip()]  # fmt: skip


def without_environment(command: str) -> str:
    """A command without the variables that are set before it."""
    return re.sub(r"^\s*(?:[A-Z_]+=\S+\s+)+", "", command)


def _place(page: str, text: str, position: int) -> str:
    return f"{page}:{text.count(chr(10), 0, position) + 1}"
