"""The formats that text comes in: told by a file's name, verified by its first and last bytes."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from jhpt.core.errors import InputError, NotHere

Layout = Literal["text", "jsonl", "parquet", "arrow"]
"""text: a file is one document; jsonl: a line is one; parquet and arrow: a row is one."""

LAYOUTS: dict[str, Layout] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""By suffix.  A file that is named itself and has another suffix is text."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""By suffix; behind that of text or JSONL."""

PACKAGES = {".parquet": ("pyarrow", "parquet"), ".arrow": ("pyarrow", "parquet"), ".zst": ("zstandard", "zstd")}
"""The packages that read a suffix, each with the extra of jhpt that installs it."""

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
BEGINNING = 1 << 16
"""Bytes in which text that is none is noticed by its zero bytes."""

END_OF_ARROW = bytes(4)
"""The end of an Arrow stream: a message of length zero."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a file is read.  compression: suffix of what it is compressed by, or an empty text."""

    layout: Layout
    compression: str = ""

    @property
    def tag(self) -> str:
        """What tells it from plain text with the same bytes, which has an empty tag."""
        suffix = "" if self.layout == "text" else f".{self.layout}"
        return (suffix or ".txt") + self.compression if self.compression else suffix


def format_of(file: Path) -> Format:
    """The format that the name says.

    Raises:
      InputError: a compressed file whose name does not say what is in it; a missing package.
    """
    suffix = file.suffix
    if suffix in PACKAGES:
        _check_package(file, *PACKAGES[suffix])
    if suffix not in COMPRESSIONS:
        return Format(layout=LAYOUTS.get(suffix, "text"))
    inner = LAYOUTS.get(Path(file.stem).suffix)
    if inner not in ("text", "jsonl"):
        raise InputError(
            f"data file {file}: its name does not say what is compressed; call it NAME.txt{suffix} if it is one text, "
            f"NAME.jsonl{suffix} if every line is a JSON object"
        )
    return Format(layout=inner, compression=suffix)


def _check_package(file: Path, package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise NotHere(f"data file {file} is read by {package}, which is not installed: pip install 'jhpt[{extra}]'")


def is_data(file: Path) -> bool:
    """Whether a file that lies in a folder is read: by its suffix.  Arrow files are named by their dataset."""
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix
    readable = ("text", "jsonl") if file.suffix in COMPRESSIONS else ("text", "jsonl", "parquet")
    return LAYOUTS.get(suffix) in readable


def check_content(file: Path) -> None:
    """Refuses a file that is not what its name says, or that is cut short as far as its ends tell.

    Raises:
      InputError: says what it seems to be.
    """
    found = format_of(file)
    with file.open("rb") as stream:
        beginning = stream.read(BEGINNING)
        head = beginning[:4]
        stream.seek(-min(4, file.stat().st_size), 2)
        tail = stream.read(4)
    seems = _seems(head, tail)
    wanted = found.compression or {"parquet": ".parquet", "arrow": ".arrow"}.get(found.layout, "")
    if wanted in (".gz", ".zst") and seems != wanted:
        raise InputError(f"data file {file} is not compressed by {COMPRESSIONS[wanted]}; {_advice(file, seems)}")
    if wanted == ".parquet" and head != PARQUET:
        raise InputError(f"data file {file} is no Parquet file; {_advice(file, seems)}")
    if (wanted == ".parquet" and tail != PARQUET) or (wanted == ".arrow" and tail != END_OF_ARROW):
        raise InputError(f"data file {file} is cut short: its end is missing; copy or download it again")
    if not wanted and seems:
        raise InputError(f"data file {file} is no text; {_advice(file, seems)}")
    if not wanted and b"\0" in beginning:
        raise InputError(
            f"data file {file} is no UTF-8 text: there are zero bytes in it; if it is UTF-16, convert it "
            "(iconv -f utf-16 -t utf-8)"
        )


def _seems(head: bytes, tail: bytes) -> str:
    """The suffix of a format that these ends of a file fit; none for text."""
    if head.startswith(GZIP):
        return ".gz"
    if head == ZSTD:
        return ".zst"
    return ".parquet" if head == tail == PARQUET else ""


def _advice(file: Path, seems: str) -> str:
    if seems in COMPRESSIONS:
        return f"it looks like {COMPRESSIONS[seems]}: give it a name that ends in {seems}, such as NAME.jsonl{seems}"
    if seems:
        return f"it looks like Parquet: give it a name that ends in {seems}"
    return "if it is text, give it a name that ends in .txt, or .jsonl for lines of JSON; else download it again"
