"""What is called a spike, and that the checkpoint from before it stays."""

import math

import jax.numpy as jnp
import pytest

import jhpt
from jhpt.training import device_step
from jhpt.training.spikes import is_spike
from jhpt.training.step_folders import pinned, steps_in
from tests.conftest import tiny_overrides

FALLING = [5.5 * 0.97**step for step in range(40)]
NOISY = [3.0 + 0.1 * math.sin(17 * step) for step in range(40)]


@pytest.mark.parametrize("losses", [FALLING, NOISY, [2.0] * 40], ids=["falling", "noisy", "flat"])
def test_ordinary_losses_are_none(losses):
    assert not any(is_spike(losses[:step], losses[step]) for step in range(len(losses)))


@pytest.mark.parametrize("losses", [FALLING, NOISY, [2.0] * 40], ids=["falling", "noisy", "flat"])
@pytest.mark.parametrize("loss", [1e15, 20.0, math.nan, math.inf])
def test_explosions_are(losses, loss):
    assert is_spike(losses, loss)


def test_nothing_is_said_before_there_is_something_to_compare_with():
    assert not is_spike([5.0, 4.0, 3.0], 1e15)


def test_the_checkpoint_before_a_spike_is_kept(tmp_path, corpus, monkeypatch, capsys):
    """At the tenth step the loss that is reported explodes, and stays there."""
    settings = tiny_overrides(corpus) | {"model.num_layers": 1, "parallel.data": 1, "train.steps": 16}
    settings |= {"checkpoint.every": 2, "checkpoint.keep": 1}
    make = device_step.make_train_step

    def exploding(*arguments, **options):
        step = make(*arguments, **options)

        def train_step(state, windows):
            state, metrics = step(state, windows)
            return state, metrics._replace(loss=jnp.where(state.step >= 10, 1e15, metrics.loss))

        return train_step

    monkeypatch.setattr(device_step, "make_train_step", exploding)
    jhpt.train("gpt-tiny", overrides=settings, out=tmp_path)
    assert pinned(tmp_path / "checkpoints") == {8} and steps_in(tmp_path / "checkpoints") == [8, 16]
    said = capsys.readouterr().out
    assert said.count("step 10: the loss has jumped") == 1 and "--resume-step 8" in said
