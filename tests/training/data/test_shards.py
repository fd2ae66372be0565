"""Shards are read as one sequence, and cut so that nothing depends on the cuts."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.training.data import documents, shards, streams
from jhpt.training.data.documents import Part, cut, read
from jhpt.training.data.shards import Tokens
from jhpt.training.data.workers import MOST_SHARDS, SHARD_BYTES, available_workers, parts_of, shard_bytes, shards_of

PROPERTY = settings(deadline=None, derandomize=True, max_examples=25)


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=5), data=st.data())
@PROPERTY
def test_any_range_of_the_sequence_is_that_of_all_shards_joined(tmp_path_factory, counts, data):
    folder = tmp_path_factory.mktemp("shards")
    whole = np.arange(sum(counts), dtype=np.uint16)
    ends = np.cumsum([0, *counts])
    files = {folder / f"{number}.bin": count for number, count in enumerate(counts)}
    for file, first, last in zip(files, ends, ends[1:], strict=False):
        whole[first:last].tofile(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "OPEN_SHARDS", 2)
        tokens, at = Tokens(files, whole.dtype), data.draw(st.integers(0, len(whole)))
        for stream, expected in zip((tokens, *tokens.split(at)), (whole, whole[:at], whole[at:]), strict=True):
            assert len(stream) == stream.size == len(expected) and stream.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(stream), expected)
            for start, stop in itertools.combinations(range(-2, len(expected) + 3), 2):
                np.testing.assert_array_equal(stream[start:stop], expected[start:stop])


def text_file(folder: Path) -> Path:
    file = folder / "a.txt"
    file.write_text(
        "".join(f"line {number} é𝄞" + ("\r\n" if number % 3 else "\n") for number in range(300)), newline=""
    )
    return file


def jsonl_file(folder: Path) -> Path:
    file = folder / "a.jsonl"
    file.write_text("".join(f'{{"text": "é{number}"}}\n' + "\n" * (number % 2) for number in range(300)))
    return file


def parquet_file(folder: Path) -> Path:
    file = folder / "a.parquet"
    pq.write_table(
        pa.table({"n": range(300), "text": [f"row {n}" * (n % 5) for n in range(300)]}), file, row_group_size=7
    )
    return file


@pytest.mark.parametrize("make", [text_file, jsonl_file, parquet_file])
@pytest.mark.parametrize("size", [1, 100, 1000, 10**6])
def test_the_parts_of_a_file_hold_the_whole_file_in_order(tmp_path, monkeypatch, make, size):
    monkeypatch.setattr(documents, "PIECE_CHARS", 50)
    monkeypatch.setattr(streams, "BLOCK", 64)
    file = make(tmp_path)
    parts = list(cut(file, size, "text"))
    whole = list(read(Part(file=file), "text"))
    assert [piece for part, _ in parts for piece in read(part, "text")] == whole
    assert abs(sum(count for _, count in parts) - file.stat().st_size) <= len(parts)
    assert len(parts) == 1 if size == 10**6 else len(parts) >= {1: 30, 100: 20, 1000: 3}[size]
    assert parts[0][0].first == 0 and parts[-1][0].last is None
    for (before, _), (after, _) in itertools.pairwise(parts):
        assert before.last == after.first


def test_a_jsonl_file_of_one_long_line_is_one_part(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "' + "x" * 500 + '"}')
    assert [part for part, _ in cut(file, 10, "text")] == [Part(file=file)]


def test_small_files_share_a_shard(tmp_path):
    files = [tmp_path / f"{number}.txt" for number in range(10)]
    for file in files:
        file.write_text("x" * 40)
    found = list(shards_of("train", parts_of(files, 100, "text"), 100))
    assert [len(shard.parts) for shard in found] == [3, 3, 3, 1]
    assert [shard.name for shard in found] == [f"train-0000{number}.bin" for number in range(4)]
    assert [part.file for shard in found for part in shard.parts] == files
    assert sum(shard.size for shard in found) == 400
    assert list(shards_of("validation", [], 100)) == []


def test_large_corpora_have_large_shards_and_small_ones_few_processes(tmp_path):
    file = tmp_path / "a.txt"
    with file.open("wb") as stream:
        stream.truncate(SHARD_BYTES * MOST_SHARDS * 4)  # a hole, which takes no room
    assert shard_bytes([file]) == 4 * SHARD_BYTES
    (tmp_path / "b.txt").write_text("x")
    assert shard_bytes([tmp_path / "b.txt"]) == SHARD_BYTES
    assert [available_workers(8, total, 10) for total in (1, 19, 20, 75, 80, 10**6)] == [1, 1, 2, 7, 8, 8]
    assert available_workers(None, 10**6, 10) >= 1
