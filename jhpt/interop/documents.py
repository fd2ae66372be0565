"""Log-likelihoods of the documents in a file, as lines of JSON in the same order.

{"text": ...}                        -> {"logprob": nats, "tokens": number}
{"context": ..., "continuation": ...} -> {"logprob": nats, "tokens": number, "greedy": whether each is the likeliest}
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from jhpt.core.errors import InputError
from jhpt.core.files import check_writable, replacing
from jhpt.core.text_files import bounded_lines, check_file
from jhpt.interop import likelihood
from jhpt.interop.rows import BATCH
from jhpt.models.family import Model, Params
from jhpt.training.data.tokenizer import Tokenizer

Record = str | tuple[str, str]
"""A text, or a context and its continuation."""

PAIR = ("context", "continuation")


def score_documents(
    model: Model,
    params: Params,
    tokenizer: Tokenizer,
    records: Sequence[Record],
    out: str | os.PathLike[str],
    batch: int = BATCH,
) -> tuple[float, int]:
    """Writes a line for every record to `out`; returns (the sum of all, the number of their tokens)."""
    check_writable("--out", out)
    found = likelihood.of_all(model, params, tokenizer, records, batch)
    with replacing(out) as partial, partial.open("w", encoding="utf-8") as stream:
        for record, one in zip(records, found, strict=True):
            line = {"logprob": one.logprob, "tokens": one.tokens}
            print(json.dumps(line if isinstance(record, str) else line | {"greedy": one.greedy}), file=stream)
    return sum(one.logprob for one in found), sum(one.tokens for one in found)


def read_documents(file: Path, text_key: str) -> list[Record]:
    """The records of a .jsonl file.

    Raises:
      InputError: no such file, or a line that is neither a text nor a pair.
    """
    try:
        check_file(file)
        with file.open(encoding="utf-8", newline="\n") as stream:
            lines = enumerate(bounded_lines(stream), start=1)
            found = [_record(line, text_key, f"{file}, line {n}") for n, line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--documents {file} cannot be read: {error}; give a .jsonl file in UTF-8") from None
    if not found:
        raise InputError(f"--documents {file} has no documents; give one on each line")
    return found


def _record(line: str, text_key: str, place: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not valid JSON ({error}); every line is one object") from None
    if isinstance(record, dict):
        texts = [record.get(name) for name in PAIR]
        if all(isinstance(text, str) for text in texts):
            return _text(str(texts[0]), place), _text(str(texts[1]), place)
        if isinstance(record.get(text_key), str) and not any(name in record for name in PAIR):
            return _text(record[text_key], place)
    keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    raise InputError(f"{place}: neither {text_key!r} nor {' and '.join(map(repr, PAIR))} (found: {keys})")


def _text(text: str, place: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: a text is no Unicode ({error.reason}); remove the character") from None
    return text
