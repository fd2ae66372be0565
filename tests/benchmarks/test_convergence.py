"""What `jhpt bench convergence` runs, what it does not run again, and what it makes of what it found."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from benchmarks.convergence import run as bench
from benchmarks.convergence.cell import by_rule, flat, looks_at_leaks, run, unflat
from benchmarks.convergence.cells import HEADLINE, PRESETS, SEEDS, STEPS, Cell, cells, kind_of
from benchmarks.convergence.compare import claims_of, lines
from benchmarks.convergence.plots import SHOWN, pages
from jhpt.core.load import load_config
from jhpt.training.setup import prepare


def invented(cell):
    """Losses of 2.0 without, 2.02 with the headline, 2.1 with anything else; odd seeds have 0.5 more."""
    loss = {"plain": 2.0, "headline": 2.02}.get(cell.group, 2.1) + 0.5 * (cell.seed % 2)
    result = {"settings": cell.settings, "validation": loss, "own": loss, "training": {"10": 3.0, "20": loss}}
    return result | {"leaks": {"own, 0 bits": dict(logits=0.0, rms=0.0, positions=0.0, spread=1.0)}}


def test_cells():
    """All are configurations that load, on as much text as the preset reads in a step; files of no two are one."""
    wanted = cells(quick=False)
    assert len({cell.name for cell in wanted}) == len(wanted)
    for cell in wanted:
        config, preset = load_config(cell.preset, {"seed": cell.seed, **cell.changes}), load_config(cell.preset)
        assert config.data == preset.data and config.optimizer == preset.optimizer
        assert config.train.steps == STEPS >= 400
        assert config.parallel.compression.settings.on or cell.group in ("plain", "gradients")
    for preset in PRESETS:
        headline = [cell for cell in wanted if (cell.preset, cell.group) == (preset, "headline")]
        assert [cell.seed for cell in headline] == list(SEEDS)
        for cell in headline:
            assert load_config(preset, cell.changes).parallel.compression.settings == HEADLINE
    assert {cell.group for cell in cells(quick=True)} == {cell.group for cell in wanted} - {"table", "one step"}


def test_a_finished_cell_is_not_run_again(tmp_path, monkeypatch):
    ran = []

    def pretend(cell, folder, core, flags):
        ran.append(cell.name)
        if cell.seed == 2 and cell.group == "plain":
            return "out of luck"
        bench.file_of(cell, folder).write_text(json.dumps(invented(cell)))

    monkeypatch.setattr(bench, "_run_cell", pretend)
    wanted = [cell for cell in cells(quick=False) if cell.group in ("plain", "headline")]
    failing = [cell.name for cell in wanted if cell.seed == 2 and cell.group == "plain"]
    bench.file_of(wanted[0], tmp_path).write_text("{}")
    with pytest.raises(bench.CellError, match="out of luck"):
        bench.complete(wanted, tmp_path, [0, 1])
    assert sorted(ran) == sorted(cell.name for cell in wanted[1:])
    ran.clear()
    with pytest.raises(bench.CellError):
        bench.complete(wanted, tmp_path, [0, 1])
    assert sorted(ran) == sorted(failing)


def test_claims_are_of_means_over_seeds():
    results = {cell: invented(cell) for cell in cells(quick=False) if cell.group in ("plain", "headline")}
    claims = claims_of(results)
    assert claims.keys() == {"headline_loss_gap", "bert_loss_gap"}
    mean = (2.0 + 2.5 + 2.0) / 3
    for claim in claims.values():
        assert claim.value == pytest.approx(0.02 / mean) and "3 seed(s)" in claim.setup
    assert not claims_of({cell: result for cell, result in results.items() if cell.plain})
    assert [line[2] for line in lines(results)] == ["3"] * 4


def test_a_report_is_of_what_is_there(tmp_path, capsys):
    wanted = cells(quick=False)
    for cell in wanted[:6]:
        bench.file_of(cell, tmp_path).write_text(json.dumps(invented(cell)))
    bench.report(wanted, tmp_path, {}, str(tmp_path / "all.json"))
    report = json.loads((tmp_path / "all.json").read_text())
    assert len(report["rows"]) == 6 and report["claims"].keys() == {"headline_loss_gap"}
    assert "the rest at 4" in capsys.readouterr().out
    drawn = sorted(file.name for file in tmp_path.glob("*.svg"))
    assert drawn == ["gaps.svg", "gpt-tiny-loss.svg"]
    for name in drawn:
        ET.fromstring((tmp_path / name).read_text())


def test_pictures_hold_every_line():
    results = {cell: invented(cell) for cell in cells(quick=False)}
    curves, bars = (pages(results)[name] for name in ("gpt-tiny-loss.svg", "gaps.svg"))
    shown = {kind_of(cell) for cell in results if cell.preset == "gpt-tiny" and cell.group in SHOWN}
    assert curves.count("<polyline") == len(shown)
    kinds = {(cell.preset, kind_of(cell)) for cell in results if not cell.plain}
    assert bars.count('fill="#1f77b4"') == len(kinds)


def test_a_cell(corpus):
    """Small, but whole: trained with compression, evaluated without and with it."""
    changes = corpus | {"model.num_layers": 1, "model.d_model": 32, "data.sequence_length": 16, "data.batch_size": 8}
    changes |= {"train.steps": 2, "optimizer.warmup_steps": 1, "evaluation.batches": 2, "log.every": 1}
    compression = HEADLINE.model_copy(update={"tokens": 0.5})
    changes |= {f"parallel.compression.{name}": value for name, value in compression.model_dump().items()}
    changes |= {"parallel.tensor": 4, "parallel.data": 1}
    result, params = run(Cell(group="table", preset="gpt-tiny", seed=1, changes=changes))
    assert list(result["training"]) == ["1", "2"] and "leaks" not in result
    assert result["validation"] != result["own"] == pytest.approx(result["validation"], rel=0.01)
    assert params["blocks/mlp/up/kernel"].shape == (1, 32, 128)
    again = flat(unflat(params))
    assert again.keys() == params.keys() and all(np.array_equal(again[name], params[name]) for name in params)


def test_leaks_are_of_both_rules(tiny):
    compression = {f"parallel.compression.{name}": value for name, value in HEADLINE.model_dump().items()}
    setup = prepare(tiny(**{"parallel.tensor": 4, "parallel.data": 1}, **compression))
    assert looks_at_leaks(setup)
    rules = {kind: other.plan.compression for kind, other in by_rule(setup).items()}
    assert rules == {
        f"{importance}, {bits} bits": HEADLINE.model_copy(update={"importance": importance, "rest_bits": bits})
        for importance in ("own", "attention")
        for bits in (0, 4)
    }
    assert not looks_at_leaks(prepare(tiny(**{"parallel.tensor": 4, "parallel.data": 1})))
