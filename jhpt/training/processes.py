"""One or many processes: their launcher, how they connect, and how they agree."""

import json
import os
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
    """How this process joins the others, set by hand; if all are None, the launcher's environment decides."""

    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None


def launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, or None.

    Only variables that are set for the *tasks* of a parallel job count; a shell inside an allocation is no task.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def join(processes: Processes) -> None:
    """Connects this process to the others; does nothing for a single process or if already connected.

    Must run before any device is touched.  Under a launcher each process takes the devices that the launcher assigns
    to it, under SLURM the one of its local rank: start one process per GPU.

    Raises:
      InputError: some of the three settings are missing, or the others cannot be reached.
    """
    if jax.distributed.is_initialized():
        return
    settings = (processes.coordinator, processes.process_id, processes.num_processes)
    started_by = launcher(os.environ)
    if any(value is not None for value in settings):
        if any(value is None for value in settings):
            raise InputError("give --coordinator HOST:PORT, --process-id and --num-processes together, or none of them")
        if not 0 <= int(processes.process_id or 0) < int(processes.num_processes or 0):
            raise InputError(
                f"--process-id {processes.process_id} is not below --num-processes {processes.num_processes}"
            )
        _initialize(
            f"check that process 0 listens at {settings[0]} and that all {settings[2]} processes were started",
            coordinator_address=settings[0],
            process_id=settings[1],
            num_processes=settings[2],
        )
    elif started_by == "Kubernetes":
        _initialize(f"jax reads the job through the package kubernetes (pip install 'jax[k8s]'); else {BY_HAND}")
    elif started_by:
        _initialize(f"jax could not read {started_by}'s settings; {BY_HAND}")


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
    """If the body fails on one process, raises on all, so that the others do not wait for it forever.

    All processes must enter and leave.  The body must not communicate.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if jax.process_count() > 1:
        failed = np.flatnonzero(gathered(np.bool_(failure is not None)))
        if failure is None and failed.size:
            raise InputError(f"process {failed[0]} failed; see its own error message")
    if failure is not None:
        raise failure


def same_everywhere(text: str) -> bool:
    """Whether the first 64 bytes of the text are the same on all processes."""
    if jax.process_count() == 1:
        return True
    code = np.frombuffer(text.encode()[:64].ljust(64), np.uint8)
    return bool(np.all(gathered(code) == code))


def check_agreed(settings: Mapping[str, object]) -> None:
    """Refuses settings that differ between a process and the main one.

    Args:
      settings: by name, values that JSON can hold.

    Raises:
      InputError: on the process that differs; the message names the settings with both values.
    """
    main = json.loads(text_from_main(json.dumps(settings)))
    with raise_on_all_processes():
        here = json.loads(json.dumps(settings))
        names = [name for name in {**main, **here} if main.get(name) != here.get(name)]
        if names:
            lines = [f"  {name}: {here.get(name)!r} here, {main.get(name)!r} on process 0" for name in names]
            raise InputError(
                f"process {jax.process_index()} has other settings than process 0:\n"
                + "\n".join(lines)
                + "\nstart all processes with the same configuration and plan"
            )


def from_main(number: int) -> int:
    """The number that the main process holds."""
    return number if jax.process_count() == 1 else int(gathered(np.int64(number))[0])


def text_from_main(text: str) -> str:
    """The text that the main process holds; that of the others is ignored."""
    if jax.process_count() == 1:
        return text
    code = np.frombuffer(text.encode(), np.uint8)
    length = from_main(len(code))
    sent = code if is_main() else np.zeros(length, np.uint8)
    return bytes(gathered(sent)[0]).decode()
