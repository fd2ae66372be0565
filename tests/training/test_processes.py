"""Several processes: the same losses as one, and who is taken for a launcher."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jhpt
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.host import host_memory
from jhpt.core.ports import free_port
from jhpt.training.metrics import read_metrics
from jhpt.training.processes import Processes, _found, launcher
from tests.conftest import tiny_overrides

LINK = Link(bandwidth=1e9, latency=1e-6)
DEVICE = Device(name="cpu", peak_flops={"float32": 1e12}, memory=1e9, memory_bandwidth=1e10)
NODE = Node(device=DEVICE, devices=1, inside=LINK, host=LINK, host_memory=1e10)
MACHINE = Cluster(name="here: 1 x cpu", nodes=(NODE,), network=LINK)
"""As one process alone has measured it."""


def start_two(
    folder: Path, settings, outs=("two", "two"), apart=({}, {}), before=(), spanned=None, devices=1
) -> list[subprocess.Popen]:
    """Two processes with so many devices each, joined through a port on localhost.

    apart: settings of each alone.  before: (folder, settings of each) of runs that the same two do first.  spanned: a
    cluster that they span before that.
    """
    port, workers = free_port(), []
    for rank in range(2):
        processes = {"coordinator": f"127.0.0.1:{port}", "process_id": rank, "num_processes": 2}
        runs = [(out, each[rank]) for out, each in before] + [(outs[rank], settings | apart[rank])]
        specs = [
            {"preset": "gpt-tiny", "overrides": overrides, "processes": processes, "out": str(folder / out)}
            for out, overrides in runs
        ]
        if spanned is not None:
            specs.insert(0, {"spanning": spanned.model_dump(mode="json"), "processes": processes})
        file = folder / f"{rank}.json"
        file.write_text(json.dumps(specs if len(specs) > 1 else specs[0]))
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.training.runner", str(file)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
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


def test_two_processes_refuse_train_and_stop_together(tmp_path, corpus):
    """One pair does what the tests below do with a pair each: both refuse what one refuses, and settings that differ;
    they train to the losses of one process, with blocks on the hosts or not; both stop where SIGTERM reaches one.
    Copies on the two are compared.  Before that, both see one node of two devices and the link between them."""
    settings = tiny_overrides(corpus) | {"model.num_layers": 1, "optimizer.schedule": "constant", "train.steps": 4}
    settings |= {"parallel.data": 2, "evaluation.every": 2, "evaluation.batches": 1}
    one = jhpt.train("gpt-tiny", out=tmp_path / "one", overrides=settings)
    different = settings | {"data.cache_dir": str(tmp_path / "cache"), "train.steps": 7}
    offloaded = settings | {"memory.offload": "both", "evaluation.sample_tokens": 4, "guards.replicas_every": 1}
    endless = settings | {"train.steps": 100_000, "checkpoint.every": 100_000}
    before = [("told", (settings, different)), ("taken", (settings, settings)), ("hosts", (offloaded, offloaded))]
    (tmp_path / "taken").mkdir()
    with (tmp_path / "taken" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        workers = start_two(tmp_path, endless, outs=("endless", "endless"), before=before, spanned=MACHINE)
        metrics = tmp_path / "endless" / "metrics.jsonl"
        wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") > 6, workers)
    workers[0].send_signal(signal.SIGTERM)
    outcomes = []
    for worker in workers:
        out, error = worker.communicate(timeout=200)
        assert worker.returncode == 0, error
        outcomes.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    spanned, told, taken, hosts, stopped = zip(*outcomes, strict=True)

    clusters = [Cluster.model_validate(outcome["cluster"]) for outcome in spanned]
    for cluster in clusters:
        (node,) = cluster.nodes
        assert (node.devices, node.count) == (2, 1) and node.inside == cluster.network == clusters[0].network
        assert node.inside.repetitions and "processes of a node" in cluster.sources["inside"]
        assert node.device.memory == host_memory() / 2 and node.host_memory == MACHINE.nodes[0].host_memory
    assert [outcome["here"] for outcome in spanned] == [[0, 1], [0, 1]]

    assert "process 1 failed" in told[0]["refused"] and "cache_dir" not in told[1]["refused"]
    assert "train.steps: 7 here, 4 on process 0" in told[1]["refused"] and not (tmp_path / "told").exists()

    assert "another process is training in" in taken[0]["refused"] and "process 0 failed" in taken[1]["refused"]
    assert {path.name for path in (tmp_path / "taken").iterdir()} == {".lock"}

    assert all(outcome["step"] == 4 and not outcome["interrupted"] for outcome in hosts)
    same_losses(tmp_path / "hosts", one)
    assert (tmp_path / "hosts" / "checkpoints" / "4").is_dir()

    (step,) = {outcome["step"] for outcome in stopped}
    assert all(outcome["interrupted"] for outcome in stopped) and 4 < step < 100_000
    same_losses(tmp_path / "endless", one)
    assert (tmp_path / "endless" / "checkpoints" / str(step)).is_dir()


@pytest.mark.exhaustive
def test_replicas_of_two_processes(tmp_path, corpus):
    """Shards on two devices of each process, replicas on the other: the losses of one process, and as many from the
    checkpoint that both wrote."""
    settings = tiny_overrides(corpus) | {"model.num_layers": 2, "optimizer.schedule": "constant", "train.steps": 6}
    settings |= {"parallel.data": 4, "parallel.zero": 3, "parallel.zero_ranks": 2, "guards.replicas_every": 1}
    settings |= {"evaluation.every": 3, "evaluation.batches": 1}
    one = jhpt.train("gpt-tiny", out=tmp_path / "one", overrides=settings)
    half = settings | {"train.steps": 3}
    for worker in start_two(tmp_path, settings, before=[("two", (half, half))], devices=2):
        out, error = worker.communicate(timeout=400)
        assert worker.returncode == 0, error
        assert [json.loads(line)["step"] for line in out.splitlines() if line.startswith("{")] == [3, 6]
    same_losses(tmp_path / "two", one)


def same_losses(run_dir: Path, one: jhpt.RunResult) -> None:
    """Training and held-out losses up to the last step of the other run."""
    records = [record for record in read_metrics(run_dir) if record["step"] <= one.step]
    for name, expected in (("loss", one.losses), ("validation_loss", one.validation_losses)):
        values = {record["step"]: record[name] for record in records if name in record}
        assert values == pytest.approx(expected, rel=1e-5) and len(values) == (one.step if name == "loss" else 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("data", "tensor", "offload"), [(2, 1, "off"), (1, 2, "off"), (2, 1, "both")])
def test_two_processes_train_to_the_losses_of_one(tmp_path, corpus, data, tensor, offload):
    """Also with blocks on the hosts of both; what they save goes on in one process with everything on the device."""
    settings = tiny_overrides(corpus) | {"train.steps": 6, "evaluation.every": 3}
    settings |= {"parallel.data": data, "parallel.tensor": tensor, "evaluation.sample_tokens": 4}
    one = jhpt.train("gpt-tiny", out=tmp_path / "one", overrides=settings)
    for worker in start_two(tmp_path, settings | {"memory.offload": offload}):
        _, error = worker.communicate(timeout=300)
        assert worker.returncode == 0, error
    same_losses(tmp_path / "two", one)
    if offload != "off":
        jhpt.train(out=tmp_path / "one", overrides={"train.steps": 7})
        for worker in start_two(tmp_path, settings | {"memory.offload": offload, "train.steps": 7}):
            _, error = worker.communicate(timeout=300)
            assert worker.returncode == 0, error
        more = {"parallel.data": 1, "train.steps": 8}
        runs = [jhpt.train(out=tmp_path / name, overrides={**more, "memory.offload": "off"}) for name in ("two", "one")]
        assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-5) and runs[0].step == 8


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
TASK |= {"SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
RANK = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
RANK |= {"OMPI_MCA_orte_hnp_uri": "9109504.0;tcp://192.0.2.2:38861"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TASK, ("node3:61447", 3, 4, [1])),
        (RANK, (f"192.0.2.2:{61440 + 9109504 // 4096 % 4096}", 1, 2, [1])),
        ({}, None),
    ],
)
def test_a_launcher_gives_each_process_its_place_and_its_gpu(monkeypatch, environment, place):
    """By hand a process takes all that it sees, also in a shell inside a job."""
    for name in {*TASK, *RANK}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _found(Processes()) == place
    by_hand = Processes(coordinator="node0:29400", process_id=0, num_processes=2)
    assert _found(by_hand) == ("node0:29400", 0, 2, None)
