"""`jhpt launch`: what follows an attempt, what a process is given, and a run that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import jhpt
from jhpt import cli, launch
from jhpt.core.errors import Exit, InputError
from jhpt.launch import Attempt, Launch, after, command_of, ending, environment_of, launched
from tests.conftest import tiny_overrides

TWO = Launch(arguments=("gpt-tiny",), out=Path("run"), processes=2, fewest=2, max_restarts=5, pause=1.0)
KILLED = -signal.SIGKILL


def attempts(*steps, status=KILLED, failed=1):
    return [Attempt(failed=failed, status=status, step=step) for step in steps]


def test_all_is_well():
    assert after(TWO, [Attempt(step=4)], 2).status == Exit.DONE


@pytest.mark.parametrize(
    "status", [Exit.DIVERGED, Exit.INPUT, Exit.NOT_HERE, Exit.DAMAGED, Exit.MEMORY, Exit.INTERRUPTED]
)
def test_some_ends_are_final(status):
    assert after(TWO, attempts(4, status=status), 2).status == status


@pytest.mark.parametrize("status", [KILLED, -signal.SIGSEGV, Exit.PEER, Exit.STORAGE, Exit.CRASH, 134])
def test_others_are_tried_again(status):
    following = after(TWO, attempts(4, status=status), 2)
    assert following.status is None and following.processes == 2 and following.pause == 1


def test_it_waits_longer_without_progress_and_then_gives_up():
    pauses = [after(TWO, attempts(4, *[4] * more), 2).pause for more in range(3)]
    assert pauses == [1, 2, 4]
    assert after(TWO, attempts(4, 4, 4, 4), 2).status == 128 + signal.SIGKILL
    assert "3 attempts in a row" in after(TWO, attempts(4, 4, 4, 4), 2).reason
    assert after(TWO, attempts(4, 4, 4, 6), 2).pause == 1
    assert after(TWO, attempts(None, None, None), 2).status is not None


def test_restarts_are_counted():
    assert after(TWO, attempts(1, 2, 3, 4, 5), 2).status is None
    assert after(TWO, attempts(1, 2, 3, 4, 5, 6), 2).status == 128 + signal.SIGKILL
    long = Launch(**vars(TWO) | {"pause": 50.0})
    assert after(long, attempts(1, 1), 2).pause == launch.LONGEST_PAUSE


def test_with_min_processes_it_goes_on_with_fewer():
    fewer = Launch(**vars(TWO) | {"fewest": 1})
    assert after(fewer, attempts(4, 4), 2).processes == 2
    assert after(fewer, attempts(4, 4, 4), 2).processes == 1
    assert after(fewer, [*attempts(4, 4), *attempts(4, failed=0)], 2).processes == 2
    assert after(fewer, attempts(4, 4, 4, 4), 1).status is not None


def test_every_process_gets_its_place_and_its_gpus():
    words = command_of(TWO, 1, 2, 1234)
    place = "--coordinator 127.0.0.1:1234 --process-id 1 --num-processes 2"
    assert words[1:] == f"-m jhpt.launched {os.getpid()} train gpt-tiny --out run {place}".split()
    assert "--coordinator" not in command_of(TWO, 0, 1, 1234)
    assert environment_of({}, 8, 1, 2)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert environment_of({"CUDA_VISIBLE_DEVICES": "3,5"}, 8, 1, 2)["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment_of({"A": "b"}, 0, 1, 2) == {"A": "b"}
    with pytest.raises(InputError, match="cannot share 8 GPUs"):
        environment_of({}, 8, 0, 3)


def test_endings_in_words():
    assert ending(KILLED) == "was ended by SIGKILL" and ending(5) == "ended with status 5 (peer)"
    assert ending(134) == "ended with status 134"


CHILD = """
import os, signal, sys, time
from jhpt.launched import ends_with
signal.signal(signal.SIGTERM, lambda *_: (open("told", "w").close(), os._exit(0)))
assert ends_with(os.getppid())
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
os.kill(os.getpid(), 9)
"""


def test_a_process_ends_with_its_launcher(tmp_path):
    """Where the launcher is killed, and where it has ended before the process could ask for that."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    launcher = subprocess.run([sys.executable, "-c", LAUNCHER], cwd=tmp_path, env=environment, timeout=60)
    assert launcher.returncode == KILLED
    deadline = time.monotonic() + 30
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    alone = [sys.executable, "-m", "jhpt.launched", str(launcher_of_nobody()), "--help"]
    gone = subprocess.run(alone, capture_output=True, text=True, timeout=60)
    assert gone.returncode == 1 and gone.stderr == "jhpt launch has ended\n" and not gone.stdout


def launcher_of_nobody() -> int:
    with subprocess.Popen(["true"]) as ended:
        return ended.pid


def fake(tmp_path, monkeypatch, program):
    """Processes that run this program instead of a training; it counts its starts in the file `starts`."""
    file = tmp_path / "fake.py"
    file.write_text(
        "import os, sys, time, pathlib, signal\nnumber, starts = int(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        + program
    )
    starts = tmp_path / "starts"
    monkeypatch.setattr(
        launch, "command_of", lambda launch, process, *_: [sys.executable, str(file), str(process), str(starts)]
    )
    return Launch(**vars(TWO) | {"out": tmp_path / "run", "pause": 0.0})


def test_the_others_are_ended_and_all_begin_again(tmp_path, monkeypatch):
    program = """
if number == 1:
    starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
    if len(starts.read_text()) < 3:
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
else:
    while not starts.exists() or len(starts.read_text()) < 3:
        time.sleep(0.05)
"""
    monkeypatch.setattr(launch, "GRACE", 0.1)
    said = []
    two = fake(tmp_path, monkeypatch, program)
    assert launched(two, said.append) == Exit.DONE
    assert (tmp_path / "starts").read_text() == "xxx"
    assert said[0] == "process 1: the last words" and "was ended by SIGKILL; starting again from the start" in said[1]


def test_a_refusal_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.1)
    two = fake(tmp_path, monkeypatch, "if number: sys.exit(2)\ntime.sleep(60)")
    assert launched(two, lambda line: None) == Exit.INPUT


def test_the_script_for_slurm(tmp_path, capsys):
    out = tmp_path / "job.sh"
    words = ["launch", "--slurm", "--nodes", "4", "--time", "1:00:00", "--max-restarts", "7", "--out", str(out)]
    assert cli.main([*words, "--", "train", "my.yaml", "--out", "runs/a b"]) == Exit.DONE
    script = out.read_text()
    assert (
        "#SBATCH --nodes=4\n" in script and "#SBATCH --ntasks-per-node=8\n" in script and "--signal=TERM@120" in script
    )
    assert "srun --kill-on-bad-exit=1 jhpt train my.yaml --out 'runs/a b'\n" in script and "0|1|2|3|6|7) exit" in script
    assert subprocess.run(["bash", "-n", str(out)]).returncode == 0 and "sbatch" in capsys.readouterr().out


REQUEUED = [(5, 0, True), (130, 3, True), (137, 0, True), (5, 4, False), (2, 0, False), (0, 0, False)]


@pytest.mark.parametrize(("status", "restarts", "requeued"), REQUEUED)
def test_the_script_puts_the_job_in_the_queue_again_where_that_helps(tmp_path, status, restarts, requeued):
    out = tmp_path / "job.sh"
    cli.main(["launch", "--slurm", "--max-restarts", "4", "--out", str(out), "--", "train", "--out", "runs/a"])
    for name, body in (("srun", f"exit {status}"), ("scontrol", f"echo $* > {tmp_path}/requeued")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    assert subprocess.run(["bash", str(out)], env=environment).returncode == status
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 42\n"


def test_the_jobset(tmp_path):
    """The fields that the published schema of v1alpha2 requires, and its names."""
    out = tmp_path / "job.yaml"
    words = ["launch", "--kubernetes", "--nodes", "4", "--image", "me/jhpt:1", "--out", str(out)]
    assert cli.main([*words, "--", "train", "my.yaml", "--out", "/shared/run"]) == Exit.DONE
    made = yaml.safe_load(out.read_text())
    assert made["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and made["kind"] == "JobSet"
    (workers,) = made["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] == 4
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 2, 3, 6, 7] and job["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["jhpt", "train", "my.yaml", "--out", "/shared/run"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("launch --processes 2", "behind --"),
        ("launch --processes 2 -- plan gpt-tiny", "comes train"),
        ("launch -- train", "--processes N"),
        ("launch --processes 0 -- train", "--processes N"),
        ("launch --processes 2 --min-processes 3 -- train", "--min-processes 3"),
        ("launch --processes 2 --max-restarts -1 -- train", "cannot be negative"),
        ("launch --processes 2 --out x -- train", "--out before --"),
        ("launch --processes 2 -- train --process-id 1", "sets --process-id by itself"),
        ("launch --slurm -- train --out a", "--out FILE"),
        ("launch --slurm --out job.sh -- train", "run's --out"),
        ("launch --slurm --kubernetes --out job.sh -- train --out a", "one of"),
        ("launch --slurm --processes 2 --out job.sh -- train --out a", "--nodes and --gpus"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == Exit.INPUT
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_run_whose_process_is_killed_goes_on(tmp_path, corpus):
    """Two processes; one of them is killed in the middle of training."""
    settings = tiny_overrides(corpus) | {"model.num_layers": 1, "train.steps": 40, "checkpoint.every": 4}
    settings |= {"parallel.data": 2, "optimizer.schedule": "constant", "evaluation.sample_tokens": 0}
    flags = [word for name, value in settings.items() for word in (f"--{name}", json.dumps(value).strip('"'))]
    run = tmp_path / "run"
    command = [sys.executable, "-m", "jhpt", "launch", "--processes", "2", "--pause", "0", "--", "train", *flags]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [*command, "--out", str(run)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as launcher:
        deadline = time.monotonic() + 200
        while not (run / "checkpoints" / "8").is_dir():
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.05)
        (second,) = (pid for pid in children(launcher.pid) if "--process-id 1 " in command_line(pid))
        os.kill(second, signal.SIGKILL)
        error = launcher.communicate(timeout=200)[1].decode()
    assert launcher.returncode == 0, error
    assert "starting again from step" in error
    whole = jhpt.train("gpt-tiny", overrides=settings, out=tmp_path / "whole")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert losses == pytest.approx(dict(whole.losses), rel=1e-5) and len(losses) == 40


def children(parent):
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
