"""The chips that jax's CUDA compiler can be asked to compile for, as data.

What a chip is capable of follows from its compute capability (CUDA C++ Programming Guide, "Technical specifications
per compute capability"); multiprocessors, clock, cache and links are the chip's own.  Memory and its bandwidth are
taken from the cluster's device.  OpenXLA keeps such descriptions among its target configurations, read off real
devices; the figures below were compared with those.
"""

import re
from dataclasses import dataclass, replace

from jhpt.core.cluster import Device
from jhpt.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip.  shared_memory: bytes of a multiprocessor; a block can have 1 KiB less.

    capability: (major, minor).  multiprocessors, l2_bytes, clock (Hz), links (NVLink): of the chip as it is sold.
    """

    capability: tuple[int, int]
    float32_units: int
    shared_memory: int
    multiprocessors: int
    l2_bytes: int
    clock: float
    links: int
    source: str


B200 = Chip(
    capability=(10, 0),
    float32_units=128,
    shared_memory=228 << 10,
    multiprocessors=148,
    l2_bytes=132_644_864,
    clock=1.965e9,
    links=18,
    source="OpenXLA target configuration b200 (2026): 148 multiprocessors, 126.5 MiB of L2, 1965 MHz",
)
H100 = Chip(
    capability=(9, 0),
    float32_units=128,
    shared_memory=228 << 10,
    multiprocessors=132,
    l2_bytes=50 << 20,
    clock=1.98e9,
    links=18,
    source="NVIDIA H100 architecture whitepaper (2022), SXM: 132 multiprocessors, 50 MiB of L2; H200: the same chip",
)
A100 = Chip(
    capability=(8, 0),
    float32_units=64,
    shared_memory=164 << 10,
    multiprocessors=108,
    l2_bytes=40 << 20,
    clock=1.41e9,
    links=12,
    source="NVIDIA A100 architecture whitepaper (2020): 108 multiprocessors, 40 MiB of L2, 1410 MHz, 12 links",
)
H100_PCIE = replace(
    H100,
    multiprocessors=114,
    clock=1.755e9,
    links=0,
    source="NVIDIA H100 architecture whitepaper (2022), PCIe: 114 multiprocessors, 1755 MHz",
)
A100_PCIE = replace(A100, links=0)

CHIPS: tuple[tuple[str, Chip], ...] = (
    (r"\bB200\b", B200),
    (r"\bH100 PCIe\b", H100_PCIE),
    (r"\bH[12]00\b", H100),
    (r"\bA100.*PCIe\b", A100_PCIE),
    (r"\bA100\b", A100),
)
"""(pattern in the driver's name, chip); the first match counts."""

TOO_OLD = re.compile(r"\bV100\b")


def chip_of(device: Device) -> Chip:
    """The chip behind a cluster's device.

    Raises:
      InputError: no chip of which the compiler has a description here.
    """
    for pattern, chip in CHIPS:
        if re.search(pattern, device.name):
            return chip
    known = "compiling works for H100, H200, B200 and A100"
    if TOO_OLD.search(device.name):
        raise InputError(
            f"{device.name} cannot be compiled for: it has no bfloat16, so what jhpt runs on it in 16 bits would be "
            f"another program than the plan's; {known}; leave out --compile"
        )
    raise InputError(f"{device.name} is no device that can be compiled for; {known}; leave out --compile")


RECKONED = 0.8
"""Share of a device's memory that XLA reckons with where no allocator tells it more (`GetSchedulerMemoryLimit`): beyond
that it computes tensors twice rather than keep them, and overlaps less."""


def target_config(device: Device) -> str:
    """XLA's description of a device (GpuTargetConfigProto, text format)."""
    chip = chip_of(device)
    major, minor = chip.capability
    # From 9.0 on programs may use instructions of exactly this capability ("9.0a").
    extension = "ACCELERATED_FEATURES" if chip.capability >= (9, 0) else "NONE"
    fields = {
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
        "shared_memory_per_core": chip.shared_memory,
        "shared_memory_per_block_optin": chip.shared_memory - (1 << 10),
        "core_count": chip.multiprocessors,
        "fpus_per_core": chip.float32_units,
        "clock_rate_ghz": chip.clock / 1e9,
        "l2_cache_size": chip.l2_bytes,
        "memory_bandwidth": int(device.memory_bandwidth),
        "device_memory_size": int(device.memory / RECKONED),
        "device_address_bits": 64,
        "ecc_enabled": "true",
        "name": f'"{device.name}"',
        "device_vendor": '"NVIDIA Corporation"',
        **VERSIONS,
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    lines += [
        f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}",
        f"  device_interconnect_info {{ active_links: {chip.links} }}",
    ]
    about = f'platform_name: "CUDA"\n{DNN_VERSION}\ndevice_description_str: "{device.name}"'
    return "\n".join(["gpu_device_info {", *lines, "}", about])


VERSIONS = {
    "driver_version": '"13.0.0"',
    "runtime_version": '"12.8.0"',
    "compile_time_toolkit_version": '"12.8.0"',
    "dnn_version": '"9.10.0"',
}
"""Of software that a machine of 2025 has; flash attention needs cuDNN 8.9 or newer, Blackwell CUDA 12.8."""

DNN_VERSION = "dnn_version_info { major: 9 minor: 10 patch: 0 }"
