"""`jhpt train` under Open MPI's mpirun."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.slurm.cluster import environment_of, processes, until
from tests.slurm.conftest import digests_of, environment, flags, losses_of, steps_of

pytestmark = pytest.mark.slurm

SAYING_ITS_STATUS = ("sh", "-c", 'jhpt "$@"; status=$?; echo "it ended with $status"; exit $status', "sh")
"""mpirun has one status for all processes."""


def started(mpirun: list[str], count: int, run: Path, train: Sequence[str], jhpt=("jhpt",)) -> subprocess.Popen[str]:
    words = [*mpirun, "-np", str(count), *jhpt, "train", *train, "--out", str(run)]
    return subprocess.Popen(
        words, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(started: subprocess.Popen[str]) -> tuple[int, str]:
    """(status, output)"""
    try:
        output, _ = started.communicate(timeout=150)
    finally:
        started.terminate()  # mpirun ends its processes
    return started.returncode, output


def process_of(run: Path, rank: int) -> int:
    """The number of a jhpt process."""
    return next(
        pid
        for pid in processes()
        if f"OMPI_COMM_WORLD_RANK={rank}" in environment_of(pid)
        and Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2:-1] == [str(run).encode()]
        and b"python" in os.readlink(f"/proc/{pid}/exe").encode()
    )


@pytest.fixture(scope="module")
def undisturbed(mpirun, settings, tmp_path_factory) -> Path:
    """A run in four processes."""
    run = tmp_path_factory.mktemp("mpi") / "run"
    status, output = finished(started(mpirun, 4, run, flags(settings, **{"parallel.data": 4})))
    assert status == 0, output
    return run


def test_mpirun_gives_the_losses_of_one_process(undisturbed, one):
    assert losses_of(undisturbed) == pytest.approx(dict(one.losses), rel=1e-5) and len(one.losses) == 24


def test_a_process_is_killed_and_the_run_goes_on(mpirun, settings, undisturbed, tmp_path):
    """The others end with status 5, mpirun with that of the process that was killed."""
    run, train = tmp_path / "run", flags(settings, **{"parallel.data": 4})
    first = started(mpirun, 4, run, train, SAYING_ITS_STATUS)
    until(lambda: max(steps_of(run), default=0) >= 4, 90, lambda: str(first.poll()))
    os.kill(process_of(run, 2), signal.SIGKILL)
    status, output = finished(first)
    assert status == 128 + signal.SIGKILL, output
    assert sorted(re.findall(r"it ended with (\d+)", output)) == ["137", "5", "5", "5"], output
    assert "jhpt train: process 2 on " in output and 4 <= max(steps_of(run)) < 24
    status, output = finished(started(mpirun, 4, run, train))
    assert status == 0, output
    assert digests_of(run) == digests_of(undisturbed) and losses_of(run) == losses_of(undisturbed)


def test_a_signal_to_mpirun_saves_the_run(mpirun, settings, tmp_path):
    """SIGUSR1, which mpirun passes on; it leaves processes a second after SIGTERM."""
    run, train = tmp_path / "run", flags(settings, **{"parallel.data": 2, "train.steps": 100_000})
    endless = started(mpirun, 2, run, train)
    until(lambda: steps_of(run), 90, lambda: str(endless.poll()))
    endless.send_signal(signal.SIGUSR1)
    status, output = finished(endless)
    assert status == 130 and f"stopped at step {max(steps_of(run))}" in output, output
