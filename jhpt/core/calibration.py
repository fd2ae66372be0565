"""What devices, links and programs reach in real training, fitted to published runs.  The figures, with their spread,
are in `calibration.yaml`, which `benchmarks/calibration/fit.py` writes.

A datasheet says what hardware could do, a benchmark of a single operation what it does for a moment.  Runs of hours
reach less: power limits lower the clocks of an H100, networks are congested, collectives slow down the computation
beside them.  Each figure has one physical meaning and one value for all runs:

    products           sustained rate of large products / the benchmark's in the catalogue (`share`), by architecture
    fused_attention    rate of FlashAttention-2 on long sequences / sustained rate of products, by architecture
    inside, network    rate that collectives reach / the catalogue's: of NVLink, net of protocol, or of a node's ports
    decline, sharing   loss by congestion (`jhpt.core.cluster.Link`)
    traffic            bytes that fused element-wise kernels move / the least possible (`jhpt.core.framework.Framework`)
    exposed_gathers, exposed_gradients
                       share of data-parallel communication that adds to the computation it runs beside
    flash1             rate of FlashAttention 1 / that of 2

A chip of an architecture without runs counts as the nearest one that has some (`NEAREST`), PCIe links as NVLink, and
Ethernet as InfiniBand.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jhpt.core.framework import Framework
from jhpt.core.text_files import data_of_package

NEAREST = {7: "volta", 8: "ampere", 9: "hopper", 10: "hopper", 12: "hopper"}
"""Architecture whose figures count, by major compute capability: Ada as Ampere, Blackwell as Hopper."""

POWER = 0.5
"""Exponent of clock by power.  Dynamic power grows with the frequency and the square of the voltage, and near its limit
a chip raises the voltage with the root of the frequency."""

MEMORY_SHARE = 0.85
"""Share of the nominal memory bandwidth that long element-wise kernels reach: BabelStream's triad has 0.83 to 0.92 on
V100, A100 and H100."""

LAUNCH = 2e-5
"""Seconds of a layer's forward pass between its kernels: some ten of them, about 2 us from one to the next."""

DRAW_BYTES = 8.0
"""Bytes moved for a random number in programs of XLA, which writes its 32 random bits to memory and reads them."""

LOOP_TRAFFIC, UNROLLED_TRAFFIC = 2.16, 0.92
"""Bytes that element-wise kernels move, relative to the least possible, in steps of jhpt compiled for H100s: with the
blocks in a loop, and one after the other, as on a single device (`jhpt.sharding.layer_loop`).  The medians of six: 1.70
to 3.65, and 0.66 to 1.08 (`benchmarks/calibration/compiled_traffic.py`).  A loop copies activations, weights and
gradients in and out of stacks; with few tokens, copies of weights weigh most."""

ACCUMULATION = 10.0
"""Bytes per parameter: a 16-bit gradient is read, the float32 sum read and written."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The fitted figures, as the head of this file defines them."""

    products: Mapping[str, float]
    fused_attention: Mapping[str, float]
    inside: float
    network: float
    decline: float
    sharing: float
    traffic: float
    exposed_gathers: float
    exposed_gradients: float
    flash1: float


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A published run beside its prediction by figures that were fitted without its source.

    ratio: measured / predicted seconds of a step.  parameters: of the model.
    """

    device: str
    devices: int
    parameters: float
    kinds: str
    ratio: float


def architecture(capability: float | None) -> str:
    """The architecture whose figures a chip of this compute capability has; unknown ones count as the newest."""
    return NEAREST.get(int(capability or 0), "hopper")


@functools.cache
def figures() -> Figures:
    """The figures that come with jhpt."""
    return grouped({name: figure["value"] for name, figure in _data()["figures"].items()})


def grouped(values: Mapping[str, float]) -> Figures:
    """The figures of values by name, `products.ampere` being the one of `products` for that architecture."""
    fields: dict[str, Any] = {name: {} for name in ("products", "fused_attention")}
    for name, value in values.items():
        group, _, key = name.partition(".")
        if key:
            fields[group][key] = value
        else:
            fields[name] = value
    return Figures(**fields)


@functools.cache
def residuals() -> tuple[Residual, ...]:
    """The published runs, by which predictions are given a range."""
    return tuple(Residual(**dict(zip(_data()["columns"], row, strict=True))) for row in _data()["residuals"])


@functools.cache
def order_error() -> float:
    """Relative.  How far the predicted ratio of the seconds of two plans of one model on the same devices is from the
    measured one, in the median.  A predicted gain of this size is there three times in four."""
    error: float = _data()["order"]["value"]
    return error


@functools.cache
def ours(*, alone: bool = False) -> Framework:
    """jhpt's own program.  alone: on a single device.

    The traffic of its element-wise kernels is that of compiled steps.  XLA schedules its communication over data ranks
    beside products (docs/reports/gpu-compile.md), where it slows them down as it does elsewhere; of all-reduces over
    the tensor axis without sample chunks it hides little.  Its fused attention, cuDNN's, counts as FlashAttention-2
    until it is measured.
    """
    return Framework(
        name="jhpt",
        traffic=UNROLLED_TRAFFIC if alone else LOOP_TRAFFIC,
        draw_bytes=DRAW_BYTES,
        keeps_scores=False,
        accumulation=ACCUMULATION,
        exposed_gathers=figures().exposed_gathers,
        exposed_gradients=figures().exposed_gathers,
        exposed_regathers=1.0,
    )


@functools.cache
def _data() -> dict[str, Any]:
    return data_of_package("calibration.yaml")
