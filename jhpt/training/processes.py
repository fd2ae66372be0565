"""One process or many: who starts them, how they find each other, and how they stay of one mind."""

import json
import os
import platform
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jhpt.core.errors import InputError
from jhpt.sharding.gather import gathered

BY_HAND = "start every process with --coordinator HOST:PORT --process-id I --num-processes N"


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How this process joins the others, given by hand; all None: look at the launcher's environment."""

    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None


def launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, or None.

    Only variables that are set for the *tasks* of a parallel job count: a shell inside an allocation is no task.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def join(processes: Processes) -> None:
    """Connects this process to the others; does nothing for a single process or when already connected.

    Must run before any device is touched.  Under a launcher each process takes the devices that the launcher shows it,
    under SLURM the one of its local rank: start one process per GPU.

    Raises:
      InputError: some of the three settings are missing, or the others cannot be reached.
    """
    if jax.distributed.is_initialized():
        return
    given = (processes.coordinator, processes.process_id, processes.num_processes)
    found = launcher(os.environ)
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise InputError("give --coordinator HOST:PORT, --process-id and --num-processes together, or none of them")
        if not 0 <= int(processes.process_id or 0) < int(processes.num_processes or 0):
            raise InputError(
                f"--process-id {processes.process_id} is not below --num-processes {processes.num_processes}"
            )
        _initialize(
            f"check that process 0 listens at {given[0]} and that all {given[2]} processes were started",
            coordinator_address=given[0],
            process_id=given[1],
            num_processes=given[2],
        )
    elif found == "Kubernetes":
        _initialize(f"jax reads the job through the package kubernetes (pip install 'jax[k8s]'); else {BY_HAND}")
    elif found:
        _initialize(f"jax could not read {found}'s settings; {BY_HAND}")


def _initialize(remedy: str, **arguments: Any) -> None:
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError, ImportError) as error:
        raise InputError(f"joining the other processes failed: {str(error).partition(chr(10))[0]}; {remedy}") from None


def is_main() -> bool:
    """Whether this process prints and writes the run's files."""
    return jax.process_index() == 0


@contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """What fails inside on one process is raised on all, instead of leaving the others waiting for it.

    All processes must enter and leave; the body must not communicate.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if jax.process_count() > 1:
        failed = np.flatnonzero(gathered(np.bool_(failure is not None)))
        if failure is None and failed.size:
            raise InputError(f"process {failed[0]} could not go on; its own message says why")
    if failure is not None:
        raise failure


def same_everywhere(text: str) -> bool:
    """Whether all processes hold the same text of at most 64 characters."""
    if jax.process_count() == 1:
        return True
    code = np.frombuffer(text.encode()[:64].ljust(64), np.uint8)
    return bool(np.all(gathered(code) == code))


def check_agreed(told: Mapping[str, Any]) -> None:
    """Refuses to go on where a process was told something else than the main one.

    Args:
      told: by name, what JSON can write.

    Raises:
      InputError: names what differs, with both values, on the process that differs.
    """
    main = json.loads(text_from_main(json.dumps(told)))
    with raise_on_all_processes():
        here = json.loads(json.dumps(told))
        names = [name for name in {**main, **here} if main.get(name) != here.get(name)]
        if names:
            lines = [f"  {name}: {here.get(name)!r} here, {main.get(name)!r} on process 0" for name in names]
            raise InputError(
                f"process {jax.process_index()} was told something else than process 0:\n"
                + "\n".join(lines)
                + "\nstart all processes with the same configuration and plan"
            )


def from_main(number: int) -> int:
    """The number that the main process holds."""
    return number if jax.process_count() == 1 else int(gathered(np.int64(number))[0])


def text_from_main(text: str) -> str:
    """The text that the main process holds; the others' is ignored."""
    if jax.process_count() == 1:
        return text
    code = np.frombuffer(text.encode(), np.uint8)
    length = from_main(len(code))
    own = code if is_main() else np.zeros(length, np.uint8)
    return bytes(gathered(own)[0]).decode()


def processes_here() -> int:
    """How many processes run on this host; a call of all."""
    if jax.process_count() == 1:
        return 1
    own = zlib.crc32(platform.node().encode())
    return int(np.sum(gathered(np.uint32(own)) == own))
