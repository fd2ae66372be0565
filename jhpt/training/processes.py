"""One or many processes: their launcher, how they connect, and how they agree."""

import atexit
import ipaddress
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import jax
import numpy as np
from jax._src import clusters
from jax._src.distributed import global_state

from jhpt.core.errors import Exit, InputError, JhptError
from jhpt.core.peers_config import PeersConfig
from jhpt.core.ports import held_port
from jhpt.sharding.gather import gathered
from jhpt.training.watch import watch
from jhpt.training.wire import Place

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
    if _count(environment, "SLURM_STEP_NUM_TASKS") > 1:
        return "SLURM"
    if _count(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def _count(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment.get(name, "1"))
    except ValueError:
        raise InputError(f"{name}={environment[name]!r} in the environment is no number; unset it") from None


NEVER = 10**6
"""Seconds after which jax would end processes whose peers are silent: `training.watch` does it, much earlier."""


def join(processes: Processes, peers: PeersConfig | None = None) -> None:
    """Connects this process to the others; does nothing for a single process or if already connected.

    Must run before any device is touched.  Under SLURM and Open MPI each process takes the GPU of its local rank: start
    one process per GPU.

    Raises:
      InputError: some of the three settings are missing, or process 0 cannot listen at its address.
      PeerLost: not all processes came in time.
    """
    if jax.distributed.is_initialized():
        return
    found = _found(processes)
    if found is None:
        return
    coordinator, process, count, devices = found
    peers = peers or PeersConfig()
    with held_port() as jax_port:  # until jax's own server listens: where it cannot, jaxlib crashes
        place = _place(coordinator, process, count, peers, jax_port if process == 0 else 0)
        _connect(place, devices, peers)
    atexit.register(_leave)


def _connect(place: Place, devices: list[int] | None, peers: PeersConfig) -> None:
    try:
        port = watch.join(place, peers)
    except OSError as error:
        raise InputError(
            f"process 0 cannot listen at {place}: {error.strerror or error}; give --coordinator an address of its own "
            "host and a free port"
        ) from None
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    address = f"127.0.0.1:{port}"
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            coordinator_bind_address=address,
            num_processes=place.count,
            process_id=place.process,
            local_device_ids=devices,
            cluster_detection_method="deactivate",  # a shell inside a SLURM job would give each process the first GPU
            initialization_timeout=round(peers.wait_seconds) + 1,
            heartbeat_timeout_seconds=NEVER,
            shutdown_timeout_seconds=round(peers.heartbeat_seconds) + 1,
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(f"joining the other processes failed: {str(error).partition(chr(10))[0]}") from None


def _found(processes: Processes) -> tuple[str, int, int, list[int] | None] | None:
    """(address of the coordinator, number of this process, of all, its GPUs), by hand or from the launcher.

    GPUs: None: all that it sees.  None for all four: only one process.
    """
    settings = (processes.coordinator, processes.process_id, processes.num_processes)
    started_by = launcher(os.environ)
    if any(value is not None for value in settings):
        coordinator, process, count = settings
        if coordinator is None or process is None or count is None:
            raise InputError("give --coordinator HOST:PORT, --process-id and --num-processes together, or none of them")
        if not 0 <= process < count:
            raise InputError(f"--process-id {process} is not below --num-processes {count}")
        return coordinator, process, count, None
    if started_by is None:
        return None
    unread = f"jax could not read {started_by}'s settings"
    if started_by == "Kubernetes":
        unread = "jax reads the job through the package kubernetes (pip install 'jax[k8s]')"
    try:
        detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
        coordinator, count, process, devices = detect(None, None, None, None, None, 300)
    except (RuntimeError, ValueError, ImportError, OSError) as error:
        reason = str(error).partition(chr(10))[0]
        raise InputError(f"joining the other processes failed: {reason}; {unread}; else {BY_HAND}") from None
    if coordinator is None or count is None or process is None:
        raise InputError(f"joining the other processes failed: {unread}; else {BY_HAND}")
    return coordinator, process, count, None if devices is None else list(devices)


def _place(coordinator: str, process: int, count: int, peers: PeersConfig, jax_port: int) -> Place:
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator {coordinator} is not HOST:PORT, such as node0:29400")
    try:
        host.encode("idna")
    except UnicodeError:
        raise InputError(f"--coordinator {coordinator}: {host!r} cannot be the name of a host") from None
    return Place(
        host=host,
        port=int(port),
        listen=_own_address(host) if process == 0 else None,
        process=process,
        count=count,
        jax_port=jax_port,
        wait=peers.wait_seconds,
        heartbeat=peers.heartbeat_seconds,
    )


def _own_address(host: str) -> str | None:
    """What process 0 binds: the address that it was given.

    JAX_COORDINATOR_BIND_ADDRESS, which jax reads too, is for hosts behind another address.  A host's own name may mean
    its loopback interface on this host alone, as Debian's does; None then stands for all its addresses.
    """
    if given := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return given.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        with suppress(OSError):
            found = {info[4][0] for info in socket.getaddrinfo(host, None)}
            if host != "localhost" and all(ipaddress.ip_address(str(at).split("%")[0]).is_loopback for at in found):
                return None
    return host


def _leave() -> None:
    """Ends jax's part once all processes have come to their end."""
    watch.leave()
    if global_state.client is not None:
        jax.distributed.shutdown()
        watch.linger()


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
        if jax.process_count() > 1:  # the others may be far from here
            watch.refuse(str(error), error.status if isinstance(error, JhptError) else Exit.CRASH)
    if jax.process_count() > 1:
        failed = np.flatnonzero(gathered(np.bool_(failure is not None)))
        if failure is None and failed.size:
            raise watch.refusal()
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


def texts_of_all(text: str) -> list[str]:
    """The text of every process, on all of them."""
    if jax.process_count() == 1:
        return [text]
    code = np.frombuffer(text.encode(), np.uint8)
    sizes = gathered(np.int64(len(code)))
    rows = gathered(np.pad(code, (0, int(sizes.max()) - len(code))))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def text_from_main(text: str) -> str:
    """The text that the main process holds; that of the others is ignored."""
    if jax.process_count() == 1:
        return text
    code = np.frombuffer(text.encode(), np.uint8)
    length = from_main(len(code))
    sent = code if is_main() else np.zeros(length, np.uint8)
    return bytes(gathered(sent)[0]).decode()
