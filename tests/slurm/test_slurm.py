"""`jhpt train` under SLURM: srun, and the script of `jhpt launch --slurm`."""

import fcntl
import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, until
from tests.slurm.conftest import digests_of, flags, losses_of, steps_of

pytestmark = pytest.mark.slurm


def submitted(cluster: Cluster, folder: Path, options: list[str], train: list[str]) -> str:
    """The number of a job made by `jhpt launch --slurm`."""
    words = ["jhpt", "launch", "--slurm", "--name", "job", "--out", "job.sh", *options, "--", "train", *train]
    cluster.command(*words, "--out", str(folder / "run"), cwd=folder)
    return re.findall(r"\d+", cluster.command("sbatch", "job.sh", cwd=folder))[0]


def ended(cluster: Cluster, job: str) -> bool:
    return cluster.job(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


def output_of(cluster: Cluster, folder: Path, job: str) -> str:
    """For a failure."""
    files = sorted(folder.glob("job-*.log"))
    return "\n".join([str(cluster.job(job)), *(file.read_text()[-3000:] for file in files), cluster.logs()])


def test_srun_gives_the_losses_of_one_process(cluster, settings, one, tmp_path):
    run = tmp_path / "run"
    train = flags(settings, **{"parallel.data": 4})
    cluster.command("srun", "-N4", "-n4", "jhpt", "train", *train, "--out", str(run), seconds=150)
    assert losses_of(run) == pytest.approx(dict(one.losses), rel=1e-5) and len(one.losses) == 24


def test_a_job_survives_the_loss_of_its_nodes(cluster, settings, two_processes, tmp_path):
    """First the node of process 1 is lost, then that of process 0 and the batch script: the job goes on elsewhere."""
    run = tmp_path / "run"
    train = flags(settings, **{"parallel.data": 2})
    job = submitted(cluster, tmp_path, ["--nodes", "2", "--gpus", "1", "--cpus", "2"], train)
    for loss, step in enumerate((4, 12)):

        def reached(step: int = step) -> bool:
            return max(steps_of(run), default=0) >= step and cluster.job(job)["JobState"] == "RUNNING"

        until(reached, 150, lambda: output_of(cluster, tmp_path, job))
        hosts = cluster.command("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()
        cluster.kill(hosts[1 - loss])
        until(lambda n=loss: int(cluster.job(job)["Restarts"]) > n, 60, lambda: output_of(cluster, tmp_path, job))
    until(lambda: ended(cluster, job), 150, lambda: output_of(cluster, tmp_path, job))
    assert cluster.job(job)["JobState"] == "COMPLETED", output_of(cluster, tmp_path, job)
    assert digests_of(run) == digests_of(two_processes) and len(steps_of(run)) == 12
    assert losses_of(run) == losses_of(two_processes)


def test_a_job_is_saved_before_its_time_is_up_and_queued_again(cluster, settings, tmp_path):
    """CPU nodes; the limit is lowered, so that two minutes before it is now.  scancel then ends the job for good."""
    endless = flags(settings, **{"parallel.data": 2, "train.steps": 100_000, "checkpoint.every": 100_000})
    job = submitted(cluster, tmp_path, ["--nodes", "2", "--gpus", "0", "--time", "10"], endless)
    until((tmp_path / "run" / "metrics.jsonl").exists, 150, lambda: output_of(cluster, tmp_path, job))
    cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    until(lambda: cluster.job(job)["Restarts"] == "1", 90, lambda: output_of(cluster, tmp_path, job))
    (step,) = steps_of(tmp_path / "run")
    assert f"stopped at step {step}" in (tmp_path / f"job-{job}.log").read_text()
    cluster.command("scancel", job)
    until(lambda: ended(cluster, job), 30, lambda: output_of(cluster, tmp_path, job))
    assert cluster.job(job)["JobState"] == "CANCELLED"


def test_a_refused_run_is_not_queued_again(cluster, settings, tmp_path):
    """What only one process can see: another run in the directory.  All end with its status, and so does the job."""
    (tmp_path / "run").mkdir()
    train = flags(settings, **{"parallel.data": 2})
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = submitted(cluster, tmp_path, ["--nodes", "2", "--gpus", "1"], train)
        until(lambda: ended(cluster, job), 150, lambda: output_of(cluster, tmp_path, job))
    state = cluster.job(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
    assert "another process is training in" in (tmp_path / f"job-{job}.log").read_text()
