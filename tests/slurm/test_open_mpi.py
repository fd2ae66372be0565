"""`jhpt train` under Open MPI's mpirun."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.slurm.cluster import environment_of, processes, until
from tests.slurm.conftest import digests_of, environment, flags, losses_of, steps_of

pytestmark = pytest.mark.slurm

KEEPING_STATUSES = """
jhpt "$@"; status=$?
echo $status > "$STATUSES/$OMPI_COMM_WORLD_RANK"
while [ $(ls "$STATUSES" | wc -l) -lt $OMPI_COMM_WORLD_SIZE ]; do sleep 0.1; done
exit $status
"""
"""mpirun has one status for all processes, and ends the others once one has ended."""


def started(
    mpirun: list[str], count: int, run: Path, train: Sequence[str], statuses: Path | None = None
) -> subprocess.Popen[str]:
    """statuses: a folder for the status of each process."""
    jhpt = ["jhpt"] if statuses is None else ["sh", "-c", KEEPING_STATUSES, "sh"]
    return subprocess.Popen(
        [*mpirun, "-np", str(count), *jhpt, "train", *train, "--out", str(run)],
        env=environment() | ({} if statuses is None else {"STATUSES": str(statuses)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(started: subprocess.Popen[str]) -> tuple[int, str]:
    """(status, output)"""
    try:
        output, _ = started.communicate(timeout=240)
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


def test_mpirun_gives_the_losses_of_one_process(mpirun, settings, one, tmp_path):
    run = tmp_path / "run"
    status, output = finished(started(mpirun, 4, run, flags(settings, **{"parallel.data": 4})))
    assert status == 0 and "\x1b" not in output, output
    assert losses_of(run) == pytest.approx(dict(one.losses), rel=1e-5) and len(one.losses) == 24


def test_a_run_goes_on_after_a_kill_and_a_signal(mpirun, settings, two_processes, tmp_path):
    """A process is killed, and the other one ends with status 5.  The run goes on until mpirun gets SIGUSR1, which it
    passes on (after SIGTERM it leaves processes one second).  It ends as if nothing had happened."""
    run, statuses, train = tmp_path / "run", tmp_path / "statuses", flags(settings, **{"parallel.data": 2})
    statuses.mkdir()
    first = started(mpirun, 2, run, train, statuses)
    until(lambda: max(steps_of(run), default=0) >= 4, 150, lambda: str(first.poll()))
    os.kill(process_of(run, 1), signal.SIGKILL)
    status, output = finished(first)
    assert status in (5, 137) and "jhpt train: process 1 on " in output, output
    assert [(statuses / str(rank)).read_text() for rank in range(2)] == ["5\n", "137\n"]
    saved = max(steps_of(run))
    second = started(mpirun, 2, run, train)
    until(lambda: max(steps_of(run)) > saved, 150, lambda: str(second.poll()))
    second.send_signal(signal.SIGUSR1)
    status, output = finished(second)
    stopped = max(steps_of(run))
    assert status == 130 and f"stopped at step {stopped}" in output and saved < stopped < 24, output
    status, output = finished(started(mpirun, 2, run, train))
    assert status == 0, output
    assert digests_of(run).items() >= digests_of(two_processes).items()  # it stops after any step
    assert losses_of(run) == losses_of(two_processes)
