"""`jhpt generate`, and the other commands that use a trained run."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from jhpt.core.errors import InputError
from jhpt.core.files import check_writable, replacing

if TYPE_CHECKING:
    from jhpt.interop.load import Loaded

Run = Annotated[str, tyro.conf.Positional]
Words = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continues prompts: one is printed as it is generated, several as lines of JSON."""

    run: Run
    """Run directory."""
    prompt: Words = ()
    """The text to continue; may be given several times."""
    prompts: str | None = None
    """File with a prompt on each line, or a .jsonl file with each prompt under data.text_key."""
    tokens: int | None = None
    """The most new tokens. Default: 128, or as many as model.max_length leaves."""
    greedy: bool = False
    """Take the likeliest token; nothing is random."""
    temperature: float | None = None
    """Logits are divided by it. Default: 0.8."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens that have this share of the probability."""
    seed: int | None = None
    """Of the random numbers. Default: 0."""
    stop: Words = ()
    """Text before which the continuation ends; may be given several times."""
    stop_tokens: tuple[int, ...] | None = None
    """Token ids before which it ends. Default: the tokenizer's end of a document."""
    batch: int | None = None
    """Prompts that are continued at once. Default: 8."""
    out: str | None = None
    """File for the continuations, as lines of JSON."""
    tokenizer: str | None = None
    """The tokenizer's file, where it is no longer where data.tokenizer says."""
    plan: str | None = None
    """File of a plan, over whose devices the parameters are cut. Default: all on one device."""


def generate_command(arguments: list[str]) -> int:
    """`jhpt generate`."""
    options = _parsed(GenerateOptions, "generate", arguments)
    if bool(options.prompt) == (options.prompts is not None):
        raise InputError("give the text to continue, either as --prompt TEXT or as --prompts FILE")
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise InputError(f"--prompts {options.prompts}: no such file; give a file with a prompt on each line")
    single = len(options.prompt) == 1 and options.out is None
    if single and options.batch is not None:
        raise InputError("--batch is for several prompts, and there is one; leave it out")
    check_writable("--out", options.out)
    from jhpt.interop.generate import Settings, generate, stream
    from jhpt.interop.load import load

    settings = Settings(**_generation(options))
    loaded = load(options.run, tokenizer=options.tokenizer, plan=options.plan)
    ready = loaded.model, loaded.params, loaded.tokenizer
    if single:
        pieces = stream(*ready, options.prompt[0], settings)
        print(options.prompt[0], end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return 0
    prompts = options.prompt if options.prompts is None else _prompts(Path(options.prompts), loaded)
    results = generate(*ready, prompts, settings)
    with _lines(options.out) as out:
        for row in results:
            line = {"prompt": row.prompt, "text": row.text, "tokens": len(row.tokens), "finish": row.finish}
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
    return 0


def _generation(options: GenerateOptions) -> dict[str, Any]:
    """The settings that are given; InputError for those that a greedy choice would not read."""
    drawn = ("temperature", "top_k", "top_p", "seed")
    names = ("tokens", *drawn, "stop", "stop_tokens", "batch")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    beside = [f"--{name.replace('_', '-')}" for name in drawn if name in given]
    if options.greedy and beside:
        raise InputError(f"--greedy draws nothing, so {' and '.join(beside)} would not be read; leave one of them out")
    return given | ({"temperature": 0.0} if options.greedy else {})


def _prompts(file: Path, loaded: "Loaded") -> list[str]:
    """The prompts in a file."""
    from jhpt.training.data.documents import Part, check_file, read
    from jhpt.training.data.formats import format_of

    text_key = loaded.config.data.text_key
    check_file(file, text_key)
    found = [piece for piece in read(Part(file=file), text_key) if piece is not None]
    if format_of(file).layout == "text":
        found = "".join(found).splitlines()
    if not found:
        raise InputError(f"--prompts {file} is empty; give a file with a prompt on each line")
    return found


def _parsed(options: Any, command: str, arguments: list[str]) -> Any:
    return tyro.cli(options, prog=f"jhpt {command}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


@contextmanager
def _lines(path: str | None) -> Iterator[TextIO]:
    """Where lines go: a file that appears when it is complete, or the terminal."""
    if path is None:
        yield sys.stdout
        return
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as stream:
        yield stream
