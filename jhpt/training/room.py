"""How much memory a run may use: of its devices, and of this host.

The devices of a CPU are threads of one process: all of them, and all processes of a machine, share its memory.  So a
program needs its bytes once for each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jhpt.core.amounts import enough_gib, gib
from jhpt.core.errors import InputError
from jhpt.core.host import available_memory
from jhpt.core.plan import Plan
from jhpt.measure.device import DeviceInfo
from jhpt.measure.hosts import processes_here
from jhpt.sharding.gather import gathered

HOUSEKEEPING = 200 * 2**20
"""Bytes of host memory that a process takes beside its arrays once it has compiled: batches, checkpoints under way,
metrics.  Measured: up to 95 MiB (docs/guides/faults.md)."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that a process may use.

    device: bytes of each device; None: not known.  host: bytes of this host for this process, the least of all
    processes.  devices: of this process that work.  one_memory: whether their memory is that of this host (CPU).
    """

    device: int | None
    host: int
    devices: int
    one_memory: bool

    def total(self, device: float, host: float) -> float:
        """Bytes of this host that a process takes with `device` bytes on each device and `host` beside."""
        return host + (self.devices * device if self.one_memory else 0)

    def fits(self, device: float, host: float) -> bool:
        """Whether so many bytes on each device, and on the host beside them, are there."""
        return (self.device is None or device <= self.device) and self.total(device, host) <= self.host

    def shortage(self, purpose: str, device: Mapping[str, float], host: Mapping[str, float]) -> str:
        """What is needed by cause, and what is there."""
        need, beside = sum(device.values()), sum(host.values())
        causes = f"{purpose} needs " + _causes(device)
        if self.device is not None and need > self.device:
            return f"{causes} on each device, which has {gib(self.device)}"
        if not self.one_memory:
            return f"{purpose} needs {_causes(host)} of this host, which has {gib(self.host)} available"
        each = f" on each of {self.devices} devices" if self.devices > 1 else ""
        also = f" and {_causes(host)}" if beside else ""
        total = enough_gib(self.total(need, beside))
        return f"{causes}{each}{also}: {total} in all of this host's memory, of which {gib(self.host)} is available"


def _causes(sizes: Mapping[str, float]) -> str:
    return " + ".join(f"{cause} {gib(size)}" for cause, size in sizes.items() if size)


class DoesNotFit(InputError):
    """A program needs more memory than there is.  device, host: bytes by cause; room: what there is."""

    def __init__(self, purpose: str, room: Room, device: Mapping[str, float], host: Mapping[str, float]):
        super().__init__(room.shortage(purpose, device, host))
        self.purpose, self.room, self.device, self.host = purpose, room, device, host


def room_of(device: DeviceInfo, devices: int) -> Room:
    """What this process may use on so many such devices, the same on all processes, which must all call this."""
    here = max(available_memory() // processes_here() - HOUSEKEEPING, 0)
    least = here if jax.process_count() == 1 else int(gathered(np.int64(here)).min())
    return Room(device=device.memory, host=least, devices=devices, one_memory=device.platform == "cpu")


def devices_here(plan: Plan) -> int:
    """The devices of this process that work under the plan."""
    return plan.devices if jax.process_count() == 1 else jax.local_device_count()
