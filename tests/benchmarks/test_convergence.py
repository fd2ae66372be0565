"""What `jhpt bench convergence` runs, what it does not run again, and what it makes of what it found."""

import json
import math
import xml.etree.ElementTree as ET

import jax
import numpy as np
import pytest

from benchmarks.convergence import again, choices, held_out
from benchmarks.convergence import run as bench
from benchmarks.convergence.cell import by_rule, flat, looks_at_leaks, run, unflat
from benchmarks.convergence.cells import HEADLINE, PRESETS, SEEDS, STEPS, Cell, cells, kind_of
from benchmarks.convergence.compare import claims_of, lines
from benchmarks.convergence.leak import leak
from benchmarks.convergence.plots import SHOWN, pages
from jhpt.core.compression import tokens_of, wire_bytes
from jhpt.core.config import Compression, DataConfig
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.kernels.attention_importance import attention_importance
from jhpt.sharding import operators
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
    bench.report(wanted, tmp_path, {}, str(tmp_path / "all.json"), choices.cells(quick=False), {})
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


def test_the_probe_finds_a_leak(tiny):
    """Attention looks ahead, and the probe sees it; a causal choice and no compression leave earlier logits alone."""
    settings = {"parallel.tensor": 4, "parallel.data": 1, "model.num_layers": 1}
    headline = {f"parallel.compression.{name}": value for name, value in HEADLINE.model_dump().items()}
    for rule, moves in {"attention": True, "own": False}.items():
        chosen = {"parallel.compression.importance": rule, "parallel.compression.rest_bits": 0}
        setup = prepare(tiny(**settings | headline | chosen))
        params = setup.layout.stored(setup.model.init(jax.random.key(0)))
        found = leak(setup, jax.tree.map(lambda leaf: 8 * leaf, params))  # new parameters attend to all tokens alike
        assert (found["logits"] > 0, found["rms"] > 0, found["positions"] > 0) == (moves,) * 3
        assert found["spread"] > 0


def test_held_out_text_is_checked(tmp_path):
    """Files that end alike in 52 bytes, with the mark of their end, share five pieces."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(
            f"{number}\n" * 20 + "all of the files have this line of fifty bytes...\n"
        )
    data = DataConfig(path=str(tmp_path / "*.txt"), cache_dir=str(tmp_path / "cache"), validation_fraction=0.25)
    with pytest.raises(InputError, match=r"^5 pieces of the held-out text stand in the training text"):
        held_out.checked(data)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 100)
    assert held_out.checked(data)["shared_pieces"].value == 0


def test_choices_differ_in_the_choice_alone():
    """As many steps as the preset, and as many bytes wherever it is a choice; what compares comes first."""
    kinds = choices.cells(quick=False)
    assert len({cell.name for cell in kinds}) == len(kinds) == len(choices.KINDS) * len(choices.SEEDS) >= 5 * 7
    sent, changes = {}, []
    for cell, kind in kinds.items():
        config = load_config(cell.preset, {"seed": cell.seed, **cell.changes})
        assert config.train.steps == load_config(cell.preset).train.steps
        sent.setdefault(kind, set()).add(wire_bytes(4, config.parallel.compression.settings, 8, 128, 128))
        changes.append({name: value for name, value in cell.changes.items() if not name.startswith("parallel.")})
    assert all(change == changes[0] for change in changes)
    assert len(set.union(*(sent[kind] for kind in kinds.values() if kind.startswith("30%")))) == 1
    assert [(cell.seed, cell.control) for cell in kinds][:6] == [
        (seed, control) for seed in (0, 1) for control in (None, choices.RANDOM, choices.LEAST)
    ]


def test_controls_take_the_place_of_the_rule():
    """They choose as many tokens: any, and those that are never the most important half."""
    compression = Compression(tokens=0.3, bits=8, importance="attention")
    keys = jax.random.split(jax.random.key(0), 3)
    q, k = (jax.random.normal(key, (2, 32, 2, 8)) for key in keys[:2])
    x = jax.random.normal(keys[2], (2, 32, 16))
    count = tokens_of(compression, 32)
    rule, found = operators.important_tokens, {}
    for control in (None, choices.RANDOM, choices.LEAST):
        with choices.controlled(control):
            chosen = operators.compressed_operators((), 1, compression, causal=True)["important"]
        found[control] = [np.asarray(chosen(q, k, None, residual)) for residual in (x, x + 1)]
        for tokens in found[control]:
            assert tokens.shape == (2, count) and (np.diff(tokens) > 0).all() and tokens.max() < 32
    assert operators.important_tokens is rule
    scores = attention_importance(q, k, causal=True, lengths=None, implementation="reference")
    order = np.argsort(-np.asarray(scores), 1)
    assert np.array_equal(found[None][0], np.sort(order[:, :count]))
    assert np.array_equal(found[choices.LEAST][0], np.sort(order[:, -count:]))
    one, other = found[choices.RANDOM]
    assert not np.array_equal(one, other) and not np.array_equal(one[0], one[1])


def test_choices_are_compared_seed_by_seed():
    kinds = choices.cells(quick=False)
    control = {"30% at 8 bits at random, the rest at 4": 0.0, "30% at 8 bits by attention, the rest at 4": -0.01}
    results = {
        cell: invented(cell) | {"validation": 2.0 + cell.seed + control[kind] * (1 + cell.seed)}
        for cell, kind in kinds.items()
        if kind in control and (cell.seed < 2 or kind == choices.CONTROL)
    }
    (line,) = [line for line in choices.lines(results, kinds) if "by attention" in line[0]]
    assert line[1:] == ("2", "2.4850", "-15.0", f"{5 * math.sqrt(2):.1f}", "-10.0, -20.0")
    claims = choices.claims_of(results, kinds)
    assert claims.keys() == {"attention_vs_random"} and "2 seed(s)" in claims["attention_vs_random"].setup
    assert claims["attention_vs_random"].value == pytest.approx(2.5 / 2.485)  # better than at random: above 1


def test_a_file_of_cells_is_measured_anew(tmp_path, monkeypatch, capsys):
    """With its settings, those of the files that are there; losses then and now stand side by side."""
    wanted = [cell for cell in cells(quick=False) if cell.group in ("plain", "headline")][:4]
    file = tmp_path / "then.json"
    file.write_text(json.dumps({"bench": "convergence", "rows": [invented(cell) for cell in wanted]}))
    assert list(again.measured(file)) == wanted

    def pretend(cell, folder, core, flags):
        bench.file_of(cell, folder).write_text(json.dumps(invented(cell) | {"validation": 3.0}))

    monkeypatch.setattr(bench, "_run_cell", pretend)
    monkeypatch.setattr(again, "checked", lambda data: {})
    assert again.main([str(file), "--out", str(tmp_path / "now"), "--json", str(tmp_path / "now.json")]) == 0
    assert "then.json, then and now" in capsys.readouterr().out
    assert [row["validation"] for row in json.loads((tmp_path / "now.json").read_text())["rows"]] == [3.0] * 4
    then = {cell: invented(cell) for cell in wanted}
    assert again.lines(then, {})[1][1:] == ["1", "2.5000", "+25.00 %", "", ""]
    assert again.lines(then, then)[3][1:] == ["0", "2.0200", "+1.00 %"] + ["2.0200", "+1.00 %"]
