"""The device mesh of a plan.

    device = first + stage x (devices of a stage) + data rank x t + tensor rank

Stages own consecutive devices.  Inside a stage the tensor axis varies fastest, so a tensor-parallel group is made of
neighbouring devices: its all-reduces, which are the most frequent communication, stay inside a node if a node has at
least t devices.  If layers of one stage differ in their degree, the devices of the stage are factorised: for degrees 2
and 8 on 16 devices they are `data` 2 x `tensor8` 4 x `tensor2` 2, and a layer of degree 2 uses `data` and `tensor8` as
data axes.

With hybrid sharding the data axis is two: `replica` x `data`.  ZeRO shards over `data`, whose ranks are neighbours.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jhpt.core.axes import DATA, PIPE, REPLICA, TENSOR
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan
from jhpt.core.plan_check import check_program


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Mesh axes as the layers of one tensor degree use them, outermost first."""

    data: tuple[str, ...]
    tensor: tuple[str, ...]
    degree: int
    """Ranks of the tensor axes together."""

    @property
    def shard(self) -> tuple[str, ...]:
        """The data axes over which ZeRO shards: all, or with hybrid sharding all but the replicas'."""
        return tuple(name for name in self.data if name != REPLICA)


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """A mesh `pipe x replica x data x tensor...`, and which layers use which axis."""

    mesh: Mesh
    degrees: tuple[int, ...]
    """The tensor degrees in use, ascending; each divides the next."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.mesh.shape[PIPE])

    def axes(self, degree: int) -> Axes:
        """The axes of layers of this degree."""
        inner = {name for t, name in _tensor_axes(self.degrees).items() if t <= degree}
        names = [name for name in self.mesh.axis_names if name != PIPE]
        return Axes(
            data=tuple(name for name in names if name not in inner),
            tensor=tuple(name for name in names if name in inner),
            degree=degree,
        )

    def size(self, names: tuple[str, ...]) -> int:
        """The number of devices along these axes."""
        return math.prod(self.mesh.shape[name] for name in names)


def make_device_mesh(plan: Plan, devices: Sequence[jax.Device]) -> DeviceMesh:
    """The mesh on which the plan runs; devices beyond it stay idle (in a single process only).

    Raises:
      InputError: a plan that one SPMD program cannot run, more devices than there are, or idle devices among several
        processes.
    """
    check_runnable(plan)
    used, count = plan.devices, len(devices)
    if used > count:
        raise InputError(
            f"the plan needs {used} devices, and there {'is' if count == 1 else 'are'} {count}; "
            f"make a plan for these, or on CPU set JAX_NUM_CPU_DEVICES={used}"
        )
    if used < count and jax.process_count() > 1:
        raise InputError(
            f"the plan leaves {count - used} of {count} devices idle, and every process must take part; "
            "use them all or start fewer processes"
        )
    degrees = plan.degrees
    tensor = _tensor_axes(degrees)
    sizes = [high // low for low, high in itertools.pairwise((1, *tensor))]
    data, groups = plan.stages[0].devices // degrees[-1], plan.replicas // plan.shards
    apart: dict[str, int] = {REPLICA: groups} if groups > 1 else {}
    shape = (len(plan.stages), *apart.values(), data // groups, *reversed(sizes))
    names = (PIPE, *apart, DATA, *reversed(tensor.values()))
    mesh = Mesh(np.asarray(devices[:used]).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
    return DeviceMesh(mesh=mesh, degrees=degrees)


def check_runnable(plan: Plan) -> None:
    """Refuses what one SPMD program cannot run."""
    if plan.space != "spmd":
        raise InputError(
            f"this plan is of the space {plan.space}, whose stages have a program each, and here one is "
            "needed for all; plan with space=spmd"
        )
    check_program(plan)


def _tensor_axes(degrees: tuple[int, ...]) -> dict[int, str]:
    """An axis for every degree but 1: a layer of degree t is cut over the axes of all degrees up to t."""
    cut = [t for t in degrees if t > 1] or [1]
    return {t: TENSOR if len(cut) == 1 else f"{TENSOR}{t}" for t in cut}
