"""The loss is that of the training loop, under any plan; likelihoods are sums over single tokens."""

import json
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

import jhpt
from jhpt.core.families.family import masked_positions
from jhpt.core.load import load_config
from jhpt.interop.evaluate import evaluation_setup, text_bytes
from jhpt.interop.likelihood import continuation, windows
from jhpt.models.family import Objective, Rows
from jhpt.training.metrics import read_metrics
from jhpt.training.step import RandomStream, random_key
from tests.conftest import text
from tests.covers import quick_and_exhaustive
from tests.test_cli import status_of, tree


def last_validation_loss(run):
    return [record["validation_loss"] for record in read_metrics(run) if "validation_loss" in record][-1]


def report(capsys, *words):
    assert status_of(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_held_out_loss_is_that_of_the_run_and_the_run_stays_as_it_is(gpt, capsys):
    before = tree(gpt)
    found = report(capsys, gpt)
    assert found["loss"] == pytest.approx(last_validation_loss(gpt), abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and found["step"] == 2
    assert tree(gpt) == before


def test_all_of_a_text_is_evaluated_under_any_plan(gpt, loaded, tmp_path, capsys):
    (tmp_path / "é.txt").write_text("é" + text(700))
    found = loaded.evaluate(**{"data.path": str(tmp_path / "é.txt")})
    stream = np.asarray([*(tmp_path / "é.txt").read_bytes(), 255])
    rows = (len(stream) - 1) // 32
    assert (found.tokens, found.left_out) == (32 * rows, len(stream) - 1 - 32 * rows)
    inputs, targets = (stream[shift : 32 * rows + shift].reshape(rows, 32) for shift in (0, 1))
    logits = np.asarray(jax.jit(loaded.model.apply)(loaded.params, inputs), np.float64)[..., :300]
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    assert found.loss == pytest.approx(np.mean(logsumexp(logits, axis=-1) - chosen), abs=1e-6)
    bytes_there = len((tmp_path / "é.txt").read_bytes())
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * len(stream) / bytes_there)
    flags = ["--parallel.tensor", "2", "--parallel.zero", "3", "--parallel.data", "2"]
    divided = report(capsys, gpt, "--data.path", tmp_path / "é.txt", *flags)
    assert divided["loss"] == pytest.approx(found.loss, abs=1e-6) and divided["tokens"] == found.tokens


PLANS = {
    "as it was trained": "--parallel.pipe 2 --parallel.tensor 2 --parallel.micro_batches 2",
    "one device": "--parallel.data 1",
}


@pytest.mark.parametrize("name", quick_and_exhaustive(PLANS, ["as it was trained"]))
def test_a_pipelined_run_is_evaluated_under_any_plan(name, divided, capsys):
    found = report(capsys, divided, *PLANS[name].split())
    assert found["loss"] == pytest.approx(last_validation_loss(divided), abs=1e-6)


@pytest.mark.parametrize("degree", quick_and_exhaustive([1, 2, 4], [2]))
def test_bert_is_evaluated_on_masked_tokens_and_draws_the_same_everywhere(degree, bert, drawn_alone):
    found = jhpt.load(bert).evaluate(**{"parallel.data": degree, "evaluation.batches": 4})
    assert found.loss == pytest.approx(drawn_alone, abs=1e-6)
    assert found.bits_per_byte is None and found.tokens == 4 * 8 * masked_positions(32, 0.15)


@pytest.fixture(scope="module")
def drawn_alone(bert) -> float:
    """The loss of BERT, computed row by row with the masks of the rows' own keys."""
    loaded, setup = jhpt.load(bert), evaluation_setup(load_config(bert / "config.yaml"), {"parallel.data": 1})
    objective = Objective(z_loss=0.0, mask_fraction=setup.config.data.mask_fraction, tokens=loaded.tokenizer)

    @jax.jit
    def sums(windows, key):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(windows)))
        rows = Rows(windows)
        x = loaded.model.encode(loaded.params, loaded.model.inputs(rows, keys, objective))
        return loaded.model.loss(loaded.params, x, rows, keys, objective)

    total = tokens = 0.0
    for batch in range(4):
        windows = np.stack([setup.validation_windows[row] for row in range(8 * batch, 8 * batch + 8)])
        found = sums(windows, random_key(0, RandomStream.EVALUATION, batch))
        total, tokens = total + float(found.nll), tokens + float(found.tokens)
    return total / tokens


def test_devices_that_share_a_batch_evenly_are_used(gpt):
    config = load_config(gpt / "config.yaml")
    assert evaluation_setup(config, {}).plan.devices == 8
    assert evaluation_setup(config, {"data.batch_size": 6}).plan.devices == 2
    assert evaluation_setup(config, {"parallel.tensor": 4}).plan.devices == 8


def test_bytes_of_text_are_those_of_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "né"}\n\n{"text": "x"}\n')
    (tmp_path / "b.txt").write_text("€\r\n", newline="")
    assert text_bytes(str(tmp_path), "text") == 3 + 1 + 5


REFUSED = {
    "--model.d_model 8": "model.d_model would not be read",
    "--data.validation_path x": "data.validation_path would not be read",
    "--parallel.gradient_compression.kind quantize": "parallel.gradient_compression.kind would not be read",
    "--parallel.auto true": "parallel.auto would not be read",
    "--seed 3": "seed would not be read",
    "--parallel.sequence true": "parallel.sequence=true is not used",
    "--data.path no.txt": "data.path=no.txt: no text found",
    "--parallel.data 16 --data.batch_size 16": "needs 16 devices",
    "--batch 3": "--batch and --plan are for --documents",
    "--out o.jsonl": "--documents FILE and --out FILE belong together",
    "--documents d.jsonl --out o.jsonl --parallel.tensor 2": "leave out parallel.tensor",
    "--documents no.jsonl --out o.jsonl": "--documents no.jsonl cannot be read",
    "--documents bad.jsonl --out o.jsonl": "bad.jsonl, line 2: neither 'text' nor 'context' and 'continuation'",
    "--documents empty.jsonl --out o.jsonl": "empty.jsonl has no documents",
    "--documents long.jsonl --out o.jsonl": "has 40 tokens, and model.max_length=32",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_evaluated_is_refused(arguments, gpt, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"context": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "long.jsonl").write_text(json.dumps({"context": "a", "continuation": "b" * 40}))
    before = tree(tmp_path, gpt)
    assert status_of(["eval", str(gpt), *arguments.split()]) == 2
    assert REFUSED[arguments] in capsys.readouterr().err
    assert tree(tmp_path, gpt) == before


# --- documents -------------------------------------------------------------------------------------------------


@cache
def whole(model):
    """The model without a cache of keys and values, compiled once."""
    return jax.jit(model.apply)


def token_by_token(loaded, ids, first):
    """(sum of log-probabilities, whether each is the likeliest) of ids[first:], one after the other, in float64."""
    total, greedy = 0.0, True
    for stop in range(first, len(ids)):
        row = np.zeros((1, 32), int)
        row[0, :stop] = ids[:stop]
        logits = np.asarray(whole(loaded.model)(loaded.params, row), np.float64)[0, stop - 1, :300]
        total += logits[ids[stop]] - logsumexp(logits)
        greedy &= bool(np.argmax(logits) == ids[stop])
    return total, greedy


def test_documents_and_continuations_are_sums_over_tokens(gpt, loaded, tmp_path, capsys):
    (row,) = loaded.generate(["the mesh"], tokens=4, temperature=0, stop_tokens=())
    likeliest = loaded.tokenizer.decode(row.tokens)
    records = [
        {"text": "the mesh maps"},
        {"context": "the mesh", "continuation": " maps"},
        {"text": ""},
        {"context": "", "continuation": "each"},
        {"text": "x" * 31},
        {"context": "y" * 60, "continuation": "zz"},
    ]
    if likeliest.encode() == bytes(row.tokens):
        records.append({"context": "the mesh", "continuation": likeliest})
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = report(capsys, gpt, "--documents", tmp_path / "d.jsonl", "--out", tmp_path / "o.jsonl", "--batch", 2)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    for record, line in zip(records, lines, strict=True):
        context = record.get("context", "").encode()
        after = record.get("continuation", record.get("text")).encode()
        ids = [*(context or [255]), *after][-33:]
        total, greedy = token_by_token(loaded, ids, len(ids) - len(after))
        assert line["logprob"] == pytest.approx(total, abs=2e-4) and line["tokens"] == len(after)
        assert line.get("greedy") == (greedy if "context" in record else None)
    assert found["tokens"] == sum(line["tokens"] for line in lines)
    assert found["logprob"] == pytest.approx(sum(line["logprob"] for line in lines))


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7, 11, 12, 13])
def test_every_token_is_predicted_once_and_windows_are_full(length):
    ids, predicted = np.arange(length), []
    for span in windows(ids, 5):
        assert len(span.ids) - 1 == min(5, length - 1) and 1 <= span.first < len(span.ids)
        predicted += span.ids[span.first :].tolist()
    assert predicted == list(range(1, length))


def test_a_long_document_is_read_in_windows(loaded):
    document = text(100)[:75]
    (found,) = loaded.log_likelihoods([document])
    ids = np.asarray([255, *document.encode()])
    total = sum(token_by_token(loaded, ids[a:c], b - a)[0] for a, b, c in [(0, 1, 33), (32, 33, 65), (43, 65, 76)])
    assert found.tokens == 75 and found.logprob == pytest.approx(total, abs=5e-4)


def test_a_space_before_a_continuation_belongs_to_it(loaded):
    first, second = (continuation(loaded.tokenizer, *pair, 32) for pair in [("a ", "b"), ("a", " b")])
    assert first.ids.tolist() == second.ids.tolist() and first.first == second.first == 1


def test_bert_has_no_likelihoods(bert):
    with pytest.raises(jhpt.InputError, match=re.escape("model.family=bert does not predict next tokens")):
        jhpt.load(bert).log_likelihoods(["the"])
