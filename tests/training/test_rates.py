"""Tokens per second count all wall time; the time of a step does not count saves and evaluations."""

import pytest

import jhpt
from jhpt.training import loop
from jhpt.training.loop import Clock, Interval, Progress
from jhpt.training.metrics import read_metrics
from tests.conftest import tiny_overrides


@pytest.fixture
def pass_time(monkeypatch):
    """Lets so many seconds pass on the loop's clock; no others do."""
    now = [100.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])

    def seconds(count: float) -> None:
        now[0] += count

    return seconds


def test_a_clock_says_what_time_was_spent_on(pass_time):
    clock = Clock()
    with clock.waiting():
        pass_time(1)
    pass_time(4)
    with clock.between_steps():
        pass_time(3)
    assert clock.read() == Interval(seconds=8, data=1, between=3)
    pass_time(2)
    assert clock.read() == Interval(seconds=2, data=0, between=0)


def test_a_rate_counts_saves_and_the_time_of_a_step_does_not():
    """Every second interval has a save, as long as its steps; the last save follows the last line of metrics."""
    plain = Interval(seconds=10, data=0, between=0, steps=5)
    progress = Progress(intervals=[plain, Interval(seconds=20, data=0, between=10, steps=5)] * 2, rest=20)
    assert progress.steps_per_s == 20 / 80 and progress.step_seconds == 2
    assert Progress().steps_per_s is None and Progress().step_seconds is None


def test_a_run_counts_its_saves(tmp_path, corpus, monkeypatch, pass_time):
    """By the loop's clock, a step takes one second and a save five.

    The first line of metrics is written when step 3 has begun, so that 6 steps and 2 saves take the rest of the time.
    """
    stepping, phase = loop.watch.stepping, loop.watch.phase

    def step_begun(number):
        pass_time(1)
        stepping(number)

    def entered(doing):
        pass_time(5 if doing.startswith("saving") else 0)
        return phase(doing)

    monkeypatch.setattr(loop.watch, "stepping", step_begun)
    monkeypatch.setattr(loop.watch, "phase", entered)
    changes = {"train.steps": 8, "checkpoint.every": 4, "log.every": 2, "evaluation.every": 8, "parallel.data": 1}
    overrides = tiny_overrides(corpus) | {"model.num_layers": 1} | changes
    result = jhpt.train("gpt-tiny", out=tmp_path / "run", overrides=overrides)
    assert result.tokens_per_s == pytest.approx(6 * 16 * 32 / (5 * 1 + 2 * 5))
    shares = [record["between_steps"] for record in read_metrics(tmp_path / "run") if "loss" in record]
    assert shares == [0, 0, 5 / 8, 0]  # the last save follows the last line
