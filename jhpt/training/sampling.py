"""Text from a model that generates: the sample at the end of a run."""

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.models.family import Model
from jhpt.sharding.types import Params

TEMPERATURE = 0.8
"""Logits are divided by it: below 1, likely tokens become likelier."""


def sample(model: Model, params: Params, prompt: np.ndarray, new_tokens: int, key: jax.Array) -> np.ndarray:
    """Continues `prompt` [n] by `new_tokens` tokens drawn from softmax(logits / TEMPERATURE); returns all of them.

    Every token reads the last `max_length` positions again, without a key/value cache: this is for a short look, not
    for serving.
    """
    total = len(prompt) + new_tokens
    window = min(model.config.max_length, total)
    tokens = jnp.zeros(total, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt, jnp.int32))

    @jax.jit
    def run(params: Params, tokens: jax.Array, key: jax.Array) -> jax.Array:
        def extend(position: jax.Array, tokens: jax.Array) -> jax.Array:
            first = jnp.maximum(position - window, 0)
            seen = jax.lax.dynamic_slice(tokens, (first,), (window,))
            logits = model.apply(params, seen[None])[0, position - 1 - first]
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / TEMPERATURE)
            return tokens.at[position].set(drawn.astype(jnp.int32))

        return jax.lax.fori_loop(len(prompt), total, extend, tokens)

    return np.asarray(run(params, tokens, key))
