"""What may be drawn is what sorting in NumPy says, and it is drawn as often as its probability says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.models.drawing import Drawing, drawn, restricted

pytestmark = pytest.mark.usefixtures("strict")


def allowed(logits, drawing):
    """The tokens that may be drawn, one row, in float64 with a loop over the sorted tokens."""
    scaled = np.asarray(logits, np.float64) / drawing.temperature
    order = [token for token in np.argsort(-scaled, kind="stable") if np.isfinite(scaled[token])]
    order = order[: drawing.top_k]
    weights = np.exp(scaled[order] - scaled[order].max())
    total, kept = 0.0, []
    for token, weight in zip(order, weights / weights.sum(), strict=True):
        kept.append(int(token))
        total += weight
        if drawing.top_p not in (None, 1.0) and total >= drawing.top_p:
            break
    return set(kept)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.4, 0.9, 1.0])
def test_what_may_be_drawn(temperature, top_k, top_p):
    drawing = Drawing(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = np.random.default_rng(3).normal(0, 2, (6, 40)).astype(np.float32)
    logits[:, 37:] = -np.inf  # columns of padding rows
    kept = np.asarray(restricted(jnp.asarray(logits), drawing))
    for row, result in zip(logits, kept, strict=True):
        expected = allowed(row, drawing)
        assert set(np.flatnonzero(np.isfinite(result))) == expected
        np.testing.assert_allclose(result[list(expected)], row[list(expected)] / temperature, rtol=1e-6)


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    logits = jnp.log(jnp.array([0.5, 0.05, 0.3, 0.15]))
    drawing = Drawing(temperature=0.5, top_k=3, top_p=0.9)  # squares: 0.25, 0.09 and, beyond the nucleus, 0.0225
    keys = jax.random.split(jax.random.key(0), 20_000)
    ids = drawn(keys, jnp.broadcast_to(logits, (20_000, 4)), drawing)
    share = np.bincount(ids, minlength=4) / 20_000
    np.testing.assert_allclose(share, [0.25 / 0.34, 0, 0.09 / 0.34, 0], atol=0.012)


def test_greedy_takes_the_likeliest_and_reads_no_key():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert drawn(None, logits, Drawing(temperature=0.0)).tolist() == [1, 0]
