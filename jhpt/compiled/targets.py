"""Descriptions of the chips that jax's CUDA compiler can compile for, in the format of XLA.

Figures of a multiprocessor by compute capability are here (CUDA C++ Programming Guide, "Technical specifications per
compute capability"), those of a chip are in the catalogue; memory and its bandwidth are those of the cluster's device.
OpenXLA has such descriptions of real devices among its target configurations, with which these agree.
"""

import re
from dataclasses import dataclass

from jhpt.core.catalogue import Chip, chip_by_driver, kinds_with_chips
from jhpt.core.cluster import Device
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """A multiprocessor of a compute capability.  shared_memory: bytes; a thread block can use 1 KiB less."""

    float32_units: int
    shared_memory: int


MULTIPROCESSORS = {
    (8, 0): Multiprocessor(float32_units=64, shared_memory=164 << 10),
    (9, 0): Multiprocessor(float32_units=128, shared_memory=228 << 10),
    (10, 0): Multiprocessor(float32_units=128, shared_memory=228 << 10),
}
"""Multiprocessors by compute capability."""

ALIKE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "shared_memory_per_block": 48 << 10,
    "device_address_bits": 64,
    "ecc_enabled": "true",
    "device_vendor": '"NVIDIA Corporation"',
}
"""Figures that all of these devices share."""

VERSIONS = {
    "driver_version": '"13.0.0"',
    "runtime_version": '"12.8.0"',
    "compile_time_toolkit_version": '"12.8.0"',
    "dnn_version": '"9.10.0"',
}
"""Software versions of a machine of 2025; flash attention needs cuDNN 8.9 or newer, Blackwell CUDA 12.8."""

DNN_VERSION = "dnn_version_info { major: 9 minor: 10 patch: 0 }"

RECKONED = 0.8
"""Share of a device's memory that XLA plans for if no allocator reports more (`GetSchedulerMemoryLimit`).  If a program
needs more, XLA recomputes tensors instead of storing them, and overlaps less."""

TOO_OLD = re.compile(r"\bV100\b")


def chip_of(device: Device) -> Chip:
    """The chip behind a cluster's device.

    Raises:
      InputError: a chip for which there is no description here.
    """
    if chip := chip_by_driver(device.name):
        return chip
    known = f"compiling works for {one_of(kinds_with_chips())}"
    if TOO_OLD.search(device.name):
        raise InputError(
            f"{device.name} cannot be compiled for: it has no bfloat16, so what jhpt runs on it in 16 bits would be "
            f"another program than the plan's; {known}; leave out --compile"
        )
    raise InputError(f"{device.name} is no device that can be compiled for; {known}; leave out --compile")


def target_config(device: Device) -> str:
    """XLA's description of a device (GpuTargetConfigProto, text format)."""
    chip = chip_of(device)
    major, minor = chip.capability
    multiprocessor = MULTIPROCESSORS[chip.capability]
    fields = {
        **ALIKE,
        "shared_memory_per_core": multiprocessor.shared_memory,
        "shared_memory_per_block_optin": multiprocessor.shared_memory - (1 << 10),
        "fpus_per_core": multiprocessor.float32_units,
        "core_count": chip.multiprocessors,
        "clock_rate_ghz": chip.clock / 1e9,
        "l2_cache_size": chip.l2_bytes,
        "memory_bandwidth": int(device.memory_bandwidth),
        "device_memory_size": int(device.memory / RECKONED),
        "name": f'"{device.name}"',
        **VERSIONS,
    }
    # From 9.0 on programs may use instructions of exactly this capability ("9.0a").
    extension = "ACCELERATED_FEATURES" if chip.capability >= (9, 0) else "NONE"
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    lines += [
        f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}",
        f"  device_interconnect_info {{ active_links: {chip.links} }}",
    ]
    about = f'platform_name: "CUDA"\n{DNN_VERSION}\ndevice_description_str: "{device.name}"'
    return "\n".join(["gpu_device_info {", *lines, "}", about])
