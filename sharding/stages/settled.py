"""Programs of stages one at a time, where the devices of a process share its threads."""

from functools import cache
from typing import TypeVar

import jax

T = TypeVar("T")


def settled(result: T) -> T:
    """What a program returned; on several CPU devices of one process, once it is computed.

    XLA's CPU client runs the programs of all devices on one pool of threads, and a device that waits for others in a
    collective keeps its thread.  Of several programs under way some can hold all threads while they wait for devices
    whose turn never comes, until XLA ends the process (seen with jaxlib 0.10.2, three devices on two cores).
    """
    if _one_pool():
        jax.block_until_ready(result)
    return result


@cache
def _one_pool() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1
