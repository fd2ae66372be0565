"""Loss and every gradient on a mesh of eight devices equal one device, in float32."""

import itertools

import jax
import numpy as np
import pytest

from jhpt.sharding.rules import path_name
from jhpt.training.data.batches import shuffled
from jhpt.training.programs import abstract_state, global_batch
from jhpt.training.setup import prepare
from jhpt.training.step import batch_gradients, init_state
from tests.covers import pairwise

pytestmark = pytest.mark.usefixtures("strict")

MODELS = {
    "gpt-tied": {"model.dropout": 0.1},
    "gpt-untied": {
        "model.d_model": 64,
        "model.num_heads": 16,
        "model.num_kv_heads": 8,
        "model.positions": "rotary",
        "model.norm": "rmsnorm",
        "model.activation": "swiglu",
        "model.bias": False,
        "model.tied": False,
        "model.vocab_size": 300,  # padded to 384
    },
    "bert": {"model.dropout": 0.1},
}
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
CASES = [MODELS, MESHES, (0, 1, 3), (1, 2)]

ZERO_GRADIENT = {"pooler/kernel", "pooler/bias"}
"""Masked-LM training does not reach the pooler.  (A key bias has a zero gradient too: part of the qkv leaf here.)"""

_reference: dict = {}


def gradients(config):
    """(gradients by path, loss) of one batch at the initial parameters, laid out as a training step does."""
    setup = prepare(config)
    state = abstract_state(setup, lambda: init_state(setup.model.init(jax.random.key(0)), setup.optimizer))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    params = jax.jit(lambda: setup.model.init(jax.random.key(config.seed)), out_shardings=shardings)()
    rows = shuffled(setup.train_windows, 0)
    windows = global_batch(setup, np.stack([rows[i] for i in range(config.data.batch_size)]))

    def run(params, windows):
        grads, sums = batch_gradients(
            setup.objective, params, windows, jax.random.key(7), config.parallel.micro_batches
        )
        return grads, sums.nll / sums.tokens

    placed = (setup.layout.optimizer(state.params), setup.layout.replicated)
    grads, loss = jax.jit(run, out_shardings=placed)(params, windows)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {path_name(path): np.asarray(leaf, np.float64) for path, leaf in leaves}, float(loss)


def reference(tiny, name, micro_batches):
    """The same on one device; micro-batches draw their own dropout masks, so they are kept."""
    key = (name, micro_batches)
    if key not in _reference:
        overrides = MODELS[name] | {"parallel.data": 1, "parallel.micro_batches": micro_batches}
        _reference[key] = gradients(tiny(preset_of(name), **overrides))
    return _reference[key]


def preset_of(name):
    return "bert-tiny" if name == "bert" else "gpt-tiny"


def check(tiny, name, mesh, zero, micro_batches):
    data, tensor = mesh
    overrides = {"parallel.data": data, "parallel.tensor": tensor, "parallel.zero": zero}
    config = tiny(preset_of(name), **MODELS[name], **overrides, **{"parallel.micro_batches": micro_batches})
    grads, loss = gradients(config)
    expected, expected_loss = reference(tiny, name, micro_batches)

    assert abs(loss - expected_loss) <= 1e-5 * abs(expected_loss)
    assert grads.keys() == expected.keys()
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        error = np.abs(grads[path] - leaf).max()
        assert error <= 1e-5 * largest, path
        if path in ZERO_GRADIENT:
            assert error == 0 and not leaf.any(), path
        else:
            assert error <= 1e-5 * np.abs(leaf).max(), path


@pytest.mark.parametrize(("name", "mesh", "zero", "micro_batches"), pairwise(*map(tuple, CASES)))
def test_gradients_equal_one_device(tiny, name, mesh, zero, micro_batches):
    check(tiny, name, mesh, zero, micro_batches)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mesh", "zero", "micro_batches"), list(itertools.product(*CASES)))
def test_gradients_equal_one_device_everywhere(tiny, name, mesh, zero, micro_batches):
    check(tiny, name, mesh, zero, micro_batches)


@pytest.mark.parametrize("name", ["gpt-tied", "gpt-untied"])
def test_micro_batches_add_up_to_the_batch(tiny, name):
    """Without dropout, accumulation changes rounding only.  (BERT masks each micro-batch by a key of its own.)"""
    overrides = MODELS[name] | {"model.dropout": 0.0, "parallel.data": 1}
    whole, loss = gradients(tiny(**overrides))
    pieces, pieces_loss = gradients(tiny(**overrides, **{"parallel.micro_batches": 4}))
    assert abs(loss - pieces_loss) <= 1e-5 * abs(loss)
    for path, leaf in whole.items():
        assert np.abs(pieces[path] - leaf).max() <= 1e-5 * np.abs(leaf).max(), path
