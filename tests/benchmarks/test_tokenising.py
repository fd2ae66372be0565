"""The text of the benchmark of tokenising is what it says, and its measurement ends well on a little of it."""

import json
from collections import Counter

import pytest

from benchmarks import tokenising
from jhpt.training.data.tokenizer import load_tokenizer


def test_the_text_is_the_same_each_time_and_follows_zipfs_law(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "BLOCK_WORDS", 20_000)
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        tokenising.write_corpus(folder, 600_000)
    files = sorted(file.name for file in first.iterdir())
    assert files == ["0.txt", "1.jsonl", "2.txt", "3.jsonl"]
    for name in files:
        content = (first / name).read_bytes()
        assert content == (second / name).read_bytes() and 150_000 <= len(content) < 400_000
    text = (first / "0.txt").read_text(encoding="utf-8")
    counts = [count for _, count in Counter(text.split()).most_common()]
    assert 1.3 < counts[0] / counts[1] < 3 and counts[0] > 5 * counts[9]
    assert len(text.encode()) > 1.02 * len(text)  # letters of several bytes
    lines = (first / "1.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 20 and all(isinstance(json.loads(line)["text"], str) for line in lines)


@pytest.mark.exhaustive
def test_the_measurement_survives_a_kill(tmp_path):
    figures = tokenising.measure(tmp_path, 80_000_000, 2, 4_000_000)
    assert figures["the same bytes"] and figures["of these written again"] == 0 < figures["done when killed"]
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).vocab_size == tokenising.VOCABULARY
