"""Malformed input ends in a documented exit status, with one message, no traceback, within limits and with nothing
written.

`tests.malformed` makes it: a valid file or command with one mutation by a seed, and what is made by hand.  `python -m
tests.malformed NAME` runs a case alone.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jhpt import cli
from jhpt.core.errors import Exit
from jhpt.training.metrics import METRICS_FILE, read_metrics
from tests.malformed.cases import CASES
from tests.malformed.seeded import KINDS
from tests.malformed.spoil import mutated_bytes

ROOT = Path(__file__).parent.parent

QUICK = [f"{kind.__name__}-{number}" for kind in KINDS for number in range(3)]
QUICK += ["pipe_as_config", "pipe_as_tokenizer_file", "loop_as_text", "full_folder_as_profile", "billion_laughs"]
QUICK += ["planned_hundred_thousand_layers", "devices_of_10^14", "a_read_only_run", "a_disk_too_small_for_weights"]
QUICK += ["one_word_of_3_mb", "a_manifest_that_leads_upwards", "offsets_beyond_the_file"]


def faults_of(names: list[str], folder: Path) -> list[dict]:
    """The cases that did not end as they should."""
    command = [sys.executable, "-m", "tests.malformed.forked", str(folder), *names]
    unset = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    *faults, summary = map(json.loads, done.stdout.splitlines())
    assert summary["cases"] == len(names)
    return faults


def test_a_few_cases_of_each_kind(tmp_path):
    assert faults_of(QUICK, tmp_path) == []


@pytest.mark.exhaustive
def test_all_cases(tmp_path):
    assert len(CASES) > 1000
    assert faults_of(list(CASES), tmp_path) == []


@pytest.mark.parametrize("seed", range(60))
def test_damaged_metrics_are_read(seed, tmp_path):
    """What is whole is kept, wherever the fault is."""
    rng = random.Random(seed)
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in range(1, 30)]
    (tmp_path / METRICS_FILE).write_bytes(mutated_bytes(rng, ("\n".join(lines) + "\n").encode()))
    for record in read_metrics(tmp_path):
        assert isinstance(record["step"], int)


@pytest.mark.parametrize("rate", ["1e-60", "1e60", "nan", "inf", "0"])
def test_numbers_that_float32_cannot_hold_are_refused(rate, capsys):
    assert cli.main(["train", "--optimizer.learning_rate", rate]) == Exit.INPUT
    assert "optimizer.learning_rate" in capsys.readouterr().err


def test_an_empty_run_directory_is_refused(capsys):
    assert cli.main(["train", "--out", ""]) == Exit.INPUT
    assert "--out is empty" in capsys.readouterr().err


def test_the_generator_makes_what_it_says():
    content = Path(__file__).read_bytes()
    assert len({mutated_bytes(random.Random(seed), content) for seed in range(60)}) > 30
