"""`model.objective=mlm+nsp`: the loss is the sum of both means under any plan, and what follows what is learned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jhpt
from jhpt.core.errors import InputError
from jhpt.models.context import Context
from jhpt.models.family import Rows, build
from jhpt.models.layers import fold
from jhpt.models.masking import mask_tokens
from jhpt.models.objective import DROPOUT, MASKS
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training import setup as training_setup
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.metrics import read_metrics
from jhpt.training.optimizer import decay_mask
from jhpt.training.setup import prepare
from tests.covers import quick_and_exhaustive
from tests.planner.profiles.test_analytic import ENDLESS
from tests.sharding.plans import batch, by_path, compiled, laid_out, piped, random_params, spread, stored

BATCH, LENGTH = 16, 32
PAIRS = {"model.family": "bert", "model.objective": "mlm+nsp"}
PREDICTED = round(0.15 * (LENGTH - 3))

PLANS = {
    "one device": (2, piped([4], 1, batch=BATCH)),
    "cut sequence": (2, piped([4], 1, data=2, tensor=4, sequence=True, zero=1, batch=BATCH)),
    "ZeRO-3, micro-batches": (1, piped([3], 1, data=2, zero=3, micro_batches=2, batch=BATCH)),
    "tensor 2, pipe 2": (2, piped(spread(2, 2), 2, tensor=2, micro_batches=4, batch=BATCH)),
    "1f1b": (2, piped(spread(2, 2), 2, data=2, tensor=2, micro_batches=4, zero=1, batch=BATCH)),
}


@pytest.mark.parametrize("fraction", [0.15, 0.5, 0.99])
@pytest.mark.parametrize("continues", [None, np.arange(256) % 3 != 0])
def test_masks_avoid_all_special_tokens(fraction, continues):
    """Whatever share is masked, and wherever the second piece begins; all other tokens are chosen sometimes."""
    rng, count = np.random.default_rng(0), 400
    tokens, second = rng.integers(0, 250, (count, LENGTH)).astype(np.int32), rng.integers(3, LENGTH - 1, count)
    keys = jax.random.split(jax.random.key(0), count)
    found = mask_tokens(keys, tokens, fraction, ByteTokenizer(), None, continues, jnp.asarray(second))
    positions, at = np.asarray(found.positions), np.arange(LENGTH)
    assert positions.shape[1] == round(fraction * (LENGTH - 3)) and found.predicts is None
    chosen = (positions[..., None] == at).sum(1)
    special = (at == 0) | (at == LENGTH - 1) | (at == second[:, None] - 1)
    assert chosen.max() == 1 and not chosen[special].any() and chosen.any(0)[1:-1].all()
    np.testing.assert_array_equal(np.asarray(found.tokens)[special], tokens[special])


def linear(params, x):
    return x @ params["kernel"] + params["bias"][None]


def expected_of(setup, params, windows):
    """(gradients by path, masked-LM loss, right pairs) of the definition, with the masks and dropout's own keys."""
    tokens, second, labels = windows[:, :LENGTH], windows[:, LENGTH + 1], windows[:, LENGTH + 2]
    types = (np.arange(LENGTH) >= second[:, None]).astype(np.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(BATCH))
    masked = mask_tokens(fold(keys, MASKS), tokens, 0.15, setup.tokenizer, None, None, jnp.asarray(second))
    each = jnp.arange(BATCH)

    def loss(params, noise):
        x = setup.model.encode(params, masked.tokens, context=Context(types=jnp.asarray(types)), keys=noise)
        chance = jax.nn.log_softmax(setup.model.logits(params, x))[each[:, None], masked.positions, masked.targets]
        pooled = jnp.tanh(linear(params["pooler"], x[:, 0]))
        pairs = jax.nn.log_softmax(linear(params["head"]["pair"], pooled))
        right = jnp.sum(jnp.argmax(pairs, -1) == labels)
        return -jnp.mean(chance) - jnp.mean(pairs[each, labels]), (-jnp.mean(chance), right)

    def run(params):
        (total, (mlm, _)), gradient = jax.value_and_grad(loss, has_aux=True)(params, fold(keys, DROPOUT))
        return gradient, total, mlm, loss(params, None)[1][1]

    gradient, *others = compiled(run, params)
    return by_path(gradient), *map(float, others)


@pytest.mark.parametrize("plan", quick_and_exhaustive(PLANS, ["tensor 2, pipe 2"]))
@pytest.mark.usefixtures("strict")
def test_every_plan_computes_the_definition(tiny, monkeypatch, plan):
    monkeypatch.setattr(training_setup, "MOST_UNROLLED_LAYERS", 0)
    blocks, layout = PLANS[plan]
    setup = prepare(tiny("bert-tiny", **PAIRS | {"model.num_layers": blocks, "model.dropout": 0.1}))
    setup = laid_out(setup, layout)
    params, windows = random_params(setup), batch(setup, BATCH)
    rows = Rows(jax.device_put(windows, setup.layout.batch))

    def run(params, rows):
        gradient, sums = setup.training.gradients(params, rows, jax.random.key(7))
        return gradient, setup.training.norm(gradient), sums

    gradient, norm, sums = compiled(run, stored(setup, params), rows)
    # A program of its own, as in training: in one program nothing orders the collectives of the two.
    seen = lambda params, rows: setup.evaluation.sums(params, rows, jax.random.key(7))  # noqa: E731
    correct = compiled(seen, stored(setup, params), rows).correct
    expected, total, mlm, right = expected_of(setup, params, windows)
    assert sums.tokens == BATCH * PREDICTED
    assert [sums.loss / sums.tokens, sums.nll / sums.tokens] == pytest.approx([total, mlm], rel=1e-5)
    assert correct / sums.tokens == right / BATCH and 0 < right < BATCH
    actual = by_path(setup.layout.model_tree(gradient, setup.training.tied))
    assert actual.keys() == expected.keys()
    assert {"head/pair/kernel", "head/pair/bias", "pooler/kernel", "pooler/bias"} < actual.keys()
    assert norm == pytest.approx(sum(np.sum(leaf**2) for leaf in expected.values()) ** 0.5, rel=1e-5)
    for path, leaf in expected.items():
        assert leaf.any() and np.abs(actual[path] - leaf).max() <= 1e-5 * np.abs(leaf).max(), path


def test_the_planner_counts_the_head(tiny):
    config, plain = tiny("bert-tiny", **PAIRS), tiny("bert-tiny")
    model, count = config.model, config.model.parameter_count()
    shapes = by_path(random_shapes(model))
    assert sum(leaf.size for leaf in shapes.values()) == count.allocated == analytic_profile(config, ENDLESS).parameters
    assert count.head == plain.model.parameter_count().head + 2 * model.d_model + 2
    matrices = sum(leaf.size for path, leaf in shapes.items() if path.endswith(("kernel", "tokens", "positions")))
    assert sum(each.numbers for each in model.matrices()) == matrices + shapes["embedding/types"].size
    assert model.float32_parameters() == plain.model.float32_parameters()
    assert model.predicted_tokens(LENGTH, 0.15) == PREDICTED and model.row_length(LENGTH) == LENGTH + 3
    head, base = (analytic_profile(each, ENDLESS).kinds["head"] for each in (config, plain))
    assert head.parameters == count.head + count.padding - model.d_model * (model.padded_vocab - model.vocab)
    assert head.tied_parameters == base.tied_parameters > 0


def random_shapes(model):
    return jax.tree.map(lambda leaf: np.empty(leaf.shape), jax.eval_shape(build(model).init, jax.random.key(0)))


def test_other_parameters_begin_as_without_pairs(tiny):
    settings = {"model.num_layers": 1, "model.d_model": 8}
    ours, plain = (
        by_path(jax.jit(build(tiny("bert-tiny", **settings | pairs).model).init)(jax.random.key(3)))
        for pairs in (PAIRS, {})
    )
    assert ours.keys() - plain.keys() == {"head/pair/kernel", "head/pair/bias"}
    for path, leaf in plain.items():
        np.testing.assert_array_equal(ours[path], leaf)


def test_the_pooler_is_trained_and_decays(tiny):
    mask = decay_mask(random_shapes(tiny("bert-tiny", **PAIRS).model))
    assert mask["pooler"] == mask["head"]["pair"] == {"kernel": True, "bias": False}


REFUSED = {
    "another family": ({"model.family": "gpt"}, r"model\.objective: unknown key"),
    "a classifier": ({"model.task": "classify"}, r"is for model\.task=pretrain.*set model\.objective=mlm"),
    "one token type": ({"model.type_vocab_size": 1}, r"model\.type_vocab_size=1; use 2"),
    "padded documents": ({"data.packing": "pad"}, r"data\.packing=pad is not available with.*use data\.packing=stream"),
    "documents": ({"data.packing": "documents"}, r"data\.packing=documents is not available with model\.objective"),
    "short rows": ({"data.sequence_length": 4}, r"data\.sequence_length=4 leaves no room for two.*use at least 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_pairs_exclude_is_refused(tiny, case):
    settings, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        tiny("gpt-tiny" if case == "another family" else "bert-tiny", **PAIRS | settings)


def four_parts(size):
    """Text in four parts of different letters, so that what is from elsewhere is of another part."""
    return "".join(letter * (size // 4) for letter in "abcd")


def test_training_learns_what_follows_what(tmp_path):
    for name, size in (("train", 60_000), ("held", 8_000)):
        (tmp_path / f"{name}.txt").write_text(four_parts(size))
    settings = PAIRS | {
        "model.d_model": 32,
        "model.max_length": 19,
        "data.path": str(tmp_path / "train.txt"),
        "data.validation_path": str(tmp_path / "held.txt"),
        "data.cache_dir": str(tmp_path / "cache"),
        "data.sequence_length": 19,
        "parallel.data": 1,
        "train.steps": 200,
        "optimizer.learning_rate": 5e-3,
        "optimizer.warmup_steps": 20,
        "evaluation.every": 200,
        "log.tensorboard": False,
    }
    result = jhpt.train("bert-tiny", out=tmp_path / "run", overrides=settings)
    assert result.validation_accuracy[200] > 0.95 and result.validation_losses[200] < 0.1
    (record,) = [record for record in read_metrics(tmp_path / "run") if "validation_accuracy" in record]
    assert record["validation_accuracy"] == result.validation_accuracy[200]
