"""The devices that jax sees: kind, memory and peak rate."""

import resource
from dataclasses import dataclass

import jax

from jhpt.core.catalogue import peak_bf16_flops


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device.

    memory: bytes; None: the backend does not report it.  capability: compute capability of an NVIDIA GPU; None for
    other devices.
    """

    kind: str
    platform: str
    memory: int | None
    peak_bf16_flops: float | None
    capability: float | None

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.platform in ("gpu", "cuda", "rocm")


def device_info() -> DeviceInfo:
    """Describes the first local device."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    return DeviceInfo(
        kind=device.device_kind,
        platform=device.platform,
        memory=(device.memory_stats() or {}).get("bytes_limit"),
        peak_bf16_flops=peak_bf16_flops(device.device_kind),
        capability=float(capability) if capability else None,
    )


def memory_in_use() -> int:
    """Peak bytes in use on the first local device; on CPU the peak resident size of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
