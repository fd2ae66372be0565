"""Masking of tokens for BERT (Devlin et al. 2018, section 3.1), on the device, from the key of the step."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jhpt.core.families.family import masked_positions


class SpecialTokens(Protocol):
    """A tokenizer as models see it: the number of its ids, and the id of `[MASK]`."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def mask(self) -> int | None:
        """The id of `[MASK]`."""


class Masked(NamedTuple):
    """tokens [B, S]: what the model reads.  positions [B, n]: where it predicts, ascending.  targets [B, n]: the tokens
    to predict."""

    tokens: jax.Array
    positions: jax.Array
    targets: jax.Array


def mask_tokens(keys: jax.Array, tokens: jax.Array, fraction: float, tokenizer: SpecialTokens) -> Masked:
    """Chooses `masked_positions(S, fraction)` positions of each row of tokens[B, S], uniformly without replacement.

    Of the chosen tokens 80 % become `[MASK]`, 10 % a uniformly drawn id, 10 % stay.  The number is the same for every
    row, so the head runs on n positions instead of S.  keys: [B]; a row's masks depend on its own key only.
    """
    return jax.vmap(lambda key, row: _mask_row(key, row, fraction, tokenizer))(keys, tokens)


def _mask_row(key: jax.Array, tokens: jax.Array, fraction: float, tokenizer: SpecialTokens) -> Masked:
    length = len(tokens)
    select_key, kind_key, random_key = jax.random.split(key, 3)
    score = jax.random.uniform(select_key, (length - 2,))
    positions = jnp.sort(jax.lax.top_k(score, masked_positions(length, fraction))[1]) + 1
    targets = tokens[positions]

    kind = jax.random.uniform(kind_key, targets.shape)
    random = jax.random.randint(random_key, targets.shape, 0, tokenizer.vocab_size, tokens.dtype)
    replaced = jnp.where(kind < 0.8, jnp.asarray(tokenizer.mask, tokens.dtype), jnp.where(kind < 0.9, random, targets))
    return Masked(tokens.at[positions].set(replaced), positions, targets)
