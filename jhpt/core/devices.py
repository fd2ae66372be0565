"""Peak rates of known GPUs."""

PEAK_BF16_FLOPS = {
    "B200": 2250e12,  # NVIDIA Blackwell architecture technical brief, dense
    "H200": 989.4e12,  # NVIDIA H200 datasheet, dense
    "H100 PCIe": 756e12,  # NVIDIA H100 datasheet, dense
    "H100": 989.4e12,  # NVIDIA H100 datasheet (SXM), dense
    "A100": 312e12,  # NVIDIA A100 datasheet
    "L4": 121e12,  # NVIDIA L4 datasheet, dense
}
"""Dense bfloat16 FLOP/s by a part of the device's name; the first match counts."""


def peak_bf16_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device, or None where it is not known."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_kind), None)
