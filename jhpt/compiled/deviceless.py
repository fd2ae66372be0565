"""Devices that are not attached: jax's CUDA plugin compiles for a cluster on a machine without a GPU.

The plugin is told which chip to compile for (`targets`) and how many there are.  Nothing runs: such devices can be put
into a mesh, and programs for it can be lowered and compiled.  It needs the wheels of the extra `deviceless`.

Kernels differ a little from those on a real device, which times candidates: autotuning is off, because there is no
device to time them on.
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
    """A sharding in pinned memory of the hosts.  Devices that are not attached list no kinds of memory, so that a plain
    sharding on them would lose it."""

    @property
    def memory_kind(self) -> str:
        """Pinned host memory."""
        return PINNED_HOST


def on_host(sharding: NamedSharding) -> NamedSharding:
    """A sharding that was made in pinned memory: the same one, or an `OnHost` for devices that are not attached."""
    return sharding if _lists_memory(sharding.mesh.devices.flat[0]) else OnHost(sharding.mesh, sharding.spec)


def _lists_memory(device: jax.Device) -> bool:
    try:
        return any(memory.kind == PINNED_HOST for memory in device.addressable_memories())
    except Exception:
        return False


def shape_on_host(shape: tuple[int, ...], dtype: Any, sharding: OnHost) -> jax.ShapeDtypeStruct:
    """The shape of an argument in pinned memory, to lower a function whose `in_shardings` are `sharding`; its type
    includes the memory."""
    abstract = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=PINNED_HOST)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=abstract)


COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": "0"}
"""Options for `compile(compiler_options=...)`."""

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
    # Otherwise the plugin looks for a driver.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        with quiet():
            devices = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology=f"1x{cluster.num_nodes}x{node.devices}",  # slices x hosts x devices of a host
                target_config=config,
            ).devices
    except (NotImplementedError, RuntimeError) as error:
        raise NotHere(f"jax's CUDA plugin cannot compile here ({_first_line(error)}); {INSTALL}") from None
    return tuple(devices)


def compile_only_info(cluster: Cluster) -> DeviceInfo:
    """The description of a device of this cluster."""
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
    """Compiles a program for devices that are not attached.  options: the compiler's, beside `COMPILER_OPTIONS`.

    A program that was compiled before is in the cache, but cannot be loaded without its devices; jax warns and compiles
    it again.

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
"""Words of the compiler's messages for the libraries that it needs."""

ABSENT = re.compile(
    r"not found|no such file|(cannot|can't|could not|couldn't|unable to|failed to) (be )?(find|found|load|open|launch)"
)
"""Words of the compiler's messages for a library that is absent."""


def missing_library(message: str) -> str | None:
    """The library that the compiler's message calls absent; None: the message is about something else."""
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
    except ModuleNotFoundError:  # its parent package is missing, too
        return False
