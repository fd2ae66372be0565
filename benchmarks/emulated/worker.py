"""The program of every emulated host: `python -m MODULE RANK HOSTS COORDINATOR TASK`.

It joins the other hosts and measures with them; host 0 writes the rows to the task's folder.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from benchmarks.emulated.hosts import AnyTask, Hosts
from jhpt.training.runtime import helpers_do_not_interrupt, keep_heap


def take_part(kind: type[AnyTask], measure: Callable[[Hosts[AnyTask]], list[dict[str, Any]]]) -> NoReturn:
    """Measures a task of this kind and ends the process.

    It ends without Python's clean-up, because a process of jax.distributed that raises would wait for the others.
    """
    status = 1
    try:
        _joined(kind, measure, sys.argv[1:])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _joined(
    kind: type[AnyTask], measure: Callable[[Hosts[AnyTask]], list[dict[str, Any]]], arguments: Sequence[str]
) -> None:
    rank, count, coordinator, text = arguments
    keep_heap()
    # A program from the cache cannot be serialized for the other hosts: it would lack functions.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(coordinator, int(count), int(rank))
    task = kind.parse(text)
    hosts = Hosts(task)
    helpers_do_not_interrupt()
    rows = measure(hosts)
    hosts.wait()
    if hosts.rank == 0:
        task.leave(rows)
    jax.distributed.shutdown()  # at the same time: a host that finds host 0 gone would end with an error
