"""Under any plan loss, gradients and their norm are those of the model and its loss written down directly, in float32.

So are those of one device with one micro-batch; plans of every kind therefore equal it.
"""

import itertools
import random
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.errors import InputError
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.plan import Chunk, Plan, Run, SavedTensors, Stage
from jhpt.models.family import Rows
from jhpt.models.layers import fold
from jhpt.models.masking import mask_tokens
from jhpt.models.objective import DROPOUT, MASKS
from jhpt.training import setup as training_setup
from jhpt.training.setup import prepare
from tests.covers import pairwise, quick_and_exhaustive
from tests.sharding.plans import batch, by_path, compiled, laid_out, mixed, piped, random_params, spread, stored

pytestmark = pytest.mark.usefixtures("strict")

MODELS = {
    "gpt-tied": {"model.dropout": 0.1},
    "gpt-untied": {
        "model.num_kv_heads": 4,
        "model.positions": "rotary",
        "model.norm": "rmsnorm",
        "model.activation": "swiglu",
        "model.bias": False,
        "model.tied": False,
        "model.vocab_size": 300,  # padded to 384
    },
    "bert": {"model.dropout": 0.1},
}
NO_DROPOUT = {
    f"{name}, no dropout": settings | {"model.dropout": 0.0}
    for name, settings in MODELS.items()
    if "model.dropout" in settings
}
"""Their programs compile in half of the time."""

BATCH = 32
WEIGHTS = np.asarray([1.0, 0.5, 0.0, 1.0] * (BATCH // 4), np.float32)
KEY = 7

ZERO_GRADIENT = {"pooler/kernel", "pooler/bias"}
"""Masked-LM training does not reach the pooler.  (A key bias has a zero gradient too: part of the qkv leaf here.)"""

ALL, NONE = 99, 0
"""Layers that are unrolled, at most."""


@pytest.fixture
def setup_of(tiny, monkeypatch):
    """Makes the setup of a model of so many blocks, of which this many are unrolled."""

    def make(name, blocks, unrolled, **overrides):
        monkeypatch.setattr(training_setup, "MOST_UNROLLED_LAYERS", unrolled)
        preset = "bert-tiny" if name.startswith("bert") else "gpt-tiny"
        overrides |= (MODELS | NO_DROPOUT)[name] | {"model.num_layers": blocks, "data.batch_size": BATCH}
        return prepare(tiny(preset, **overrides))

    return make


# What is expected.

_known: dict = {}


def definition(setup_of, name, blocks):
    """(gradients by path, loss per token, weighted sum of the losses without dropout, weighted tokens)."""
    if (name, blocks) not in _known:
        _known[name, blocks] = _definition(setup_of(name, blocks, NONE))
    return _known[name, blocks]


def _definition(setup):
    model, config, params = setup.model, setup.config, random_params(setup)
    windows = batch(setup, BATCH)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(KEY), jnp.arange(BATCH))

    def nll(params, noise):
        """[B, predicted tokens]"""
        if config.model.family == "gpt":
            logits, targets = model.apply(params, windows[:, :-1], keys=noise), windows[:, 1:]
        else:
            masked = mask_tokens(fold(keys, MASKS), windows, config.data.mask_fraction, setup.tokenizer)
            logits, targets = model.apply(params, masked.tokens, keys=noise), masked.targets
            logits = jnp.take_along_axis(logits, masked.positions[..., None], axis=1)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]

    noise = fold(keys, DROPOUT) if config.model.dropout else None

    def run(params):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(nll(params, noise)))(params)
        return grads, loss, nll(params, None)

    grads, loss, each = compiled(run, params)
    each = np.asarray(each, np.float64)
    return by_path(grads), float(loss), np.sum(each * WEIGHTS[:, None]), np.sum(WEIGHTS) * each.shape[1]


# What is found.


def gradients(setup):
    """(gradients by path, loss per token, norm) of one batch, as a training step computes them."""
    params = stored(setup, random_params(setup))
    rows = Rows(jax.device_put(batch(setup, BATCH), setup.layout.batch))

    def run(params, rows):
        grads, sums = setup.training.gradients(params, rows, jax.random.key(KEY))
        return grads, sums.nll / sums.tokens, setup.training.norm(grads)

    grads, loss, norm = compiled(run, params, rows)
    return by_path(setup.layout.model_tree(grads, setup.training.tied)), float(loss), float(norm)


def check_gradients(setup_of, name, blocks, unrolled, plan, **changes):
    actual, loss, norm = gradients(laid_out(setup_of(name, blocks, unrolled), plan, **changes))
    expected, expected_loss, *_ = definition(setup_of, name, blocks)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert norm == pytest.approx(sum(np.sum(leaf**2) for leaf in expected.values()) ** 0.5, rel=1e-5)
    assert actual.keys() == expected.keys()
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        error = np.abs(actual[path] - leaf).max()
        assert error <= 1e-5 * largest, path
        if path in ZERO_GRADIENT:
            assert error == 0 and not leaf.any(), path
        else:
            assert leaf.any() and error <= 1e-5 * np.abs(leaf).max(), path


def check_sums(setup_of, name, blocks, plan, **changes):
    """Evaluation of a batch whose rows count differently."""
    setup = laid_out(setup_of(name, blocks, NONE), plan, **changes)
    params = stored(setup, random_params(setup))
    rows = Rows(*(jax.device_put(leaf, setup.layout.batch) for leaf in (batch(setup, BATCH), WEIGHTS)))
    sums = compiled(lambda params, rows: setup.evaluation.sums(params, rows, jax.random.key(KEY)), params, rows)
    *_, nll, tokens = definition(setup_of, name, blocks)
    assert sums.tokens == tokens
    assert [sums.nll, sums.loss] == pytest.approx([nll, nll], rel=1e-5)


# Plans of one tensor degree.

STAGES, SCHEDULES, SHARES = (1, 2, 4), ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1"), (1, 2)
SHAPES = ("even", "uneven", "bare entry", "bare exit")
CORE = {
    "stages": STAGES,
    "schedule": SCHEDULES,
    "data": SHARES,
    "tensor": SHARES,
    "pieces": (1, 2, 4),  # micro-batches per stage
    "zero": (0, 1, 2, 3),
    "name": tuple(MODELS),
}
REST = {
    "saved": ("all", "all, loop", "input", "input, loop"),
    "ahead": (0, 1, 2),  # layers whose communication is begun before
    "sequence": (False, True),
    "chunks": (1, 2, 3),  # of samples
}
BLOCKS = {
    1: {"even": 3},
    2: {"even": 4, "uneven": 3, "bare entry": 3, "bare exit": 3},
    4: {"even": 4, "uneven": 5, "bare entry": 4, "bare exit": 4},
    8: {"even": 8, "bare entry": 8, "bare exit": 8},
}
"""By the number of chunks in all, as few as make the shape."""


def chunks_of(stages, schedule):
    return stages * (2 if schedule == "interleaved" else 1)


def fits(stages, schedule, data, tensor, pieces, zero, name, saved, ahead, sequence, chunks, shape):
    """Eight devices; one stage has no schedule; a sequence is cut over tensor ranks; weight passes need more than
    inputs."""
    if (stages == 1 and schedule != "1f1b") or (sequence and tensor == 1) or (schedule == "zb-h1" and "input" in saved):
        return False
    return stages * data * tensor <= 8 and shape in BLOCKS[chunks_of(stages, schedule)]


def variant(saved, ahead, sequence, chunks):
    """(layers that are unrolled at most, settings of the plan, changes of the execution)"""
    plan = {"recompute": "input" in saved, "prefetch": ahead, "sequence": sequence, "sample_chunks": chunks}
    return NONE if "loop" in saved else ALL, plan, {"overlap": ahead > 0}


def check_case(setup_of, stages, schedule, data, tensor, pieces, zero, name, saved, ahead, sequence, chunks, shape):
    blocks = BLOCKS[chunks_of(stages, schedule)][shape]
    unrolled, settings, changes = variant(saved, ahead, sequence, chunks)
    settings |= {"schedule": schedule, "zero": zero, "micro_batches": pieces * stages, "batch": BATCH}
    layers = spread(blocks, chunks_of(stages, schedule), shape)
    plan = piped(layers, stages, data=data, tensor=tensor, **settings)
    check_gradients(setup_of, name, blocks, unrolled, plan, **changes)


@cache
def every_case():
    """The whole product of `CORE`; the rest is drawn for each."""
    rest, draw = list(itertools.product(*REST.values(), SHAPES)), random.Random(0)
    cases = []
    for core in itertools.product(*CORE.values()):
        if fitting := [one for one in rest if fits(*core, *one)]:
            cases.append((*core, *draw.choice(fitting)))
    return cases


NAMES = (*CORE, *REST, "shape")


FEWER = {
    "stages": (1, 2),
    "schedule": SCHEDULES[:-1],
    "data": (2,),
    "pieces": (2,),
    "zero": (0, 1, 3),
    "name": ("gpt-untied",),
    "saved": ("all, loop", "input, loop"),
    "ahead": (0, 1),
    "chunks": (1, 2),
    "shape": SHAPES[:3],
}
"""What the quick suite pairs; every value of every axis is in the product of `-m exhaustive`.  Unrolled layers, which
take long to compile, are in the quick `test_layer_loop`, and tied tables in the tests that follow."""


def fits_quick(*case):
    """Even stages hide more than they show."""
    return fits(*case) and (case[0] == 1 or case[-1] != "even")


BERT = [
    (2, "1f1b", 2, 2, 2, 3, "bert, no dropout", "all, loop", 1, False, 2, "bare entry"),
    (2, "interleaved", 2, 1, 2, 1, "bert, no dropout", "input, loop", 0, False, 1, "uneven"),
]
"""Its objective and its head, whose programs compile in twice the time."""

ZERO_2 = [
    (1, "1f1b", 2, 2, 4, 2, "gpt-tied", "input, loop", 1, False, 2, "even"),
    (2, "1f1b", 2, 1, 2, 2, "gpt-untied", "all, loop", 1, False, 1, "uneven"),
]
"""A loop that gathers first and scatters late, and a pipeline whose stages hold whole weights and shares of sums."""


ZERO_BUBBLE = [
    (2, "zb-h1", 1, 2, 1, 1, "gpt-untied", "all, loop", 0, False, 2, "bare exit"),
    (4, "zb-h1", 2, 1, 2, 2, "gpt-untied", "all, loop", 1, False, 1, "bare entry"),
]
"""Weight passes, with fewer micro-batches in flight than stages would allow and with more."""


@pytest.mark.parametrize(
    NAMES, [*pairwise(*(CORE | REST | FEWER).values(), where=fits_quick, seed=2), *BERT, *ZERO_2, *ZERO_BUBBLE]
)
def test_gradients_are_those_of_the_definition(
    setup_of, stages, schedule, data, tensor, pieces, zero, name, saved, ahead, sequence, chunks, shape
):
    check_case(setup_of, stages, schedule, data, tensor, pieces, zero, name, saved, ahead, sequence, chunks, shape)


@pytest.mark.exhaustive
@pytest.mark.parametrize(NAMES, every_case())
def test_gradients_are_those_of_the_definition_everywhere(
    setup_of, stages, schedule, data, tensor, pieces, zero, name, saved, ahead, sequence, chunks, shape
):
    check_case(setup_of, stages, schedule, data, tensor, pieces, zero, name, saved, ahead, sequence, chunks, shape)


@pytest.mark.parametrize("name", MODELS)
def test_one_device_computes_the_definition(setup_of, name):
    check_gradients(setup_of, name, 3, NONE, piped([5], 1, batch=BATCH))


# What a GPU runs where one stage is enough: a loop whose communication runs beside other layers.

OVERLAPPED = {"zero": (0, 1, 2, 3), "micro_batches": (1, 4), "ahead": (1, 2), "chunks": (1, 3)}


HYBRID = {
    "a loop, ZeRO-1": ("gpt-tied", ([5], 1), {"data": 4, "tensor": 2, "zero": 1, "micro_batches": 2}, True),
    "a loop, ZeRO-3, in line": ("gpt-untied", ([5], 1), {"data": 4, "zero": 3, "micro_batches": 4}, False),
    "a pipeline, ZeRO-2": ("gpt-untied", ([3, 2], 2), {"data": 4, "zero": 2, "micro_batches": 4}, True),
    "a loop, ZeRO-2": ("gpt-untied", ([5], 1), {"data": 8, "zero": 2, "micro_batches": 2}, True),
    "a pipeline, ZeRO-1": ("gpt-tied", ([3, 2], 2), {"data": 4, "zero": 1, "micro_batches": 2}, True),
    "a loop, ZeRO-3, bert": ("bert", ([5], 1), {"data": 4, "tensor": 2, "zero": 3, "micro_batches": 1}, True),
}
"""(model, layers of the stages, settings, whether communication runs beside computation), over two neighbours."""


@pytest.mark.parametrize("kind", quick_and_exhaustive(HYBRID, list(HYBRID)[:3]))
def test_gradients_of_hybrid_sharding(setup_of, kind):
    name, layers, settings, overlap = HYBRID[kind]
    plan = piped(*layers, batch=BATCH, zero_ranks=2, **settings)
    check_gradients(setup_of, name, 3, NONE, plan, overlap=overlap)


def check_overlapped(setup_of, name, zero, micro_batches, ahead, chunks):
    settings = {"micro_batches": micro_batches, "zero": zero, "prefetch": ahead, "sample_chunks": chunks}
    check_gradients(setup_of, name, 3, NONE, piped([5], 1, data=4, tensor=2, batch=BATCH, **settings), overlap=True)


LOOPS = list(zip(itertools.cycle(MODELS), pairwise(*(OVERLAPPED | {"zero": (0, 1, 3)}).values()), strict=False))


@pytest.mark.parametrize(("name", "case"), quick_and_exhaustive(LOOPS, LOOPS[3:5]), ids=str)
def test_gradients_of_overlapped_loops(setup_of, name, case):
    check_overlapped(setup_of, name, *case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", *OVERLAPPED), list(itertools.product(MODELS, *OVERLAPPED.values())))
def test_gradients_of_overlapped_loops_everywhere(setup_of, name, zero, micro_batches, ahead, chunks):
    check_overlapped(setup_of, name, zero, micro_batches, ahead, chunks)


# What of a block is kept, where: by name.

SAVED = {
    "one stage, unrolled": ("bert", SavedTensors(device=("qkv", "mlp_out"), host=("mlp_hidden",)), ALL, ([5], 1), {}),
    "one stage, in a loop": ("gpt-untied", SavedTensors(host=NAMED_TENSORS), NONE, ([5], 1), {"zero": 1, "data": 2}),
    "given late": (
        "gpt-tied, no dropout",
        SavedTensors(device=("projection_out",), host=("residual_in", "qkv")),
        NONE,
        ([5], 1),
        {"data": 4},
    ),
    "micro-batches": (
        "bert",
        SavedTensors(host=("residual_in", "attention_out")),
        NONE,
        ([5], 1),
        {"micro_batches": 4},
    ),
    "tensor, chunks": (
        "gpt-tied, no dropout",
        SavedTensors(host=NAMED_TENSORS[:4]),
        NONE,
        ([5], 1),
        {"tensor": 2, "sample_chunks": 3},
    ),
    "cut sequence": (
        "bert",
        SavedTensors(host=("residual_in", "mlp_hidden")),
        NONE,
        ([5], 1),
        {"tensor": 2, "sequence": True},
    ),
    "pipeline": (
        "gpt-tied, no dropout",
        SavedTensors(device=("qkv",), host=("residual_in", "mlp_hidden")),
        NONE,
        ([3, 2], 2),
        {"micro_batches": 4},
    ),
    "interleaved": (
        "bert, no dropout",
        SavedTensors(host=NAMED_TENSORS),
        NONE,
        ([2, 1, 1, 2], 2),
        {"schedule": "interleaved", "micro_batches": 4, "tensor": 2},
    ),
}


@pytest.mark.parametrize("case", quick_and_exhaustive(SAVED, ("given late", "tensor, chunks", "pipeline")))
def test_gradients_with_names_of_what_is_kept(setup_of, case):
    name, saved, unrolled, (layers, stages), settings = SAVED[case]
    plan = piped(layers, stages, batch=BATCH, recompute=True, saved=saved, **settings)
    check_gradients(setup_of, name, sum(layers) - 2, unrolled, plan, overlap=stages == 1)


# Samples in chunks.


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "stages", "chunks"), [("gpt-tied", 1, 3), ("bert", 2, 2)])
def test_chunks_compute_what_the_whole_does(setup_of, name, stages, chunks):
    """To 1e-6 of the largest entry, whether the chunks are even or not and take turns or not."""
    layers = {1: [5], 2: [3, 2]}[stages]
    plans = {
        n: piped(layers, stages, tensor=4, batch=BATCH, micro_batches=stages, sample_chunks=n) for n in (1, chunks)
    }
    expected, expected_loss, _ = gradients(laid_out(setup_of(name, 3, NONE), plans[1]))
    actual, loss, _ = gradients(laid_out(setup_of(name, 3, NONE), plans[chunks], overlap=stages == 1))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        assert np.abs(actual[path] - leaf).max() <= 1e-6 * largest, path


# Plans of one stage whose layers differ.

DEGREES = {
    "untied, up": ("gpt-untied", (1, 2, 4, 4, 4)),
    "tied, down and up": ("gpt-tied, no dropout", (8, 2, 2, 1, 8)),
    "bert, every way": ("bert, no dropout", (2, 4, 1, 1, 2)),
    "untied, down": ("gpt-untied", (4, 4, 1, 2, 1)),
    "tied, blocks alone": ("gpt-tied", (1, 4, 4, 2, 1)),
}
"""(model, of embedding, three blocks and head); ends that share a table share the degree."""

MIXED_CORE = {"micro_batches": (1, 4), "zero": (0, 1, 2, 3)}
MIXED_NAMES = ("layers", *MIXED_CORE, *REST)
FEW = {
    "saved": ("all", "input, loop"),
    "ahead": (0, 1),
    "sequence": (False, True),
    "chunks": (None, (1, 2, 2, 3, 1)),
}
QUICK = MIXED_CORE | FEW | {"zero": (0, 1, 3), "saved": ("all, loop", "input, loop")}
MIXED = [(layers, *rest) for layers, rest in zip(itertools.cycle(DEGREES), pairwise(*QUICK.values()), strict=False)]


def check_mixed(setup_of, layers, micro_batches, zero, saved, ahead, sequence, chunks):
    name, degrees = DEGREES[layers]
    unrolled, settings, changes = variant(saved, ahead, sequence, chunks)
    plan = mixed(degrees, batch=BATCH, micro_batches=micro_batches, zero=zero, **settings)
    check_gradients(setup_of, name, len(degrees) - 2, unrolled, plan, **changes)


@pytest.mark.parametrize(MIXED_NAMES, quick_and_exhaustive(MIXED, MIXED[6:]))
def test_degrees_may_differ_from_layer_to_layer(setup_of, layers, micro_batches, zero, saved, ahead, sequence, chunks):
    check_mixed(setup_of, layers, micro_batches, zero, saved, ahead, sequence, chunks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(MIXED_NAMES, list(itertools.product(DEGREES, *MIXED_CORE.values(), *FEW.values())))
def test_degrees_may_differ_everywhere(setup_of, layers, micro_batches, zero, saved, ahead, sequence, chunks):
    check_mixed(setup_of, layers, micro_batches, zero, saved, ahead, sequence, chunks)


def test_a_single_stage_of_chunks_is_no_plan(setup_of):
    """The planner refuses it too."""
    chunks = Chunk(first=0, runs=(Run(layers=2, tensor=2),)), Chunk(first=2, runs=(Run(layers=3, tensor=4),))
    plan = Plan(
        model="any",
        cluster="any",
        batch=BATCH,
        micro_batches=2,
        zero=1,
        stages=(Stage(device=0, devices=8, chunks=chunks),),
    )
    with pytest.raises(InputError, match="join them into one chunk"):
        check_gradients(setup_of, "gpt-untied", 3, NONE, plan)


# Evaluation.

EVALUATED = {
    "one device": piped([5], 1),
    "data x tensor, ZeRO-1, micro-batches": piped([5], 1, data=4, tensor=2, zero=1, micro_batches=4),
    "ZeRO-3, cut sequence": piped([5], 1, data=2, tensor=4, zero=3, sequence=True),
    "several degrees, chunks": mixed((4, 1, 2, 2, 4), zero=3, micro_batches=4, sample_chunks=(1, 1, 2, 3, 1)),
    "gpipe, uneven": piped([3, 2], 2, data=2, tensor=2, micro_batches=4, schedule="gpipe", zero=1, sample_chunks=3),
    "1f1b, bare ends": piped([1, 1, 2, 1], 4, data=2, micro_batches=8, zero=3),
    "interleaved": piped([1, 1, 1, 2], 2, data=2, tensor=2, micro_batches=4, schedule="interleaved"),
}
"""Of three blocks."""


@pytest.mark.parametrize(("name", "kind"), list(zip(itertools.cycle(MODELS), EVALUATED, strict=False)))
def test_evaluation_counts_rows_by_their_weights(setup_of, name, kind):
    check_sums(setup_of, name, 3, EVALUATED[kind], overlap=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kind", "overlap"), list(itertools.product(MODELS, EVALUATED, (False, True))))
def test_evaluation_counts_rows_by_their_weights_everywhere(setup_of, name, kind, overlap):
    check_sums(setup_of, name, 3, EVALUATED[kind], overlap=overlap)
