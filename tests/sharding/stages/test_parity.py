"""Plans whose stages have devices, degrees and replicas of their own: loss, every gradient and their norm are
those of one device, in float32."""

import jax
import numpy as np
import pytest

from benchmarks.networks.execution import class_execution
from jhpt.models.family import Rows
from jhpt.sharding.stages.execution import StagesExecution
from jhpt.sharding.stages.layout import place_stages
from jhpt.training.setup import execution, prepare
from tests.sharding import test_networks as networks
from tests.sharding.plans import batch, by_path, compiled, laid_out, mixed, random_params, stored
from tests.sharding.stages.plans import KEY, found, general, random_plan, text

pytestmark = pytest.mark.usefixtures("strict")

BLOCKS, BATCH = 3, 16
MODELS = {
    "gpt-tied": {},
    "gpt-untied": {"model.tied": False, "model.positions": "rotary", "model.norm": "rmsnorm", "model.dropout": 0.1},
    "bert": {"model.dropout": 0.1},
}

_known: dict = {}


@pytest.fixture
def setup_of(tiny):
    """Makes the setup of a model."""

    def make(name):
        overrides = MODELS[name] | {"model.num_layers": BLOCKS, "data.batch_size": BATCH}
        return prepare(tiny("bert-tiny" if name == "bert" else "gpt-tiny", **overrides))

    return make


def one_device(setup_of, name):
    """(setup, parameters, gradients by path, loss) without any plan that cuts something."""
    if name not in _known:
        setup = setup_of(name)
        setup = laid_out(setup, mixed([1] * (BLOCKS + 2), 1, batch=BATCH))
        params, rows = random_params(setup), Rows(jax.device_put(batch(setup, BATCH), setup.layout.batch))
        gradients, sums = compiled(setup.training.gradients, stored(setup, params), rows, jax.random.key(KEY))
        _known[name] = setup, params, by_path(gradients), float(sums.nll / sums.tokens)
    return _known[name]


def check(actual, expected):
    leaves, loss, norm, _ = actual
    gradients, expected_loss = expected
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert leaves.keys() == gradients.keys()
    largest = max(np.abs(leaf).max() for leaf in gradients.values())
    for path, leaf in gradients.items():
        assert np.abs(leaves[path] - leaf).max() <= 1e-5 * largest, path
    assert norm == pytest.approx(sum(np.sum(leaf**2) for leaf in gradients.values()) ** 0.5, rel=1e-5)


def check_text(setup_of, name, plan):
    setup, params, *expected = one_device(setup_of, name)
    model = setup.model
    layout = place_stages(plan, jax.devices(), BLOCKS, shared=model.head_reads, rules=model.partition_rules)
    made = [execution(setup.config, model, chunk.layout, setup.tokenizer, train=True) for chunk in layout.chunks]
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rows = Rows(batch(setup, BATCH))
    actual = found(StagesExecution(layout=layout, executions=tuple(made), params=shapes, rows=rows), params, rows)
    check(actual, expected)
    return actual


def check_network(network, plan):
    layout = place_stages(plan, jax.devices(), network.num_blocks, alike=network.alike)
    made = tuple(class_execution(network, chunk.layout) for chunk in layout.chunks)
    params, rows = networks.parameters(network), networks.examples(network)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    actual = found(StagesExecution(layout=layout, executions=made, params=shapes, rows=rows), params, rows)
    gradients, loss, *_ = networks.reference(network)
    check(actual, (gradients, loss))
    assert actual[3] == pytest.approx(loss, rel=1e-5)


BY_HAND = {
    "tied, 3|1, uneven samples": ("gpt-tied", general([3, 2], [3, 1], [1] * 5, micro_batches=4)),
    "tied, embedding and head of other degrees": ("gpt-tied", general([1, 3, 1], [2, 1, 4], [2, 1, 1, 1, 4])),
    "interleaved": (
        "gpt-untied",
        general([2, 1, 1, 1], [2, 1], [2, 1, 1, 1, 1], micro_batches=2, schedule="interleaved"),
    ),
    "one stage, uneven samples": ("gpt-tied", general([5], [3], [1] * 5, micro_batches=2)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(setup_of, name):
    check_text(setup_of, *BY_HAND[name])


def random_cases():
    """24 plans, of which four run always."""
    names = [*MODELS, "vgg"]
    for seed in range(24):
        name = names[seed % 4]
        layers, size = (8, networks.BATCH) if name == "vgg" else (BLOCKS + 2, BATCH)
        plan = random_plan(seed, layers, batch=size, most_tensor=4)
        yield pytest.param(name, plan, id=f"{name} {text(plan)}", marks=() if seed < 4 else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "plan"), list(random_cases()))
def test_random(setup_of, name, plan):
    if name == "vgg":
        check_network(networks.VGG_NETWORK, plan)
    else:
        check_text(setup_of, name, plan)
