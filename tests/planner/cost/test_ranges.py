"""Ranges are weighted quantiles of the runs that are most alike."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.calibration import Residual, residuals
from jhpt.planner.cost.ranges import Case, architecture_of, parallelism, range_of

CASE = Case(architecture="ampere", devices=8, parameters=1e9, kinds="data")


def runs(*ratios, device="a100", devices=8, parameters=1e9, kinds="data"):
    return [
        Residual(device=device, devices=devices, parameters=parameters, kinds=kinds, ratio=ratio) for ratio in ratios
    ]


def test_equal_runs_give_plain_quantiles():
    # Ten equal weights: the first ratio lies at 0.05, the second at 0.15, so the 10th percentile lies between.
    found = range_of(CASE, runs(*(1 + at / 10 for at in range(10))))
    assert (found.low, found.high) == pytest.approx((1.05, 1.85))


def test_the_nearest_runs_decide():
    near, far = runs(0.9, 1.0, 1.1), runs(2.0, 3.0, device="v100", devices=1024, parameters=1e11, kinds="pipe tensor")
    mixed = range_of(CASE, near + far)
    assert mixed.high < 2.0 < range_of(CASE, near + runs(2.0, 3.0)).high


def test_other_sizes_have_no_range():
    assert range_of(CASE, runs(1.0, parameters=1e11)) is None
    assert range_of(Case(architecture="ampere", devices=64, parameters=1e9, kinds="data"), runs(1.0)) is None
    assert range_of(Case(architecture="ampere", devices=16, parameters=2e9, kinds="data"), runs(1.0)) is not None


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.sampled_from(["volta", "ampere", "hopper"]),
    st.integers(0, 11),
    st.floats(1e8, 2e11),
    st.sampled_from(["", "data", "data zero3", "data pipe tensor", "tensor"]),
)
def test_ranges_hold_one_and_are_not_too_wide(era, doublings, parameters, kinds):
    found = range_of(Case(architecture=era, devices=1 << doublings, parameters=parameters, kinds=kinds))
    assert 0.5 < found.low < 1 < found.high < 2


def test_coverage_without_a_run_itself():
    """Of the runs that come with jhpt, about eight of ten lie in the range that the others give them."""
    known, inside = residuals(), 0
    for at, run in enumerate(known):
        era = architecture_of(run.device)
        case = Case(architecture=era, devices=run.devices, parameters=run.parameters, kinds=run.kinds)
        found = range_of(case, known[:at] + known[at + 1 :])
        inside += found.low <= run.ratio <= found.high
    assert 0.75 <= inside / len(known) <= 0.85


def test_kinds_of_parallelism():
    assert parallelism(1, 1, 1, 3) == ""
    assert parallelism(8, 1, 1, 3) == "data zero3"
    assert parallelism(2, 4, 2, 1) == "data pipe tensor"
