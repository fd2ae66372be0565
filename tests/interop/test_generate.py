"""Generated text does not depend on batches, ends where it should, and comes in pieces that add up to it."""

import json
import shlex

import jax
import numpy as np
import pytest

import jhpt
from jhpt.interop.generate import Settings, _complete, continuation
from jhpt.interop.rows import padded
from jhpt.training.data.tokenizer import ByteTokenizer
from tests.test_cli import status_of

PROMPTS = ["the mesh", "t", "and each step", "to a device "]

NEVER = (299,)
"""An id that no text has: rows do not end at it."""


def test_a_row_is_the_same_alone_and_in_any_batch(loaded):
    settings = {"tokens": 12, "seed": 3}
    together, alone = (loaded.generate(PROMPTS, batch=batch, **settings) for batch in (3, 1))
    assert together == alone
    assert [row.prompt for row in together] == PROMPTS
    assert len({row.text for row in loaded.generate(["the"] * 3, **settings)}) == 3


def test_the_seed_decides(loaded):
    first, again, other = (loaded.generate(["the"], tokens=12, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_greedy_is_the_likeliest_token_of_the_whole_model(loaded):
    (row,) = loaded.generate(["the mesh"], tokens=20, temperature=0)
    ids = [*loaded.tokenizer.encode("the mesh"), *row.tokens]
    logits = jax.jit(loaded.model.apply)(loaded.params, np.asarray([ids]))[0, 7:-1]
    assert row.tokens == tuple(np.argmax(logits, axis=-1))
    assert row.finish == "length" and len(row.tokens) == 20


def test_a_run_under_tensor_and_pipeline_parallelism_generates(divided, capsys):
    assert status_of(["generate", str(divided), "--prompt", "the ", "--greedy", "--tokens", "8"]) == 0
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed == "the " + jhpt.load(divided).generate(["the "], tokens=8, temperature=0)[0].text


def test_rows_end_at_stops(loaded):
    (whole,) = loaded.generate(["the mesh"], tokens=20, stop_tokens=NEVER)
    later = next(token for token in whole.tokens if token != whole.tokens[0])
    first = whole.tokens.index(later)
    stopped, other, _ = loaded.generate(["the mesh", "to", "to"], tokens=20, stop_tokens=(later,))
    assert (stopped.tokens, stopped.finish) == (whole.tokens[:first], "stop")
    assert later not in other.tokens
    (cut,) = loaded.generate(["the mesh"], tokens=20, stop_tokens=NEVER, stop=(whole.text[2:4], "never"))
    assert (cut.text, cut.finish) == (whole.text[: whole.text.index(whole.text[2:4])], "stop")


def test_a_row_ends_where_the_model_does(loaded):
    rows = loaded.generate(["the mesh", "a" * 30, "t"], stop_tokens=NEVER)
    assert [len(row.tokens) for row in rows] == [24, 2, 31]
    assert {row.finish for row in rows} == {"length"}


@pytest.mark.parametrize("settings", [{"seed": 1}, {"seed": 2, "stop": ("e t", "\ufffd")}])
def test_pieces_add_up_to_the_text(loaded, settings):
    settings |= {"tokens": 24, "stop_tokens": NEVER}
    pieces = list(loaded.stream("the mesh", **settings))
    assert "".join(pieces) == loaded.generate(["the mesh"], **settings)[0].text


def test_what_may_still_change_is_held_back():
    decode = ByteTokenizer().decode
    text = "né €"
    ids = list(text.encode())
    shown = [_complete(decode(ids[:count]), ()) for count in range(1, len(ids) + 1)]
    assert shown == ["n", "n", "né", "né ", "né ", "né ", "né €"]
    assert _complete("one two st", ("stop", "tw")) == "one two "
    assert _complete("one two s", ("stop",)) == "one two "
    assert _complete("one two", ("stop",)) == "one two"


def test_the_text_of_a_token_that_depends_on_what_is_before_it():
    class Words:
        def decode(self, ids):
            return " ".join("abc"[token] for token in ids)

    assert continuation(Words(), [0, 1], [2, 0]) == " c a"


def test_lengths_are_rounded_up_to_few_sizes():
    assert [padded(n, 100) for n in (1, 16, 17, 33, 65, 100)] == [16, 16, 32, 64, 100, 100]


def test_many_prompts_are_lines_of_json(gpt, loaded, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS).replace("to a", "\nto a") + "\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    expected = [
        {"prompt": row.prompt, "text": row.text, "tokens": len(row.tokens), "finish": row.finish}
        for row in loaded.generate(PROMPTS, tokens=4, temperature=0)
    ]
    flags = [str(gpt), "--tokens", "4", "--greedy"]
    assert status_of(["generate", *flags, "--prompts", str(tmp_path / "p.txt")]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    out = tmp_path / "out.jsonl"
    assert status_of(["generate", *flags, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == expected


REFUSED = {
    "--prompt the --tokens 30": "model.max_length=32: 30 more do not fit; generate at most 29",
    "--prompt 0123456789012345678901234567890123": "prompt 1 has 34 tokens, and model.max_length=32 leaves no room",
    "--prompt the --greedy --top-k 3 --seed 1": "--top-k and --seed would not be read",
    "--prompt the --temperature 0 --top-p 0.5": "top_k and top_p would not be read",
    "--prompt the --temperature -1": "temperature=-1.0 is not possible",
    "--prompt the --top-p 1.5": "top_p=1.5 is no share",
    "--prompt the --top-k 0": "top_k=0 is too small; use 1 or more",
    "--prompt the --tokens 0": "tokens=0 is too small",
    "--prompt the --batch 2": "--batch is for several prompts",
    "--prompt the --stop ''": "stop='' is in every text",
    "--prompt the --prompts p.txt": "either as --prompt TEXT or as --prompts FILE",
    "--tokens 3": "either as --prompt TEXT or as --prompts FILE",
    "--prompts no.txt": "--prompts no.txt: no such file",
    "--prompts empty.txt": "empty.txt is empty",
    "--prompt the --out no/where.jsonl": "--out no/where.jsonl cannot be written",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_generated_is_refused(arguments, gpt, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    assert status_of(["generate", str(gpt), *shlex.split(arguments)]) == 2
    out, error = capsys.readouterr()
    assert REFUSED[arguments] in error and not out
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_bert_does_not_generate(bert, capsys):
    assert status_of(["generate", str(bert), "--prompt", "the"]) == 2
    assert "model.family=bert does not generate text" in capsys.readouterr().err


def test_no_prompts_are_no_rows(loaded):
    assert loaded.generate([]) == []
    assert Settings().drawing.temperature == 0.8
