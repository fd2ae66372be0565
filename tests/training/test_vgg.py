"""VGG, a family of unlike layers on synthetic images: it learns, evaluates and resumes, under plans of one program and
under plans whose stages have unequal numbers of devices."""

import itertools
import shutil

import jax
import numpy as np
import pytest

import jhpt
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.unused import unused_settings
from jhpt.models.family import Rows
from jhpt.training.data.batches import training_batches
from jhpt.training.data.synthetic import synthetic_images
from jhpt.training.metrics import read_metrics
from jhpt.training.planning import model_differences
from jhpt.training.setup import prepare
from tests.sharding.plans import batch, laid_out, mixed, piped, random_params, stored
from tests.sharding.stages.plans import general
from tests.sharding.traced import equations, loops
from tests.training.test_resume import final_state, losses, same_bits

BATCH = 12
SETTINGS = {
    "model.image_size": 8,
    "model.convolutions": [[8, 8], [16]],
    "model.dense": [32],
    "model.num_classes": 4,
    "data.images": 96,
    "data.batch_size": BATCH,
    "data.validation_fraction": 0.25,
    "optimizer.learning_rate": 3e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "train.steps": 4,
    "checkpoint.every": 2,
    "evaluation.every": 2,
    "log.every": 1,
    "log.tensorboard": False,
}
THREE_ONE = general([3, 2], [3, 1], [1] * 5, batch=BATCH, micro_batches=3)
"""Convolutions on three devices and dense layers on one: four images on three replicas with room for two each."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The results of four steps on one device and under the plan 3|1.  Copy their folders before you change them."""
    folder = tmp_path_factory.mktemp("vgg")
    one = jhpt.train("vgg16-tiny", out=folder / "one", overrides=SETTINGS | {"parallel.data": 1})
    return one, jhpt.train("vgg16-tiny", out=folder / "stages", overrides=SETTINGS, plan=THREE_ONE)


def test_stages_of_unequal_size_train_as_one_device_does(runs):
    one, stages = runs
    for name in ("losses", "validation_losses", "validation_accuracy"):
        expected = getattr(one, name)
        assert expected and getattr(stages, name) == pytest.approx(expected, rel=1e-5)
    assert losses(stages.run_dir, "grad_norm") == pytest.approx(losses(one.run_dir, "grad_norm"), rel=1e-5)


def test_a_run_is_loaded_and_evaluated_as_it_was(runs):
    one, _ = runs
    loaded = jhpt.load(one.run_dir)
    found = loaded.evaluate()
    assert found.loss == pytest.approx(one.validation_losses[4], rel=1e-5) and found.bits_per_byte is None
    assert found.accuracy == one.validation_accuracy[4] and found.tokens == 24
    for refused, words in (
        (lambda: loaded.evaluate(**{"data.path": "x"}), "data.path would not be read"),
        (lambda: loaded.generate(["a"]), "does not generate text"),
        (lambda: loaded.score(np.zeros((1, 4), np.int32)), "use jhpt eval"),
        (lambda: jhpt.train("vgg16-tiny", init=one.run_dir), "only models of text start from other weights"),
    ):
        with pytest.raises(InputError, match=words):
            refused()


def resumed(whole, run_dir, **changes):
    """The last two of the four steps once more."""
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "4")
    return jhpt.train(out=run_dir, **changes)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_resumed_it_is_bitwise_the_same(runs, tmp_path):
    _, stages = runs
    same = resumed(stages, tmp_path / "same")
    assert same.losses == stages.losses and same.validation_losses == stages.validation_losses
    same_bits(final_state(tmp_path / "same", 4), final_state(stages.run_dir, 4))


def test_it_goes_on_under_another_plan_and_learns_the_classes(runs, tmp_path):
    """Chance would be right about a quarter of the images."""
    one, stages = runs
    overrides = {"parallel.tensor": 2, "parallel.data": 1, "train.steps": 60, "evaluation.every": 60}
    result = resumed(stages, tmp_path / "run", overrides=overrides)
    assert [result.losses[step] for step in (3, 4)] == pytest.approx([one.losses[step] for step in (3, 4)], rel=1e-4)
    assert one.losses[1] > 1.3 and result.losses[60] < 0.2 and result.validation_accuracy[60] > 0.9
    record = read_metrics(tmp_path / "run")[-2]
    assert record["images_per_s"] > 0 and "tokens_per_s" not in record
    assert result.images_per_s and result.tokens_per_s is None and result.sample is None


@pytest.mark.exhaustive
def test_resumed_on_one_device_it_is_bitwise_the_same_and_close_on_stages(runs, tmp_path):
    one, _ = runs
    same = resumed(one, tmp_path / "same")
    assert same.losses == one.losses
    same_bits(final_state(tmp_path / "same", 4), final_state(one.run_dir, 4))
    plan = general([1, 2, 2], [2, 1, 1], [2, 1, 1, 1, 1], batch=BATCH, micro_batches=2)
    assert resumed(one, tmp_path / "stages", plan=plan).losses == pytest.approx(one.losses, rel=1e-4)
    sharded = {"parallel.data": 2, "parallel.tensor": 2, "parallel.zero": 3}
    assert resumed(one, tmp_path / "sharded", overrides=sharded).losses == pytest.approx(one.losses, rel=1e-4)


def test_convolutions_of_several_micro_batches_are_in_no_loop():
    """XLA's CPU client takes several times as long for one that is."""
    setup = prepare(load_config("vgg16-tiny", SETTINGS | {"parallel.data": 1}))
    setup = laid_out(setup, mixed([1] * 5, 1, batch=BATCH, micro_batches=4))
    rows = Rows(batch(setup, BATCH))
    for function in (setup.training.gradients, setup.training.sums):
        program = jax.make_jaxpr(function)(stored(setup, random_params(setup)), rows, jax.random.key(0)).jaxpr
        convolutions = [within for one, within in equations(program) if one.primitive.name == "conv_general_dilated"]
        assert convolutions and not any(map(loops, itertools.chain(*convolutions)))


def test_a_row_depends_on_the_seed_and_its_number_alone():
    config = load_config("vgg16-tiny", SETTINGS)
    rows, again = synthetic_images(config), synthetic_images(config)
    assert (len(rows.train), len(rows.validation), rows.key) == (72, 24, again.key)
    assert np.array_equal(rows.train[5], again.train[5]) and not np.array_equal(rows.train[5], rows.train[6])
    row = rows.train[5]
    assert row.dtype == np.int32 and row.shape == (8 * 8 * 3 + 1,) == (config.model.row_length(0),)
    assert row[:-1].min() >= 0 and row[:-1].max() <= 255 and {int(one[-1]) for one in rows.train} == {0, 1, 2, 3}
    # Those that are held out are the ones that would follow.
    more = synthetic_images(load_config(config, {"data.validation_fraction": 0.0}))
    assert np.array_equal(rows.validation[0], more.train[72])
    other = synthetic_images(load_config(config, {"seed": 1}))
    assert other.key != rows.key and not np.array_equal(other.train[5], row)
    whole = next(training_batches(rows.train, 6, slice(0, 6), 3))
    assert np.array_equal(next(training_batches(rows.train, 6, slice(2, 4), 3)), whole[2:4])


REFUSED = {
    "parallel.pipe": (2, "those of vgg16-tiny differ; .* --space general"),
    "memory.offload": ("both", "needs layers that are all alike"),
    "parallel.sequence": (True, "a sample here is an image"),
    "parallel.sample_chunks": (2, "a sample here is an image"),
    "parallel.compression": ("auto", "a sample here is an image"),
    "data.packing": ("documents", "use stream"),
    "optimizer.name": ("muon", "use adamw, lion or sgd"),
    "optimizer.moments": ("int8", "use float32"),
    "parallel.tensor": (3, "model.convolutions.0.0=8 is not divisible by parallel.tensor=3; use 1, 2, 4 or 8"),
    "model.image_size": (10, "use a multiple of 4"),
    "model.d_model": (64, "unknown key"),
    "model.vocab_size": (64, "unknown key"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_text_or_equal_blocks_need_is_refused_with_a_remedy(setting):
    value, words = REFUSED[setting]
    with pytest.raises(InputError, match=words):
        load_config("vgg16-tiny", SETTINGS | {setting: value})


@pytest.mark.parametrize("setting", ["path", "tokenizer", "sequence_length", "mask_fraction", "label_key", "workers"])
def test_settings_of_text_would_not_be_read(setting):
    value = {"sequence_length": 64, "mask_fraction": 0.3, "workers": 2}.get(setting, "x")
    (line,) = unused_settings(load_config("vgg16-tiny", SETTINGS | {f"data.{setting}": value}))
    assert line.startswith(f"data.{setting}=") and "model of images" in line
    assert not unused_settings(load_config("vgg16-tiny", SETTINGS))
    (line,) = unused_settings(load_config("gpt-tiny", {"data.noise": 2.0}))
    assert "set model.family=vgg" in line


def test_a_plan_of_one_program_has_one_stage():
    config = load_config("vgg16-tiny", SETTINGS)
    (line,) = model_differences(piped([3, 2], 2, batch=BATCH, micro_batches=2), config)
    assert "blocks of one shape" in line and "--space general" in line
    assert not model_differences(THREE_ONE, config) and not model_differences(plan_by_hand(config, 4), config)
    assert not model_differences(mixed([1, 1, 2, 2, 2], 2, batch=BATCH), config)
