"""VGG and the perceptron on eight devices: loss and every gradient equal one device, in float32."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks.execution import Examples, class_execution
from benchmarks.networks.mlp import MLP
from benchmarks.networks.vgg import VGG
from jhpt.core.families.vgg import VGGConfig
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.sharding.layout import Layout
from jhpt.sharding.mesh import make_device_mesh
from jhpt.sharding.partition import path_name
from tests.covers import quick_and_exhaustive

pytestmark = pytest.mark.usefixtures("strict")

BATCH = 16
MLP_NETWORK = MLP(inputs=12, width=16, hidden=32, num_blocks=6, classes=24)
VGG_NETWORK = VGG(
    config=VGGConfig(image_size=16, convolutions=((8,), (8, 16), (16, 16)), dense=(32, 24), num_classes=16)
)
"""Convolutions 1 + 4 and dense layers 2 + 1, the first and the last of which are the ends."""


def make_plan(network, degrees, *, devices=4, micro_batches=1, zero=0, schedule="1f1b", cuts=(), chunks=1):
    """degrees: one for all layers, or one each.  cuts: the first layers of all parts but the first."""
    layers = network.num_blocks + 2
    degrees = [degrees] * layers if isinstance(degrees, int) else degrees
    edges = [0, *cuts, layers]
    parts = [Chunk(first=a, runs=runs_of(degrees[a:b])) for a, b in itertools.pairwise(edges)]
    pipe = len(parts) // chunks
    per_stage = devices // pipe
    stages = tuple(Stage(device=s * per_stage, devices=per_stage, chunks=tuple(parts[s::pipe])) for s in range(pipe))
    return Plan(
        model="network",
        cluster="test",
        batch=BATCH,
        micro_batches=micro_batches,
        schedule="interleaved" if chunks > 1 else schedule,
        zero=zero,
        stages=stages,
    )


def examples(network):
    """A batch of random inputs with random classes."""
    rng = np.random.default_rng(1)
    shape = (network.size, network.size, network.channels) if isinstance(network, VGG) else (network.inputs,)
    inputs = rng.normal(size=(BATCH, *shape)).astype(np.float32)
    return Examples(inputs, rng.integers(0, network.classes, BATCH).astype(np.int32))


def parameters(network):
    """Initial ones, with biases that are not zero."""
    params = jax.jit(network.init)(jax.random.key(0))
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), params
    )


def gradients(network, plan):
    """(gradients by path, loss, norm) of one batch at the initial parameters, and the loss of a forward pass alone."""
    layout = Layout(
        plan=plan, device_mesh=make_device_mesh(plan, jax.devices()), num_layers=network.num_blocks, alike=network.alike
    )
    execution = class_execution(network, layout)
    rows = jax.tree.map(lambda leaf: jax.device_put(leaf, layout.batch), examples(network))
    params = parameters(network)
    shardings = layout.shardings(jax.eval_shape(layout.stored, params))
    stored = jax.jit(layout.stored, out_shardings=shardings)(params)

    @jax.jit
    def run(stored):
        grads, sums = execution.gradients(stored, rows, jax.random.key(7))
        alone = execution.sums(stored, rows, jax.random.key(7))
        return layout.model_tree(grads, execution.tied), sums, alone, execution.norm(grads)

    back, sums, alone, norm = run(stored)
    leaves = {path_name(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree_util.tree_leaves_with_path(back)}
    return leaves, float(sums.loss / sums.tokens), float(norm), float(alone.loss / alone.tokens)


_reference = {}


def reference(network):
    """The same on one device, in one piece."""
    if network not in _reference:
        _reference[network] = gradients(network, make_plan(network, 1, devices=1))
    return _reference[network]


def check(network, plan):
    actual, loss, norm, alone = gradients(network, plan)
    expected, expected_loss, expected_norm, _ = reference(network)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert alone == pytest.approx(expected_loss, rel=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        assert np.abs(leaf).max() > 0, path
        assert np.abs(actual[path] - leaf).max() <= 2e-5 * np.abs(leaf).max(), path


VGG_PLANS = {
    "data": dict(degrees=1),
    "data, micro-batches, ZeRO-1": dict(degrees=1, micro_batches=2, zero=1),
    "data, ZeRO-3": dict(degrees=1, zero=3),
    "tensor": dict(degrees=4),
    "tensor 8": dict(degrees=8, devices=8, micro_batches=2),
    "hybrid": dict(degrees=[1, 1, 1, 1, 1, 4, 4, 4]),
    "hybrid, micro-batches": dict(degrees=[1, 1, 1, 1, 2, 4, 4, 4], micro_batches=2),
    "hybrid, 8 devices, ZeRO-1": dict(degrees=[2, 2, 1, 1, 4, 8, 8, 4], devices=8, zero=1),
    "hybrid, back": dict(degrees=[4, 1, 4, 2, 1, 4, 1, 2], micro_batches=4, zero=3),
}


@pytest.mark.parametrize("name", quick_and_exhaustive(VGG_PLANS, ["hybrid"]))
def test_vgg(name):
    check(VGG_NETWORK, make_plan(VGG_NETWORK, **VGG_PLANS[name]))


MLP_PLANS = {
    "data": dict(degrees=1, devices=8),
    "tensor": dict(degrees=4, micro_batches=2),
    "hybrid": dict(degrees=[1, 1, 2, 2, 2, 4, 4, 4], devices=8, micro_batches=2, zero=1),
    "ZeRO-3": dict(degrees=2, devices=8, zero=3),
    "pipe 2, 1f1b": dict(degrees=1, cuts=(4,), micro_batches=4),
    "pipe 2, uneven, tensor, gpipe": dict(degrees=2, cuts=(3,), devices=8, micro_batches=4, schedule="gpipe"),
    "pipe 4, 1f1b, ZeRO-1": dict(degrees=1, cuts=(2, 4, 6), devices=8, micro_batches=8, zero=1),
    "pipe 4, gpipe": dict(degrees=1, cuts=(2, 4, 6), micro_batches=2, schedule="gpipe"),
    "pipe 4, head alone, ZeRO-3": dict(degrees=1, cuts=(3, 5, 7), devices=8, micro_batches=4, zero=3),
    "pipe 2, interleaved": dict(degrees=2, cuts=(2, 4, 6), chunks=2, micro_batches=4),
}


@pytest.mark.parametrize(
    "name",
    quick_and_exhaustive(MLP_PLANS, ["hybrid", "pipe 4, head alone, ZeRO-3", "pipe 2, interleaved"]),
)
def test_mlp(name):
    check(MLP_NETWORK, make_plan(MLP_NETWORK, **MLP_PLANS[name]))
