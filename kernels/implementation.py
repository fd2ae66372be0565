"""The choice of the program that computes an operation."""

from dataclasses import dataclass
from typing import Literal

Implementation = Literal["reference", "mosaic"]
"""`reference`: plain jax.numpy, on any device.  `mosaic`: Pallas on NVIDIA GPUs of capability 9.0 or newer."""


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The programs in use and the reason, printed once at the start of a run that needs them."""

    implementation: Implementation
    reason: str


def choose_kernels(platform: str, capability: float | None) -> KernelChoice:
    """The programs for this device: Pallas on Hopper, for which the kernels have been compiled and whose tensor core
    instructions they use.  Kernels call the reference for shapes and dtypes that they do not support."""
    if platform not in ("gpu", "cuda"):
        return KernelChoice(implementation="reference", reason=f"the device is a {platform}")
    if capability is None or not 9.0 <= capability < 10.0:
        return KernelChoice(implementation="reference", reason=f"compute capability {capability} is not Hopper's 9.0")
    return KernelChoice(implementation="mosaic", reason="Pallas kernels for Hopper")
