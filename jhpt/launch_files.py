"""What `jhpt launch` writes for schedulers: a batch script for SLURM, a JobSet for Kubernetes.

JobSet: jobset.x-k8s.io/v1alpha2 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/).  jax reads the job from
the environment that the scheduler sets (`training.processes.launcher`).
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from jhpt.core.errors import Exit
from jhpt.launch import FINAL


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster.  time: as SLURM writes it, such as 24:00:00.  grace: seconds to save before the limit."""

    name: str
    arguments: tuple[str, ...]
    nodes: int
    gpus: int
    time: str
    image: str
    max_restarts: int
    grace: int = 120


def slurm_script(job: Job) -> str:
    """A script for sbatch: a task for each GPU; saved before the time limit, queued again where that helps."""
    final = "|".join(str(int(status)) for status in sorted({Exit.DONE, *FINAL} - {Exit.INTERRUPTED}))
    train = shlex.join(["jhpt", "train", *job.arguments])
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node={job.gpus}
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --time={job.time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={job.name}-%j.log
#SBATCH --signal=TERM@{job.grace}

# A run saves and leaves with status 130 when it gets SIGTERM; the job is then put in the queue again, and goes on from
# the last good step.  Statuses that another attempt would end with, too, end the job.
srun --kill-on-bad-exit=1 {train}
status=$?
case $status in
    {final}) exit $status ;;
esac
if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


def jobset(job: Job) -> str:
    """A JobSet, as YAML: a pod for each node, one process in it for all its GPUs."""
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "command": ["jhpt", "train", *job.arguments],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus}},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "subdomain": job.name,
        "containers": [container],
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


def _no_restart() -> Mapping[str, Any]:
    """A pod that ends with a final status makes its job fail for this reason; see `_template`."""
    return {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def _template(nodes: int, pod: Mapping[str, Any]) -> Mapping[str, Any]:
    final: Sequence[int] = sorted(int(status) for status in FINAL - {Exit.INTERRUPTED})
    return {
        "spec": {
            "parallelism": nodes,
            "completions": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": final}}],
            },
            "template": {"spec": pod},
        }
    }
