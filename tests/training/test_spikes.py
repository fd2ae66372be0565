"""What is called a spike; that the checkpoint from before it stays, its update is left out, or training goes back."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import jhpt
from jhpt.core.errors import InputError
from jhpt.core.guards_config import GuardsConfig
from jhpt.core.load import load_config
from jhpt.core.manifest import write_manifest
from jhpt.training import device_step, loop, setup
from jhpt.training.data.left_out import gone_back, position
from jhpt.training.loop import TrainingDiverged
from jhpt.training.parts import make_parts
from jhpt.training.rewind import checkpoint_before, whole_before
from jhpt.training.spikes import SpikeGuard, is_spike
from jhpt.training.step_folders import pinned, steps_in
from tests.conftest import tiny_overrides
from tests.covers import quick_and_exhaustive
from tests.training.test_resume import final_state, losses, same_bits

FALLING = [5.5 * 0.97**step for step in range(40)]
NOISY = [3.0 + 0.1 * math.sin(17 * step) for step in range(40)]
SERIES = pytest.mark.parametrize("series", [FALLING, NOISY, [2.0] * 40], ids=["falling", "noisy", "flat"])
GUARD = SpikeGuard(sigmas=10.0, window=20, rewinds=True)


def called(series) -> list[bool]:
    """Whether each of these losses is called a spike, by the host."""
    return [is_spike(series[:step], series[step], GuardsConfig()) for step in range(len(series))]


@SERIES
def test_ordinary_losses_are_none(series):
    assert not any(called(series))


@SERIES
@pytest.mark.parametrize("loss", [1e15, 20.0, math.nan, math.inf])
def test_explosions_are(series, loss):
    assert is_spike(series, loss, GuardsConfig())


def test_nothing_is_said_before_there_is_something_to_compare_with():
    assert not is_spike([5.0, 4.0, 3.0], 1e15, GuardsConfig())


@SERIES
@pytest.mark.parametrize("last", [1e15, 20.0, 1.15, 1.25])
def test_a_step_calls_the_same_a_spike_as_the_host(series, last):
    """At each loss of a series, and at one that is a multiple of it.  A loss that is not finite is skipped anyway."""
    state = GUARD.fresh()
    for step, loss in enumerate(series, 1):
        for value in (loss, loss * last):
            assert bool(GUARD.spikes(state, jnp.float32(value))) == is_spike(series[: step - 1], value, GuardsConfig())
        assert not GUARD.spikes(state, jnp.float32(jnp.nan)) and not GUARD.spikes(state, jnp.float32(jnp.inf))
        state = GUARD.after(state, jnp.int32(step), jnp.float32(loss), spike=jnp.bool_(False), good=jnp.bool_(True))


def test_the_window_is_of_applied_updates_and_the_first_spike_is_remembered():
    state, no, yes = GUARD.fresh(), jnp.bool_(False), jnp.bool_(True)
    for step, (loss, spike) in enumerate([(3.0, no), (9.0, yes), (2.0, no), (8.0, yes)], 1):
        state = GUARD.after(state, jnp.int32(step), jnp.float32(loss), spike=spike, good=~spike)
    assert (int(state["spikes"][0]), int(state["first"][0])) == (2, 2)
    np.testing.assert_array_equal(state["window"], [math.nan] * 18 + [3.0, 2.0])
    places = dict.fromkeys(state)
    shorter = SpikeGuard(sigmas=1.0, window=5, rewinds=False).fitted(state, places)
    np.testing.assert_array_equal(shorter["window"], [math.nan] * 3 + [3.0, 2.0])
    assert (int(shorter["spikes"][0]), int(shorter["first"][0])) == (2, 0)  # without rewinding none waits
    longer = SpikeGuard(sigmas=1.0, window=21, rewinds=True).fitted(state, places)
    np.testing.assert_array_equal(longer["window"], [math.nan] * 19 + [3.0, 2.0])
    assert int(longer["first"][0]) == 2


def settings_of(corpus, **changes):
    """A run of 16 steps of one block on one device."""
    settings = tiny_overrides(corpus) | {"model.num_layers": 1, "parallel.data": 1, "train.steps": 16}
    settings |= {"checkpoint.every": 2, "checkpoint.keep": 1, "evaluation.every": 100, "optimizer.schedule": "constant"}
    return settings | {name.replace("__", "."): value for name, value in changes.items()}


def test_the_checkpoint_before_a_spike_is_kept(tmp_path, corpus, monkeypatch, capsys):
    """At the tenth step the loss that is reported explodes, and stays there."""
    make = device_step.make_train_step

    def exploding(*arguments, **options):
        step = make(*arguments, **options)

        def train_step(state, windows):
            state, metrics = step(state, windows)
            return state, metrics._replace(loss=jnp.where(state.step >= 10, 1e15, metrics.loss))

        return train_step

    monkeypatch.setattr(device_step, "make_train_step", exploding)
    jhpt.train("gpt-tiny", overrides=settings_of(corpus), out=tmp_path)
    assert pinned(tmp_path / "checkpoints") == {8} and steps_in(tmp_path / "checkpoints") == [8, 16]
    said = capsys.readouterr().out
    assert said.count("step 10: the loss has jumped") == 1 and "--resume-step 8" in said


BATCHES = loop._batches
BAD = 7
"""All tokens of a batch on which the loss explodes."""


def spoil_in(patch, positions, factor=1e3, absent=(0, 0)):
    """Multiplies the loss, and so the gradient, on the batches at these positions.

    absent: (step, count): positions after this step that the data does not have at all.
    """

    def spoilt_parts(*arguments, **options):
        made = make_parts(*arguments, **options)

        def head_loss(params, x, batch, context):
            sums = made.head_loss(params, x, batch, context)
            times = jnp.where(jnp.all(batch.windows == BAD), factor, 1.0)
            return sums._replace(loss=times * sums.loss, nll=times * sums.nll)

        return replace(made, head_loss=head_loss)

    def spoilt_batches(setup, first, left_out=()):
        everything = list(itertools.islice(BATCHES(setup, 0), 40))
        for at in positions:
            everything[at] = np.full_like(everything[at], BAD)
        after, count = absent
        del everything[after : after + count]
        return iter([everything[position(step, left_out)] for step in range(first, 30)])

    patch.setattr(setup, "make_parts", spoilt_parts)
    patch.setattr(loop, "_batches", spoilt_batches)


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(positions, ...)`."""
    return partial(spoil_in, monkeypatch)


def train(corpus, out, **changes):
    """The final state of a run with these changes."""
    result = jhpt.train("gpt-tiny", overrides=settings_of(corpus, **changes), out=out)
    return final_state(out, result.step)


PLANS = {
    "one device": {},
    "pipeline x data": {"parallel__data": 2, "parallel__pipe": 2, "parallel__micro_batches": 2},
    "compressed": {"parallel__data": 4, "parallel__gradient_compression": "topk"},
    "offload": {"parallel__data": 2, "memory__offload": "both"},
    "offload, updated in the backward pass": {
        "parallel__data": 2,
        "memory__offload": "both",
        "optimizer__clip": "layer",
    },
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("plan", quick_and_exhaustive(PLANS, ["pipeline x data"]))
def test_the_update_of_a_spike_is_left_out_and_nothing_else(tmp_path, corpus, spoil, plan, capsys):
    """Bit for bit as if the loss had not been finite there, which leaves the state alone by another way; also where the
    run is resumed just before."""
    changes = PLANS[plan] | {"train__steps": 10, "checkpoint__every": 8}
    changes["model__num_layers"] = changes.get("parallel__pipe", 1)
    spoil([8])
    skipped = train(corpus, tmp_path / "skipped", guards__spike="skip", checkpoint__keep=2, **changes)
    assert "step 9: 1 update skipped" in capsys.readouterr().out
    assert losses(tmp_path / "skipped")[9] > 1e3 and skipped["['skipped']"] == 1
    shutil.rmtree(tmp_path / "skipped" / "checkpoints" / "10")
    jhpt.train(out=tmp_path / "skipped")
    same_bits(skipped, final_state(tmp_path / "skipped", 10))
    spoil([8], factor=math.nan)
    same_bits(skipped, train(corpus, tmp_path / "expected", **changes))


def test_the_guard_can_be_put_on_and_off_where_a_run_goes_on(tmp_path, corpus):
    """A checkpoint without what the guard knows, and one with it, are restored by runs with and without it."""
    train(corpus, tmp_path / "changed", train__steps=3)
    train(corpus, tmp_path / "changed", train__steps=6, guards__spike="skip", guards__window=5)
    assert (tmp_path / "changed" / "checkpoints" / "6" / "losses").is_dir()
    changed = train(corpus, tmp_path / "changed", train__steps=7)
    same_bits(changed, train(corpus, tmp_path / "plain", train__steps=7))


def test_a_run_that_spikes_on_and_on_ends(tmp_path, corpus, spoil, capsys):
    spoil(range(11, 40))
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .* or a loss that has jumped"):
        train(corpus, tmp_path / "skip", guards__spike="skip", train__max_bad_steps=3)
    settings = REWINDING | {"guards__max_rewinds": 2}
    with pytest.raises(TrainingDiverged, match="step 7: the loss has jumped again after going back 2 times"):
        train(corpus, tmp_path / "rewind", **settings)
    said = capsys.readouterr().out
    assert "step 12: the loss has jumped; going back to checkpoint 8" in said
    assert "step 9: the loss has jumped; going back to checkpoint 6" in said


REWINDING = {"guards__spike": "rewind", "guards__rewind_steps": 3, "checkpoint__keep": 8}


SEEN_LATE = REWINDING | {"log__every": 4}
"""The loss of step 13 is read where one is due at step 14, with the checkpoint."""


@pytest.fixture(scope="module")
def rewound(corpus, tmp_path_factory):
    """The folder and final state of a run that spikes at step 13 and goes back to 10."""
    folder = tmp_path_factory.mktemp("rewound") / "run"
    with pytest.MonkeyPatch.context() as patch:
        spoil_in(patch, [12])
        return folder, train(corpus, folder, **SEEN_LATE)


def test_a_run_goes_back_to_a_checkpoint_and_never_sees_that_data(tmp_path, corpus, spoil, rewound):
    """Bit for bit as a run whose data lacks the batches of steps 11 to 13."""
    folder, state = rewound
    assert "step 13: the loss has jumped; going back to checkpoint 10" in (folder / "train.log").read_text()
    spoil([], absent=(10, 3))
    same_bits(state, train(corpus, tmp_path / "expected", **SEEN_LATE))
    assert losses(folder) == losses(tmp_path / "expected")
    record = json.loads((folder / "checkpoints" / "16" / "record.json").read_text())
    assert (record["left_out"], record["rewinds"]) == ([[10, 3]], 1)


@pytest.mark.parametrize("lost", [(14, 16), (12, 14, 16)], ids=["after a checkpoint", "before one"])
def test_a_run_that_has_gone_back_can_be_resumed(tmp_path, spoil, rewound, lost):
    """Bit for bit, also one that was killed before the first checkpoint after going back, which spikes again."""
    folder = shutil.copytree(rewound[0], tmp_path / "run")
    spoil([12])
    for step in lost:
        shutil.rmtree(folder / "checkpoints" / str(step))
    jhpt.train(out=folder)
    same_bits(rewound[1], final_state(folder, 16))
    assert losses(folder) == losses(rewound[0])


def test_a_run_that_is_stopped_at_a_spike_goes_back_when_it_is_resumed(tmp_path, corpus, spoil, rewound, monkeypatch):
    """It has saved the step of the spike."""
    spoil([12])
    with monkeypatch.context() as patch:
        patch.setattr(loop.watch, "stops_after", lambda step: step == 13)
        stopped = jhpt.train("gpt-tiny", overrides=settings_of(corpus, **SEEN_LATE), out=tmp_path / "run")
    assert stopped.interrupted and steps_in(tmp_path / "run" / "checkpoints")[-1] == 13
    jhpt.train(out=tmp_path / "run")
    same_bits(rewound[1], final_state(tmp_path / "run", 16))


def test_without_a_checkpoint_from_before_it_begins_anew(tmp_path, corpus, spoil):
    spoil([6])
    state = train(corpus, tmp_path / "rewound", **REWINDING | {"checkpoint__every": 10})
    spoil([], absent=(0, 7))
    same_bits(state, train(corpus, tmp_path / "expected", **REWINDING | {"checkpoint__every": 10}))


def test_which_checkpoint_it_goes_back_to(tiny):
    config = tiny(**{"checkpoint.every": 10, "guards.rewind_steps": 25})
    assert checkpoint_before([10, 20, 30, 33, 40, 50], 58, config) == 30  # 33 was saved when the run was stopped
    assert checkpoint_before([40, 50, 60], 58, config) == 40  # none is so far back
    assert checkpoint_before([33, 60], 58, config) == 33
    assert checkpoint_before([60], 58, config) == 0


def test_a_damaged_checkpoint_is_passed_over(tmp_path, tiny):
    config = tiny(**{"checkpoint.every": 10, "guards.rewind_steps": 5})
    for step in (10, 20):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "state").write_text("as written")
        write_manifest(tmp_path / str(step))
    assert whole_before(tmp_path, 28, config) == 20
    (tmp_path / "20" / "state").write_text("as Written")
    assert whole_before(tmp_path, 28, config) == 10


def test_data_that_is_left_out():
    """A run of 10 batches, number by number: it goes back from step 5 to 2, from 8 to 2, and from 9 to 1."""
    left_out = gone_back((), 2, 5)  # steps 3, 4, 5 had batches 2, 3, 4
    assert [position(step, left_out) for step in range(5)] == [0, 1, 5, 6, 7]
    left_out = gone_back(left_out, 2, 8)  # steps 3 to 8 had batches 5 to 10
    assert [position(step, left_out) for step in range(5)] == [0, 1, 11, 12, 13]
    left_out = gone_back(left_out, 6, 9)  # steps 7, 8, 9 had batches 15, 16, 17
    assert [position(step, left_out) for step in (1, 2, 5, 6, 7)] == [1, 11, 14, 18, 19]
    assert tuple(map(tuple, gone_back(left_out, 1, 8))) == ((1, 19),)  # step 8 had batch 19


def test_a_checkpoint_that_would_be_gone_is_refused():
    far = {"guards.spike": "rewind", "guards.rewind_steps": 492, "log.every": 10}  # 492 + 9 > 500
    with pytest.raises(InputError, match=r"set checkpoint\.keep=3 or more"):
        load_config("gpt-tiny", far)
    load_config("gpt-tiny", far | {"checkpoint.keep": 3})
    load_config("gpt-tiny", far | {"guards.rewind_steps": 491})
