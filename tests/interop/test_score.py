"""Logits in a file are those of the model, whatever the batches; input that the model cannot read is refused."""

import numpy as np
import pytest

import jhpt
from jhpt.core.errors import InputError
from jhpt.models.context import Context
from tests.test_cli import status_of


def ids(rows=5, length=12, high=200, seed=0):
    return np.random.default_rng(seed).integers(0, high, (rows, length))


def score(run, folder, *flags, **arrays) -> tuple[int, np.ndarray | None]:
    """(exit status, what is in the file)."""
    words = ["score", str(run), "--out", str(folder / "logits.npy"), *flags]
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        words += [f"--{name}", str(folder / f"{name}.npy")]
    status = status_of(words)
    return status, np.load(folder / "logits.npy") if status == 0 else None


def test_logits_of_gpt(gpt, loaded, tmp_path, capsys):
    tokens = ids().astype(np.uint8)
    status, logits = score(gpt, tmp_path, "--batch", "2", tokens=tokens)
    assert status == 0 and "[5, 12, 300] of step 2" in capsys.readouterr().out
    assert (logits.shape, logits.dtype) == ((5, 12, 300), np.float32)
    expected = np.asarray(loaded.model.apply(loaded.params, tokens))
    np.testing.assert_allclose(logits, expected[..., :300], atol=1e-5)
    np.testing.assert_allclose(loaded.score(tokens), logits, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.npy", "tokens.npy"]


def test_logits_of_bert_with_types_and_lengths(bert, tmp_path):
    loaded, tokens, lengths = jhpt.load(bert), ids(), np.array([12, 3, 1, 7, 12])
    types = (ids(seed=1) > 99).astype(np.int16)
    status, logits = score(bert, tmp_path, "--batch", "3", tokens=tokens, types=types, lengths=lengths)
    assert status == 0
    expected = loaded.model.apply(loaded.params, tokens, context=Context(types=types.astype(int), lengths=lengths))[
        ..., :256
    ]
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert np.abs(loaded.score(tokens)[1] - logits[1]).max() > 1e-3, "types and lengths are read"


def test_no_rows_have_no_logits(loaded):
    assert loaded.score(np.zeros((0, 7), int)).shape == (0, 7, 300)


REFUSED = {
    "too large an id": ({"tokens": ids() + 290}, "and only 0 to 299 are possible"),
    "negative id": ({"tokens": ids() - 1}, "tokens has -1"),
    "floats": ({"tokens": ids().astype(float)}, "must be integers [rows, positions]; this is float64 [5, 12]"),
    "one row": ({"tokens": ids()[0]}, "this is int64 [12]"),
    "too long": ({"tokens": ids(length=33)}, "tokens have 33 positions, and the model reads 1 to model.max_length=32"),
    "no positions": ({"tokens": ids()[:, :0]}, "tokens have 0 positions"),
    "types": ({"tokens": ids(), "types": ids()}, "types are for BERT, and model.family=gpt"),
    "objects": ({"tokens": np.array([[{}]])}, "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scored_is_refused(name, gpt, tmp_path, capsys):
    arrays, words = REFUSED[name]
    assert score(gpt, tmp_path, **arrays) == (2, None)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "logits.npy").exists()


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"types": ids() * 0 + 2}, "types has 2, and only 0 to 1 are possible"),
        ({"types": ids()[:3] * 0}, r"types \[3, 12\] does not belong to tokens \[5, 12\]"),
        ({"lengths": np.array([1, 2, 3, 4, 13])}, "lengths has 13, and only 1 to 12"),
        ({"lengths": np.ones((5, 1), int)}, r"lengths must be integers \[rows\]"),
    ],
)
def test_what_bert_cannot_read_is_refused(others, words, bert):
    with pytest.raises(InputError, match=words):
        jhpt.load(bert).score(ids(), **others)


def test_files_that_are_no_arrays_or_cannot_be_written_are_refused(gpt, tmp_path, capsys):
    (tmp_path / "text.npy").write_text("text")
    np.savez(tmp_path / "two.npz", a=ids(), b=ids())
    np.save(tmp_path / "good.npy", ids())
    for tokens, out, words in [
        ("text.npy", "o.npy", "text.npy cannot be read"),
        ("two.npz", "o.npy", "several arrays"),
        ("no.npy", "o.npy", "no.npy cannot be read"),
        ("good.npy", "no/o.npy", "cannot be written: No such file"),
    ]:
        assert status_of(["score", str(gpt), "--tokens", str(tmp_path / tokens), "--out", str(tmp_path / out)]) == 2
        assert words in capsys.readouterr().err
    flags = ["--tokens", str(tmp_path / "good.npy"), "--out", str(tmp_path / "o.npy"), "--batch", "0"]
    assert status_of(["score", str(gpt), *flags]) == 2
    assert "batch=0 is too small" in capsys.readouterr().err
    assert not (tmp_path / "o.npy").exists()
