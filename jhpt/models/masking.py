"""Masking of tokens for BERT (Devlin et al. 2018, section 3.1), on the device, from the key of the step."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

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
    to predict.  predicts [B, n]: which of them count, where rows are padded; None: all."""

    tokens: jax.Array
    positions: jax.Array
    targets: jax.Array
    predicts: jax.Array | None = None


def mask_tokens(
    keys: jax.Array,
    tokens: jax.Array,
    fraction: float,
    tokenizer: SpecialTokens,
    lengths: jax.Array | None = None,
    continues: np.ndarray | None = None,
    second: jax.Array | None = None,
) -> Masked:
    """Chooses `masked_positions(S, fraction)` positions of each row of tokens[B, S], uniformly without replacement.

    Of the chosen tokens 80 % become `[MASK]`, 10 % a uniformly drawn id, 10 % stay.  The number is the same for every
    row, so the head runs on n positions instead of S.  keys: [B]; a row's masks depend on its own key only.

    lengths: [B], of rows that are padded; None: S.  Of l tokens, `masked_positions(l, fraction)` are chosen, and the
    other ones of the n positions do not count.
    continues: [V], which ids go on with the word before.  Whole words are chosen then, all equally likely, until there
    are n positions; the last word may be cut.  (Whole-word masking of the authors' repository, google-research/bert.)
    None: tokens are chosen.
    second: [B], where the second text of a row without padding begins, after a `[SEP]` that is not chosen: of the other
    S - 1 tokens as many are as of a row of S - 1.  None: there is one text.
    """

    def one(key: jax.Array, row: jax.Array, length: jax.Array | None, begins: jax.Array | None) -> Masked:
        return _mask_row(key, row, fraction, tokenizer, length, continues, begins)

    return jax.vmap(one)(keys, tokens, lengths, second)


def _scores(key: jax.Array, tokens: jax.Array, continues: np.ndarray | None) -> jax.Array:
    """A random number for each of tokens [n], the same for all tokens of a word."""
    if continues is None:
        return jax.random.uniform(key, tokens.shape)
    words = jnp.cumsum(jnp.where(jnp.asarray(continues)[tokens], 0, 1))
    return jax.random.uniform(key, (len(tokens) + 1,))[words]


def _mask_row(
    key: jax.Array,
    tokens: jax.Array,
    fraction: float,
    tokenizer: SpecialTokens,
    inside: jax.Array | None,
    continues: np.ndarray | None,
    second: jax.Array | None,
) -> Masked:
    """inside: tokens that are not padding; None: all."""
    length = len(tokens)
    select_key, kind_key, random_key = jax.random.split(key, 3)
    score = _scores(select_key, tokens[1:-1], continues)
    if inside is not None:
        score = jnp.where(jnp.arange(length - 2) < inside - 2, score, -1.0)
    if second is not None:
        score = jnp.where(jnp.arange(length - 2) == second - 2, -1.0, score)
    count = masked_positions(length if second is None else length - 1, fraction)
    chosen = jax.lax.top_k(score, count)[1] + 1
    positions, targets = jnp.sort(chosen), tokens[jnp.sort(chosen)]

    kind = jax.random.uniform(kind_key, targets.shape)
    random = jax.random.randint(random_key, targets.shape, 0, tokenizer.vocab_size, tokens.dtype)
    replaced = jnp.where(kind < 0.8, jnp.asarray(tokenizer.mask, tokens.dtype), jnp.where(kind < 0.9, random, targets))
    if inside is None:
        return Masked(tokens.at[positions].set(replaced), positions, targets)
    counted = jnp.maximum(1, jnp.round(fraction * (inside - 2).astype(jnp.float32))).astype(jnp.int32)
    predicts = (jnp.arange(len(chosen)) < counted)[jnp.argsort(chosen)]
    replaced = jnp.where(predicts, replaced, targets)
    return Masked(tokens.at[positions].set(replaced), positions, targets, predicts)
