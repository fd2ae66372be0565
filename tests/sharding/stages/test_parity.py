"""Plans whose stages have devices, degrees and replicas of their own: loss, every gradient and their norm are
those of one device, in float32."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from jhpt.core.load import load_config
from jhpt.models.family import Rows
from jhpt.sharding.stages.execution import StagesExecution
from jhpt.sharding.stages.layout import place_stages
from jhpt.training.setup import execution, prepare
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import batch, by_path, compiled, laid_out, mixed, random_params, stored
from tests.sharding.stages.plans import KEY, found, general, random_plan, text
from tests.sharding.traced import equations, products

pytestmark = pytest.mark.usefixtures("strict")

BLOCKS, BATCH = 3, 16
MODELS = {
    "gpt-tied": {},
    "gpt-untied": {"model.tied": False, "model.positions": "rotary", "model.norm": "rmsnorm", "model.dropout": 0.1},
    "bert": {"model.dropout": 0.1},
}
VGG = {
    "model.image_size": 16,
    "model.convolutions": [[8], [8, 16], [16, 16]],
    "model.dense": [32, 24],
    "data.images": 32,
    "data.batch_size": BATCH,
}
"""Convolutions 1 + 4 and dense layers 2 + 1, the first and the last of which are the ends."""

_known: dict = {}


@pytest.fixture
def setup_of(tiny):
    """Makes the setup of a model."""

    def make(name):
        if name == "vgg":
            return prepare(load_config("vgg16-tiny", VGG))
        overrides = MODELS[name] | {"model.num_layers": BLOCKS, "data.batch_size": BATCH}
        return prepare(tiny("bert-tiny" if name == "bert" else "gpt-tiny", **overrides))

    return make


def one_device(setup_of, name):
    """(setup, parameters, gradients by path, loss) without any plan that cuts something."""
    if name not in _known:
        setup = setup_of(name)
        setup = laid_out(setup, mixed([1] * (setup.config.model.num_layers + 2), 1, batch=BATCH))
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


def executed(setup, plan, *, overlap=False):
    model, shape = setup.model, setup.config.model
    ends = {"shared": model.head_reads, "rules": model.partition_rules}
    layout = place_stages(plan, jax.devices(), shape.num_layers, alike=shape.alike, **ends)
    made = [execution(setup.config, model, chunk.layout, setup.tokenizer, train=True) for chunk in layout.chunks]
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    made = [replace(one, overlap=overlap, unroll=one.unroll and not overlap) for one in made]  # as on a GPU
    return StagesExecution(layout=layout, executions=tuple(made), params=shapes, rows=Rows(batch(setup, BATCH)))


def check_plan(setup_of, name, plan, *, overlap=False):
    setup, params, *expected = one_device(setup_of, name)
    execution = executed(setup, plan, overlap=overlap)
    actual = found(execution, params, execution.rows)
    check(actual, expected)
    return actual


BY_HAND = {
    "tied, 3|1, uneven samples": ("gpt-tied", general([3, 2], [3, 1], [1] * 5, micro_batches=4)),
    "tied, embedding and head of other degrees": ("gpt-tied", general([1, 3, 1], [2, 1, 4], [2, 1, 1, 1, 4])),
    "interleaved": (
        "gpt-untied",
        general([2, 1, 1, 1], [2, 1], [2, 1, 1, 1, 1], micro_batches=2, schedule="interleaved"),
    ),
    "one stage, uneven samples": ("gpt-tied", general([5], [3], [1] * 5, micro_batches=2)),
    "samples by speed": ("gpt-tied", general([5], [3], [1] * 5, micro_batches=2, samples=(4, 3, 1))),
    "samples by speed, tensor": ("gpt-untied", general([5], [4], [2] * 5, micro_batches=4, samples=(1, 3))),
    "vgg, samples by speed": ("vgg", general([8], [2], [1] * 8, micro_batches=2, samples=(5, 3))),
    "vgg, 3|1, uneven samples": ("vgg", general([5, 3], [3, 1], [1] * 8, micro_batches=2)),
    "vgg, 1|3, uneven samples": ("vgg", general([2, 6], [1, 3], [1] * 8, micro_batches=4)),
    "vgg, 2|1|1, tensor": ("vgg", general([4, 2, 2], [2, 1, 1], [1, 2, 2, 1, 1, 1, 1, 1], micro_batches=4)),
    "vgg, 1|4, tensor of the dense layers": ("vgg", general([5, 3], [1, 4], [1] * 5 + [4, 2, 4], micro_batches=2)),
}


OFTEN = [name for name in BY_HAND if name not in ("interleaved", "samples by speed", "samples by speed, tensor")][:5]


@pytest.mark.parametrize("name", quick_and_exhaustive(BY_HAND, OFTEN))
def test_by_hand(setup_of, name):
    check_plan(setup_of, *BY_HAND[name])


OVERLAPPED = [
    "tied, 3|1, uneven samples",
    "samples by speed",
    "tied, embedding and head of other degrees",
    "interleaved",
]


@pytest.mark.parametrize("name", quick_and_exhaustive(OVERLAPPED, OVERLAPPED[:2]))
def test_with_gradients_summed_in_the_last_backward_pass(setup_of, name):
    check_plan(setup_of, *BY_HAND[name], overlap=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_where_gradients_are_summed(setup_of, overlap):
    """With overlap the blocks' in the last micro-batch's backward pass, where each iteration of its loop sums those of
    the layer before (the first has none and drops the result); otherwise all of them after it."""
    plan = general([5], [4], [2] * 5, micro_batches=2)
    execution = executed(setup_of("gpt-untied"), plan, overlap=overlap)
    programs = execution.route.programs[0]
    data = programs.placed.device_mesh.axes(2).data
    rows = jax.eval_shape(lambda: execution.batches(execution.rows)[0])
    given = rows, jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), "int32")
    params, totals = (jax.eval_shape(each, execution.stored[0]) for each in (programs.read, programs.zeros))
    y, saved = jax.eval_shape(programs.forward, params, None, *given)

    def summed(program, *inputs):
        """(numbers that data ranks sum in loops, and elsewhere)."""
        inside = outside = 0
        for one, within in equations(jax.make_jaxpr(program)(*inputs).jaxpr):
            if one.primitive.name == "psum" and set(data) & set(one.params["axes"]):
                repeated = math.prod(outer.params["length"] for outer in within if outer.primitive.name == "scan")
                numbers = repeated * sum(var.aval.size for var in one.invars)
                inside, outside = (inside + numbers, outside) if repeated > 1 else (inside, outside + numbers)
        return inside, outside

    blocks, others = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) // plan.devices
        for tree in (totals["blocks"], {name: part for name, part in totals.items() if name != "blocks"})
    )
    inputs = totals, params, saved, y, *given
    assert summed(programs.backward, *inputs) == (0, 0)
    assert summed(programs.last_backward, *inputs) == ((blocks, blocks // BLOCKS) if overlap else (0, 0))
    assert summed(programs.finish, totals) == ((0, others) if overlap else (0, blocks + others))


def random_cases():
    """24 plans, of which four run always."""
    names = [*MODELS, "vgg"]
    for seed in range(24):
        name = names[seed % 4]
        plan = random_plan(seed, 8 if name == "vgg" else BLOCKS + 2, batch=BATCH, most_tensor=4)
        yield pytest.param(name, plan, id=f"{name} {text(plan)}", marks=() if seed < 4 else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "plan"), list(random_cases()))
def test_random(setup_of, name, plan):
    check_plan(setup_of, name, plan)


def test_a_replica_computes_its_own_samples_only(setup_of):
    execution = executed(setup_of("gpt-tied"), general([5], [3], [1] * 5, micro_batches=2, samples=(4, 1, 3)))
    params = jax.eval_shape(execution.route.programs[0].read, execution.stored[0])
    rows = jax.eval_shape(lambda: execution.batches(execution.rows)[0])
    given = rows, jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), "int32")
    forward = execution.route.programs[0].forward
    program = jax.make_jaxpr(forward)(params, None, *given).jaxpr
    (choice,) = (one for one, _ in equations(program) if one.primitive.name == "cond")
    flop = [products(branch.jaxpr) for branch in choice.params["branches"]]
    assert flop == [flop[0], 3 * flop[0], 4 * flop[0]] and flop[0] > 0
