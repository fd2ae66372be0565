"""Going back to a checkpoint with another learning rate: only on request, and as if it had been so from there on."""

import shutil

import pytest
import yaml

import jhpt
from jhpt.core.errors import InputError
from jhpt.training.step_folders import steps_in
from tests.conftest import tiny_overrides
from tests.training.test_resume import final_state, losses, same_bits

LOWER = {"optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 0}


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of six steps with checkpoints at 2, 4 and 6."""
    settings = tiny_overrides(corpus) | {"parallel.data": 1, "model.num_layers": 1, "optimizer.schedule": "linear"}
    settings |= {"train.steps": 6, "checkpoint.every": 2, "checkpoint.keep": 9, "evaluation.every": 100}
    out = tmp_path_factory.mktemp("rate") / "run"
    jhpt.train("gpt-tiny", overrides=settings, out=out)
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def test_it_is_refused_unasked_and_nothing_is_changed(run):
    """Also where something else changes, for which no checkpoint can be asked."""
    before = (run / "config.yaml").read_text()
    with pytest.raises(InputError, match=r"learning_rate: the run has 0.002, now 0.001\n.*--resume-step N"):
        jhpt.train(None, out=run, overrides={"train.steps": 8, "optimizer.learning_rate": 1e-3})
    other = {"optimizer.learning_rate": 1e-3, "optimizer.b1": 0.8}
    with pytest.raises(InputError, match=r"(?s)b1: the run has 0.9, now 0.8(?!.*--resume-step)"):
        jhpt.train(None, out=run, overrides=other, resume_step=2)
    assert (run / "config.yaml").read_text() == before and steps_in(run / "checkpoints") == [2, 4, 6]
    assert not list((run / "checkpoints").glob("*.left"))


def test_it_holds_from_the_checkpoint_on_and_is_recorded(run, capsys):
    """The losses up to the checkpoint stay; each rate after it is that of the new schedule."""
    old = losses(run), losses(run, "learning_rate")
    jhpt.train(None, out=run, overrides=LOWER, resume_step=2)
    said = capsys.readouterr().out
    assert "learning_rate=0.001 instead of 0.002, optimizer.warmup_steps=0 instead of 2: a learning rate of" in said
    rates = losses(run, "learning_rate")
    assert [rates[step] for step in (1, 2)] == [old[1][step] for step in (1, 2)]
    decay = [1e-3 * (1 - 0.9 * step / 5) for step in range(6)]  # linear to a tenth over steps 0 to 5
    assert [rates[step] for step in (3, 4, 5, 6)] == pytest.approx(decay[2:], rel=1e-6)
    assert losses(run)[3] == old[0][3] != losses(run)[4] != old[0][4]  # the third loss comes before the third update
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["learning_rate"] == 1e-3


@pytest.mark.parametrize("lost", [(6,), (4, 6)], ids=["with a checkpoint since", "with none since"])
def test_such_a_run_is_resumed_without_asking_again(run, lost):
    """Bit for bit, also if it was killed before the first checkpoint with the new rate."""
    jhpt.train(None, out=run, overrides=LOWER, resume_step=2)
    expected = final_state(run, 6)
    for step in lost:
        shutil.rmtree(run / "checkpoints" / str(step))
    jhpt.train(None, out=run)
    same_bits(expected, final_state(run, 6))
