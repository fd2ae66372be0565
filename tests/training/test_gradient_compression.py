"""Training with compressed sums of gradients: under any plan nothing is lost, nor when a run goes on."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jhpt
from jhpt import cli
from jhpt.core.config import CheckpointConfig, GradientCompression
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.models.family import Rows
from jhpt.sharding.compression import feedback
from jhpt.sharding.partition import MATRICES
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.compile import compile_step
from jhpt.training.loop import _batches
from jhpt.training.programs import global_batch
from jhpt.training.record import make_record
from jhpt.training.setup import prepare
from tests.conftest import tiny_overrides
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import batch, by_path, laid_out, mixed, on_host, piped, random_params, stored
from tests.sharding.test_parity import BATCH, KEY, NONE, ZERO_GRADIENT, definition, setup_of

__all__ = ["setup_of"]

EIGHT = GradientCompression(kind="quantize", bucket=9000)
FOUR = GradientCompression(kind="quantize", bits=4)
FEW = GradientCompression(kind="topk", share=0.03, block=512, bucket=20_000)

PLANS = {
    "data 8": ("gpt-tied", EIGHT, piped([5], 1, data=8, batch=BATCH), {}),
    "data x tensor, cut sequence, ZeRO-1": (
        "gpt-untied",
        EIGHT,
        piped([5], 1, data=4, tensor=2, batch=BATCH, zero=1, micro_batches=2, sequence=True),
        {},
    ),
    "several degrees": ("bert", FOUR, mixed((1, 4, 2, 8, 1), batch=BATCH), {}),
    "several degrees, ZeRO-1": ("gpt-untied", FEW, mixed((2, 4, 1, 1, 4), batch=BATCH, zero=1), {}),
    "layer by layer": ("gpt-untied", FEW, piped([5], 1, data=4, tensor=2, batch=BATCH), {"overlap": True}),
    "layer by layer, micro-batches": (
        "bert",
        EIGHT,
        piped([5], 1, data=4, batch=BATCH, micro_batches=4),
        {"overlap": True},
    ),
    "layer by layer, ZeRO-1, micro-batches": (
        "gpt-tied",
        FOUR,
        mixed((2, 1, 2, 2, 2), batch=BATCH, zero=1, micro_batches=2),
        {"overlap": True},
    ),
    "pipeline, tied": (
        "gpt-tied, no dropout",
        FEW,
        piped([3, 2], 2, data=2, tensor=2, batch=BATCH, micro_batches=2),
        {},
    ),
    "pipeline, untied, ZeRO-1": (
        "gpt-untied",
        EIGHT,
        piped([1, 2, 2], 3, data=2, batch=BATCH, zero=1, micro_batches=4),
        {},
    ),
}


QUICK = ("layer by layer", "pipeline, tied")


@pytest.mark.parametrize("kind", quick_and_exhaustive(PLANS, QUICK))
def test_what_is_applied_and_what_is_left_are_the_gradient(setup_of, kind):
    """In two steps, the second of which has what the first has left; biases and scales of norms are exact."""
    name, compression, plan, changes = PLANS[kind]
    setup = laid_out(setup_of(name, 3, NONE), plan.model_copy(update={"gradient_compression": compression}), **changes)
    layout, tied, params = setup.layout, setup.training.tied, stored(setup, random_params(setup))
    rows = Rows(jax.device_put(batch(setup, BATCH), layout.batch))
    run = jax.jit(lambda left: setup.training.compressed_gradients(params, rows, jax.random.key(KEY), left))
    left = feedback.fresh(layout, params, compression)
    left = jax.device_put(left, feedback.shardings(layout, left))
    expected, *_ = definition(setup_of, name, 3)
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    before = dict.fromkeys(expected, 0.0)
    for _ in range(2):
        grads, sums, left = run(left)
        total = by_path(layout.model_tree(on_host(grads), tied))
        units = rows.windows.size / float(sums.tokens)
        saved = by_path(jax.tree.map(lambda leaf: leaf.sum(0), _saved(layout, left, tied)["residual"]))
        saved = {path: units * leaf for path, leaf in saved.items()}
        assert saved.keys() == {path for path in expected if MATRICES.search(path)}
        assert total.keys() == expected.keys()
        for path, leaf in expected.items():
            after = saved.get(path, 0.0)
            assert np.abs(total[path] + after - before[path] - leaf).max() <= 1e-5 * largest, path
            assert path in ZERO_GRADIENT or path not in saved or np.abs(after).max() > 1e-4 * np.abs(leaf).max(), path
        before = before | saved


def _saved(layout, left, tied):
    return feedback.saved(layout, jax.tree.map(jnp.asarray, on_host(left)), tied)


# In training.

KINDS = {
    "quantize": "quantize",
    "4 bits": {"kind": "quantize", "bits": 4},
    "topk": {"kind": "topk", "share": 0.1, "momentum": 0.5},
}


def overrides(corpus, compression, **parallel):
    parallel = {f"parallel.{name}": value for name, value in ({"data": 4} | parallel).items()}
    return tiny_overrides(corpus) | {"parallel.gradient_compression": compression} | parallel


def trained(config, steps):
    """(setup, step, state, losses) after so many steps."""
    setup = prepare(config)
    step = compile_step(setup)
    state = step.init()
    batches, losses = _batches(setup, int(state.step)), []
    for _ in range(steps):
        state, metrics = step.step(state, global_batch(setup, next(batches)))
        losses.append(float(metrics.loss))
    return setup, step, state, losses


FOLLOWED = {"train.steps": 30, "optimizer.learning_rate": 5e-3, "data.batch_size": 24}


def followed(corpus, compression):
    """A configuration with four ranks, of which all tests of steps that are taken here make use."""
    return load_config("gpt-tiny", overrides(corpus, compression) | FOLLOWED)


@pytest.fixture(scope="module")
def stepped(corpus):
    """(setup, step, state after two steps, on the host, and its place on the devices)."""
    setup, step, state, _ = trained(followed(corpus, KINDS["topk"]), 2)
    return setup, step, on_host(state), jax.tree.map(lambda leaf: leaf.sharding, state)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "most"), [("4 bits", 0.01), ("topk", 0.1)])
def test_losses_are_near_those_of_plain_sums(corpus, kind, most):
    """30 steps; top-k sends a tenth of the numbers and lags behind at first."""
    *_, plain = trained(followed(corpus, "off"), 30)
    assert plain[-1] < plain[0] - 2
    *_, losses = trained(followed(corpus, KINDS[kind]), 30)
    assert losses[0] == pytest.approx(plain[0], rel=1e-6)
    assert 0 < abs(np.mean(losses[-5:]) / np.mean(plain[-5:]) - 1) < most


def test_a_step_that_is_not_finite_leaves_everything_as_it_was(stepped):
    setup, step, saved, places = stepped
    state = jax.device_put(saved, places)
    spoilt = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    after, metrics = step.step(_replaced(state, spoilt), global_batch(setup, next(_batches(setup, 2))))
    assert metrics.bad_steps == 1 and not np.isfinite(metrics.loss)
    same_bits((saved.feedback, saved.optimizer), on_host((after.feedback, after.optimizer)))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(saved.feedback))


def _replaced(state, params):
    return replace(state, params=jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, state.params)))


def same_bits(first, second):
    leaves, others = jax.tree.leaves(first), jax.tree.leaves(second)
    assert len(leaves) == len(others) > 0
    for one, other in zip(leaves, others, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


RESUMED = {
    "data": {},
    "ZeRO-1 x tensor": {"data": 2, "tensor": 2, "zero": 1},
    "pipeline": {"data": 2, "pipe": 2, "micro_batches": 2},
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
    ("plan", "kind"),
    quick_and_exhaustive(zip(RESUMED, ("topk", "4 bits", "topk"), strict=True), [("data", "topk")]),
)
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, corpus, plan, kind):
    settings = overrides(corpus, KINDS[kind], **RESUMED[plan]) | {
        "checkpoint.every": 2,
        "data.validation_fraction": 0.0,
    }
    whole = jhpt.train("gpt-tiny", out=tmp_path / "whole", overrides=settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")  # as if it had been killed before
    parts = jhpt.train(out=tmp_path / "parts")
    assert parts.losses == whole.losses and set(whole.losses) == {1, 2, 3, 4}
    names = ("state", "residual", "momentum") if kind == "topk" else ("state", "residual")
    same_bits(read(tmp_path / "parts", 4, names), read(tmp_path / "whole", 4, names))


def read(run_dir, step, names):
    """Items of a checkpoint, as saved."""
    manager = ocp.CheckpointManager(run_dir / "checkpoints")
    items = manager.restore(step, args=ocp.args.Composite(**{name: ocp.args.StandardRestore() for name in names}))
    manager.close()
    return [items[name] for name in names]


PLACES = [
    {"data": 3},
    {"data": 2, "tensor": 2, "zero": 1},
    {"data": 2, "pipe": 2, "micro_batches": 2},
    {"data": 1},
]


@pytest.mark.parametrize("places", [PLACES[1:2], pytest.param(PLACES, marks=pytest.mark.exhaustive)], ids=len)
def test_on_other_ranks_the_sum_of_what_is_left_stays(tmp_path, corpus, stepped, places):
    """From checkpoint to checkpoint under other plans, whatever the number of ranks and stages."""
    setup, step, saved, shardings = stepped
    config, state = setup.config, jax.device_put(saved, shardings)
    expected = total(setup, state)
    assert expected and all(np.abs(leaf).max() > 0 for leaf in expected.values())
    for number, place in enumerate(places):
        with Checkpoints(tmp_path / str(number), CheckpointConfig()) as checkpoints:
            step.save(checkpoints, 2, state, _record(config))
        parallel = {f"parallel.{name}": value for name, value in ({"tensor": 1, "zero": 0} | place).items()}
        config = load_config(followed(corpus, KINDS["topk"]), parallel)
        setup = prepare(config)
        step = compile_step(setup)
        with Checkpoints(tmp_path / str(number), CheckpointConfig()) as checkpoints:
            state = step.load(checkpoints, 2)
        here = total(setup, state)
        assert here.keys() == expected.keys()
        assert all(np.allclose(here[path], leaf, rtol=1e-6, atol=1e-9) for path, leaf in expected.items())
    step.step(state, global_batch(setup, next(_batches(setup, 2))))


def total(setup, state):
    """Sums over the ranks by path, of residuals and momenta."""
    saved = _saved(setup.layout, state.feedback, setup.training.tied)
    return {f"{name} {path}": leaf.sum(0) for name, tree in saved.items() for path, leaf in by_path(tree).items()}


def _record(config):
    return make_record(config, "key", "float32")


@pytest.mark.exhaustive
def test_compression_may_begin_and_end_with_any_checkpoint(tmp_path, corpus):
    """A plain run's checkpoint has nothing that is left; what a compressed run has left, a plain one drops."""
    settings = {"checkpoint.every": 2, "optimizer.schedule": "constant"}
    plain = overrides(corpus, "off") | settings
    jhpt.train("gpt-tiny", out=tmp_path / "run", overrides=plain | {"train.steps": 2})
    assert {path.name for path in (tmp_path / "run" / "checkpoints" / "2").iterdir() if path.is_dir()} == {
        "record",
        "state",
    }
    for steps, compression in ((4, "quantize"), (6, KINDS["topk"]), (8, "off")):
        jhpt.train(
            "gpt-tiny",
            out=tmp_path / "run",
            overrides=overrides(corpus, compression) | settings | {"train.steps": steps},
        )
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("are dropped") == 1
    assert len(read(tmp_path / "run", 6, ("residual", "momentum"))) == 2


# What a user writes.


def test_one_word_or_all(tmp_path):
    assert not load_config("gpt-tiny").parallel.gradient_compression.on
    file = tmp_path / "run.yaml"
    for text, expected in {
        "off": GradientCompression(),
        "quantize": GradientCompression(kind="quantize"),
        "{kind: topk, share: 0.05}": GradientCompression(kind="topk", share=0.05),
    }.items():
        file.write_text(f"parallel: {{data: 2, gradient_compression: {text}}}\n")
        config = load_config(file)
        assert config.parallel.gradient_compression == expected
        assert plan_by_hand(config, 2).gradient_compression == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient_compression": "topkk"}, "'off', 'quantize' or 'topk'"),
        ({"gradient_compression.share": 0.2}, "set parallel.gradient_compression.kind to topk"),
        ({"gradient_compression": {"kind": "topk", "bits": 4}}, "kind to quantize"),
        ({"gradient_compression": {"kind": "quantize", "momentum": 0.9}}, "kind to topk"),
        ({"gradient_compression": {"kind": "quantize", "bits": 2}}, "4 or 8"),
        ({"gradient_compression": {"kind": "topk", "share": 0}}, "greater than 0"),
        ({"gradient_compression": {"kind": "topk", "block": 1 << 17}}, "65536"),
        ({"gradient_compression": "topk", "zero": 3}, "use parallel.zero=1"),
    ],
)
def test_refusals(tiny, settings, words):
    with pytest.raises(InputError, match=words):
        tiny(**{f"parallel.{name}": value for name, value in settings.items()})


@pytest.mark.parametrize(
    "flag", (["--parallel.gradient_compression", "topk"], ["--parallel.gradient_compression=topk"])
)
def test_one_word_on_the_command_line(flag, capsys):
    """It is read: with ZeRO-3 it is refused, before anything is made."""
    assert cli.main(["train", "gpt-tiny", *flag, "--parallel.zero", "3"]) == 2
    assert "use parallel.zero=1" in capsys.readouterr().err


def test_a_plan_is_refused_alike(setup_of):
    plan = piped([5], 1, data=8, batch=BATCH, zero=3, gradient_compression=EIGHT)
    with pytest.raises(InputError, match="use zero=1 or leave out gradient_compression"):
        laid_out(setup_of("gpt-tied", 3, NONE), plan)
