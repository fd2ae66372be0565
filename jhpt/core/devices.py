"""Peak rates of known GPUs."""

import re

PEAK_BF16_FLOPS = {
    r"\bB200\b": 2250e12,  # NVIDIA Blackwell architecture technical brief
    r"\bH200\b": 989.4e12,  # NVIDIA H200 datasheet, SXM
    r"\bH100 NVL\b": 835e12,  # NVIDIA H100 datasheet
    r"\bH100 PCIe\b": 756e12,  # NVIDIA H100 datasheet
    r"\bH100\b": 989.4e12,  # NVIDIA H100 datasheet, SXM
    r"\bA100\b": 312e12,  # NVIDIA A100 datasheet
    r"\bL40S\b": 362e12,  # NVIDIA L40S datasheet
    r"\bL4\b": 121e12,  # NVIDIA L4 datasheet
}
"""Dense bfloat16 FLOP/s by a pattern in the device's name; the first match counts."""


def peak_bf16_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device, or None where it is not known."""
    return next((peak for pattern, peak in PEAK_BF16_FLOPS.items() if re.search(pattern, device_kind)), None)
