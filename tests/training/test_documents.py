"""`data.packing=documents`: nothing passes from one document of a window to another, under any plan, in float32."""

import itertools
import json
import random
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import jhpt
from jhpt.core.errors import InputError
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.load import load_config
from jhpt.core.plan import SavedTensors
from jhpt.models.context import Context, document_starts
from jhpt.models.family import Rows, build
from jhpt.models.layers import fold
from jhpt.models.masking import mask_tokens
from jhpt.models.objective import MASKS
from jhpt.planner.search.request import compressions
from jhpt.training import setup as training_setup
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.loop import training_flops_per_token
from jhpt.training.parts import make_parts
from jhpt.training.profiling import Grid, measure_layers
from jhpt.training.setup import prepare
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import batch, by_path, compiled, laid_out, mixed, piped, random_params, spread, stored
from tests.training.test_resume import final_state, forgotten, same_bits

BYTES = ByteTokenizer()
APART = {"data.packing": "documents"}
MODELS = {
    "gpt": {},
    "llama": {
        "model.num_kv_heads": 4,
        "model.positions": "rotary",
        "model.norm": "rmsnorm",
        "model.activation": "swiglu",
        "model.bias": False,
        "model.tied": False,
    },
    "bert": {},
}
BATCH, LENGTH = 16, 32


def settings(name):
    return ("bert-tiny" if name == "bert" else "gpt-tiny"), APART | MODELS[name]


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """Overrides that point at documents of 1 to 50 letters: several in a window, or one that a window cuts."""
    folder, rng = tmp_path_factory.mktemp("short"), random.Random(0)
    for file in range(4):
        texts = ("".join(rng.choices("abcdefgh", k=rng.randint(1, 50))) for _ in range(200))
        (folder / f"{file}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return {"data.path": str(folder), "data.cache_dir": str(folder / "cache")}


# One window.

ENDS = (5, 6, 20)
"""Where documents of the window end: the second is a single token, the last is cut."""


def window(name):
    """One row of token ids: [1, 33] for GPT, [1, 32] for BERT, whose edges are [CLS] and [SEP]."""
    row = np.random.default_rng(1).integers(97, 123, (1, LENGTH + (name != "bert")))
    row[0, list(ENDS)] = BYTES.end
    if name == "bert":
        row[0, 0], row[0, -1] = BYTES.start, BYTES.separator
    return jnp.asarray(row, jnp.int32)


def documents_of(row):
    """The slices of a row's documents, each with the token that ends it."""
    edges = [0, *(end + 1 for end in ENDS), row.shape[1]]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


@pytest.fixture
def model_of(tiny):
    def make(name):
        preset, overrides = settings(name)
        config = tiny(preset, **overrides)
        model = build(config.model)
        parts = make_parts(model, config.data, BYTES, 0.1, train=True)
        rng = np.random.default_rng(0)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.05, 0.2, leaf.shape), leaf.dtype), shapes)
        return config, model, parts, params

    return make


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_one_document_change_no_number_of_another(model_of, name):
    """Not a bit of any other token's logits; of its own they do."""
    _, model, _, params = model_of(name)
    row = window(name)[:, :LENGTH]
    context = Context(documents=document_starts(row, BYTES.end))
    run = jax.jit(partial(model.apply, context=context))
    before = np.asarray(run(params, row))
    for own in documents_of(row):
        other = row.at[0, own].set(jnp.where(row[0, own] == BYTES.end, row[0, own], (row[0, own] * 7 + 3) % 90))
        after = np.asarray(run(params, other))
        outside = np.ones(LENGTH, bool)
        outside[own] = False
        np.testing.assert_array_equal(after[0, outside], before[0, outside])
        assert own.stop - own.start == 1 or (after[0, own] != before[0, own]).any(-1).all()


def whole_loss(parts, params, windows, key):
    """(loss, sums) of rows through all parts, as the runtime calls them."""
    rows, keys = Rows(windows), jax.random.split(key, len(windows))
    context = parts.context(rows, keys)
    x = parts.embed(params, rows, context)
    for layer in range(2):
        x = parts.block(jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"]), x, (context, layer))
    sums = parts.head_loss(params, x, rows, context)
    return sums.loss, sums


def alone(model, params, row, masked):
    """(summed loss, predicted tokens) of the documents of a row, each by itself from position 0 on."""
    loss, tokens = 0.0, 0
    for one in documents_of(row):
        if masked is not None:
            inside = np.flatnonzero((masked.positions[0] >= one.start) & (masked.positions[0] < one.stop))
            logits, targets = model.apply(params, masked.tokens[:, one]), masked.targets[:, inside]
            logits = logits[:, masked.positions[0, inside] - one.start]
        elif one.stop - one.start == 1:
            continue  # nothing follows
        else:
            piece = row[:, one]
            logits, targets = model.apply(params, piece[:, :-1]), piece[:, 1:]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        nll = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        loss, tokens = loss + jnp.sum(nll) + 0.1 * jnp.sum(log_z**2), tokens + targets.size
    return loss, tokens


@pytest.mark.parametrize("name", quick_and_exhaustive(MODELS, ["llama", "bert"]))
def test_a_window_is_the_sum_of_its_documents(model_of, name):
    """Loss, gradients and the number of predicted tokens.  The first token of a document is predicted by nothing."""
    config, model, parts, params = model_of(name)
    row, key = window(name), jax.random.key(4)
    masked = mask_tokens(fold(jax.random.split(key, 1), MASKS), row, config.data.mask_fraction, BYTES)
    masked = jax.tree.map(np.asarray, masked) if name == "bert" else None

    def both(params):
        whole = jax.value_and_grad(lambda params: whole_loss(parts, params, row, key), has_aux=True)
        return whole(params), jax.value_and_grad(lambda params: alone(model, params, row, masked), has_aux=True)(params)

    ((together, sums), gradient), ((loss, tokens), expected) = compiled(both, params)
    assert sums.tokens == tokens == (LENGTH - len(ENDS) if name != "bert" else round(0.15 * (LENGTH - 2)))
    np.testing.assert_allclose(together, loss, rtol=1e-5)
    for path, leaf in by_path(expected).items():
        np.testing.assert_allclose(by_path(gradient)[path], leaf, atol=1e-5 * np.abs(leaf).max(), err_msg=path)


# Any plan.

PLANS = {
    "interleaved x tensor, sample chunks, recompute": (
        "llama",
        4,
        piped(
            spread(4, 4),
            2,
            tensor=2,
            schedule="interleaved",
            micro_batches=4,
            sample_chunks=2,
            recompute=True,
            batch=BATCH,
        ),
    ),
    "several degrees, ZeRO-3, cut sequence, named": (
        "gpt",
        2,
        mixed(
            (2, 4, 2, 2),
            zero=3,
            sequence=True,
            micro_batches=2,
            recompute=True,
            saved=SavedTensors(device=NAMED_TENSORS[:2]),
            batch=BATCH,
        ),
    ),
    "1f1b": ("bert", 2, piped(spread(2, 2), 2, data=2, micro_batches=4, batch=BATCH)),
    "gpipe": ("gpt", 2, piped(spread(2, 2), 2, data=2, micro_batches=2, schedule="gpipe", zero=1, batch=BATCH)),
    "one device": ("llama", 2, piped([4], 1, batch=BATCH)),
    "tensor": ("bert", 2, piped([4], 1, tensor=2, batch=BATCH)),
    "ZeRO-3, micro-batches": ("bert", 2, piped([4], 1, data=4, zero=3, micro_batches=2, batch=BATCH)),
    "bert, sample chunks, named": (
        "bert",
        2,
        piped(
            [4], 1, tensor=2, sample_chunks=3, recompute=True, saved=SavedTensors(device=NAMED_TENSORS[:3]), batch=BATCH
        ),
    ),
    "1f1b, full": ("gpt", 2, piped(spread(2, 2), 2, tensor=2, micro_batches=4, recompute=True, batch=BATCH)),
    "1f1b, ZeRO-3, sample chunks": (
        "llama",
        2,
        piped(spread(2, 2), 2, data=2, micro_batches=4, zero=3, sample_chunks=2, batch=BATCH),
    ),
}


def expected_of(setup, params, windows):
    """(gradients by path, loss per token) of the model and its loss, written down directly."""
    model, key = setup.model, jax.random.key(7)
    context = Context(documents=document_starts(windows[:, :LENGTH], BYTES.end))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(BATCH))

    def loss(params):
        if setup.config.model.masked:
            masked = mask_tokens(fold(keys, MASKS), windows, setup.config.data.mask_fraction, BYTES)
            logits, targets = model.apply(params, masked.tokens, context=context), masked.targets
            logits, weight = jnp.take_along_axis(logits, masked.positions[..., None], axis=1), jnp.ones(targets.shape)
        else:
            logits, targets = model.apply(params, windows[:, :-1], context=context), windows[:, 1:]
            weight = jnp.where(windows[:, :-1] == BYTES.end, 0.0, 1.0)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return jnp.sum(nll * weight) / jnp.sum(weight)

    loss, gradient = compiled(jax.value_and_grad(loss), params)
    return by_path(gradient), float(loss)


@pytest.mark.parametrize("plan", quick_and_exhaustive(PLANS, list(PLANS)[:2]))
@pytest.mark.usefixtures("strict")
def test_every_plan_keeps_documents_apart(tiny, short, monkeypatch, plan):
    """Training's loss and gradients, and evaluation's loss."""
    monkeypatch.setattr(training_setup, "MOST_UNROLLED_LAYERS", 0)
    name, blocks, layout = PLANS[plan]
    preset, overrides = settings(name)
    prepared = prepare(tiny(preset, **short | overrides | {"model.num_layers": blocks, "data.batch_size": BATCH}))
    setup = laid_out(prepared, layout)
    params, windows = random_params(setup), batch(setup, BATCH)
    assert ((windows == BYTES.end).sum(1) > 1).any() and ((windows == BYTES.end).sum(1) == 0).any()
    placed, rows = stored(setup, params), Rows(jax.device_put(windows, setup.layout.batch))

    def run(params, rows):
        gradient, sums = setup.training.gradients(params, rows, jax.random.key(7))
        seen = setup.evaluation.sums(params, rows, jax.random.key(7))
        return gradient, sums.nll / sums.tokens, seen.nll / seen.tokens

    gradient, loss, evaluated = compiled(run, placed, rows)
    expected, expected_loss = expected_of(setup, params, windows)
    assert [loss, evaluated] == pytest.approx([expected_loss] * 2, rel=1e-5)
    actual = by_path(setup.layout.model_tree(gradient, setup.training.tied))
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        assert np.abs(actual[path] - leaf).max() <= 1e-5 * np.abs(leaf).max(), path


# Runs.

ONE = {"parallel.data": 1, "model.num_layers": 1, "train.steps": 4, "checkpoint.every": 2}


@pytest.mark.exhaustive
def test_a_run_resumes_bit_for_bit(tiny, short, tmp_path):
    config = tiny(**short | APART | ONE | {"model.dropout": 0.1, "data.validation_fraction": 0.0})
    straight = jhpt.train(config, out=tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    resumed = jhpt.train(config, out=forgotten(tmp_path / "resumed", 4))
    assert straight.step == resumed.step == 4 and resumed.losses == straight.losses
    same_bits(final_state(tmp_path / "straight", 4), final_state(tmp_path / "resumed", 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["gpt-tiny", "bert-tiny"])
def test_offloaded_blocks_train_alike(tiny, short, tmp_path, preset):
    """With several micro-batches, of which each has its own documents."""
    overrides = short | APART | ONE | {"parallel.micro_batches": 4, "model.num_layers": 2}
    plain, offloaded, stream = (
        jhpt.train(tiny(preset, **overrides | changes), out=tmp_path / str(number)).losses
        for number, changes in enumerate(
            ({}, {"memory.offload": "both", "memory.recompute": "full"}, {"data.packing": "stream"})
        )
    )
    assert list(offloaded.values()) == pytest.approx(list(plain.values()), rel=1e-5)
    assert list(stream.values()) != pytest.approx(list(plain.values()), rel=1e-3)


@pytest.mark.parametrize("preset", ["gpt-tiny", "bert-tiny"])
def test_only_visible_keys_count_as_work(tiny, short, preset):
    """Against every pair of query and key, told apart by hand."""
    apart, stream = (
        prepare(tiny(preset, **short | {"data.packing": packing, "parallel.data": 1}))
        for packing in ("documents", "stream")
    )
    rows = np.stack([apart.train_windows[index] for index in range(len(apart.train_windows))])[:, :LENGTH]
    number = np.cumsum(np.pad(rows[:, :-1] == BYTES.end, ((0, 0), (1, 0))), axis=1)
    visible = number[:, :, None] == number[:, None]
    if preset == "gpt-tiny":
        visible &= np.tri(LENGTH, dtype=bool)
    assert len(rows) < 1024 and apart.visible_keys == pytest.approx(visible.sum() / rows.size, rel=1e-12)
    all_keys = (LENGTH + 1) / 2 if preset == "gpt-tiny" else LENGTH
    model = apart.config.model
    less = 3 * 2 * model.num_layers * 2 * model.d_model * (all_keys - apart.visible_keys)
    assert training_flops_per_token(stream) - training_flops_per_token(apart) == pytest.approx(less, rel=1e-9)


# Refusals.


def test_a_tokenizer_has_to_end_documents(tiny, tmp_path):
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(file))
    config = tiny(**APART | {"data.tokenizer": str(file)})
    for refuses in (prepare, lambda config: measure_layers(config, Grid(batches=(1,), tensors=(1,), rounds=1))):
        with pytest.raises(InputError, match=r"needs a token between documents.*or use data\.packing=stream"):
            refuses(config)


def test_compression_of_a_whole_row_is_refused(tiny):
    """By hand, and in a plan that is given; the planner leaves it out."""
    compressed = {"parallel.tensor": 2, "parallel.compression": {"bits": 8, "tokens": 0.5}}
    with pytest.raises(InputError, match=r"parallel\.compression chooses .* use data\.packing=stream"):
        tiny(**APART | compressed)
    plan = training_setup.plan_by_hand(tiny(**compressed), 8)
    with pytest.raises(InputError, match="compression chooses"):
        prepare(tiny(**APART), plan)
    auto = {"parallel.auto": True, "parallel.compression": "auto"}
    assert compressions(load_config("gpt-tiny", APART | auto)) == (None,)
    assert len(compressions(load_config("gpt-tiny", auto))) > 1
