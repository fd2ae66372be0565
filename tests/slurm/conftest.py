"""A run's settings, the same run in one process, and a cluster."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jhpt
from benchmarks.faults.setups import SETTINGS, write_text
from jhpt.training.step_folders import FOLDER, RECORD, steps_in
from tests.slurm.cluster import SYSTEM, Cluster, missing, running


@pytest.fixture(scope="session")
def settings(tmp_path_factory) -> dict[str, object]:
    """24 steps of a GPT of 2 layers and width 32, saved after every second one."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return {**SETTINGS, "data.path": str(folder / "text"), "data.cache_dir": str(folder / "tokens"), "data.workers": 1}


@pytest.fixture(scope="session")
def one(tmp_path_factory, settings) -> jhpt.RunResult:
    """The run in one process with one device."""
    return jhpt.train("gpt-tiny", out=tmp_path_factory.mktemp("one") / "run", overrides=settings)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if reason := missing():
        pytest.fail(reason)
    with running(tmp_path_factory.mktemp("slurm"), environment()) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm) -> Cluster:
    """All nodes are there, and idle."""
    slurm.repair()
    return slurm


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    program = shutil.which("mpirun", path=SYSTEM)
    if program is None:
        pytest.fail("mpirun not found; on Debian: apt-get install openmpi-bin")
    return [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


@pytest.fixture(scope="session")
def two_processes(mpirun, settings, tmp_path_factory) -> Path:
    """The run in two processes, undisturbed."""
    run = tmp_path_factory.mktemp("two") / "run"
    words = [*mpirun, "-np", "2", "jhpt", "train", *flags(settings, **{"parallel.data": 2}), "--out", str(run)]
    subprocess.run(words, env=environment(), timeout=240, check=True)
    return run


def environment() -> dict[str, str]:
    """That of processes with a device each; `jhpt` is this one."""
    path = f"{Path(sys.executable).parent}:{SYSTEM}"
    return os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "PATH": path}


def flags(settings: dict[str, object], **changes: object) -> list[str]:
    """`flags(settings, **{"parallel.data": 2})`: as arguments of `jhpt train`."""
    values = {**settings, **changes}
    return [word for name, value in values.items() for word in (f"--{name}", json.dumps(value).strip('"'))]


def steps_of(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return steps_in(run / FOLDER)


def digests_of(run: Path) -> dict[int, dict[str, str]]:
    """The digests of all arrays, by step."""
    return {step: json.loads((run / FOLDER / str(step) / RECORD).read_text())["digests"] for step in steps_of(run)}


def losses_of(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}
