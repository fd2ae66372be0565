"""Products in 8 bits under plans: scales are those of what a device multiplies at once, and that changes little."""

from dataclasses import replace

import numpy as np
import pytest

from jhpt.models.family import build
from tests.sharding.plans import laid_out, mixed, piped
from tests.sharding.test_parity import ALL, BATCH, NONE, definition, gradients, setup_of

__all__ = ["setup_of"]

ONE = piped([5], 1, batch=BATCH)

PLANS = {
    "ZeRO-3 x tensor": ("bert", piped([5], 1, data=2, tensor=2, batch=BATCH, zero=3)),
    "sequence, chunks": ("gpt-tied", piped([5], 1, tensor=4, batch=BATCH, sequence=True, sample_chunks=2)),
    "several degrees": ("gpt-untied", mixed((1, 2, 4, 4, 4), batch=BATCH, micro_batches=2, zero=1)),
    "pipeline, recomputed": ("bert", piped([3, 2], 2, tensor=2, batch=BATCH, micro_batches=4, recompute=True)),
}


def in_8_bits(setup_of, name, unrolled, plan):
    """A CPU computes such products by conversion; as a setting it is refused them."""
    setup = setup_of(name, 3, unrolled)
    config = setup.config.model.model_copy(update={"matmul_dtype": "float8"})
    return laid_out(replace(setup, model=build(config, dtype=setup.model.dtype)), plan, overlap=True)


def distance(one, other):
    """Of two trees by path: the root mean square, relative to the other."""
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in tree.values()))  # noqa: E731
    return norm({path: one[path] - leaf for path, leaf in other.items()}) / norm(other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", PLANS)
def test_plans_agree(setup_of, kind):
    """Up to sums whose order tips some number in 8 bits over to the next: far less than 8 bits take away."""
    name, plan = PLANS[kind]
    expected, expected_loss, *_ = definition(setup_of, name, 3)
    one, loss, _ = gradients(in_8_bits(setup_of, name, ALL, ONE))
    actual, other, _ = gradients(in_8_bits(setup_of, name, NONE, plan))
    off = distance(one, expected)
    assert loss == pytest.approx(expected_loss, rel=1e-2) and 0.01 < off < 0.2
    assert other == pytest.approx(loss, rel=1e-4) and distance(actual, one) < off / 5
