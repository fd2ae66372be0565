"""One row, so one device, gives a loss or only a gradient that is not finite: the whole state stays as it was."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.sharding.offload.stream import GRADIENT, RESIDENT
from jhpt.training.compile import compile_step
from jhpt.training.loop import _batches
from jhpt.training.programs import global_batch
from jhpt.training.setup import prepare
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import on_host

LOSS, GRADIENT_ALONE = 7, 8
"""Tokens of which a row is made whose loss, or only whose gradient, is not finite."""

ROW = 5
"""Of 16, on the second of four devices."""

TOPK = {"kind": "topk", "share": 0.1, "momentum": 0.5}
CASES = {
    "plain": {"parallel.data": 4},
    "8 bits": {"parallel.data": 4, "parallel.gradient_compression": "quantize"},
    "4 bits, ZeRO-1": {
        "parallel.data": 4,
        "parallel.zero": 1,
        "parallel.gradient_compression": {"kind": "quantize", "bits": 4},
    },
    "hybrid, ZeRO-2": {"parallel.data": 4, "parallel.zero": 2, "parallel.zero_ranks": 2, "parallel.micro_batches": 2},
    "top-k, pipeline": {
        "parallel.data": 2,
        "parallel.pipe": 2,
        "parallel.micro_batches": 2,
        "parallel.gradient_compression": TOPK,
    },
    "low precision": {
        "parallel.data": 4,
        "optimizer.weights": "bfloat16_kahan",
        "optimizer.moments": "int8",
        "optimizer.clip": "previous",
    },
    "offload": {"parallel.data": 4, "memory.offload": "both"},
    "offload, updated in the backward pass": {
        "parallel.data": 4,
        "memory.offload": "both",
        "optimizer.clip": "layer",
    },
}


@jax.custom_vjp
def spoilt(x, bad):
    """x; the gradient of rows [b] that are bad is not a number."""
    return x


def along(rows, x):
    return rows.reshape(-1, *[1] * (x.ndim - 1))


spoilt.defvjp(
    lambda x, bad: (x, bad),
    lambda bad, gradient: (jnp.where(along(bad, gradient), jnp.nan, gradient), None),
)


def bad_parts(parts):
    """The model with a head that spoils rows of these tokens."""

    def head_loss(params, x, batch, context):
        loss, gradient = (jnp.all(batch.windows == token, axis=1) for token in (LOSS, GRADIENT_ALONE))
        x = spoilt(jnp.where(along(loss, x), jnp.nan, x), gradient)
        return parts.head_loss(params, x, batch, context)

    return replace(parts, head_loss=head_loss)


def with_bad_rows(setup):
    """The setup with a head that spoils rows of these tokens."""

    parts = {degree: bad_parts(parts) for degree, parts in setup.training.parts.items()}
    return replace(setup, training=replace(setup.training, parts=parts))


def kept(state):
    """What a step that is skipped has to leave alone: all but the counts of steps, and scratch of offloaded blocks."""
    state = on_host(state)
    parts = {each.name: getattr(state, each.name) for each in fields(state)}
    for count in ("step", "skipped", "bad_steps", "pending"):
        parts.pop(count, None)
    if rows := parts.get("rows"):
        parts["rows"] = {name: row for name, row in rows.items() if name.removeprefix(RESIDENT) != GRADIENT}
    return jax.tree.leaves(parts)


@pytest.mark.parametrize("case", quick_and_exhaustive(CASES, ["8 bits", "top-k, pipeline", "offload"]))
def test_one_bad_row_leaves_the_whole_state_as_it_was(tiny, case):
    """Bit for bit, moments, residuals and offloaded rows too; and the step after it is a good one."""
    setup = with_bad_rows(prepare(tiny(**CASES[case])))
    step = compile_step(setup)
    batches = _batches(setup, 0)
    state, _ = step.step(step.init(), global_batch(setup, next(batches)))
    state = step.flush(state)
    before = kept(state)
    assert len(before) > 15 and all(np.isfinite(leaf).all() for leaf in before)
    for skipped, token in enumerate((LOSS, GRADIENT_ALONE), 1):
        rows = next(batches).copy()
        rows[ROW] = token
        state, metrics = step.step(state, global_batch(setup, rows))
        state = step.flush(state)
        assert int(metrics.bad_steps) == int(state.skipped) == skipped and not np.isfinite(metrics.grad_norm)
        assert np.isfinite(metrics.loss) == (token == GRADIENT_ALONE)
        for one, other in zip(before, kept(state), strict=True):
            assert one.tobytes() == other.tobytes()
    state, metrics = step.step(state, global_batch(setup, next(batches)))
    assert int(metrics.bad_steps) == 0 and np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm)
    after = kept(step.flush(state))
    assert all(np.isfinite(leaf).all() for leaf in after)
    assert sum(one.tobytes() != other.tobytes() for one, other in zip(before, after, strict=True)) > len(after) / 2
