"""Arguments of dequantize_sum that tests compare and benchmarks time."""

from typing import NamedTuple

import jax

from jhpt.core.compression import BLOCK, Bits
from jhpt.kernels.segment_quantize.reference import quantize
from jhpt.kernels.segments import Knee, Quantized, fit_knee, knee_for


class Spec(NamedTuple):
    """Payloads of x[rows, columns]; fitted: with a knee for these numbers."""

    payloads: int
    rows: int
    columns: int
    bits: Bits
    group: int = BLOCK
    fitted: bool = False


TESTED: tuple[Spec, ...] = (
    Spec(1, 4, 256, 8, 128),
    Spec(4, 3, 384, 8, 128),
    Spec(2, 5, 200, 8, 128),
    Spec(3, 6, 512, 8, 512),
    Spec(2, 3, 2048, 8, 2048),
    Spec(2, 2, 130, 8, 130, fitted=True),
)
TESTED += tuple(spec._replace(bits=4) for spec in TESTED)
TIMED = tuple(Spec(8, rows, 4096, bits) for bits in (8, 4) for rows in (2048, 8192, 32768))


def arguments(spec: Spec, key: jax.Array) -> tuple[Quantized, Knee]:
    """Payloads of Student-t(5) numbers, and the knee they share."""
    x = jax.random.t(key, 5, (spec.payloads, spec.rows, spec.columns))
    fixed = knee_for(spec.bits, spec.group)
    knee = fit_knee(x.reshape(-1, spec.columns), spec.bits, spec.group) if spec.fitted else fixed
    one = [quantize(each, bits=spec.bits, group=spec.group, knee=knee, rows=None, seed=None) for each in x]
    return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *one), knee
