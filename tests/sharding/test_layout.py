"""Rules, meshes and where the bytes are."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jhpt.core.config import ParallelConfig
from jhpt.core.errors import InputError
from jhpt.sharding.mesh import make_mesh
from jhpt.sharding.rules import parameter_spec, path_name
from jhpt.training.programs import abstract_state
from jhpt.training.setup import prepare
from jhpt.training.step import init_state


def test_tensor_groups_are_neighbours():
    mesh = make_mesh(ParallelConfig(data=2, tensor=4), 16, jax.devices())
    assert [[device.id for device in group] for group in mesh.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_data_degree_defaults_to_the_rest():
    assert dict(make_mesh(ParallelConfig(tensor=2), 16, jax.devices()).shape) == {"data": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(data=16), "needs 16 devices, and there are 8"),
        (ParallelConfig(tensor=3, data=3), "needs 9 devices"),
        (ParallelConfig(), "parallel.data to 1, 2 or 4"),  # batch 12 does not divide by 8
    ],
)
def test_impossible_meshes_are_refused(parallel, words):
    with pytest.raises(InputError, match=words):
        make_mesh(parallel, 12, jax.devices())


@pytest.mark.parametrize(
    ("path", "shape", "plain", "zero"),
    [
        ("embedding/tokens", (256, 64), P("tensor", None), P("tensor", "data")),
        ("embedding/positions", (32, 64), P(None, None), P(None, "data")),
        ("blocks/attention/qkv/kernel", (2, 64, 8, 3, 8), *(P(None, d, "tensor", None, None) for d in (None, "data"))),
        ("blocks/attention/qkv/bias", (2, 8, 3, 8), *[P(None, "tensor", None, None)] * 2),
        ("blocks/attention/projection/kernel", (2, 64, 64), P(None, "tensor", None), P(None, "tensor", "data")),
        ("blocks/mlp/up/kernel", (2, 64, 2, 128), P(None, None, None, "tensor"), P(None, "data", None, "tensor")),
        ("blocks/mlp/down/kernel", (2, 128, 64), P(None, "tensor", None), P(None, "tensor", "data")),
        ("blocks/mlp_norm/scale", (2, 64), P(None, None), P(None, None)),
        ("1/mu/blocks/mlp/down/kernel", (2, 128, 64), P(None, "tensor", None), P(None, "tensor", "data")),
        ("1/count", (), P(), P()),
        ("head/norm/scale", (63,), P(None), P(None)),
        ("embedding/types", (2, 63), P(None, None), P("data", None)),
    ],
)
def test_rules(path, shape, plain, zero):
    assert parameter_spec(path, shape, 2, shard_over_data=False) == plain
    assert parameter_spec(path, shape, 2, shard_over_data=True) == zero


@pytest.mark.parametrize(("zero", "params_share", "moments_share"), [(0, 2, 2), (1, 2, 8), (3, 8, 8)])
def test_zero_divides_what_it_says(tiny, zero, params_share, moments_share):
    """Bytes of matrices per device on data 4 x tensor 2: the tensor axis always halves what it shards."""
    setup = prepare(tiny(**{"parallel.data": 4, "parallel.tensor": 2, "parallel.zero": zero}))
    state = abstract_state(setup, lambda: init_state(setup.model.init(jax.random.key(0)), setup.optimizer))

    def share(tree, name):
        leaf = next(leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if path_name(path).endswith(name))
        return np.prod(leaf.shape) // np.prod(leaf.sharding.shard_shape(leaf.shape))

    for name in ("embedding/tokens", "mlp/up/kernel", "mlp/down/kernel", "qkv/kernel", "projection/kernel"):
        assert share(state.params, name) == params_share
        assert share(state.optimizer, f"mu/{name}" if "embedding" in name else name) == moments_share
