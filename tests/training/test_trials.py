"""Plans that take a few steps before one of them trains (`parallel.trials`)."""

import itertools
import math

import pytest

import jhpt
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Plan
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.choice import Candidate
from jhpt.training import auto, trials
from jhpt.training.console import Display
from jhpt.training.trials import CLOSE, NOISE, fastest, step_seconds
from tests.sharding.plans import piped
from tests.training.test_planning import SHORT, decided, go, here, measured

__all__ = ["go", "measured"]

SIMPLE, GPIPE, LATE = (
    plan.model_copy(update={"seconds": seconds, "origin": "auto"})
    for plan, seconds in (
        (piped([3], 1, data=4), 3.0),
        (piped([2, 2], 2, schedule="gpipe"), 2.0),
        (piped([2, 2], 2, schedule="1f1b"), 1.0),
    )
)
"""The later ones are predicted to be faster, and are less simple."""


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ((3.0, 2.0, 1.0), LATE),
        ((1.0, 2.0, 3.0), SIMPLE),
        ((1.0, 1 / (1 + 0.9 * NOISE), 3.0), SIMPLE),
        ((1.0, 1 / (1 + 1.1 * NOISE), 3.0), GPIPE),
        (("does not fit", 2.0, 3.0), GPIPE),
        (("does not fit", "does not fit", "does not fit"), SIMPLE),
    ],
    ids=["as predicted", "not as predicted", "within the noise", "beyond the noise", "left out", "all left out"],
)
def test_the_plan_measured_to_be_the_fastest_trains(tiny, monkeypatch, capsys, found, kept):
    plans = SIMPLE, GPIPE, LATE
    seconds = dict(zip(map(shape_text, plans), found, strict=True))
    monkeypatch.setattr(trials, "step_seconds", lambda config, plan, display: seconds[shape_text(plan)])
    assert fastest(tiny(), [Candidate(plan=plan) for plan in plans], Display(1)) == kept
    said = capsys.readouterr().out
    assert all(f"trial {number} of 3: {shape_text(plan)}" in said for number, plan in enumerate(plans, 1))
    assert said.count("does not fit") == found.count("does not fit")


HALF, TWICE = (LATE.model_copy(update={"micro_batches": count}) for count in (2, 8))
MORE_OF_GPIPE = GPIPE.model_copy(update={"micro_batches": 8})


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ((1.0, 2.0, 0.9, 1.0, 0.9), TWICE),
        ((1.0, 0.8, 0.9, 1.0, 0.8), HALF),
        ((1.0, 2.0, 1.1), LATE),
        ((1.0, 2.0, 1 / (1 + 0.9 * NOISE)), LATE),
        ((1.0, 2.0, 1 / (1 + 1.1 * NOISE), 1.0, 1 / (1 + 1.1 * NOISE)), TWICE),
        ((1.0, 2.0, 0.9, 1.0, 1 / (1 + 0.9 * NOISE)), LATE),
        ((1.0, 2.0, 0.9, 1.0, "does not fit"), LATE),
        ((1.0, "does not fit", "does not fit"), LATE),
        ((4.0,), SIMPLE),
    ],
    ids=[
        "twice",
        "half",
        "as it is",
        "within the noise",
        "beyond the noise",
        "within the noise once more",
        "left out once more",
        "left out",
        "another is the fastest",
    ],
)
def test_the_fastest_is_tried_with_half_and_twice_as_many_micro_batches(tiny, monkeypatch, capsys, found, kept):
    """The one that led and the one that is faster are timed once more."""
    candidates = [Candidate(plan=SIMPLE), Candidate(plan=LATE, nearby=(HALF, TWICE))]
    seconds, tried = iter((3.0, *found)), []

    def step_seconds(config, plan, display):
        tried.append(plan)
        return next(seconds)

    monkeypatch.setattr(trials, "step_seconds", step_seconds)
    assert fastest(tiny(), candidates, Display(1)) == kept
    again = [LATE, HALF if kept == HALF else TWICE]
    assert tried == [SIMPLE, LATE, HALF, TWICE, *again][: 1 + len(found)]
    said = capsys.readouterr().out
    assert ("trial 4 of 4" in said) == (len(found) >= 3) and ("of 4 again" in said) == (len(found) == 5)


def test_a_signal_leaves_the_lead_as_it_was(tiny, monkeypatch):
    """It comes when a plan that is faster would be timed once more."""
    seconds = iter((3.0, 1.0, 2.0, 0.9))
    monkeypatch.setattr(trials, "step_seconds", lambda *_: next(seconds))
    stops = itertools.chain([False] * 4, itertools.repeat(True))
    monkeypatch.setattr(trials.watch, "stops_after", lambda step: next(stops))
    candidates = [Candidate(plan=SIMPLE), Candidate(plan=LATE, nearby=(HALF, TWICE))]
    assert fastest(tiny(), candidates, Display(1)) == LATE


@pytest.mark.parametrize(
    ("behind", "order", "kept"),
    [
        (0.99 * CLOSE, [HALF, TWICE, MORE_OF_GPIPE, LATE, MORE_OF_GPIPE], MORE_OF_GPIPE),
        (1.01 * CLOSE, [HALF, TWICE], LATE),
    ],
    ids=["close", "not close"],
)
def test_others_that_are_close_to_the_fastest_are_tried_likewise(tiny, monkeypatch, behind, order, kept):
    """A step of bert at 100 Mbit/s took 402 ms with 16 and 386 with 32 micro-batches of eager 1F1B, 428 and 373 of
    GPipe.  What has been tried is not tried again."""
    candidates = [
        Candidate(plan=GPIPE, nearby=(SIMPLE, MORE_OF_GPIPE, HALF)),
        Candidate(plan=SIMPLE),
        Candidate(plan=LATE, nearby=(HALF, TWICE)),
    ]
    plans, tried = [GPIPE, SIMPLE, LATE, HALF, TWICE, MORE_OF_GPIPE], []

    def step_seconds(config, plan, display):
        tried.append(plan)
        return (1 + behind, 2.0, 1.0, 1.1, 1.0, 0.9)[plans.index(plan)]

    monkeypatch.setattr(trials, "step_seconds", step_seconds)
    assert fastest(tiny(), candidates, Display(1)) == kept
    assert tried == [GPIPE, SIMPLE, LATE, *order]


def test_a_signal_ends_the_trials(tiny, monkeypatch):
    monkeypatch.setattr(trials.watch, "stops_after", lambda step: True)
    monkeypatch.setattr(trials, "step_seconds", lambda *arguments: pytest.fail("a plan was tried"))
    assert fastest(tiny(), (Candidate(plan=SIMPLE), Candidate(plan=GPIPE)), Display(1)) == SIMPLE


def test_a_step_is_timed_or_has_a_reason(tiny, monkeypatch):
    config = tiny(**SHORT)
    plan = plan_by_hand(config, 1)
    seconds = step_seconds(config, plan, Display(1))
    assert isinstance(seconds, float) and 0 < seconds < math.inf

    def refuse(setup):
        raise InputError("no room\nlines that say more")

    monkeypatch.setattr(trials, "compile_step", refuse)
    assert step_seconds(config, plan, Display(1)) == "no room"


def test_plans_are_tried_once(tiny, tmp_path, measured, monkeypatch, capsys, go):
    """The run goes on with the one that was the fastest."""
    if go is decided:
        found = itertools.chain([2.0, 1.0], itertools.repeat(3.0))  # then those with other numbers of micro-batches
        monkeypatch.setattr(trials, "step_seconds", lambda *arguments: next(found))
    monkeypatch.setattr(auto, "cached_cluster", lambda rounds: (here(1), None, False))
    config, out = tiny(**SHORT, **{"parallel.auto": True, "parallel.trials": 2}), tmp_path / "run"
    go(config, out)
    plan, said = Plan.load(out / "plan.json"), capsys.readouterr().out
    assert "trial 1 of 2" in said and "trial 2 of 2" in said
    assert f"decides: {shape_text(plan)}" in said and plan.origin == "auto"
    assert go is not decided or "trial 2 decides" in said
    go(config, out, overrides={"train.steps": 2})
    assert "trial" not in capsys.readouterr().out and Plan.load(out / "plan.json") == plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel.trials": 3}, r"parallel\.trials.*parallel\.auto=true"),
        ({"parallel.auto": True, "parallel.trials": 1}, "2 or more, or 0"),
    ],
)
def test_trials_without_a_choice_are_refused(tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        jhpt.train(load_config("gpt-tiny", settings), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
