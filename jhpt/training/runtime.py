"""Process-wide settings: where compiled programs are kept, and how the host allocates memory."""

import ctypes
import os
import platform

import jax

from jhpt.training.data.cache import default_cache_dir

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""


def configure_runtime() -> None:
    """Sets up caches and, on CPU, the allocator; call before the first program is compiled."""
    keep_compiled_programs()
    if jax.default_backend() == "cpu":
        keep_heap()


def keep_compiled_programs() -> None:
    """Keeps compiled programs in the user's cache folder, unless jax is already told where."""
    if jax.config.values["jax_compilation_cache_dir"] is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "programs"))


def keep_heap() -> bool:
    """Makes glibc reuse freed memory instead of returning it to the kernel; returns whether it could.

    XLA's CPU client allocates a program's temporary buffers at every execution.  glibc maps anything above 32 MiB anew
    each time and every page faults again: a third of a gpt-tiny step (docs/cpu-performance.md).  The price is a larger
    resident set.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
