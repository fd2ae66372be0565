"""What `jhpt launch` writes for schedulers: a batch script for SLURM, a JobSet for Kubernetes.

JobSet: jobset.x-k8s.io/v1alpha2 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/).  Under SLURM the
processes read the job from the environment that srun sets (`training.processes.launcher`); the JobSet tells them.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from jhpt.core.errors import Exit
from jhpt.launch import FINAL, FRUITLESS, LOGS
from jhpt.training.step_folders import FOLDER

ENDS = sorted(int(status) for status in FINAL - {Exit.INTERRUPTED})
"""Statuses that end a job.  A scheduler interrupts a run that is to go on later."""

SLURM_FAILED = 99
"""Status of srun when SLURM itself fails, which else is 1, as of a run that has diverged."""

WAIT = 60
"""Seconds that the other tasks have, once one has ended.  They end by themselves, with the same status.  srun would end
them at once with --kill-on-bad-exit, and itself with status 143 where the run was refused with 2."""

PORT = 29400
"""Of process 0, whose pod has an address of its own."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster.

    arguments: those of `jhpt train`, `out` among them.  gpus: of each node; 0: a process on each node, on its CPUs.
    cpus: cores of each process, None: as the scheduler has it.  grace: seconds to save before the job is ended.
    """

    name: str
    arguments: tuple[str, ...]
    out: str
    nodes: int
    gpus: int
    cpus: int | None
    max_restarts: int
    grace: int = 120


def slurm_script(job: Job, time: str) -> str:
    """A script for sbatch: a task for each GPU; saved before the time limit, queued again where that helps.

    time: the limit as SLURM writes it, such as 24:00:00.
    """
    final = "|".join(str(status) for status in [Exit.DONE.value, *ENDS])
    cpus = [] if job.cpus is None else [f"--cpus-per-task={job.cpus}"]
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={max(job.gpus, 1)}",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *cpus,
        f"--time={time}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.name}-%j.log",
        f"--signal=TERM@{job.grace}",
    ]
    directives = "\n".join(f"#SBATCH {line}" for line in lines)
    step = shlex.join(["srun", "--kill-on-bad-exit=0", f"--wait={WAIT}", *cpus, "jhpt", "train", *job.arguments])
    return f"""#!/bin/bash
{directives}

# A run saves and leaves with status 130 when it gets SIGTERM; the job is then put in the queue again, and goes on from
# the last good step.  Statuses that another attempt would end with, too, end the job; so do {FRUITLESS} attempts in a
# row that bring no new checkpoint.
export SLURM_EXIT_ERROR={SLURM_FAILED}
run={shlex.quote(job.out)}
count="$run/{LOGS}/fruitless"
newest() {{ ls "$run/{FOLDER}" 2>/dev/null | grep -xE '[0-9]+' | sort -n | tail -n 1; }}

before=$(newest)
{step}
status=$?
case $status in
    {final}) rm -f "$count"; exit $status ;;
esac
fruitless=0
if [ "$(newest)" = "$before" ]; then
    fruitless=$(( $(cat "$count" 2>/dev/null || echo 0) + 1 ))
fi
mkdir -p "$run/{LOGS}" && echo $fruitless > "$count"
if [ $fruitless -ge {FRUITLESS} ]; then
    echo "status $status; $fruitless attempts in a row brought no new checkpoint" >&2
    rm -f "$count"
elif [ "${{SLURM_RESTART_COUNT:-0}}" -ge {job.max_restarts} ]; then
    echo "status $status; all of --max-restarts {job.max_restarts} are used up" >&2
else
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A PersistentVolumeClaim, and where the pods mount it."""

    name: str
    path: str


def jobset(job: Job, image: str, claim: Claim) -> str:
    """A JobSet, as YAML: a pod for each node, one process in it for all its GPUs."""
    limits = ({"nvidia.com/gpu": job.gpus} if job.gpus else {}) | ({} if job.cpus is None else {"cpu": job.cpus})
    container: dict[str, Any] = {
        "name": "train",
        "image": image,
        "command": ["jhpt", "train", *(word.replace("$", "$$") for word in job.arguments), *_place(job)],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            # Its own name may not be known yet when process 0 begins to listen.
            {"name": "JAX_COORDINATOR_BIND_ADDRESS", "value": f"$(POD_IP):{PORT}"},
        ],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "run", "mountPath": claim.path}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "containers": [container],
        "volumes": [{"name": "run", "persistentVolumeClaim": {"claimName": claim.name}}],
    }
    return yaml.safe_dump(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": job.name},
                "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [_no_restart()]},
                "replicatedJobs": [{"name": "workers", "replicas": 1, "template": _template(job.nodes, pod)}],
            },
        },
        sort_keys=False,
    )


def _place(job: Job) -> Sequence[str]:
    """How a pod joins the others.  Kubernetes puts the pod's index in the place of $(JOB_COMPLETION_INDEX)."""
    if job.nodes == 1:
        return []
    first = f"{job.name}-workers-0-0.{job.name}:{PORT}"
    return [
        "--coordinator", first, "--process-id", "$(JOB_COMPLETION_INDEX)", "--num-processes", str(job.nodes)
    ]  # fmt: skip


def longest_pod_name(job: Job) -> str:
    """The name that Kubernetes gives the last pod, of which five characters are random."""
    return f"{job.name}-workers-0-{job.nodes - 1}-00000"


def _no_restart() -> Mapping[str, Any]:
    """A pod that ends with a final status makes its job fail for this reason; see `_template`."""
    return {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def _template(nodes: int, pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "spec": {
            "parallelism": nodes,
            "completions": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": ENDS}}],
            },
            "template": {"spec": pod},
        }
    }
