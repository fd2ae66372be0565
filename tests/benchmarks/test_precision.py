"""What `jhpt bench precision` runs, and what it makes of what it found."""

import json
from dataclasses import replace

import pytest

from benchmarks.convergence import precision
from benchmarks.convergence.cell import prepared, run
from benchmarks.convergence.run import file_of
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.training.setup import prepare


def invented(kind, loss):
    cell = precision.cells(quick=False)[kind]
    return {"settings": cell.settings, "validation": loss, "own": loss, "training": {"10": 3.0}}


def test_cells_differ_in_what_is_in_few_bits_alone():
    configs = {
        kind: load_config(cell.preset, {"seed": cell.seed, **cell.changes})
        for kind, cell in precision.cells(quick=False).items()
    }
    few = {
        kind: (config.optimizer.weights, config.optimizer.moments, config.model.matmul_dtype)
        for kind, config in configs.items()
    }
    assert len(set(few.values())) == len(few) == 7 and few["float32"] == ("float32", "float32", "same")
    same = {"optimizer.weights": "float32", "optimizer.moments": "float32", "model.matmul_dtype": "same"}
    assert all(load_config(config, same) == configs["float32"] for config in configs.values())
    assert configs["float32"].train.steps == 2000
    assert len({cell.name for cell in precision.cells(quick=False).values()}) == 7


def test_losses_stand_against_float32():
    losses = {"float32": 2.0, "bfloat16": 2.1, "int8 moments": 1.99}
    results = {kind: invented(kind, loss) for kind, loss in losses.items()}
    assert precision.lines(results) == [
        ("float32", "2.0000", "+0.00 %"),
        ("bfloat16", "2.1000", "+5.00 %"),
        ("int8 moments", "1.9900", "-0.50 %"),
    ]
    claims = precision.claims_of(results)
    assert set(claims) == {"bfloat16_loss_gap", "int8_moments_loss_gap"}
    assert claims["bfloat16_loss_gap"].value == pytest.approx(0.05)
    del results["float32"]
    assert precision.claims_of(results) == {} and precision.lines(results)[0] == ("bfloat16", "2.1000", "")


def test_the_report_is_of_cells_that_are_there(tmp_path, capsys):
    wanted = precision.cells(quick=False)
    for kind, loss in (("float32", 2.0), ("bfloat16_kahan", 2.01)):
        file_of(wanted[kind], tmp_path).write_text(json.dumps(invented(kind, loss)))
    precision.report(wanted, tmp_path, {"quick": False}, str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bench"] == "precision" and len(report["rows"]) == 2
    assert report["claims"]["bfloat16_kahan_loss_gap"]["value"] == pytest.approx(0.005)
    assert "+0.50 %" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_cell_runs(corpus):
    cell = precision.cells(quick=True)["bfloat16_kahan, int8 moments"]
    changes = {**cell.changes, "train.steps": 2, **corpus}
    result, params = run(type(cell)(group=cell.group, preset=cell.preset, seed=cell.seed, changes=changes))
    assert 3 < result["validation"] < 7 and params["embedding/tokens"].dtype.name == "bfloat16"


def in_8_bits(corpus):
    cell = precision.cells(quick=True)["float8 products"]
    return replace(cell, changes={**cell.changes, "train.steps": 2, **corpus})


def test_products_in_8_bits_are_prepared_where_they_are_refused_as_a_setting(corpus):
    cell = in_8_bits(corpus)
    config = load_config(cell.preset, cell.changes)
    with pytest.raises(InputError, match="the device is a cpu"):
        prepare(config)
    setup = prepared(config)
    assert setup.config == config and setup.model.config == config.model and setup.training.dtype == "float32"


@pytest.mark.exhaustive
def test_products_in_8_bits_are_computed(corpus):
    assert 3 < run(in_8_bits(corpus))[0]["validation"] < 7
