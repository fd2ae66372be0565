"""`model.task=classify`: loss and gradients are those of the definition under any plan, and order is learned."""

import json
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jhpt
from jhpt.core.plan import SavedTensors
from jhpt.models.context import Context
from jhpt.models.family import Rows, build
from jhpt.models.layers import fold, layer_keys
from jhpt.models.objective import DROPOUT
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training import setup as training_setup
from jhpt.training.metrics import read_metrics
from jhpt.training.optimizer import decay_mask
from jhpt.training.setup import prepare
from tests.covers import quick_and_exhaustive
from tests.planner.profiles.test_analytic import ENDLESS
from tests.sharding.plans import batch, by_path, compiled, laid_out, mixed, piped, random_params, spread, stored

BATCH, LENGTH = 16, 32
CLASSIFY = {"model.task": "classify", "data.sequence_length": LENGTH}


def before_and_after(count, seed):
    """Letters among which an `a` comes before or after the only `b`: a bag of letters holds nothing of it."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        letters, first = [rng.choice("cdefgh") for _ in range(rng.randint(4, 10))], rng.random() < 0.5
        early, late = sorted(rng.sample(range(len(letters) + 2), 2))
        letters.insert(early, "a" if first else "b")
        letters.insert(late, "b" if first else "a")
        rows.append({"text": "".join(letters), "label": "before" if first else "after"})
    return rows


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Overrides that point at texts of 2 to 24 letters, half of them in pairs, with three labels."""
    folder, rng = tmp_path_factory.mktemp("labelled"), random.Random(0)
    words = lambda: "".join(rng.choices("abcdefg", k=rng.randint(2, 24)))  # noqa: E731
    rows = [{"text": words(), "text_pair": rng.choice(["", words()]), "label": rng.choice("xyz")} for _ in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CLASSIFY | {"data.path": str(folder / "rows.jsonl"), "data.batch_size": BATCH}


# Under any plan.

PLANS = {
    "one device": (3, piped([5], 1, batch=BATCH)),
    "tensor": (2, piped([4], 1, tensor=2, batch=BATCH)),
    "cut sequence": (2, piped([4], 1, data=2, tensor=4, sequence=True, zero=1, batch=BATCH)),
    "ZeRO-3, micro-batches": (2, piped([4], 1, data=4, zero=3, micro_batches=2, batch=BATCH)),
    "sample chunks": (
        2,
        piped([4], 1, tensor=2, sample_chunks=3, recompute=True, saved=SavedTensors(device=("qkv",)), batch=BATCH),
    ),
    "several degrees": (2, mixed([1, 2, 4, 4], batch=BATCH, zero=1)),
    "1f1b": (3, piped(spread(3, 2), 2, data=2, tensor=2, micro_batches=4, zero=1, batch=BATCH)),
    "1f1b, ZeRO-3, full": (
        3,
        piped(spread(3, 2), 2, data=2, micro_batches=4, zero=3, recompute=True, batch=BATCH),
    ),
    "gpipe of four, bare exit": (3, piped([2, 1, 1, 1], 4, data=2, micro_batches=2, schedule="gpipe", batch=BATCH)),
    "interleaved": (3, piped([2, 1, 1, 1], 2, micro_batches=2, schedule="interleaved", batch=BATCH)),
}


def read(row):
    """(tokens, length, types, class) of a row, by hand."""
    length, second, label = row[LENGTH:]
    return row[:LENGTH], length, np.array([int(second <= at < length) for at in range(LENGTH)]), label


def expected_of(setup, params, windows):
    """(gradients by path, loss with dropout, loss without, correct rows) of the definition, with dropout's own keys."""
    tokens, lengths, types, labels = map(np.stack, zip(*map(read, windows), strict=True))
    context = Context(lengths=jnp.asarray(lengths), types=jnp.asarray(types, jnp.int32))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(BATCH))

    def logits(params, noise):
        x = setup.model.encode(params, tokens, context=context, keys=noise)
        head = layer_keys(noise, setup.config.model.num_layers)
        return setup.model.logits(params, x, head)

    def loss(params, noise):
        return -jnp.mean(jax.nn.log_softmax(logits(params, noise))[jnp.arange(BATCH), labels])

    def run(params):
        value, gradient = jax.value_and_grad(loss)(params, fold(keys, DROPOUT))
        plain = logits(params, None)
        return gradient, value, loss(params, None), jnp.sum(jnp.argmax(plain, -1) == labels)

    gradient, *others = compiled(run, params)
    return by_path(gradient), *map(float, others)


@pytest.mark.parametrize("plan", quick_and_exhaustive(PLANS, ["cut sequence", "1f1b"]))
@pytest.mark.usefixtures("strict")
def test_every_plan_computes_the_definition(tiny, written, monkeypatch, plan):
    """Gradients and loss of training, with dropout; loss and accuracy of evaluation."""
    monkeypatch.setattr(training_setup, "MOST_UNROLLED_LAYERS", 0)
    blocks, layout = PLANS[plan]
    setup = prepare(tiny("bert-tiny", **written | {"model.num_layers": blocks, "model.dropout": 0.1}))
    setup = laid_out(setup, layout)
    params, windows = random_params(setup), batch(setup, BATCH)
    lengths, seconds = windows[:, LENGTH], windows[:, LENGTH + 1]
    assert len(set(lengths)) > 4 and (lengths == LENGTH).any() and 2 < (seconds < lengths).sum() < BATCH - 2
    rows = Rows(jax.device_put(windows, setup.layout.batch))

    def run(params, rows):
        gradient, sums = setup.training.gradients(params, rows, jax.random.key(7))
        return gradient, setup.training.norm(gradient), sums.nll / sums.tokens, sums.tokens

    gradient, norm, loss, tokens = compiled(run, stored(setup, params), rows)
    # A program of its own, as in training: in one program nothing orders the collectives of the two.
    evaluation = lambda params, rows: setup.evaluation.sums(params, rows, jax.random.key(7))  # noqa: E731
    seen = compiled(evaluation, stored(setup, params), rows)
    evaluated, correct = seen.nll / seen.tokens, seen.correct
    expected, with_dropout, without, right = expected_of(setup, params, windows)
    assert [loss, evaluated] == pytest.approx([with_dropout, without], rel=1e-5)
    assert abs(with_dropout - without) > 1e-3
    assert (tokens, correct) == (BATCH, right) and 0 < right < BATCH
    actual = by_path(setup.layout.model_tree(gradient, setup.training.tied))
    assert actual.keys() == expected.keys()
    assert {"head/classifier/kernel", "head/classifier/bias", "pooler/kernel", "pooler/bias"} < actual.keys()
    assert norm == pytest.approx(sum(np.sum(leaf**2) for leaf in expected.values()) ** 0.5, rel=1e-5)
    for path, leaf in expected.items():
        assert leaf.any() and np.abs(actual[path] - leaf).max() <= 1e-5 * np.abs(leaf).max(), path


def test_rows_that_only_fill_up_do_not_count(tiny, written):
    setup = prepare(tiny("bert-tiny", **written | {"parallel.data": 1}))
    params, windows, weights = random_params(setup), batch(setup, BATCH), np.arange(BATCH) < 5
    program = jax.jit(lambda rows: setup.evaluation.sums(params, rows, jax.random.key(0)))
    sums = lambda *rows: jax.tree.map(float, program(Rows(*rows)))  # noqa: E731
    some = sums(windows, weights.astype(np.float32))
    each = [sums(np.repeat(windows[row : row + 1], BATCH, 0), np.ones(BATCH, np.float32)) for row in range(5)]
    assert some.tokens == 5
    assert some.nll == pytest.approx(sum(one.nll for one in each) / BATCH, rel=1e-5)
    assert some.correct == sum(one.correct for one in each) / BATCH


def test_padding_is_not_read(tiny, written):
    """Other ids in it change no bit of the loss; with it as part of the text they do."""
    setup = prepare(tiny("bert-tiny", **written | {"parallel.data": 1}))
    params, windows = random_params(setup), batch(setup, BATCH)
    padded = np.arange(LENGTH + 3) >= windows[:, LENGTH, None]
    padded[:, LENGTH:] = False
    assert padded.any()
    other, longer = np.where(padded, 77, windows), np.array(windows)
    longer[:, LENGTH] = LENGTH
    program = jax.jit(lambda rows: setup.evaluation.sums(params, Rows(rows), jax.random.key(0)))
    nll = [program(rows).nll for rows in (windows, other, longer)]
    assert nll[0] == nll[1] != nll[2]


# Numbers.


@pytest.mark.parametrize("classes", [2, 16])
def test_the_planner_counts_the_head(tiny, classes):
    config = tiny("bert-tiny", **CLASSIFY | {"model.num_classes": classes})
    model, count = config.model, config.model.parameter_count()
    shapes = jax.eval_shape(build(model).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count.allocated
    head = sum(leaf.size for name in ("head", "pooler") for leaf in jax.tree.leaves(shapes[name]))
    profile = analytic_profile(config, ENDLESS)
    assert count.head == head == profile.kinds["head"].parameters and profile.kinds["head"].tied_parameters == 0
    assert profile.parameters == count.allocated
    wide = sum(leaf.size for path, leaf in by_shape(shapes).items() if "norm" in path)
    assert model.float32_parameters() == wide
    # Two products of a row, [d] [d, d] and [d] [d, C]; every tensor rank computes them, so no degree is faster.
    products, d = model.d_model * (model.d_model + classes), model.d_model
    assert model.head_products() == products == d * d + d * classes
    assert model.flops_per_token(LENGTH, predicted_share=1 / LENGTH).forward == pytest.approx(
        model.flops_per_token(LENGTH, predicted_share=0).forward + 2 * products / LENGTH
    )


def by_shape(shapes):
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_a_pooler_that_is_trained_decays(tiny):
    for task, decays in (("classify", True), ("pretrain", False)):
        model = tiny("bert-tiny", **{"model.task": task, "model.num_classes": 2}).model
        mask = decay_mask(jax.eval_shape(build(model).init, jax.random.key(0)))
        assert mask["pooler"] == {"kernel": decays, "bias": False}
    assert not mask["head"]["bias"] and mask["embedding"]["types"]


# Runs.


def bag_of_letters(train, held):
    """Accuracy of the least-squares classifier on counts of letters."""
    letters = sorted({letter for row in train for letter in row["text"]})
    count = lambda rows: np.array([[1, *(row["text"].count(each) for each in letters)] for row in rows])  # noqa: E731
    sign = lambda rows: np.array([1 if row["label"] == "before" else -1 for row in rows])  # noqa: E731
    weights = np.linalg.lstsq(count(train), sign(train), rcond=None)[0]
    return np.mean(np.sign(count(held) @ weights) == sign(held))


def test_fine_tuning_learns_order(tmp_path):
    """What no bag of words can; and a run that goes on ends where one without a stop does."""
    train, held = before_and_after(2000, seed=0), before_and_after(256, seed=1)
    for name, rows in (("train", train), ("held", held)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model.task": "classify",
        "model.num_layers": 1,
        "model.d_model": 32,
        "model.max_length": 16,
        "data.path": str(tmp_path / "train.jsonl"),
        "data.validation_path": str(tmp_path / "held.jsonl"),
        "data.sequence_length": 16,
        "parallel.data": 1,
        "train.steps": 150,
        "optimizer.learning_rate": 3e-3,
        "optimizer.warmup_steps": 20,
        "evaluation.every": 75,
        "checkpoint.every": 75,
        "log.tensorboard": False,
    }
    result = jhpt.train("bert-tiny", out=tmp_path / "run", overrides=settings)
    assert bag_of_letters(train, held) < 0.6
    assert result.validation_accuracy[150] > 0.9 and result.validation_losses[150] < 0.3
    recorded = {
        record["step"]: record["validation_accuracy"]
        for record in read_metrics(tmp_path / "run")
        if "validation_accuracy" in record
    }
    assert recorded == result.validation_accuracy and set(recorded) == {75, 150}
    config = jhpt.load_config(tmp_path / "run" / "config.yaml")
    assert config.model.class_names == ("after", "before") and config.model.num_classes == 2
    again = jhpt.train(out=tmp_path / "run")
    assert again.step == 150 and replace(again, run_dir=result.run_dir).validation_accuracy == recorded
