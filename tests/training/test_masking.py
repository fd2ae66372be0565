"""BERT's corruption: how many positions, which, by what, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.families.family import masked_positions
from jhpt.models.masking import mask_tokens
from jhpt.training.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
ROWS, LENGTH, FRACTION = 512, 130, 0.15
CHOSEN = 19  # 0.15 x 128 = 19.2


def sentences(rows, length, seed=0):
    """[CLS] text [SEP] of random bytes, none of them special."""
    inner = np.random.default_rng(seed).integers(0, 0xF8, (rows, length - 2))
    return jnp.asarray(np.pad(inner, ((0, 0), (1, 1)))).at[:, 0].set(BYTES.start).at[:, -1].set(BYTES.separator)


@pytest.fixture(scope="module")
def original():
    return sentences(ROWS, LENGTH)


def keys(seed, rows=ROWS):
    return jax.random.split(jax.random.key(seed), rows)


@pytest.fixture(scope="module")
def masked(original):
    return mask_tokens(keys(0), original, FRACTION, BYTES)


def within_chance(hits, trials, share) -> bool:
    """Whether a count is within five standard deviations of a binomial: chance alone leaves it once in 1.7 million."""
    return abs(hits - trials * share) < 5 * (trials * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(
    ("length", "fraction", "count"),
    [(130, 0.15, 19), (512, 0.15, 76), (128, 0.15, 19), (3, 0.15, 1), (10, 0.99, 8), (102, 0.5, 50)],
)
def test_the_number_of_predictions(length, fraction, count):
    """round(fraction x (length - 2)), and at least one."""
    assert masked_positions(length, fraction) == count
    tokens = jax.ShapeDtypeStruct((4, length), jnp.int32)
    masked = jax.eval_shape(lambda keys, tokens: mask_tokens(keys, tokens, fraction, BYTES), keys(0, rows=4), tokens)
    assert (masked.tokens.shape, masked.positions.shape, masked.targets.shape) == ((4, length), (4, count), (4, count))


def test_positions_are_distinct_ascending_and_inside(masked):
    positions = np.asarray(masked.positions)
    assert positions.shape == (ROWS, CHOSEN)
    assert np.all(np.diff(positions, axis=1) > 0)
    assert positions.min() >= 1 and positions.max() <= LENGTH - 2  # never [CLS] or [SEP]


def test_every_position_is_as_likely(masked):
    counts = np.bincount(np.asarray(masked.positions).ravel(), minlength=LENGTH)[1:-1]
    assert all(within_chance(count, ROWS, CHOSEN / (LENGTH - 2)) for count in counts)


def test_targets_are_the_originals(original, masked):
    np.testing.assert_array_equal(masked.targets, np.take_along_axis(original, np.asarray(masked.positions), axis=1))


def test_other_positions_are_untouched(original, masked):
    chosen = np.zeros((ROWS, LENGTH), bool)
    np.put_along_axis(chosen, np.asarray(masked.positions), True, axis=1)
    np.testing.assert_array_equal(np.where(chosen, 0, masked.tokens), np.where(chosen, 0, original))
    assert masked.tokens.dtype == original.dtype


def test_four_fifths_are_masked_a_tenth_random_a_tenth_kept(masked):
    """A random id hits [MASK] or the original once in 256 each."""
    targets = np.asarray(masked.targets)
    replaced = np.take_along_axis(np.asarray(masked.tokens), np.asarray(masked.positions), axis=1)
    trials, chance = targets.size, 0.1 / BYTES.vocab_size
    assert within_chance((replaced == BYTES.mask).sum(), trials, 0.8 + chance)
    assert within_chance((replaced == targets).sum(), trials, 0.1 + chance)
    random = replaced[(replaced != targets) & (replaced != BYTES.mask)]
    assert within_chance(random.size, trials, 0.1 - 2 * chance)
    assert random.min() >= 0 and random.max() < BYTES.vocab_size
    assert within_chance((random < BYTES.vocab_size // 2).sum(), random.size, 0.5)


def test_the_key_decides(original, masked):
    again, other = (mask_tokens(keys(seed), original, FRACTION, BYTES) for seed in (0, 1))
    for first, second in zip(masked, again, strict=True):
        np.testing.assert_array_equal(first, second)
    assert np.any(np.asarray(masked.positions) != np.asarray(other.positions))


def test_a_row_is_masked_by_its_own_key(original, masked):
    """Whatever rows it is masked together with, and in whatever order."""
    some = np.array([300, 7, 8, 511])
    alone = mask_tokens(keys(0)[some], original[some], FRACTION, BYTES)
    for first, second in zip(masked[:3], alone[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(first)[some], second)
    same = mask_tokens(keys(0)[np.array([5, 5])], original[:2], FRACTION, BYTES)
    np.testing.assert_array_equal(same.positions[0], same.positions[1])


def test_compiled_is_the_same(original, masked):
    compiled = jax.jit(lambda keys, tokens: mask_tokens(keys, tokens, FRACTION, BYTES))(keys(0), original)
    for first, second in zip(masked, compiled, strict=True):
        np.testing.assert_array_equal(first, second)
