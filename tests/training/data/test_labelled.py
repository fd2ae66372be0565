"""Texts with labels: what is read, what becomes of it in rows, and what is refused."""

import csv
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.training.data.batches import shuffled
from jhpt.training.data.labelled import joined, labelled_rows, with_classes
from jhpt.training.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
START, END = BYTES.start, BYTES.separator
ROWS = [
    {"text": "one, two", "text_pair": "three", "label": "b"},
    {"text": 'a "quoted"\nline', "text_pair": "", "label": "a"},
    {"text": "longer than the sequence is", "text_pair": "and so is this", "label": "c"},
    {"text": "four", "text_pair": "", "label": "b"},
]


def written(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def configured(path, **overrides):
    base = {"model.task": "classify", "data.sequence_length": 20, "data.validation_fraction": 0.0}
    return load_config("bert-tiny", base | {"data.path": path} | overrides)


def read(path, **overrides):
    config = with_classes(configured(path, **overrides))
    return config, labelled_rows(config, BYTES)


def parts(row, length=20):
    """(ids, length, where the second text begins, class)"""
    count, second, label = row[length:]
    assert not row[count:length].any()
    return bytes(row[:count].tolist()), count, second, label


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_rows_hold_texts_lengths_and_classes(tmp_path, name):
    config, rows = read(written(tmp_path / name, ROWS))
    assert config.model.class_names == rows.classes == ("a", "b", "c") and config.model.num_classes == 3
    found = sorted(parts(row) for row in rows.train)
    cls, sep = bytes([START]), bytes([END])
    expected = [
        (cls + b"one, two" + sep + b"three" + sep, 16, 10, 1),
        (cls + b'a "quoted"\nline' + sep, 17, 17, 0),
        (cls + b"longer th" + sep + b"and so i" + sep, 20, 11, 2),
        (cls + b"four" + sep, 6, 6, 1),
    ]
    assert found == sorted(expected)


def test_both_forms_are_the_same_data(tmp_path):
    """Not so other rows, or another length."""
    keys = [read(written(tmp_path / name, ROWS))[1].key for name in ("rows.csv", "rows.jsonl")]
    assert keys[0] == keys[1]
    assert read(written(tmp_path / "less.csv", ROWS[1:]))[1].key != keys[0]
    assert read(str(tmp_path / "rows.csv"), **{"data.sequence_length": 21})[1].key != keys[0]


def test_what_is_cut_is_said(tmp_path):
    config = with_classes(configured(written(tmp_path / "rows.jsonl", ROWS)))
    said = []
    labelled_rows(config, BYTES, said.append)
    assert said == ["1 of 4 rows are longer than data.sequence_length=20 tokens and are cut"]


@given(first=st.integers(0, 30), second=st.none() | st.integers(0, 30), length=st.integers(3, 24))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_texts_that_are_too_long_are_cut_evenly(first, second, length):
    """The row is full where anything is cut, and no text is cut below the half while the other one is longer."""
    one = np.full(first, ord("a"))
    other = None if second is None else np.full(second, ord("b"))
    ids, begins = joined(one, other, BYTES, length)
    whole = first + 2 + (0 if second is None else second + 1)
    assert len(ids) == min(length, whole) and ids[0] == START and ids[-1] == END
    kept, kept_other = int((ids == ord("a")).sum()), int((ids == ord("b")).sum())
    if second is None:
        assert begins == len(ids) and kept == len(ids) - 2
        return
    assert ids[begins - 1] == END and (ids[begins:] != ord("a")).all() and (ids[:begins] != ord("b")).all()
    if kept < first:
        assert kept >= kept_other
    if kept_other < second:
        assert kept_other >= kept - 1


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 9, 2, 9], ("2", "9", "10")),
        (["10", "9", "2", "9"], ("2", "9", "10")),
        (["10", "9", "x", "9"], ("10", "9", "x")),
        (["-1", "1", "0", "0"], ("-1", "0", "1")),
    ],
    ids=["integers", "in text", "mixed", "signs"],
)
def test_classes_are_sorted_labels(tmp_path, labels, names):
    rows = [{"text": f"t{number}", "label": label} for number, label in enumerate(labels)]
    config, found = read(written(tmp_path / "rows.jsonl", rows))
    assert config.model.class_names == names
    classes = {bytes(row[1:3].tolist()): row[-1] for row in found.train}
    assert classes == {f"t{number}".encode(): names.index(str(label)) for number, label in enumerate(labels)}


def test_other_columns_may_be_named(tmp_path):
    path = written(tmp_path / "rows.csv", [{"a": "x", "b": "y", "gold": "1"}, {"a": "z", "b": "w", "gold": "0"}])
    keys = {"data.text_key": "b", "data.pair_key": "a", "data.label_key": "gold"}
    _, rows = read(path, **keys)
    assert sorted(row[1] for row in rows.train) == [ord("w"), ord("y")]
    assert sorted(row[3] for row in rows.train) == [ord("x"), ord("z")]


def test_a_share_of_the_rows_is_held_out(tmp_path):
    """Of files sorted by label both parts have all labels, and no row is in both."""
    rows = [{"text": f"{number:02}", "label": number // 25} for number in range(50)]
    _, found = read(written(tmp_path / "rows.jsonl", rows), **{"data.validation_fraction": 0.4})
    train, held = ({tuple(row) for row in part} for part in (found.train, found.validation))
    assert len(train) == 30 and len(held) == 20 and not train & held
    assert {row[-1] for row in train} == {row[-1] for row in held} == {0, 1}


def test_a_held_out_file_is_evaluated_in_another_order(tmp_path):
    train = written(tmp_path / "train.jsonl", [{"text": "x", "label": 0}, {"text": "y", "label": 1}])
    held = written(tmp_path / "held.jsonl", [{"text": "h", "label": number // 20} for number in range(40)])
    _, found = read(train, **{"data.validation_path": held})
    assert len(found.train) == 2 and sorted(found.validation[:, -1]) == [0] * 20 + [1] * 20
    assert set(found.validation[:10, -1]) == {0, 1}


def test_epochs_are_shuffled_by_the_seed(tmp_path):
    rows = [{"text": f"{number:02}", "label": number % 2} for number in range(20)]
    _, found = read(written(tmp_path / "rows.jsonl", rows))
    orders = [[tuple(shuffled(found.train, seed)[at]) for at in range(40)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:20]) == sorted(orders[0][20:]) == sorted(map(tuple, found.train))
    assert orders[0][:20] != orders[0][20:]


TWO = [{"text": "x", "label": "a"}, {"text": "y", "label": "b"}]
REFUSED = {
    "another kind of file": ("rows.txt", "text", {}, r"rows\.txt is none; give such files"),
    "no label": (
        "rows.jsonl",
        '{"text": "x"}',
        {},
        r"line 1: no label under 'label'.*found: text\); set data\.label_key",
    ),
    "an empty label": ("rows.csv", "text,label\nx,", {}, r"line 2: no label under 'label'"),
    "a label that is a number with a point": ("rows.jsonl", '{"text": "x", "label": 0.5}', {}, "a whole number"),
    "no text": ("rows.jsonl", '{"words": "x", "label": 1}', {}, r"line 1: no text under 'text'.*set data\.text_key"),
    "a second text that is none": (
        "rows.jsonl",
        '{"text": "x", "text_pair": 3, "label": 1}',
        {},
        r"no second text under 'text_pair'.*set data\.pair_key",
    ),
    "no JSON": ("rows.jsonl", '{"text": ', {}, r"line 1: not valid JSON"),
    "no object": ("rows.jsonl", "[1]", {}, r"line 1: list instead of an object"),
    "fields that are missing": ("rows.csv", "text,label\nx", {}, r"line 2: not as many fields as the first line names"),
    "fields too many": ("rows.csv", "text,label\nx,y,z", {}, r"line 2: not as many fields as the first line names"),
    "a quote that does not end": ("rows.csv", 'text,label\n"x,y', {}, r"not valid CSV"),
    "no rows": ("rows.csv", "text,label\n", {}, r"has no rows"),
    "one label": ("rows.csv", "text,label\nx,1\ny,1", {}, r"has one label only, '1'"),
    "another number of classes": (
        "rows.csv",
        "text,label\nx,1\ny,2",
        {"model.num_classes": 3},
        r"num_classes=3, and .* has 2 labels \(1, 2\); set model\.num_classes=auto",
    ),
    "a label of no class": (
        "rows.csv",
        "text,label\nx,1\ny,2",
        {"model.class_names": ["0", "1"]},
        r"line 3: the label '2' is none of the classes \(0, 1\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path, case):
    name, content, overrides, message = REFUSED[case]
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read(str(tmp_path / name), **overrides)


def test_held_out_labels_are_those_of_the_training_data(tmp_path):
    train = written(tmp_path / "train.jsonl", TWO)
    held = written(tmp_path / "held.jsonl", [*TWO, {"text": "z", "label": "new"}])
    with pytest.raises(InputError, match=r"held\.jsonl, line 3: the label 'new' is none of the classes \(a, b\)"):
        read(train, **{"data.validation_path": held})


def test_one_token_type_cannot_tell_texts_apart(tmp_path):
    with pytest.raises(InputError, match=r"type_vocab_size=1 cannot tell the texts of a pair apart"):
        read(written(tmp_path / "rows.csv", ROWS), **{"model.type_vocab_size": 1})


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"text,label\n\xff,1\n")
    with pytest.raises(InputError, match=r"not UTF-8"):
        read(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.class_names": ["a"]}, r"are not two or more different names"),
        ({"model.class_names": ["a", "a"]}, r"are not two or more different names"),
        (
            {"model.class_names": ["a", "b"], "model.num_classes": 3},
            r"num_classes=3 and model\.class_names has 2 names",
        ),
    ],
    ids=str,
)
def test_classes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        load_config("bert-tiny", {"model.task": "classify"} | changes)


def test_only_bert_classifies():
    with pytest.raises(InputError, match=r"model\.task: unknown key"):
        load_config("gpt-tiny", {"model.task": "classify"})


def test_a_plan_needs_the_number_of_classes():
    with pytest.raises(InputError, match=r"num_classes=auto is counted in the training data.*set model\.num_classes"):
        load_config("bert-tiny", {"model.task": "classify"}).model.parameter_count()
