"""Segmented against uniform quantization: mean squared error at equal total bits on the wire, ranges included.

    symmetric   code = round(x / m * N), N = 2^(bits-1) - 1; one range m a group
    affine      code = round((x - low) / (high - low) * (2^bits - 1)); two ranges a group
    segmented   `jhpt.kernels.segments`; one range a group, and one bend for the tensor where it is fitted

Ranges have 16 bits.  A scheme that spends more bits a number than another is charged for it: every bit on the codes
would have quartered its error, so errors are multiplied by 4^(total bits).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np

from benchmarks.convergence.cell import unflat
from benchmarks.convergence.cells import TENSOR
from benchmarks.partial_sums import partial_sums
from jhpt.bench.results import write_json
from jhpt.core.compression import BLOCK, Bits
from jhpt.core.load import load_config
from jhpt.kernels.dequantize_sum import segment_dequantize
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.kernels.segments import Group, Knee, fit_knee, knee_for, most
from jhpt.training.data.batches import evaluation_batches
from jhpt.training.setup import prepare

Numbers = np.ndarray[Any, np.dtype[np.float32]]

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "Gaussian": lambda rng, size: rng.standard_normal(size),
    "Laplace": lambda rng, size: rng.laplace(size=size),
    "Student-t(5)": lambda rng, size: rng.standard_t(5, size),
}
GROUPS: dict[str, Group] = {"tensor": "tensor", "row": "row", "block": BLOCK}
NARROW: dict[str, Group] = {"tensor": "tensor", "block": BLOCK, "block of 32": 32}
"""Of tensors as wide as a block, whose rows are blocks."""

ROW = 1024
"""Numbers in a row."""

RANGE_BITS, KNEE_BITS = 16, 64
"""Of a range, and of a fitted bend: two float32."""


def charged_errors(x: Numbers, bits: Bits, kind: Group) -> dict[str, float]:
    """Mean squared error x 4^(bits of ranges a number) of every scheme on x[rows, columns], over x's mean square."""
    size = kind if isinstance(kind, int) else {"tensor": x.size, "row": x.shape[1]}[kind]
    fixed, fitted = None if kind == "tensor" else knee_for(bits, kind), fit_knee(jnp.asarray(x), bits, kind)
    even = Knee(1 / most(bits), 1.0)
    found = {
        "symmetric": (_error(x, bits, kind, even), RANGE_BITS / size),
        "affine": (_affine_error(x.reshape(-1, size), bits), 2 * RANGE_BITS / size),
        "fitted": (_error(x, bits, kind, fitted), RANGE_BITS / size + KNEE_BITS / x.size),
    }
    if fixed is not None:
        found["fixed"] = (_error(x, bits, kind, fixed), RANGE_BITS / size)
    return {name: error * 4**more / float(np.mean(np.square(x))) for name, (error, more) in found.items()}


def relative_errors(distribution: str, bits: Bits, *, size: int, seed: int) -> dict[str, float]:
    """By group: the error of the segmented scheme in use (fixed bend; fitted by tensor) / the better uniform one's."""
    x = DISTRIBUTIONS[distribution](np.random.default_rng(seed), size).astype(np.float32).reshape(-1, ROW)
    return {group: relative(charged_errors(x, bits, kind)) for group, kind in GROUPS.items()}


def relative(errors: Mapping[str, float]) -> float:
    """Of the segmented scheme in use over the better uniform one."""
    return errors.get("fixed", errors["fitted"]) / min(errors["symmetric"], errors["affine"])


def measure(path: str, *, size: int = 1 << 21, seeds: int = 5) -> list[dict[str, Any]]:
    """Every entry of the table, by seed, written to a file as JSON."""
    rows = [
        {"distribution": name, "bits": bits, "group": group, "seed": seed, "numbers": size, "error": errors}
        for bits in get_args(Bits)
        for name, draw in DISTRIBUTIONS.items()
        for seed in range(seeds)
        for x in [draw(np.random.default_rng(seed), size).astype(np.float32).reshape(-1, ROW)]
        for group, kind in GROUPS.items()
        for errors in [charged_errors(x, bits, kind)]
    ]
    write_json(path, "quantization", {"row": ROW, "block": BLOCK}, rows, {}, device=False)
    return rows


def measure_trained(parameters: str, path: str) -> list[dict[str, Any]]:
    """The same of what four ranks would send of a trained gpt-tiny, of every layer, for a held-out batch.

    Args:
      parameters: the .npz of an uncompressed cell of gpt-tiny of `jhpt bench convergence`.
      path: of the file that is written.
    """
    setup = prepare(load_config("gpt-tiny", {"parallel.tensor": TENSOR, "parallel.data": 1}))
    size = setup.config.data.batch_size
    assert setup.validation_windows is not None
    windows, _ = next(evaluation_batches(setup.validation_windows, size, slice(0, size), 1))
    params = setup.layout.stored(unflat(np.load(parameters)))
    rows = [
        {"layer": layer, "place": place, "bits": bits, "group": group, "numbers": x.size, "error": errors}
        for (layer, place), x in partial_sums(setup, params, windows).items()
        for bits in get_args(Bits)
        for group, kind in NARROW.items()
        for errors in [charged_errors(x, bits, kind)]
    ]
    write_json(path, "quantization of a trained gpt-tiny", {"block": BLOCK, "ranks": TENSOR}, rows, {})
    return rows


def _error(x: Numbers, bits: Bits, group: Group, knee: Knee) -> float:
    payload = segment_quantize(jnp.asarray(x), bits=bits, group=group, knee=knee, implementation="reference")
    back = segment_dequantize(
        payload, columns=x.shape[1], bits=bits, group=group, knee=knee, implementation="reference"
    )
    return float(np.mean(np.square(np.asarray(back, np.float64) - x)))


def _affine_error(x: Numbers, bits: Bits) -> float:
    low, high = (_outward(x.min(1), -math.inf), _outward(x.max(1), math.inf))
    step = np.maximum((high - low) / (2**bits - 1), np.finfo(np.float32).tiny)[:, None]
    back = np.rint((x - low[:, None]) / step) * step + low[:, None]
    return float(np.mean(np.square(back - x)))


def _outward(values: Numbers, way: float) -> Any:
    """The nearest bfloat16 in that direction, as float64."""
    short = values.astype(jnp.bfloat16)
    inside = short.astype(np.float32) < values if way > 0 else short.astype(np.float32) > values
    return np.where(inside, np.nextafter(short, jnp.bfloat16(way)), short).astype(np.float64)
