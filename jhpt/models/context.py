"""What a model may read of the rows of a batch beside their tokens and activations.

Documents of a row are told apart by where they start: position i belongs to the one that starts at `documents[i]`, and
is the (i - documents[i])-th of it.  Two positions are of one document where these numbers are equal.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Context(NamedTuple):
    """Of rows [B] of S positions, in every layer and on every stage.

    documents: [B, S] int32, the position at which the document of each position starts; None: a row is one document.
    lengths: [B] int32, tokens that are not padding; None: all.
    types: [B, S] int32, the token types (segments), which the embedding reads; None: all 0.
    """

    documents: jax.Array | None = None
    lengths: jax.Array | None = None
    types: jax.Array | None = None


WHOLE = Context()
"""Every row is one document without padding."""


def document_starts(tokens: jax.Array, end: int) -> jax.Array:
    """`Context.documents` of tokens [B, S], whose documents end with the token `end`."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    follows = jnp.pad(tokens[:, :-1] == end, ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(follows, at, 0), axis=1)


def text_lengths(tokens: jax.Array, last: int) -> jax.Array:
    """`Context.lengths` of tokens [B, S] that end with the first `last`, or are as long as their row."""
    found = tokens == last
    lengths = jnp.where(jnp.any(found, axis=1), jnp.argmax(found, axis=1) + 1, tokens.shape[1])
    return lengths.astype(jnp.int32)


def document_positions(documents: jax.Array) -> jax.Array:
    """[B, S] -> the position of each token in its document, from 0."""
    return jnp.broadcast_to(jnp.arange(documents.shape[1], dtype=jnp.int32), documents.shape) - documents


def same_document(documents: jax.Array) -> jax.Array:
    """[B, S] -> [B, 1, S, S]: whether query and key are of one document."""
    return documents[:, None, :, None] == documents[:, None, None, :]
