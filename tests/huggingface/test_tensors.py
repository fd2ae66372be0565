import jax
import numpy as np
import pytest

from jhpt.huggingface.architectures import ARCHITECTURES, exported
from jhpt.huggingface.settings import Settings
from jhpt.huggingface.tensors import Heads
from jhpt.models.family import build
from jhpt.sharding.partition import path_name
from tests.huggingface.shapes import MODELS, settings_of


def leaves_of(model):
    """Shapes of the model's own tree by path."""
    shapes = jax.eval_shape(build(model).init, jax.random.key(0))
    return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}


@pytest.mark.parametrize("name", MODELS)
def test_settings_survive_the_way_there_and_back(name):
    _, tree = exported(MODELS[name])
    again = ARCHITECTURES[tree["model_type"]].settings(Settings(tree, "config.json"))
    assert settings_of(again) == settings_of(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_its_part(name):
    architecture, _ = exported(MODELS[name])
    parts = [part.leaf for part in architecture.parts(MODELS[name])]
    assert sorted(parts) == sorted(leaves_of(MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_numbers_survive_the_way_there_and_back(name):
    """Every number arrives where it was; rows of padding come back as zeros."""
    architecture, _ = exported(MODELS[name])
    shapes, rows = leaves_of(MODELS[name]), MODELS[name].vocab
    for part in architecture.parts(MODELS[name]):
        shape = shapes[part.leaf][1:] if part.layered else shapes[part.leaf]
        array = np.arange(1, 1 + np.prod(shape), dtype=np.float64).reshape(shape)
        if shape[0] == MODELS[name].padded_vocab:
            array[rows:] = 0
        split = part.split(array)
        assert len(split) == len(part.names)
        assert sorted(np.concatenate([piece.ravel() for piece in split])) == sorted(array[array > 0])
        np.testing.assert_array_equal(part.join(split), array)


def test_grouped_heads_by_hand():
    """Two key heads of width 1 with two query heads each: head h belongs to key head h // 2."""
    heads = Heads(kv=2, group=2, width=1)
    joined = heads.joined(np.array([0, 1, 2, 3]), np.array([10, 11]), np.array([20, 21]))
    assert joined[..., 0].tolist() == [[0, 1, 10, 20], [2, 3, 11, 21]]
