"""Several processes: the same losses as one, and who is taken for a launcher."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jhpt
from jhpt.training.metrics import read_metrics
from jhpt.training.processes import launcher
from tests.conftest import tiny_overrides
from tests.covers import quick_and_exhaustive


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_two(folder: Path, settings, outs=("two", "two"), apart=({}, {})) -> list[subprocess.Popen]:
    """Two processes with a device each, joined through a port on localhost.  apart: settings of each alone."""
    port, workers = free_port(), []
    for rank in range(2):
        processes = {"coordinator": f"127.0.0.1:{port}", "process_id": rank, "num_processes": 2}
        spec = {"preset": "gpt-tiny", "overrides": settings | apart[rank], "processes": processes}
        spec["out"] = str(folder / outs[rank])
        file = folder / f"{rank}.json"
        file.write_text(json.dumps(spec))
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.training.runner", str(file)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return workers


def wait_for(condition, workers) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline and all(worker.poll() is None for worker in workers)
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("data", "tensor", "offload"),
    quick_and_exhaustive([(2, 1, "off"), (1, 2, "off"), (2, 1, "both")], [(1, 2, "off"), (2, 1, "both")]),
)
def test_two_processes_train_to_the_losses_of_one(tmp_path, corpus, data, tensor, offload):
    """Also with blocks on the hosts of both; what they save goes on in one process with everything on the device."""
    settings = tiny_overrides(corpus) | {"train.steps": 6, "evaluation.every": 3}
    settings |= {"parallel.data": data, "parallel.tensor": tensor, "evaluation.sample_tokens": 4}
    one = jhpt.train("gpt-tiny", out=tmp_path / "one", overrides=settings)
    for worker in start_two(tmp_path, settings | {"memory.offload": offload}):
        _, error = worker.communicate(timeout=300)
        assert worker.returncode == 0, error
    records = read_metrics(tmp_path / "two")
    for name, expected in (("loss", one.losses), ("validation_loss", one.validation_losses)):
        values = {record["step"]: record[name] for record in records if name in record}
        assert values == pytest.approx(expected, rel=1e-5)
        assert len(values) == (6 if name == "loss" else 2)
    if offload != "off":
        jhpt.train(out=tmp_path / "one", overrides={"train.steps": 7})
        for worker in start_two(tmp_path, settings | {"memory.offload": offload, "train.steps": 7}):
            _, error = worker.communicate(timeout=300)
            assert worker.returncode == 0, error
        more = {"parallel.data": 1, "train.steps": 8}
        runs = [jhpt.train(out=tmp_path / name, overrides={**more, "memory.offload": "off"}) for name in ("two", "one")]
        assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-5) and runs[0].step == 8


@pytest.mark.parametrize("signals", [(signal.SIGTERM, None), (signal.SIGINT, signal.SIGINT)], ids=["sigterm", "ctrl-c"])
def test_two_processes_save_and_stop_together(tmp_path, corpus, signals):
    """SIGTERM to one process, as a scheduler sends it, or Ctrl-C, which reaches all."""
    settings = tiny_overrides(corpus) | {"parallel.data": 2, "train.steps": 100_000, "checkpoint.every": 100_000}
    workers = start_two(tmp_path, settings)
    metrics = tmp_path / "two" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, workers)
    for worker, number in zip(workers, signals, strict=True):
        if number is not None:
            worker.send_signal(number)
    steps = set()
    for worker in workers:
        out, error = worker.communicate(timeout=200)
        assert worker.returncode == 0, error
        result = json.loads(out.splitlines()[-1])
        assert result["interrupted"]
        steps.add(result["step"])
    (step,) = steps
    assert (tmp_path / "two" / "checkpoints" / str(step)).is_dir()


def test_what_one_process_refuses_stops_all(tmp_path, corpus):
    """The run directory is taken, which only process 0 can see."""
    (tmp_path / "two").mkdir()
    with (tmp_path / "two" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        workers = start_two(tmp_path, tiny_overrides(corpus) | {"parallel.data": 2})
        errors = [worker.communicate(timeout=200)[1] for worker in workers]
    assert all(worker.returncode == 1 for worker in workers)  # the runner does not catch InputError
    assert "another process is training in" in errors[0]
    assert "process 0 failed" in errors[1]
    assert {path.name for path in (tmp_path / "two").iterdir()} == {".lock"}


def test_processes_that_are_told_different_things_are_refused(tmp_path, corpus):
    """Where their files lie may differ, what they do may not."""
    elsewhere = {"data.cache_dir": str(tmp_path / "cache"), "train.steps": 7}
    workers = start_two(tmp_path, tiny_overrides(corpus) | {"parallel.data": 2}, apart=({}, elsewhere))
    errors = [worker.communicate(timeout=200)[1] for worker in workers]
    assert all(worker.returncode == 1 for worker in workers)  # the runner does not catch InputError
    assert "process 1 failed" in errors[0]
    assert "train.steps: 7 here, 4 on process 0" in errors[1] and "cache_dir" not in errors[1].split("InputError")[-1]
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # a shell inside an allocation
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),  # an interactive step
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "x"}, None),  # any pod
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1"}, "Kubernetes"),
    ],
)
def test_launchers_are_told_from_shells(environment, name):
    assert launcher(environment) == name
