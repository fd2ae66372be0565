"""Buckets: every number of a layer, once, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.sharding.offload.buckets import ALIGN, bucket_of

SHAPES = {"norm": {"scale": (5,)}, "up": {"kernel": (5, 30), "bias": (30,)}, "down": {"kernel": (30, 5)}, "one": ()}


def layer():
    rng = np.random.default_rng(0)
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), SHAPES, is_leaf=is_shape)


def matrix(path):
    return path.endswith("kernel")


def test_there_and_back_is_exact():
    tree = layer()
    bucket = bucket_of(tree, matrix)
    flat = bucket.packed(tree)
    assert flat.shape == (bucket.size,) and bucket.size % ALIGN == 0 and all(at % ALIGN == 0 for at in bucket.offsets)
    assert jax.tree.all(jax.tree.map(np.array_equal, bucket.unpacked(flat), tree))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert np.count_nonzero(flat) == numbers
    assert np.array_equal(jax.jit(bucket.packed)(tree), flat)


def test_matrices_decay():
    tree = layer()
    bucket = bucket_of(tree, matrix)
    marked = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.full(leaf.shape, float(matrix(jax.tree_util.keystr(path, simple=True)))), tree
    )
    decays, filled = np.asarray(bucket.decays), np.asarray(bucket.packed(jax.tree.map(jnp.ones_like, tree))) > 0
    assert np.array_equal(decays & filled, np.asarray(bucket.packed(marked)) > 0)
    assert not bucket_of(tree).decays.any()


def test_one_kind_of_numbers():
    with pytest.raises(ValueError, match="bfloat16, float32"):
        bucket_of({"a": jnp.zeros(3), "b": jnp.zeros(3, jnp.bfloat16)})
