"""Process-wide settings."""

import platform
import subprocess
import sys

import jax
import pytest

from jhpt.training import runtime
from jhpt.training.runtime import compile_collectives_anew, prepare_collectives


@pytest.fixture
def cached():
    """The cache of compiled programs, switched on."""
    jax.config.update("jax_enable_compilation_cache", True)
    yield lambda: jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)


def test_programs_of_several_cpus_are_compiled_anew(cached):
    compile_collectives_anew()
    assert not cached()


@pytest.mark.parametrize("changed", [{"default_backend": "gpu"}, {"device_count": 1}])
def test_others_may_come_from_the_cache(cached, monkeypatch, changed):
    for name, value in changed.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)
    compile_collectives_anew()
    assert cached()


@pytest.mark.skipif(sys.platform != "linux", reason="policies of threads are Linux's")
def test_helpers_wait_for_their_turn_and_the_main_thread_does_not():
    code = """
import os, threading
from jhpt.training.runtime import helpers_do_not_interrupt

end = threading.Event()
helper = threading.Thread(target=end.wait)
helper.start()
helpers_do_not_interrupt()
print(os.sched_getscheduler(helper.native_id) == os.SCHED_BATCH, os.sched_getscheduler(os.getpid()) == os.SCHED_OTHER)
end.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(("backend", "processes", "wait"), [("cpu", 2, True), ("cpu", 1, False), ("gpu", 2, False)])
def test_helpers_wait_where_several_processes_compute_on_cpus(monkeypatch, backend, processes, wait):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(runtime, "helpers_do_not_interrupt", lambda: asked.append(True))
    prepare_collectives()
    assert asked == [True] * wait


HEAP = """
from jhpt.training.runtime import keep_heap, return_freed_memory

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

def left():
    before = resident()
    block = bytearray(100 << 20)
    del block
    return resident() - before

kept = keep_heap(), left() > 90
before = resident()
print(*kept, return_freed_memory(), before - resident() > 90, left() < 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap can be told to keep what is freed")
def test_freed_memory_is_kept_until_it_is_needed():
    shown = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.split() == ["True"] * 5, shown.stdout
