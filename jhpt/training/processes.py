"""One process or many: who starts them, and how they find each other."""

import os
from dataclasses import dataclass
from typing import Any

import jax

from jhpt.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How this process joins the others, given by hand; all None: look at the launcher's environment."""

    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None


def launcher(environment: dict[str, str]) -> str | None:
    """The launcher that started this process as one of several, or None.

    Only variables that are set for the *tasks* of a parallel job count: a shell inside an allocation is no task.
    """
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in environment:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def join(processes: Processes) -> None:
    """Connects this process to the others; does nothing for a single process or when already connected.

    Must run before any device is touched.

    Raises:
      InputError: some of the three settings are missing, or the coordinator does not answer.
    """
    if jax.distributed.is_initialized():
        return
    given = (processes.coordinator, processes.process_id, processes.num_processes)
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise InputError("give --coordinator HOST:PORT, --process-id and --num-processes together, or none of them")
        if not 0 <= int(processes.process_id or 0) < int(processes.num_processes or 0):
            raise InputError(
                f"--process-id {processes.process_id} is not below --num-processes {processes.num_processes}"
            )
        _initialize(coordinator_address=given[0], process_id=given[1], num_processes=given[2])
    elif launcher(dict(os.environ)):
        _initialize()


def _initialize(**arguments: Any) -> None:
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"joining the other processes failed: {error}; check the coordinator's address and port"
        ) from None


def is_main() -> bool:
    """Whether this process prints and writes the run's files."""
    return jax.process_index() == 0
