"""The GPU kit, run dry on a CPU: parts on their own, results as they come, and commands that exist."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import checks, run
from benchmarks.gpu.prepare import installed, lacking, requirements
from benchmarks.gpu.stages import LIMIT_S, PREDICTED, STAGES, Part
from jhpt.bench.predict import GPU_CASES
from jhpt.bench.registry import NAMES
from jhpt.bench.train import GPU_PRESETS


def python(name, code, seconds=60.0):
    return Part(name=name, seconds=seconds, arguments=("-c", code, "{result}"))


def test_a_failing_part_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LEAST_S", 0.0)
    parts = [
        python("fails", "import sys; print('why'); sys.exit(3)"),
        python("hangs", "import sys, time; open(sys.argv[1], 'w').write('[1]'); time.sleep(60)", seconds=0.5),
        python("works", "import sys; open(sys.argv[1], 'w').write('{\"found\": 1}')"),
    ]
    lines = run.run_stage("any", parts, tmp_path)
    assert [line["status"] for line in lines] == [3, run.TIMED_OUT, 0]
    assert "why" in lines[0]["log"] and lines[1]["result"] == [1] and lines[2]["result"] == {"found": 1}
    assert [json.loads(line) for line in (tmp_path / "any.jsonl").read_text().splitlines()] == lines


def test_no_part_begins_without_time(tmp_path):
    (line,) = run.run_stage("any", [python("late", "1 / 0")], tmp_path, limit=1.0)
    assert line["status"] == run.NOT_BEGUN and "no time" in line["log"]


def test_a_dry_stage(tmp_path):
    """A stage's own command line, on a CPU."""
    assert run.main(["memory", "--dry", "--only", "grow-memory,copies", "--out", str(tmp_path)]) == 0
    grown, copied = map(json.loads, (tmp_path / "memory.jsonl").read_text().splitlines())
    assert grown["result"]["most_gib"] > 0
    assert copied["result"]["16 MiB"]["both"] > 0


def test_the_kit_starts_without_packages():
    """The wheels are installed by it, and downloaded by a Python that has nothing but pip."""
    code = "import benchmarks.gpu.prepare, benchmarks.gpu.run"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=run.ROOT, check=True, timeout=60)


def test_stages_ask_for_what_exists():
    assert list(PREDICTED) == [str(case) for case in GPU_CASES]
    for parts in STAGES.values():
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            assert part.seconds < LIMIT_S < 600
            words = part.arguments
            if words[:3] == ("-m", "jhpt", "bench"):
                assert words[3] in NAMES
                if "--only" in words:
                    only = words[words.index("--only") + 1]
                    assert only in {"train": list(GPU_PRESETS), "predict": [str(case) for case in GPU_CASES]}[words[3]]
            if words[:2] == ("-m", "benchmarks.gpu.checks"):
                assert words[2] in checks.CHECKS


def test_wheels_are_those_that_the_machine_lacks():
    machine = installed("# a comment\njax==0.11.2\nTyping_Extensions==4.16.0\nScipy\n")
    assert machine == {"jax": "0.11.2", "typing-extensions": "4.16.0", "scipy": None}
    names = (("jax", "0.11.2"), ("typing_extensions", "4.17.0"), ("tyro", "1.0"), ("scipy", "1.18"))
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in names]}
    assert lacking(report, machine) == ["typing-extensions==4.17.0", "tyro==1.0"]


def test_requirements_name_no_extra_of_the_project():
    """pip cannot resolve them: the project itself is not installed there."""
    names = requirements()
    assert not [name for name in names if name.startswith("jhpt")]
    assert any(name.startswith("pyarrow") for name in names)


def test_unknown_stages_are_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["nope"])
    assert "invalid choice" in capsys.readouterr().err
