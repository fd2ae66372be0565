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
from jhpt.core.load import run_config
from jhpt.flags import EvaluateOptions, parse_overrides, source_of

if TYPE_CHECKING:
    from jhpt.interop.load import Loaded

Run = Annotated[str, tyro.conf.Positional]
Words = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continues prompts: one is printed as it is generated, several as lines of JSON."""

    run: Run
    """Run directory, or a folder in Hugging Face's layout."""
    prompt: Words = ()
    """The text to continue; may be given several times."""
    prompts: str | None = None
    """File with a prompt on each line that is not empty, or a .jsonl file with each prompt under data.text_key."""
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
        found = [line for line in "".join(found).replace("\r\n", "\n").split("\n") if line]
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


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Computes the logits of given tokens: of next tokens for GPT, of masked tokens for BERT."""

    run: Run
    """Run directory, or a folder in Hugging Face's layout."""
    tokens: str
    """.npy file of token ids [rows, positions], integers."""
    out: str
    """.npy file for the logits [rows, positions, model.vocab_size], float32."""
    types: str | None = None
    """For BERT: .npy file of token types [rows, positions]. Default: all 0."""
    lengths: str | None = None
    """For BERT: .npy file of the tokens in each row that are not padding, [rows]. Default: all."""
    batch: int = 8
    """Rows that are computed at once."""
    plan: str | None = None
    """File of a plan, over whose devices the parameters are cut. Default: all on one device."""


def score_command(arguments: list[str]) -> int:
    """`jhpt score`."""
    options = _parsed(ScoreOptions, "score", arguments)
    check_writable("--out", options.out)
    from jhpt.interop.load import load
    from jhpt.interop.score import read_inputs, score_file

    names = ("tokens", "types", "lengths")
    inputs = read_inputs({name: path for name in names if (path := getattr(options, name)) is not None})
    loaded = load(options.run, plan=options.plan, reads_text=False)
    shape = score_file(loaded.model, loaded.params, inputs, options.out, options.batch)
    print(f"wrote float32 logits {list(shape)} of step {loaded.step} to {options.out}")
    return 0


def eval_command(arguments: list[str]) -> int:
    """`jhpt eval`: the first argument is a run directory; settings as flags say on what, and under which plan."""
    run = source_of(arguments)
    base = run_config(None, run)
    options, overrides = parse_overrides("jhpt eval", base, arguments, EvaluateOptions)
    if run is None:
        raise InputError("name the run directory first: jhpt eval RUN --data.path FILES")
    if (options.documents is None) != (options.out is None):
        raise InputError("--documents FILE and --out FILE belong together: give both, or neither")
    check_writable("--out", options.out)
    return _likelihoods(run, options, overrides) if options.documents else _loss(run, options, overrides)


def _loss(run: str, options: EvaluateOptions, overrides: dict[str, Any]) -> int:
    """The loss on a text."""
    from jhpt.interop.evaluate import evaluate, evaluation_setup
    from jhpt.interop.load import load, run_settings

    if options.batch is not None or options.plan is not None:
        raise InputError(
            "--batch and --plan are for --documents; windows are read data.batch_size at once, under the plan that "
            "--parallel.* describe"
        )
    tokenizer = overrides.get("data.tokenizer")
    setup = evaluation_setup(run_settings(Path(run), tokenizer), overrides)
    loaded = load(run, tokenizer=tokenizer, plan=setup.plan)
    found = evaluate(setup, loaded.params)
    if options.json:
        print(json.dumps({"step": loaded.step, "perplexity": found.perplexity} | vars(found)))
        return 0
    accuracy = "" if found.accuracy is None else f"  accuracy {found.accuracy:.2%}"
    if setup.config.model.classifies:
        unit = "image" if setup.config.model.reads == "images" else "row"
        print(f"step {loaded.step}  loss {found.loss:.6f} nats per {unit}{accuracy} of {found.tokens:,} {unit}s")
        return 0
    bits = "" if found.bits_per_byte is None else f"  bits per byte {found.bits_per_byte:.4f}"
    pairs = accuracy and f"{accuracy} of pairs"
    print(
        f"step {loaded.step}  loss {found.loss:.6f} nats per token  perplexity {found.perplexity:.4f}{bits}{pairs}\n"
        f"{found.tokens:,} predicted tokens; {found.left_out:,} at the end, fewer than a window has, are left out"
    )
    return 0


def _likelihoods(run: str, options: EvaluateOptions, overrides: dict[str, Any]) -> int:
    """The log-likelihoods of the documents in a file."""
    from jhpt.interop.documents import read_documents, score_documents
    from jhpt.interop.load import load
    from jhpt.interop.rows import BATCH

    read = ("data.tokenizer", "data.text_key")
    if others := [name for name in overrides if name not in read]:
        raise InputError(f"with --documents only {' and '.join(read)} are read; leave out {' and '.join(others)}")
    loaded = load(run, tokenizer=overrides.get("data.tokenizer"), plan=options.plan)
    text_key = overrides.get("data.text_key", loaded.config.data.text_key)
    records = read_documents(Path(str(options.documents)), text_key)
    ready = loaded.model, loaded.params, loaded.tokenizer
    total, tokens = score_documents(*ready, records, str(options.out), options.batch or BATCH)
    if options.json:
        print(json.dumps({"step": loaded.step, "logprob": total, "tokens": tokens}))
    else:
        print(f"step {loaded.step}  {len(records)} documents, log-likelihood {total:.4f} nats, {tokens:,} tokens")
    return 0
