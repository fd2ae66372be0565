"""`jhpt launch`: what follows an attempt, what a process is given, and a run that is killed and goes on."""

import json
import os
import re
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


def test_it_goes_back_only_once(tmp_path, monkeypatch):
    """The first attempt fails before it has gone back to step 4; the second one has; the third one ends well."""
    folder, given = tmp_path / "run" / "checkpoints", []
    (folder / "6").mkdir(parents=True)
    (folder / "4").mkdir()

    def attempt(launch, processes, say):
        given.append(launch.arguments)
        if len(given) == 2:
            (folder / "6").rename(folder / "6.left")
        return Attempt(failed=None if len(given) == 3 else 1, status=Exit.PEER, step=4)

    monkeypatch.setattr(launch, "_attempt", attempt)
    back = ("gpt-tiny", "--resume-step", "4", "--seed", "1")
    run = Launch(**vars(TWO) | {"out": tmp_path / "run", "pause": 0.0, "arguments": back})
    assert launched(run, lambda line: None) == Exit.DONE
    assert given == [back, back, ("gpt-tiny", "--seed", "1")]


def write(tmp_path, words, train="train my.yaml --out /shared/run") -> str:
    """What `jhpt launch` writes."""
    out = tmp_path / "file"
    assert cli.main(["launch", *words.split(), "--out", str(out), "--", *train.split()]) == Exit.DONE
    return out.read_text()


def test_the_script_for_slurm(tmp_path, capsys):
    script = write(tmp_path, "--slurm --nodes 4 --cpus 6 --time 1:00:00", "train my.yaml --out runs/a$b")
    directives = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert directives == {
        "--job-name=my", "--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=6",
        "--time=1:00:00", "--requeue", "--open-mode=append", "--output=my-%j.log", "--signal=TERM@120",
    }  # fmt: skip
    train = "jhpt train my.yaml --out 'runs/a$b'\n"
    assert f"\nsrun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=6 {train}" in script and "0|1|2|3|6|7) " in script
    assert subprocess.run(["bash", "-n", str(tmp_path / "file")]).returncode == 0
    assert capsys.readouterr().out == f"{tmp_path}/file: sbatch {tmp_path}/file\n"


def test_without_gpus_each_node_has_a_process(tmp_path):
    script = write(tmp_path, "--slurm --gpus 0")
    assert "--ntasks-per-node=1\n" in script and "gpu" not in script
    job = yaml.safe_load(write(tmp_path, "--kubernetes --gpus 0 --claim c:/shared"))
    assert not pod_of(job)["containers"][0]["resources"]["limits"]


class Slurm:
    """Runs a script with an srun that ends as told, and counts requests for another attempt."""

    def __init__(self, folder: Path, restarts: int = 0):
        self.folder, self.restarts = folder, restarts
        self.run = folder / "runs" / "a b"
        words = ["launch", "--slurm", "--max-restarts", "4", "--out", str(folder / "job.sh")]
        assert cli.main([*words, "--", "train", "--out", str(self.run)]) == Exit.DONE

    def attempt(self, status: int, step: int | None = None) -> bool:
        """An attempt that reaches this step; whether another one was asked for."""
        made = f"mkdir -p '{self.run}/checkpoints/{step}'; " if step is not None else ""
        requeued = self.folder / "requeued"
        requeued.unlink(missing_ok=True)
        for name, body in (("srun", f"{made}exit {status}"), ("scontrol", f"echo $* > {requeued}")):
            (self.folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (self.folder / name).chmod(0o755)
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "42",
            "SLURM_RESTART_COUNT": str(self.restarts),
        }
        job = subprocess.run(["bash", str(self.folder / "job.sh")], env=environment)
        assert job.returncode == status
        assert not requeued.exists() or requeued.read_text() == "requeue 42\n"
        return requeued.exists()


REQUEUED = [(5, 0, True), (130, 3, True), (137, 0, True), (99, 0, True), (5, 4, False), (2, 0, False), (0, 0, False)]


@pytest.mark.parametrize(("status", "restarts", "requeued"), REQUEUED)
def test_the_script_puts_the_job_in_the_queue_again_where_that_helps(tmp_path, status, restarts, requeued):
    assert Slurm(tmp_path, restarts).attempt(status) == requeued


def test_the_script_gives_up_without_progress(tmp_path):
    job = Slurm(tmp_path)
    assert [job.attempt(70), job.attempt(5, step=9), job.attempt(70), job.attempt(5)] == [True] * 4
    assert [job.attempt(130, step=10), job.attempt(70), job.attempt(70), job.attempt(70)] == [True, True, True, False]
    assert [job.attempt(70), job.attempt(70), job.attempt(70)] == [True, True, False]  # submitted again by hand


# CustomResourceDefinition jobsets.jobset.x-k8s.io, version v1alpha2: kubernetes-sigs/jobset, commit 0a2be5c551fc,
# config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml.  Only what is written, with its type.
NAME = {"name": str}
FIELDS = {
    "apiVersion": str,
    "kind": str,
    "metadata": NAME,
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "failurePolicy": {"maxRestarts": int, "rules": [NAME | {"action": str, "onJobFailureReasons": [str]}]},
        "replicatedJobs": [NAME | {"replicas": int, "template": {"spec": {
            "parallelism": int,
            "completions": int,
            "completionMode": str,
            "backoffLimit": int,
            "podFailurePolicy": {"rules": [{"action": str, "onExitCodes": {"operator": str, "values": [int]}}]},
            "template": {"spec": {
                "restartPolicy": str,
                "terminationGracePeriodSeconds": int,
                "containers": [NAME | {
                    "image": str,
                    "command": [str],
                    "env": [NAME | {"value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
                    "resources": {"limits": {"nvidia.com/gpu": int, "cpu": int}},
                    "volumeMounts": [NAME | {"mountPath": str}],
                }],
                "volumes": [NAME | {"persistentVolumeClaim": {"claimName": str}}],
            }},
        }}}],
    },
}  # fmt: skip


def fits(value, schema) -> bool:
    if isinstance(schema, dict):
        return value.keys() <= schema.keys() and all(fits(value[name], schema[name]) for name in value)
    return all(fits(item, schema[0]) for item in value) if isinstance(schema, list) else type(value) is schema


def pod_of(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_jobset(tmp_path):
    """The published schema, and what JobSet's and Kubernetes' own validation wants beyond it."""
    made = yaml.safe_load(write(
        tmp_path, "--kubernetes --nodes 4 --cpus 6 --image me/jhpt:1 --claim shared:/shared",
        "train GPT2_1.5b.yaml --out /shared/run --data.path $(x)$y",
    ))  # fmt: skip
    assert fits(made, FIELDS)
    assert made["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and made["kind"] == "JobSet"
    assert made["metadata"]["name"] == made["spec"]["network"]["subdomain"] == "gpt2-1-5b"
    (rule,) = made["spec"]["failurePolicy"]["rules"]
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] == 4
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 2, 3, 6, 7]  # in order, without 0
    assert pod_of(made)["restartPolicy"] == "Never"  # as a podFailurePolicy demands
    (container,) = pod_of(made)["containers"]
    place = "--coordinator gpt2-1-5b-workers-0-0.gpt2-1-5b:29400 --process-id $(JOB_COMPLETION_INDEX) --num-processes 4"
    train = "jhpt train GPT2_1.5b.yaml --out /shared/run --data.path $$(x)$$y"
    assert " ".join(container["command"]) == f"{train} {place}"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": 6}
    assert container["volumeMounts"][0]["mountPath"] == "/shared"


def test_one_pod_needs_no_coordinator(tmp_path):
    made = yaml.safe_load(write(tmp_path, "--kubernetes --claim shared:/shared"))
    assert pod_of(made)["containers"][0]["command"] == ["jhpt", "train", "my.yaml", "--out", "/shared/run"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("launch --processes 2", "behind --"),
        ("launch --processes 2 -- plan gpt-tiny", "comes train"),
        ("launch -- train", "--processes N"),
        ("launch --processes 0 -- train", "--processes N"),
        ("launch --processes 2 --min-processes 3 -- train", "--min-processes 3"),
        ("launch --processes 2 --min-processes 0 -- train", "--min-processes 0"),
        ("launch --processes 2 --max-restarts -1 -- train", "cannot be negative"),
        ("launch --processes 2 --pause nan -- train", "--pause nan"),
        ("launch --processes 2 --out x -- train", "--out before --"),
        ("launch --processes 2 --nodes 2 --gpus 8 -- train", "--nodes, --gpus are only for --slurm"),
        ("launch --processes 2 -- train --process-id 1", "sets --process-id by itself"),
        ("launch --slurm -- train --out a", "--out FILE"),
        ("launch --slurm --out job.sh -- train", "run's --out"),
        ("launch --slurm --kubernetes --out job.sh -- train --out a", "one of"),
        ("launch --slurm --processes 2 --out job.sh -- train --out a", "--nodes and --gpus"),
        ("launch --slurm --pause 2 --out job.sh -- train --out a", "--pause is only for this machine"),
        ("launch --slurm --image a --out job.sh -- train --out a", "--image is only for --kubernetes"),
        ("launch --slurm --nodes 0 --out job.sh -- train --out a", "--nodes 0 is below 1"),
        ("launch --slurm --gpus -1 --out job.sh -- train --out a", "--gpus -1 is below 0"),
        ("launch --slurm --time soon --out job.sh -- train --out a", "no time limit of SLURM"),
        ("launch --slurm --out job.sh -- train --out a --resume-step 6", "rename the later folders"),
        ("launch --slurm --name a/b --out job.sh -- train --out a", "--name 'a/b' is not made of"),
        ("launch --kubernetes --time 1 --out job.yaml -- train --out /a/b", "--time is only for --slurm"),
        ("launch --kubernetes --out job.yaml -- train --out /a/b", "--claim NAME:/PATH"),
        ("launch --kubernetes --claim c:/a:b --out job.yaml -- train --out /a:b/c", "--claim NAME:/PATH"),
        ("launch --kubernetes --claim c:/x --out job.yaml -- train --out /a/b", "is not in /x"),
        ("launch --kubernetes --claim c:/a --name A --out job.yaml -- train --out /a/b", "small letters"),
        ("launch --kubernetes --claim c:/a --name " + "a" * 50 + " --out j -- train --out /a/b", "shorter --name"),
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
