"""Seconds of a layer from its operations: the analytic part of a `ModelProfile`.

    seconds of a layer = sum over its operations of max(FLOP / (peak * efficiency(FLOP)), bytes / memory bandwidth)

Operations run one after the other.  Left out: launches of element-wise kernels, caches (operands in the L2 cache count
as read from memory), and slow shapes (thin or unaligned matrices).
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

from jhpt.core.cluster import Device
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.profile import Timing
from jhpt.core.work import Operation, Work

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one number of the compute dtypes."""

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batch sizes of the grid, in samples; `Timing` extrapolates in proportion above the last."""

STATE_BYTES = {"adam": 16.0, "momentum": 12.0}
"""Bytes of state per parameter: weight and gradient (2 + 2), float32 master weight (4) and moments (4 each); in float32
the weight is its own master, weight and gradient (4 + 4), and the sum is the same."""

UPDATE_BYTES = {"adam": 28.0, "momentum": 20.0}
"""Traffic of an update per parameter: reads the gradient (2), writes the weight (2), reads and writes the master weight
(8) and each moment (8); in float32 reads the gradient (4), reads and writes the weight (8) and each moment (8)."""


def check_dtype(device: Device, dtype: str) -> None:
    """InputError if the device has no rate for `dtype`, or `ELEMENT_BYTES` does not list it."""
    known = [name for name in ELEMENT_BYTES if name in device.peak_flops]
    if dtype not in known:
        raise InputError(f"{device.name} has no rate for dtype={dtype}; use {one_of(known)}")


def timings(work: Callable[[int, int], Work], degrees: Iterable[int], device: Device, dtype: str) -> tuple[Timing, ...]:
    """The timings of `work(batch, tensor)` over `BATCHES` and ascending tensor `degrees`.

    A larger micro-batch is never faster and a larger degree never slower.  Where a tabulated efficiency implies
    otherwise between two of its sizes, the neighbouring value is used.
    """
    table: list[Timing] = []
    for tensor in degrees:
        works = [work(batch, tensor) for batch in BATCHES]
        forward, backward = (
            list(accumulate((_seconds(part, device, dtype) for part in parts), max))
            for parts in zip(*works, strict=True)
        )
        if table:
            forward = list(map(min, forward, table[-1].forward))
            backward = list(map(min, backward, table[-1].backward))
        table.append(Timing(tensor=tensor, batches=BATCHES, forward=tuple(forward), backward=tuple(backward)))
    return tuple(table)


def _seconds(operations: Iterable[Operation], device: Device, dtype: str) -> float:
    return sum(device.seconds(operation.flops, operation.moved, dtype) for operation in operations)
