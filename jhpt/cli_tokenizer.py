"""`jhpt tokenizer train`."""

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jhpt.core.errors import InputError
from jhpt.core.files import replacing
from jhpt.training.data.corpus import find_files

if TYPE_CHECKING:
    from jhpt.training.data.tokenizer_training import Kind

MEASURED_LINES, MEASURED_CHARS = 50_000, 1 << 22
"""The first lines of the text, whose tokens are counted for the report, until they are so many or so long."""


def tokenizer_command(arguments: list[str]) -> int:
    """`jhpt tokenizer`: `train` is all it can do."""
    if arguments[:1] == ["train"]:
        arguments = arguments[1:]
    elif arguments not in (["--help"], ["-h"]):
        raise InputError("say what to do: jhpt tokenizer train FILES --vocab-size N --out tokenizer.json")

    def train(
        files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")],
        /,
        vocab_size: int,
        out: str = "tokenizer.json",
        kind: Literal["bpe", "wordpiece"] = "bpe",
        lowercase: bool = False,
        text_key: str = "text",
        force: bool = False,
    ) -> None:
        """Makes a tokenizer of your text.

        Args:
            files: text or .jsonl files, globs or folders, as in data.path.
            vocab_size: number of token ids, special ones included.
            out: the file to write.
            kind: bpe: of bytes, as GPT-2; wordpiece: as BERT.
            lowercase: for wordpiece: read text in lower case and without accents.
            text_key: the field of a JSONL line that holds the text.
            force: write over a file that is there.
        """
        if not files:
            raise InputError("FILES: name text to make the tokenizer of, as in jhpt tokenizer train corpus/*.txt")
        _check_out(Path(out), force)
        _train(files, kind, vocab_size, Path(out), lowercase=lowercase, text_key=text_key)

    tyro.cli(train, prog="jhpt tokenizer train", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    return 0


def _check_out(out: Path, force: bool) -> None:
    """Refuses a file that is there, or could not be written once the work is done; leaves no trace."""
    if out.exists() and not force:
        raise InputError(f"--out {out} is there already; give another file, or --force to write over it")
    try:
        if out.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise InputError(
            f"--out {out} cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from None


def _train(names: Sequence[str], kind: "Kind", vocab_size: int, out: Path, *, lowercase: bool, text_key: str) -> None:
    from jhpt.training.data.tokenizer_training import train_tokenizer

    files = find_files(names, "FILES")
    tokenizer = train_tokenizer(files, kind, vocab_size, lowercase=lowercase, text_key=text_key)
    with replacing(out) as partial:
        partial.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for line in _report(names, files, kind, vocab_size, out, text_key):
        print(line)


def _first(lines: Iterator[str]) -> list[str]:
    """The lines that are measured."""
    taken, size = [], 0
    for line in islice(lines, MEASURED_LINES):
        taken.append(line[: MEASURED_CHARS - size])
        size += len(taken[-1])
        if size >= MEASURED_CHARS:
            break
    return taken


def _report(
    names: Sequence[str], files: Sequence[Path], kind: "Kind", vocab_size: int, out: Path, text_key: str
) -> list[str]:
    """What was made, and what to do next."""
    from jhpt.training.data.tokenizer import FileTokenizer
    from jhpt.training.data.tokenizer_training import lines

    tokenizer, text = FileTokenizer(out), _first(lines(files, text_key))
    tokens = sum(map(len, tokenizer.encode_batch(text)))
    size = sum(len(line.encode()) for line in text)
    fewer = f" (the text has no more pairs for {vocab_size:,})" if tokenizer.vocab_size < vocab_size else ""
    preset = "bert-base" if kind == "wordpiece" else "gpt2-124m"
    path = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    key = "" if text_key == "text" else f" --data.text_key {shlex.quote(text_key)}"
    return [
        f"{out}: {tokenizer.vocab_size:,} ids{fewer}, {size / max(tokens, 1):.2f} bytes per token of the text",
        f"next: jhpt train {preset} --data.path {shlex.quote(path)}{key} --data.tokenizer {shlex.quote(str(out))}",
    ]
