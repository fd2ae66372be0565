"""Segmented against uniform quantization: mean squared error at equal total bits on the wire, ranges included.

    python -m benchmarks.quantization FILE [PARAMETERS]

    symmetric   code = round(x / m * N), N = 2^(bits-1) - 1; one range m per group
    affine      code = round((x - low) / (high - low) * (2^bits - 1)); two ranges per group
    segmented   `jhpt.kernels.segments`; one range per group, and one knee for the tensor where it is fitted

Ranges have 16 bits.  Schemes that spend different numbers of bits on ranges are made comparable: one more bit in the
codes quarters an error, so errors are multiplied by 4^(bits of ranges per number).  With PARAMETERS, the .npz file of
an uncompressed cell of `jhpt bench convergence` for gpt-tiny, the numbers are those that four ranks would send, and
JAX_NUM_CPU_DEVICES has to be 4.
"""

import argparse
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
from jhpt.kernels.dequantize_sum import dequantize_sum
from jhpt.kernels.segment_quantize import segment_quantize
from jhpt.kernels.segments import Knee, Quantized, fit_knee, knee_for, most
from jhpt.training.data.batches import evaluation_batches
from jhpt.training.setup import prepare

Numbers = np.ndarray[Any, np.dtype[np.float32]]

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "Gaussian": lambda rng, size: rng.standard_normal(size),
    "Laplace": lambda rng, size: rng.laplace(size=size),
    "Student-t(5)": lambda rng, size: rng.standard_t(5, size),
}
ROW = 1024
"""Numbers in a row."""

GROUPS: dict[str, int | None] = {"tensor": None, "row": ROW, "block": BLOCK}
NARROW: dict[str, int | None] = {"tensor": None, "block": BLOCK, "block of 32": 32}
"""Numbers that share a range; None: the whole tensor.  `NARROW` is for tensors whose rows are one block."""

RANGE_BITS, KNEE_BITS = 16, 64
"""Bits of a bfloat16 range, and of a fitted knee: two float32 numbers."""


def charged_errors(x: Numbers, bits: Bits, group: int | None) -> dict[str, float]:
    """Mean squared error x 4^(bits of ranges per number) of every scheme on x[rows, columns], over x's mean square.

    Args:
      group: numbers that share a range, neighbours in a row; None: the whole tensor.
    """
    size = group or x.size
    groups = x.reshape(-1, size)
    fitted, uniform = fit_knee(jnp.asarray(groups), bits, size), Knee(1 / most(bits), 1.0)
    errors = {
        "symmetric": (_error(groups, bits, uniform), RANGE_BITS / size),
        "affine": (_affine_error(groups, bits), 2 * RANGE_BITS / size),
        "fitted": (_error(groups, bits, fitted), RANGE_BITS / size + KNEE_BITS / x.size),
    }
    if group is not None:  # whole tensors differ too much for a fixed knee
        errors["fixed"] = (_error(groups, bits, knee_for(bits, group)), RANGE_BITS / size)
    return {name: error * 4**extra / float(np.mean(np.square(x))) for name, (error, extra) in errors.items()}


def relative_errors(distribution: str, bits: Bits, *, numbers: int, seed: int) -> dict[str, float]:
    """By group: error of segmented quantization (knee fixed, or fitted for a whole tensor) / error of the better
    uniform quantization."""
    x = DISTRIBUTIONS[distribution](np.random.default_rng(seed), numbers).astype(np.float32).reshape(-1, ROW)
    return {group: relative(charged_errors(x, bits, size)) for group, size in GROUPS.items()}


def relative(errors: Mapping[str, float]) -> float:
    """Error of segmented quantization / error of the better uniform quantization."""
    return errors.get("fixed", errors["fitted"]) / min(errors["symmetric"], errors["affine"])


def measure(path: str, *, size: int = 1 << 21, seeds: int = 5) -> list[dict[str, Any]]:
    """Writes every entry of the table, by seed, to a file as JSON."""
    rows = [
        {"distribution": name, "bits": bits, "group": group, "seed": seed, "numbers": size, "error": errors}
        for bits in get_args(Bits)
        for name, draw in DISTRIBUTIONS.items()
        for seed in range(seeds)
        for x in [draw(np.random.default_rng(seed), size).astype(np.float32).reshape(-1, ROW)]
        for group, neighbours in GROUPS.items()
        for errors in [charged_errors(x, bits, neighbours)]
    ]
    write_json(path, "quantization", {"row": ROW, "block": BLOCK}, rows, {}, device=False)
    return rows


def measure_trained(parameters: str, path: str) -> list[dict[str, Any]]:
    """As `measure`, for the numbers that four ranks would send of a trained gpt-tiny, every layer, a held-out batch.

    Args:
      parameters: the .npz file of an uncompressed cell of `jhpt bench convergence` for gpt-tiny.
      path: file for the entries.
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
        for group, neighbours in NARROW.items()
        for errors in [charged_errors(x, bits, neighbours)]
    ]
    write_json(path, "quantization of a trained gpt-tiny", {"block": BLOCK, "ranks": TENSOR}, rows, {})
    return rows


def _error(groups: Numbers, bits: Bits, knee: Knee) -> float:
    """Mean squared error of segmented quantization; every row is a group."""
    size = groups.shape[1]
    payload = segment_quantize(jnp.asarray(groups), bits=bits, group=size, knee=knee, implementation="reference")
    one = Quantized(payload.codes[None], payload.ranges[None])
    decoded = dequantize_sum(one, columns=size, bits=bits, group=size, knee=knee, implementation="reference")
    return float(np.mean(np.square(np.asarray(decoded, np.float64) - groups)))


def _affine_error(x: Numbers, bits: Bits) -> float:
    """Mean squared error of affine quantization; every row is a group."""
    low, high = (_outward(x.min(1), -math.inf), _outward(x.max(1), math.inf))
    step = np.maximum((high - low) / (2**bits - 1), np.finfo(np.float32).tiny)[:, None]
    decoded = np.rint((x - low[:, None]) / step) * step + low[:, None]
    return float(np.mean(np.square(decoded - x)))


def _outward(values: Numbers, way: float) -> Any:
    """The nearest bfloat16 in that direction, as float64."""
    short = values.astype(jnp.bfloat16)
    inside = short.astype(np.float32) < values if way > 0 else short.astype(np.float32) > values
    return np.where(inside, np.nextafter(short, jnp.bfloat16(way)), short).astype(np.float64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__.partition("\n")[0])
    parser.add_argument("file", help="file for the errors")
    parser.add_argument("parameters", nargs="?", help=".npz file of an uncompressed cell of `jhpt bench convergence`")
    options = parser.parse_args()
    if options.parameters:
        measure_trained(options.parameters, options.file)
    else:
        measure(options.file)
