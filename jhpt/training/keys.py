"""Random streams: every key is a function of the seed, a stream and a number, so none needs saving."""

import enum

import jax


class RandomStream(enum.IntEnum):
    """What randomness is used for."""

    INIT = 0
    STEP = 1
    EVALUATION = 2
    SAMPLE = 3
    ROUNDING = 4


def random_key(seed: int, stream: RandomStream, number: int | jax.Array = 0) -> jax.Array:
    """The key of the `number`-th use of a stream."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), int(stream)), number)
