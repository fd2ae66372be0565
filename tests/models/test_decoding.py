"""A cache changes no token: greedy text with it is that of reading everything again; rows do not touch each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.models.decoding import CachedReader, RereadingReader, reader_of, visible
from jhpt.models.family import build
from tests.covers import quick_and_exhaustive
from tests.models.test_models import BERT, GPTS, random_params, tokens

ROOM = 16
LENGTHS = np.array([5, 1, 8], np.int32)


def greedy(reader, params, prompts, lengths, count):
    """(tokens [B, count], logits of each [B, count, V])."""
    begin = jax.jit(reader.begin, static_argnums=3)
    logits, memory = begin(params, prompts, lengths, ROOM)
    chosen, seen, positions, read = [], [], jnp.asarray(lengths), jax.jit(reader.read)
    for _ in range(count):
        chosen.append(jnp.argmax(logits, -1).astype(jnp.int32))
        seen.append(logits)
        logits, memory = read(params, memory, chosen[-1], positions)
        positions = positions + 1
    return np.stack(chosen, 1), np.stack(seen, 1)[..., :200]


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", quick_and_exhaustive(GPTS, ["gpt2", "llama"]))
def test_with_and_without_a_cache_the_tokens_are_the_same(name):
    model = build(GPTS[name])
    params, prompts = random_params(model), tokens(length=8).astype(np.int32)
    ids, logits = greedy(CachedReader(model=model), params, prompts, LENGTHS, 8)
    expected, others = greedy(RereadingReader(model=model), params, prompts, LENGTHS, 8)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(logits, others, atol=2e-5 * np.abs(others).max())
    # Both are what the whole model says about prompt and text together.
    for row, length in enumerate(LENGTHS):
        whole = np.concatenate([prompts[row, :length], ids[row]])
        plain = jax.jit(model.apply)(params, whole[None])[0, length - 1 : -1, :200]
        np.testing.assert_array_equal(np.argmax(plain, -1), ids[row])


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("reader", [CachedReader, RereadingReader])
def test_a_row_does_not_depend_on_its_batch_nor_on_what_lies_behind_its_prompt(reader):
    model = build(GPTS["llama"])
    params, prompts = random_params(model), tokens(length=8).astype(np.int32)
    together, logits = greedy(reader(model=model), params, prompts, LENGTHS, 6)
    for row, length in enumerate(LENGTHS):
        alone, others = greedy(reader(model=model), params, prompts[row : row + 1, :length], LENGTHS[row : row + 1], 6)
        np.testing.assert_array_equal(alone[0], together[row])
        np.testing.assert_allclose(others[0], logits[row], atol=2e-5 * np.abs(logits).max())
    behind = np.where(np.arange(8) < LENGTHS[:, None], prompts, (prompts + 9) % 200)
    np.testing.assert_array_equal(greedy(reader(model=model), params, behind, LENGTHS, 6)[1], logits)


def test_the_cache_is_in_the_compute_dtype():
    model = build(GPTS["llama"], dtype=jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0))
    shapes = jax.ShapeDtypeStruct((3, 8), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    _, cache = jax.eval_shape(lambda p, t, n: CachedReader(model=model).begin(p, t, n, ROOM), params, *shapes)
    assert [(leaf.shape, leaf.dtype) for leaf in cache] == [((2, 3, ROOM, 2, 8), jnp.bfloat16)] * 2


def test_a_query_sees_itself_and_what_is_before_it():
    """And with a window of two, the one before it and itself."""
    queries, keys = np.array([[[0], [2]]]), np.arange(4)[None, None]
    seen = visible(queries, keys, None)
    np.testing.assert_array_equal(seen, [[[True, False, False, False], [True, True, True, False]]])
    seen = visible(queries, keys, 2)
    np.testing.assert_array_equal(seen, [[[True, False, False, False], [False, True, True, False]]])


def test_gpt_has_a_cache_and_bert_cannot():
    assert isinstance(reader_of(build(GPTS["gpt2"])), CachedReader)
    assert isinstance(reader_of(build(BERT)), RereadingReader)
