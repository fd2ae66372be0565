"""The fit finds figures that it did not start from, and leaves alone what no run depends on."""

import math

import numpy as np
import pytest

from benchmarks.calibration.fit import PRIORS, cross_validated, figures_of, fit, order_errors, residuals_at
from jhpt.bench.published import predicted_seconds
from tests.bench.test_published import run_of

LARGE = {"layers": "16", "width": "2048", "heads": "16", "kv_heads": "16", "ffn": "8192", "seq": "2048"}
PLANS = (
    {"gpus": "8", "data": "8", "tensor": "1", "pipe": "1", "zero": "3"},
    {"gpus": "8", "data": "1", "tensor": "8", "pipe": "1", "zero": "0"},
    {"gpus": "64", "data": "16", "tensor": "4", "pipe": "1", "zero": "1"},
    {"gpus": "64", "data": "64", "tensor": "1", "pipe": "1", "zero": "0"},
)


def drawn(truth):
    """Runs whose measured speeds are those that these figures predict."""
    runs = []
    for gpu in ("a100", "h100"):
        for at, plan in enumerate(PLANS):
            run = run_of(**LARGE, **plan, gpu=gpu, global_batch="128", source=f"source {at}", group="all")
            seconds = predicted_seconds(run, figures_of(truth))
            tokens = run.global_batch * run.seq / run.gpus / seconds
            runs.append(run.model_copy(update={"tokens_per_gpu": tokens}))
    return runs


@pytest.fixture(scope="module")
def known():
    """(logarithms of figures, runs that have them)."""
    start = np.array([math.log(prior.value) for prior in PRIORS.values()])
    changes = {"products.ampere": 0.1, "products.hopper": -0.15, "network": -0.3, "exposed_gathers": 0.4}
    truth = start + np.array([changes.get(name, 0.0) for name in PRIORS])
    return truth, drawn(truth)


def test_figures_are_found_again(known):
    truth, runs = known
    assert np.abs(residuals_at(truth, runs)).max() < 1e-9
    found = fit(runs, steps=3)
    start = np.array([math.log(prior.value) for prior in PRIORS.values()])
    before, after = (np.abs(residuals_at(x, runs)).max() for x in (start, found.x))
    assert after < 0.06 < 0.12 < before  # eight runs do not overrule the priors altogether
    names = list(PRIORS)
    assert found.x[names.index("products.volta")] == pytest.approx(start[names.index("products.volta")])
    assert np.abs(order_errors(runs, residuals_at(found.x, runs))).max() < 0.1


def test_each_source_is_predicted_without_itself(known):
    runs = [run for run in known[1] if run.gpu == "a100"]
    whole = fit(runs, steps=1)
    residuals, folds = cross_validated(runs, whole)
    assert folds.shape == (len(PLANS), len(PRIORS))
    assert 0 < np.abs(residuals).max() < 0.3
    # A source that is wrong by a factor of two changes the figures of the other folds, but not of its own.
    wrong = [
        run.model_copy(update={"tokens_per_gpu": run.tokens_per_gpu * (2 if run.source == "source 0" else 1)})
        for run in runs
    ]
    again = cross_validated(wrong, whole)[1]
    assert again[0] == pytest.approx(folds[0])
    assert np.abs(again[1:] - folds[1:]).max() > 1e-3
