"""Copies of the state that differ: which device is named, and that it holds what the others do afterwards."""

import jax
import numpy as np
import pytest

import jhpt
from jhpt.core.errors import InputError
from jhpt.sharding.partition import path_name
from jhpt.training.compile import replicas_of
from jhpt.training.device_step import abstract_state, fresh_state
from jhpt.training.replicas import Replicas, ReplicasDiffer
from jhpt.training.setup import prepare
from tests.conftest import tiny_overrides
from tests.covers import quick_and_exhaustive

NORM, MATRIX = "params/blocks/mlp_norm/scale", "params/blocks/mlp/up/kernel"
MEAN, COUNT = "optimizer/0/mu/blocks/mlp/up/kernel", "optimizer/0/count"
CODES, REMAINDER = "optimizer/0/mu/codes/blocks/mlp/up/kernel", "remainder/blocks/mlp/up/kernel"

PLANS = {
    "data": {"parallel": {"data": 8}, "copies": {NORM: 8, MATRIX: 8, MEAN: 8, COUNT: 8}},
    "data, low precision": {
        "parallel": {"data": 8},
        "changes": {"optimizer.weights": "bfloat16_kahan", "optimizer.moments": "int8"},
        "copies": {MATRIX: 8, REMAINDER: 8, CODES: 8},
    },
    "data x tensor": {"parallel": {"data": 4, "tensor": 2}, "copies": {NORM: 8, MATRIX: 4, MEAN: 4}},
    "ZeRO-1": {"parallel": {"data": 4, "tensor": 2, "zero": 1}, "copies": {NORM: 8, MATRIX: 1, MEAN: 1, COUNT: 8}},
    "hybrid sharding": {
        "parallel": {"data": 8, "zero": 1, "zero_ranks": 2},
        "copies": {NORM: 8, MATRIX: 4, MEAN: 4, COUNT: 8},
    },
    "pipeline x data": {
        "parallel": {"data": 4, "pipe": 2, "micro_batches": 2},
        "copies": {NORM: 4, MATRIX: 4, MEAN: 4, COUNT: 8},
    },
}
"""By the plan, how many copies there are of arrays."""


def setup_of(tiny, plan, **changes):
    parallel = {f"parallel.{name}": value for name, value in plan.items()}
    blocks = {"model.num_layers": plan.get("pipe", 1)}
    return prepare(tiny(**{"guards.replicas_every": 2} | blocks | parallel | changes))


def state_of(setup):
    """Before the first step."""
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(setup))
    return jax.jit(lambda: fresh_state(setup), out_shardings=places)()


def flipped(tree, path, *devices, bit=0):
    """A copy of the tree with a bit of the leaf at this path flipped on these devices, by their places in the mesh."""

    def copied(at, leaf):
        order, shards = list(leaf.sharding.mesh.devices.flat), []
        for shard in leaf.addressable_shards:
            data = np.array(shard.data)
            if path_name(at) == path and order.index(shard.device) in devices:
                data.reshape(-1).view(np.uint8)[0] ^= 1 << bit
            shards.append(jax.device_put(data, shard.device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return jax.tree_util.tree_map_with_path(copied, tree)


def shards_of(state):
    """What each device holds of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        (path_name(path), shard.device.id): np.asarray(shard.data).tobytes()
        for path, leaf in leaves
        for shard in leaf.addressable_shards
    }


@pytest.mark.parametrize("plan", PLANS)
def test_a_flipped_bit_is_named_and_repaired(tiny, plan, capsys):
    """On device 5, in each array of which the plan keeps copies; where it keeps none, there is nothing to tell from."""
    setup = setup_of(
        tiny, PLANS[plan]["parallel"], **PLANS[plan].get("changes", {}), **{"guards.repair_replicas": True}
    )
    replicas = replicas_of(setup, print)
    state = state_of(setup)
    assert not replicas.differences(state)
    sound = shards_of(state)
    for bit, (path, copies) in enumerate(PLANS[plan]["copies"].items()):
        spoilt = flipped(state, path, 5, bit=bit)
        assert shards_of(spoilt) != sound
        if copies == 1:
            assert not replicas.differences(spoilt)
            continue
        (found,) = replicas.differences(spoilt)
        assert (found.devices, len(found.group)) == ((5,), copies)
        assert shards_of(replicas.checked(4, spoilt)) == sound
        who = f"device 5 of process 0 holds other numbers than {copies - 1} others in {path}"
        assert capsys.readouterr().out == f"warning: step 4: {who}; repaired\n"


def test_several_arrays_on_several_devices_are_repaired_at_once(tiny):
    setup = setup_of(tiny, {"data": 4, "tensor": 2}, **{"guards.repair_replicas": True})
    said: list[str] = []
    replicas = replicas_of(setup, said.append)
    state = state_of(setup)
    sound = shards_of(state)
    spoilt = flipped(flipped(flipped(state, NORM, 0, 7), MATRIX, 0, bit=7), COUNT, 3)
    assert shards_of(replicas.checked(4, spoilt)) == sound
    assert said == [
        "warning: step 4: device 0 of process 0, device 3 of process 0 and device 7 of process 0 hold other numbers "
        f"than 3 others in {MATRIX} and 2 more arrays; repaired"
    ]


def test_two_copies_do_not_say_which_is_right(tiny):
    """Whichever is flipped: both are named, and nothing is repaired."""
    setup = setup_of(tiny, {"data": 2}, **{"guards.repair_replicas": True})
    replicas, state = replicas_of(setup, print), state_of(setup)
    for device in (0, 1):
        with pytest.raises(
            ReplicasDiffer, match="device 0 of process 0 and device 1 of process 0 hold different numbers"
        ):
            replicas.checked(4, flipped(state, MATRIX, device))


def test_a_difference_is_not_repaired_unasked(tiny):
    setup = setup_of(tiny, {"data": 4})
    with pytest.raises(ReplicasDiffer, match=r"guards\.repair_replicas=true") as error:
        replicas_of(setup, print).checked(4, flipped(state_of(setup), MATRIX, 2))
    assert (
        "step 4: device 2 of process 0 holds other numbers than 3 others" in str(error.value)
        and error.value.status == 8
    )


def test_nothing_to_compare_is_refused(tiny):
    with pytest.raises(InputError, match="nothing to compare"):
        replicas_of(setup_of(tiny, {"data": 1, "pipe": 2, "micro_batches": 2}), print)
    assert replicas_of(prepare(tiny()), print) is None


TRAINED = {
    "pipeline": {"data": 2, "pipe": 2, "tensor": 2, "micro_batches": 2},
    "compressed": {"data": 4, "gradient_compression": "topk"},
    "offload": {"data": 4},
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("plan", quick_and_exhaustive(TRAINED, ["pipeline", "offload"]))
def test_copies_stay_the_same_in_training(tmp_path, corpus, plan, monkeypatch, capsys):
    """After each of four steps, but for a bit that flips after the third and is repaired."""
    settings = tiny_overrides(corpus) | {f"parallel.{name}": value for name, value in TRAINED[plan].items()}
    settings |= {"guards.replicas_every": 1, "guards.repair_replicas": True}
    settings |= {"memory.offload": "both", "model.num_layers": 1} if plan == "offload" else {}
    checked, steps = Replicas.checked, []

    def spoilt(self, step, state):
        path = "embedding_and_head/head/norm/scale" if plan == "offload" else "params/head/norm/scale"
        steps.append(step)
        return checked(self, step, flipped(state, path, 1) if step == 3 and plan != "offload" else state)

    monkeypatch.setattr(Replicas, "checked", spoilt)
    jhpt.train("gpt-tiny", overrides=settings, out=tmp_path)
    said = capsys.readouterr().out
    assert steps == [1, 2, 3, 4] and said.count("other numbers") == (plan != "offload")
    assert plan == "offload" or "step 3: device 1 of process 0 holds other numbers than 3 others" in said
