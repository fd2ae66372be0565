"""Process-wide settings: where compiled programs are cached, and how the host allocates memory."""

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jhpt.core.cluster import HOST_SHARE
from jhpt.core.config import MemoryConfig
from jhpt.core.folders import cache_folder
from jhpt.core.host import host_memory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
"""Parameters of glibc's mallopt(3)."""


GPU_MEMORY_SHARE = "0.92"
"""Share of a GPU's memory that is reserved at the start; jax's default of 0.75 leaves 35 GB of an H200 unused."""


def configure_runtime() -> None:
    """Sets up allocators and caches.  Call it before any device is touched, because jax then starts its threads."""
    if accelerator_present():
        if not {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & os.environ.keys():
            os.environ["XLA_CLIENT_MEM_FRACTION"] = GPU_MEMORY_SHARE
    else:
        keep_heap()
    keep_compiled_programs()


def allow_pinned_memory(memory: MemoryConfig) -> None:
    """Lets the CUDA client pin as much host memory as offload may use; its default limit is 64 GiB.

    XLA reads the variable as GiB, whatever its name says.  Call it before the client starts.
    """
    if accelerator_present():
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(int(host_budget(memory) / 2**30), 1)))


def host_budget(memory: MemoryConfig) -> float:
    """Bytes of this host's memory that offloaded blocks or activations may use, never more than it has."""
    if memory.host_budget_bytes != "auto":
        return min(memory.host_budget_bytes, host_memory())
    return HOST_SHARE * host_memory()


def accelerator_present() -> bool:
    """Whether this machine has a GPU: by the driver's device files, because asking jax would start it."""
    return os.environ.get("JAX_PLATFORMS") != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))


def keep_compiled_programs() -> None:
    """Caches compiled programs in the user's cache folder, unless jax is already configured."""
    if jax.config.values["jax_compilation_cache_dir"] is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))


def prepare_collectives() -> None:
    """What collectives between CPUs need.  Call it once the processes have joined, and before anything is compiled."""
    compile_collectives_anew()
    if jax.default_backend() == "cpu" and jax.process_count() > 1:
        helpers_do_not_interrupt()


def compile_collectives_anew() -> None:
    """Ignores cached programs where the devices are several CPUs.

    In a program that XLA's CPU client loads from the cache, devices may wait for each other in different collectives
    until XLA ends the process; in a program that it has compiled they did not (jaxlib 0.10.2; measured in
    docs/reports/cpu-performance.md).
    """
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # whether it is used is decided once


def helpers_do_not_interrupt() -> None:
    """Lets the other threads of this process wait for their turn (`SCHED_BATCH`) instead of interrupting the main one.

    A thread of Gloo wakes up when bytes come.  It needs a lock that the thread that sends holds, and asks for it again
    and again.  On a shared core it interrupts the very thread that it waits for, until its time slice is over: a sum of
    16 KiB over two hosts of half a core took 8.2 ms, and takes 0.4 ms where Gloo waits for its turn (measured in
    docs/reports/cpu-performance.md).
    """
    threads = Path("/proc/self/task")
    if not threads.is_dir():  # not Linux
        return
    for thread in (int(each.name) for each in threads.iterdir()):
        if thread != os.getpid():
            with suppress(OSError):  # it has ended, or the system does not allow it, which only costs time
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def keep_heap() -> bool:
    """Makes glibc reuse freed memory instead of returning it to the kernel; returns whether it could.

    XLA's CPU client allocates a program's temporary buffers at every execution.  glibc maps anything above 32 MiB anew
    each time, and every page faults again: a third of a gpt-tiny step (docs/reports/cpu-performance.md).  One arena,
    because the others cannot hold large blocks without mapping them.  The price is a larger resident set.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = {M_ARENA_MAX: 1, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1}
    return all(libc.mallopt(name, value) for name, value in settings.items())


def return_freed_memory() -> bool:
    """Undoes `keep_heap` for large blocks, which are then returned to the kernel; returns whether it could.

    Programs take longer and need no more than the compiler says: for those that nearly fill this host.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = {M_MMAP_THRESHOLD: 32 << 20, M_MMAP_MAX: 1 << 16, M_TRIM_THRESHOLD: 1 << 28}
    return all([libc.mallopt(name, value) for name, value in settings.items()]) and bool(libc.malloc_trim(0) >= 0)
