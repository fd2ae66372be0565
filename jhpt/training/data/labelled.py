"""Texts with labels: CSV or JSONL -> rows in memory, for sequence classification.

    [CLS] text [SEP] (second text [SEP]) padding, length, where the second text begins, class        int32 [S + 3]

Padding has the id 0, which nothing reads (`jhpt.models.labelled` has the same layout on the device).
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jhpt.core.config import Config, DataConfig
from jhpt.core.errors import InputError
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.family import LABEL_COLUMNS
from jhpt.core.load import load_config
from jhpt.core.text_files import bounded_lines
from jhpt.training.data.corpus import find_files
from jhpt.training.data.tokenizer import Tokenizer

CSV, JSONL = ".csv", ".jsonl"

ORDER = 0
"""Seed of the order in which rows are held out and evaluated: files may be sorted by label."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A text, or a pair of texts, and its label.  place: file and line."""

    text: str
    pair: str | None
    label: str
    place: str


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """Rows [n, S + 3] for training and held-out ones.  key: identifies their content."""

    train: np.ndarray
    validation: np.ndarray
    key: str
    classes: tuple[str, ...]

    @property
    def summary(self) -> str:
        """How much there is, in words."""
        return f"{len(self.train):,} training and {len(self.validation):,} held-out rows of {len(self.classes)} classes"


def with_classes(config: Config) -> Config:
    """The configuration with the names and the number of its classes, from the labels of the training data.

    Labels are sorted, as numbers where all of them are whole numbers.

    Raises:
      InputError: the data cannot be read, or has other labels than the configuration says.
    """
    model = config.model
    if not isinstance(model, BERTConfig) or not model.classifies:
        return config
    examples = [example for file in _files(config.data.path, "data.path") for example in _examples(file, config.data)]
    labels = _sorted({example.label for example in examples})
    if model.class_names is not None:
        _classes_of(examples, model.class_names)
        return config
    if len(labels) < 2:
        raise InputError(
            f"data.path={config.data.path} has one label only, {labels[0]!r}; give rows of several classes"
        )
    if model.num_classes not in ("auto", len(labels)):
        raise InputError(
            f"model.num_classes={model.num_classes}, and data.path={config.data.path} has {len(labels)} labels "
            f"({_listed(labels)}); set model.num_classes=auto, or list the classes in model.class_names"
        )
    return load_config(config, {"model.class_names": labels, "model.num_classes": len(labels)})


def labelled_rows(config: Config, tokenizer: Tokenizer, say: Callable[[str], None] = lambda line: None) -> LabelledRows:
    """The rows of `data.path`, and those of `data.validation_path` or a share of them, held out at random.

    config: with classes (`with_classes`).  `say` reports texts that are too long.

    Raises:
      InputError: the data cannot be read, or a label is of no class.
    """
    data, model = config.data, config.model
    assert isinstance(model, BERTConfig) and model.class_names is not None
    parts = [
        [example for file in _files(path, setting) for example in _examples(file, data)]
        for setting, path in (("data.path", data.path), ("data.validation_path", data.validation_path))
        if path is not None
    ]
    if model.type_vocab_size < 2 and any(example.pair is not None for part in parts for example in part):
        raise InputError("model.type_vocab_size=1 cannot tell the texts of a pair apart; use 2")
    rows = [_rows(part, model.class_names, tokenizer, data.sequence_length, say) for part in parts]
    if len(rows) == 1:
        held = int(len(rows[0]) * data.validation_fraction)
        rows = [_shuffled(rows[0])[held:], _shuffled(rows[0])[:held]]
    train, validation = rows[0], _shuffled(rows[1])
    digest = hashlib.blake2b(json.dumps(model.class_names).encode(), digest_size=16)
    for part in (train, validation):
        digest.update(part.tobytes() + b"|")
    return LabelledRows(train=train, validation=validation, key=digest.hexdigest(), classes=model.class_names)


def _shuffled(rows: np.ndarray) -> np.ndarray:
    shuffled: np.ndarray = np.random.default_rng(ORDER).permutation(rows)
    return shuffled


def _files(path: str | Sequence[str], setting: str) -> list[Path]:
    files = find_files(path, setting)
    other = next((file for file in files if file.suffix not in (CSV, JSONL)), None)
    if other is not None:
        raise InputError(
            f"{setting}={path}: model.task=classify reads labels from {CSV} and {JSONL} files, and {other.name} is "
            "none; give such files"
        )
    return files


def _examples(file: Path, data: DataConfig) -> list[Example]:
    """The examples of a file.

    Raises:
      InputError: it is malformed, has no text or no label somewhere, or has no examples.
    """
    read = _csv_records if file.suffix == CSV else _json_records
    try:
        examples = [_example(record, data, f"{file}, line {line}") for line, record in read(file)]
    except UnicodeDecodeError as error:
        raise InputError(f"data file {file} is not UTF-8 ({error.reason}); convert it (iconv -t utf-8)") from None
    except OSError as error:
        raise InputError(f"data file {file} cannot be read ({error.strerror}); make it readable") from None
    if not examples:
        raise InputError(f"data file {file} has no rows; give a file with texts and labels")
    return examples


def _csv_records(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(bounded_lines(stream), strict=True)
        try:
            for record in reader:
                if None in record or None in record.values():
                    raise InputError(
                        f"{file}, line {reader.line_num}: not as many fields as the first line names columns; quote "
                        "fields that hold commas or line ends"
                    )
                yield reader.line_num, record
        except csv.Error as error:
            raise InputError(f"{file}, line {reader.line_num}: not valid CSV ({error}); repair the line") from None


def _json_records(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(bounded_lines(stream), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)
                raise InputError(f"{file}, line {number}: not valid JSON ({reason}); a line is one object") from None
            if not isinstance(record, dict):
                raise InputError(
                    f"{file}, line {number}: {type(record).__name__} instead of an object; repair the line"
                )
            yield number, record


def _example(record: Mapping[str, Any], data: DataConfig, place: str) -> Example:
    text, pair, label = (record.get(key) for key in (data.text_key, data.pair_key, data.label_key))
    for what, value, key, setting in (
        ("text", text, data.text_key, "data.text_key"),
        ("second text", pair or "", data.pair_key, "data.pair_key"),
    ):
        if not isinstance(value, str):
            raise InputError(f"{place}: no {what} under {key!r} (found: {', '.join(record)}); set {setting}")
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        raise InputError(
            f"{place}: no label under {data.label_key!r}, a name or a whole number (found: {', '.join(record)}); set "
            "data.label_key"
        )
    return Example(text=str(text), pair=pair or None, label=str(label).strip(), place=place)


def _sorted(labels: set[str]) -> tuple[str, ...]:
    try:
        return tuple(sorted(labels, key=int))
    except ValueError:
        return tuple(sorted(labels))


def _classes_of(examples: Sequence[Example], names: Sequence[str]) -> list[int]:
    number = {name: index for index, name in enumerate(names)}
    for example in examples:
        if example.label not in number:
            raise InputError(
                f"{example.place}: the label {example.label!r} is none of the classes ({_listed(names)}): those of "
                "model.class_names or, where it is not set, of the training data; correct the one or the other"
            )
    return [number[example.label] for example in examples]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _rows(
    examples: Sequence[Example],
    names: Sequence[str],
    tokenizer: Tokenizer,
    length: int,
    say: Callable[[str], None],
) -> np.ndarray:
    """int32 [n, S + 3]."""
    classes = _classes_of(examples, names)
    firsts = tokenizer.encode_batch([example.text for example in examples])
    pairs = [example.pair for example in examples if example.pair is not None]
    encoded = iter(tokenizer.encode_batch(pairs) if pairs else [])
    rows, cut = np.zeros((len(examples), length + LABEL_COLUMNS), np.int32), 0
    for row, example, first, label in zip(rows, examples, firsts, classes, strict=True):
        second = next(encoded) if example.pair is not None else None
        ids, begins = joined(first, second, tokenizer, length)
        cut += len(ids) < len(first) + (2 if second is None else len(second) + 3)
        row[: len(ids)] = ids
        row[length:] = len(ids), begins, label
    if cut:
        say(f"{cut:,} of {len(rows):,} rows are longer than data.sequence_length={length} tokens and are cut")
    return rows


def joined(first: np.ndarray, second: np.ndarray | None, tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, int]:
    """([CLS] first [SEP] (second [SEP]), where the second text begins, or the end without one).

    Where both are too long together, the longer one is cut at its end until they fit or are equally long.
    """
    start, separator = [tokenizer.start], [tokenizer.separator]
    if second is None:
        ids = np.concatenate([start, first[: length - 2], separator])
        return ids, len(ids)
    room = length - 3
    keep = min(len(first), max(room - len(second), -(-room // 2)))
    ids = np.concatenate([start, first[:keep], separator, second[: room - keep], separator])
    return ids, keep + 2
