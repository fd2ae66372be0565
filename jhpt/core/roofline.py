"""The seconds of an operation on a device in a framework's program: rooflines with reasons.

    product           max(launch + FLOP / (peak share fill),  bytes / stream rate)
    fused attention   max(FLOP / (peak share fused rate),     bytes / stream rate)
    element-wise      (bytes traffic + numbers drawn x bytes of each) / stream rate
    table             bytes / stream rate

peak share: what large products sustain, less for small ones (`Device.efficiency`).  fill: products are cut into tiles,
which the multiprocessors work off in waves; the last wave is rarely full, nor are tiles at the edges (NVIDIA, Matrix
Multiplication Background User's Guide, sections "tile quantization" and "wave quantization").  cuBLAS has kernels of
several tile sizes; the best one counts.  fused: `Device.fused_attention` times the framework's and the shape's rate.

Left out: caches (operands in the L2 cache count as read from memory), and unaligned matrices.
"""

import math
from functools import lru_cache

from jhpt.core.cluster import Device
from jhpt.core.framework import Framework
from jhpt.core.work import Operation

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.88), (64, 64, 0.75))
"""(rows, columns, rate relative to the largest tile): smaller tiles read their operands more often.  The ratios are
rounded from figure 2 of the guide above."""


def seconds(operation: Operation, device: Device, dtype: str, framework: Framework) -> float:
    """Seconds of one operation, by the table at the head of this file."""
    flops, moved, kind, result, rate, drawn, _ = operation
    if kind == "table":
        return moved / device.stream_rate
    if kind == "element-wise":
        return (moved * framework.traffic + drawn * framework.draw_bytes) / device.stream_rate
    if kind == "fused attention":
        rate *= device.fused_attention * framework.fused_attention
        return max(device.seconds(flops, 0.0, dtype) / rate, moved / device.stream_rate)
    filled = fill(*result, device.multiprocessors) if result and device.multiprocessors else 1.0
    if filled == 1.0:
        return device.seconds(flops, moved, dtype)
    compute = device.seconds(flops, 0.0, dtype) + flops / device.sustained(dtype) * (1 / filled - 1)
    return max(compute, moved / device.stream_rate)


@lru_cache(maxsize=1 << 16)
def fill(rows: float, columns: float, count: float, multiprocessors: int) -> float:
    """Share of its time in which a device is at work on `count` products of [rows, columns], with the best tile."""
    best = 0.0
    for height, width, rate in TILES:
        tiles = math.ceil(rows / height) * math.ceil(columns / width) * count
        waves = math.ceil(tiles / multiprocessors)
        best = max(best, rate * rows * columns * count / (waves * multiprocessors * height * width))
    return best
