"""Devices that are not there: jax's CUDA plugin compiles for a cluster on a machine without a GPU.

The plugin is told which chip to compile for (`targets`) and how many there are.  Nothing runs: such devices can be put
into a mesh, and programs for it lowered and compiled.  It needs the wheels of the extra `deviceless`.

Kernel choice differs a little from that on a real device, where candidates are timed: without one there is nothing to
time them on, so autotuning is off.
"""

import importlib.util
import os
import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from jhpt.compiled.quiet import quiet
from jhpt.compiled.targets import chip_of, target_config
from jhpt.core.catalogue import peak_bf16_flops
from jhpt.core.cluster import Cluster
from jhpt.core.errors import InputError, NotHere
from jhpt.measure.device import DeviceInfo

PINNED_HOST = "pinned_host"


class OnHost(NamedSharding):
    """A sharding in pinned memory of the hosts.  Devices that are not there list no kinds of memory, and a plain
    sharding on them would forget it."""

    @property
    def memory_kind(self) -> str:
        """Always the same."""
        return PINNED_HOST


def on_host(sharding: NamedSharding) -> NamedSharding:
    """One that was made in pinned memory: itself, or for devices that are not there one that has not forgotten it."""
    return sharding if _lists_memory(sharding.mesh.devices.flat[0]) else OnHost(sharding.mesh, sharding.spec)


def _lists_memory(device: jax.Device) -> bool:
    try:
        return any(memory.kind == PINNED_HOST for memory in device.addressable_memories())
    except Exception:
        return False


def shape_on_host(shape: tuple[int, ...], dtype: Any, sharding: OnHost) -> jax.ShapeDtypeStruct:
    """An argument there, to lower a function with whose `in_shardings` say the same: its type knows where it lies."""
    abstract = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=PINNED_HOST)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=abstract)


COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": "0"}
"""For `compile(compiler_options=...)`."""

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")

INSTALL = "install what compiling without a GPU needs: pip install 'jhpt[deviceless]'"


def compile_only_devices(cluster: Cluster) -> tuple[jax.Device, ...]:
    """The devices of a cluster, for compiling only; their order is the planner's.

    With too little memory the compiler computes tensors twice.

    Raises:
      InputError: nodes of several kinds, or devices that the compiler does not know.
      NotHere: jax's CUDA plugin is not installed or cannot be used.
    """
    if cluster.mixed:
        raise InputError(f"{cluster.name} has nodes of several kinds, for which no single program can be compiled")
    node = cluster.nodes[0]
    config = target_config(node.device)
    if not any(_installed(name) for name in PLUGINS):
        raise NotHere(f"jax's CUDA plugin is missing; {INSTALL}")
    # The plugin asks for a driver when it is found, unless it is told not to.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        with quiet():
            found = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology=f"1x{cluster.num_nodes}x{node.devices}",  # slices x hosts x devices of a host
                target_config=config,
            ).devices
    except (NotImplementedError, RuntimeError) as error:
        raise NotHere(f"jax's CUDA plugin cannot compile here ({_first_line(error)}); {INSTALL}") from None
    return tuple(found)


def compile_only_info(cluster: Cluster) -> DeviceInfo:
    """What is known of such a device."""
    device = cluster.nodes[0].device
    major, minor = chip_of(device).capability
    return DeviceInfo(
        kind=device.name,
        platform="gpu",
        memory=int(device.memory),
        peak_bf16_flops=peak_bf16_flops(device.name),
        capability=major + minor / 10,
    )


def compiled_for(lowered: jax.stages.Lowered, options: Mapping[str, Any] = MappingProxyType({})) -> jax.stages.Compiled:
    """Compiles a program for devices that are not there; options: the compiler's, beside `COMPILER_OPTIONS`.

    One that was compiled for them before is in the cache of programs and cannot be loaded from there, for they cannot
    hold it; jax warns and compiles it again.

    Raises:
      NotHere: the compiler lacks a library.
    """
    try:
        with quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
            return lowered.compile(compiler_options=COMPILER_OPTIONS | dict(options))
    except RuntimeError as error:
        if (library := missing_library(str(error))) is None:
            raise
        raise NotHere(f"the compiler does not find {library} ({_first_line(error)}); {INSTALL}") from error


LIBRARIES = {"cudnn": "cuDNN", "dnn library": "cuDNN", "ptxas": "ptxas", "libdevice": "libdevice", "nvvm": "NVVM"}
"""What messages of the compiler call what it needs."""

ABSENT = re.compile(
    r"not found|no such file|(cannot|can't|could not|couldn't|unable to|failed to) (be )?(find|found|load|open|launch)"
)
"""How they say that it is not there."""


def missing_library(message: str) -> str | None:
    """The library that a line of the compiler's message calls absent; None: the message is about something else."""
    for line in filter(ABSENT.search, message.lower().splitlines()):
        for word, name in LIBRARIES.items():
            if word in line:
                return name
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False
