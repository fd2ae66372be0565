"""Documents of a row, against a walk through its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError
from jhpt.core.families.gpt import GPTConfig
from jhpt.models.attention import attention, choose_attention
from jhpt.models.context import Context, document_positions, document_starts, same_document

END = 9


def walked(tokens):
    """[B, S]: where the document of each token starts, token by token."""
    starts = np.zeros_like(tokens)
    for row, line in enumerate(tokens):
        start = 0
        for at in range(len(line)):
            if at and line[at - 1] == END:
                start = at
            starts[row, at] = start
    return starts


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_a_document_starts_after_the_end_of_the_one_before(share):
    """Ends in a row, at either edge and none at all among them."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((40, 12)) < share, END, rng.integers(0, END, (40, 12))).astype(np.int32)
    starts = np.asarray(document_starts(jnp.asarray(tokens), END))
    np.testing.assert_array_equal(starts, walked(tokens))
    assert starts.dtype == np.int32
    np.testing.assert_array_equal(document_positions(jnp.asarray(starts)), np.arange(12) - starts)
    visible = np.asarray(same_document(jnp.asarray(starts)))
    np.testing.assert_array_equal(visible[:, 0], starts[:, :, None] == starts[:, None])


@pytest.mark.parametrize(("causal", "kv_heads"), [(True, 2), (False, 4)])
def test_attention_stays_in_its_document(causal, kv_heads):
    """Each document of a row is attended to as if it were alone."""
    keys, sizes = jax.random.split(jax.random.key(0), 3), (3, 1, 4)
    q, k, v = (
        jax.random.normal(key, (2, sum(sizes), heads, 8))
        for key, heads in zip(keys, (4, kv_heads, kv_heads), strict=True)
    )
    starts = np.repeat(np.cumsum((0, *sizes[:-1])), sizes).astype(np.int32)
    context = Context(documents=jnp.broadcast_to(jnp.asarray(starts), (2, sum(sizes))))

    def both(q, k, v):
        each = [slice(start, start + size) for start, size in zip(np.unique(starts), sizes, strict=True)]
        alone = [attention(q[:, one], k[:, one], v[:, one], causal=causal) for one in each]
        return attention(q, k, v, causal=causal, context=context), jnp.concatenate(alone, axis=1)

    np.testing.assert_allclose(*jax.jit(both)(q, k, v), rtol=1e-5, atol=1e-6)


def test_cudnn_keeps_documents_apart_in_sequences_of_even_length():
    gpu = ("cuda", jnp.dtype("bfloat16"), 9.0)
    even, odd = (DataConfig(packing="documents", sequence_length=length) for length in (128, 127))
    choice = choose_attention(GPTConfig(), *gpu, even)
    assert choice.implementation == "cudnn" and "documents" in choice.reason
    assert "127, which is odd" in choose_attention(GPTConfig(), *gpu, odd).reason
    assert choose_attention(GPTConfig(), *gpu, DataConfig(sequence_length=127)).implementation == "cudnn"
    with pytest.raises(InputError, match=r"use model\.attention=auto"):
        choose_attention(GPTConfig(attention="cudnn"), *gpu, odd)
