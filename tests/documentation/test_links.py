"""Every link leads somewhere, and every file and module that a page names exists."""

import importlib
import re
from pathlib import Path

import pytest

from tests.documentation.extraction import LINK, ROOT, inline, pages

FILE = re.compile(r"(?!.*/s$)[\w.*-]+(?:/[\w.*-]+)+/?")
"""A text in backticks that is a path, such as `sharding/zero.py`, and no setting and no rate, such as `450GB/s`."""

MADE = ("runs/", "corpus/", "build/", ".venv/")
"""What commands write, or a user has."""


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
    for target in LINK.findall(pages()[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page} links to {target}: no such heading"


def slug(heading: str) -> str:
    """A heading's anchor."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", pages())
def test_files_that_a_page_names_exist(page):
    """Paths start at the root of the checkout; a page may also name what lies beside it."""
    missing = []
    for piece in inline():
        name = piece.text
        if piece.place.startswith(f"{page}:") and FILE.fullmatch(name) and not name.startswith(MADE):
            pattern = re.sub(r"\bNAME\b", "*", name).rstrip("/")
            if not any(list(folder.glob(pattern)) for folder in (ROOT, (ROOT / page).parent)):
                missing.append(f"{piece.place}: {name}")
    assert not missing, "no such file, from the root of the checkout on: " + ", ".join(missing)


def test_modules_and_functions_that_pages_name_exist():
    for piece in inline():
        if re.fullmatch(r"jhpt(\.\w+)+", piece.text):
            assert resolves(piece.text), f"{piece.place}: there is no {piece.text}"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), attribute)
    return True


def rooms() -> dict[str, str]:
    """What WORKSPACE.md says of each room, by the room."""
    (text,) = re.findall(r"^## Rooms\n(.*?)^## ", pages()["WORKSPACE.md"], re.MULTILINE | re.DOTALL)
    parts = re.split(r"\*\*`([\w/]+)`\*\*", text)
    return {name.rstrip("/"): content for name, content in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("room", rooms())
def test_the_map_names_what_is_in_a_room(room):
    """Files and folders by their names, or what one of them defines."""
    files = [path for path in (ROOT / room).rglob("*") if "__pycache__" not in path.parts]
    names = {path.name for path in files} | {path.stem for path in files}
    code = "\n".join(path.read_text() for path in files if path.suffix == ".py")
    for name in re.findall(r"`([^`]+)`", rooms()[room]):
        for step in name.split(" <- "):
            known = step.rstrip("/") in names or (ROOT / step).exists() or is_elsewhere(step)
            defined = re.search(
                rf"^\s*(?:class|def|type|from \S+ import) {re.escape(step)}\b|\b{re.escape(step)}\b *[:=(]", code, re.M
            )
            assert known or defined, f"WORKSPACE.md: there is no {step} in {room}"


def is_elsewhere(name: str) -> bool:
    """A command, or a dotted name of jhpt's own."""
    return name.startswith("jhpt ") or (name.startswith("jhpt.") and resolves(name))


def test_the_readme_is_short():
    assert len(Path(ROOT / "README.md").read_text().splitlines()) <= 150
