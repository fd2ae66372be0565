"""Several processes: the same losses as one, and who is taken for a launcher."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jhpt
from jhpt.training.metrics import read_metrics
from jhpt.training.processes import launcher
from tests.conftest import tiny_overrides


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2)])
def test_two_processes_train_to_the_losses_of_one(tmp_path, corpus, data, tensor):
    settings = tiny_overrides(corpus) | {"train.steps": 6, "evaluation.every": 3}
    settings |= {"parallel.data": data, "parallel.tensor": tensor, "evaluation.sample_tokens": 4}
    one = jhpt.train("gpt-tiny", out=tmp_path / "one", overrides=settings)

    port, workers = free_port(), []
    for rank in range(2):
        processes = {"coordinator": f"127.0.0.1:{port}", "process_id": rank, "num_processes": 2}
        spec = {"preset": "gpt-tiny", "overrides": settings, "out": str(tmp_path / "two"), "processes": processes}
        file = tmp_path / f"{rank}.json"
        file.write_text(json.dumps(spec))
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.training.runner", str(file)],
                cwd=Path(__file__).parents[2],
                env={**__import__("os").environ, "JAX_NUM_CPU_DEVICES": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    for worker in workers:
        _, error = worker.communicate(timeout=300)
        assert worker.returncode == 0, error.decode()
    records = read_metrics(tmp_path / "two")
    for name, expected in (("loss", one.losses), ("validation_loss", one.validation_losses)):
        found = {record["step"]: record[name] for record in records if name in record}
        assert found == pytest.approx(expected, rel=1e-5)
        assert len(found) == (6 if name == "loss" else 2)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # a shell inside an allocation
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, "SLURM"),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "x"}, None),  # any pod
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1"}, "Kubernetes"),
    ],
)
def test_launchers_are_told_from_shells(environment, name):
    assert launcher(environment) == name
