"""Every ratio of seconds that a benchmark claims has one direction: seconds of the other / seconds of jhpt's."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reported
from benchmarks.comms import gradients, task
from benchmarks.comms import run as comms
from benchmarks.hybrid import run as hybrid
from benchmarks.hybrid.bubble import BLOCKS, plan_of
from benchmarks.planner.worth import SHORT, Alternative, WorthRow, worth_claims
from jhpt.bench import kernels, train
from jhpt.bench.memory import run as memory
from jhpt.bench.ratios import ratio_unit, speed_claims, times_as_fast
from jhpt.bench.results import Claim
from jhpt.kernels.operations import OPERATIONS

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("jhpt/bench", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path != ROOT / "jhpt/bench/ratios.py"
)

OF_OTHERS = ("reported.py", "choices.py")
"""What reads claims of others, and ratios of losses: above 1 is better there, too (`test_convergence`)."""

OURS, OTHERS = [0.5, 0.6, 0.5], [1.0, 1.2, 1.0]
"""Seconds of the rounds, in each of which the other takes twice as long."""


def test_the_direction():
    assert times_as_fast([2.0, 9.0, 2.2], [1.0, 3.0, 1.1]) == pytest.approx(2.0)
    assert ratio_unit("GPipe", "the plan", kind="predicted") == "predicted seconds of GPipe / seconds of the plan"
    claims = speed_claims("vs_it", {"a": 4.0, "b": 0.25, "c": 8.0}, unit="u", place="here")
    assert {name: claim.value for name, claim in claims.items()} == {
        "vs_it_max": 8.0,
        "vs_it_geomean": pytest.approx(2.0),
        "worst_vs_it": 0.25,
    }
    assert claims["worst_vs_it"].setup == "b, the worst of 3, here"
    assert speed_claims("vs_it", {}, unit="u", place="here") == {}
    with pytest.raises(ValueError, match="vs_whom"):
        speed_claims("speedup", {"a": 1.0}, unit="u", place="here")


def step(row: str, name: str, samples: list[float], **more: Any) -> dict[str, Any]:
    plan = plan_of(BLOCKS, 1, "1f1b").model_dump(mode="json")
    return {"row": row, "samples_s": samples, "predicted_s": 1.0, "plan": plan, name: more.pop("of"), **more}


def of_hybrid() -> Mapping[str, Claim]:
    """The plan has other micro-batches than the others: its own program would be as fast as itself."""
    names = ("data parallel", "data parallel again", "data parallel 16 bits", "gpipe", "3-D grid", "plan")
    rows = [
        step("step", "competitor", OURS if name == "plan" else OTHERS, of=name, model="gpt", bits_per_s=1e8)
        for name in names
    ]
    rows[-1]["plan"]["micro_batches"] *= 2
    return hybrid.claims(rows)


def of_comms() -> Mapping[str, Claim]:
    """Everything together is compared with overlap, too, and takes half of its seconds."""
    seconds = {task.BASELINE: OTHERS, task.ALL: [half / 2 for half in OURS]}
    variants = [
        step("step", "variant", seconds.get(one.name, OURS), of=one.name, bits_per_s=5e8) for one in task.VARIANTS
    ]
    exchanges = [
        step("gradient step", "variant", OTHERS if e.name == gradients.BASELINE else OURS, of=e.name, bits_per_s=5e8)
        for e in gradients.EXCHANGES
    ]
    return comms.claims(variants + exchanges)


def of_planner() -> Mapping[str, Claim]:
    row = WorthRow(
        model="m", cluster="c", batch=8, space="spmd", plan="p", seconds=1.0, lower_bound=1.0, gap=0.0, reason="",
        others={name: Alternative(seconds=2.0, ratio=None, reason="") for name in SHORT}, search_s=0.0,
    )  # fmt: skip
    others = {name: {"seconds": 2.0, "ratio": 0.1, "reason": ""} for name in SHORT}
    return worth_claims([WorthRow.from_json({**vars(row), "others": others})])


def of_kernels() -> Mapping[str, Claim]:
    fields = {"spec": "s", "bytes": 1}
    rows = [{"operation": "copy", "competitor": "copy", "samples_s": OURS, **fields}]
    for name in OPERATIONS:
        rows += [
            {"operation": name, "competitor": each, "samples_s": OURS if each == "mosaic" else OTHERS, **fields}
            for each in ("mosaic", "reference")
        ]
    return kernels.claims(rows)


def of_memory() -> Mapping[str, Claim]:
    steps = [
        {"setup": "any", "competitor": name, "samples_s": OURS if name == "planned" else OTHERS}
        for name in ("planned", "synchronous")
    ]
    return memory.choice_claims([{"best_s": 2.0, "greedy_s": 1.0}]) | memory.step_claims(steps)


def of_train() -> Mapping[str, Claim]:
    return train.ratio_claims({"jhpt": OURS, "minimal": OTHERS, "torch": OTHERS}, "here")


@pytest.mark.parametrize(
    ("claims", "count"),
    [(of_hybrid, 15), (of_comms, 40), (of_planner, 9), (of_kernels, 4), (of_memory, 6), (of_train, 2)],
)
def test_whoever_takes_half_the_seconds_is_twice_as_fast(claims, count):
    made = {name: claim for name, claim in claims().items() if "vs_" in name}
    assert len(made) == count
    for name, claim in made.items():
        twice = {"all_vs_serial_max", "all_vs_serial_geomean", "worst_all_vs_serial"}
        assert claim.value == pytest.approx(4.0 if name in twice else 2.0), name
        assert re.fullmatch(r"(predicted )?seconds of .+ / seconds of .+", claim.unit), name
    for name, claim in claims().items():
        assert ("vs_" in name) == ("seconds of" in claim.unit), name


def strings(path: Path) -> Iterator[str]:
    """Texts of a file, the fixed parts of formatted ones too, without docstrings."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def calls(path: Path, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_benchmark_divides_seconds_in_its_own_way(path):
    """No unit but those of `ratio_unit` names two seconds, and every claim `vs_` something comes from `ratios`."""
    texts = list(strings(path))
    for text in texts:
        assert not re.search(r"\b(time|seconds|ms) of .* / ", text), f"{text!r}: use jhpt.bench.ratios.ratio_unit"
    named = [text for text in texts if re.fullmatch(r"[a-z0-9_]*vs_[a-z0-9_]*", text)]
    source = path.read_text()
    assert not named or path.name in OF_OTHERS or "from jhpt.bench.ratios import" in source, named
    for call in calls(path, "Claim"):
        values = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert values["unit"] not in ("'x'", "'ratio'"), f"{path}:{call.lineno}: of what, and above 1 is better?"
        assert "times_as_fast" not in values["value"], f"{path}:{call.lineno}: a ratio is made by speed_claim"


MEASUREMENTS = sorted((ROOT / "docs/reports/measurements").glob("bench-*.json"))


@pytest.mark.parametrize("path", MEASUREMENTS, ids=lambda path: path.stem)
def test_reported_ratios_follow_from_the_samples_beside_them(path):
    report = json.loads(path.read_text())
    if report["bench"] in reported.CLAIMS:
        assert reported.with_claims(report)["claims"] == report["claims"]
    else:
        assert not [name for name in report["claims"] if "vs_" in name]


def test_files_are_launches_of_their_own():
    rows = [{"row": "step", "launch": 0}, {"row": "step", "launch": 1}]
    joined = reported.joined([{"rows": rows}, {"rows": [{"row": "step"}]}])
    assert [row["launch"] for row in joined] == [0, 1, 2]
