"""Drawing the next token from its logits.

greedy (temperature 0)   the token with the largest logit
otherwise                one of softmax(logits / temperature), restricted to the top_k likeliest tokens, and of these
                         to the nucleus: the fewest of the likeliest whose probabilities, which then add up to 1,
                         reach top_p (Holtzman et al. 2019, arXiv 1904.09751, section 3.1)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn.

    temperature: logits are divided by it; 0: greedy.
    top_k: number of tokens that may be drawn; None: all.
    top_p: share of the probability that the tokens which may be drawn have together, in (0, 1]; None or 1: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    @property
    def greedy(self) -> bool:
        """Whether nothing is random."""
        return self.temperature == 0


def restricted(logits: jax.Array, drawing: Drawing) -> jax.Array:
    """logits [..., V] / temperature in float32, -inf where a token may not be drawn.

    Tokens exactly as likely as the last that may be drawn may be drawn, too.
    """
    scaled = logits.astype(jnp.float32) / drawing.temperature
    nucleus = None if drawing.top_p == 1 else drawing.top_p
    if drawing.top_k is None and nucleus is None:
        return scaled
    size = logits.shape[-1]
    candidates, _ = jax.lax.top_k(scaled, min(drawing.top_k or size, size))
    least = candidates[..., -1:]
    if nucleus is not None:
        probabilities = jax.nn.softmax(candidates, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The likeliest token is always one of them, also where top_p is tiny.
        inside = (before < nucleus).at[..., 0].set(True)
        least = jnp.min(jnp.where(inside, candidates, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= least, scaled, -jnp.inf)


def drawn(keys: jax.Array, logits: jax.Array, drawing: Drawing) -> jax.Array:
    """A token for each row of logits [B, V]: int32 [B].  keys: [B], one for each row; greedy reads none."""
    if drawing.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, restricted(logits, drawing)).astype(jnp.int32)
