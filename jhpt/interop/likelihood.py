"""Log-likelihoods of texts under a model that predicts next tokens, in nats.

    log p(text) = sum_i log p(token i | the end of a document, tokens before i)

A text longer than the model reads is cut into windows.  Each token is predicted once: from the tokens of its window,
and the first of a window from the one before it; the last window reaches back as far as the model reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.errors import InputError
from jhpt.interop.rows import BATCH, padded
from jhpt.models.family import Model, Params
from jhpt.models.vocabulary import token_nll
from jhpt.training.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Span:
    """Token ids [n], of which those from `first` >= 1 on are predicted, each from all before it."""

    ids: np.ndarray
    first: int


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """logprob: the sum over the predicted tokens, in nats.  tokens: their number.  greedy: each is the likeliest."""

    logprob: float
    tokens: int
    greedy: bool


def of_all(
    model: Model, params: Params, tokenizer: Tokenizer, texts: Sequence[str | tuple[str, str]], batch: int = BATCH
) -> list[Likelihood]:
    """The log-likelihood of every text, or of the second text of a pair, given the first.

    If the tokenizer has no end of a document, the first token of a text is not predicted.

    Raises:
      InputError: the second text of a pair is longer than the model reads, or the model does not predict next tokens.
    """
    if not model.config.generates:
        raise InputError(f"model.family={model.config.family} does not predict next tokens; use a run of GPT")
    longest = model.config.max_length
    cut = [
        windows(np.concatenate([_beginning(tokenizer), tokenizer.encode(text)]), longest)
        if isinstance(text, str)
        else [continuation(tokenizer, *text, longest)]
        for text in texts
    ]
    found = iter(of_spans(model, params, [span for spans in cut for span in spans], batch))
    return [_joined([next(found) for _ in spans]) for spans in cut]


def windows(ids: np.ndarray, longest: int) -> list[Span]:
    """ids [n], all of which but the first are predicted once, in spans of which at most `longest` tokens are read."""
    spans = []
    for start in range(1, len(ids), longest):
        stop = min(start + longest, len(ids))
        begin = max(stop - longest - 1, 0)
        spans.append(Span(ids=ids[begin:stop], first=start - begin))
    return spans


def continuation(tokenizer: Tokenizer, context: str, text: str, longest: int) -> Span:
    """`text` after `context`, of which the last tokens are read that fit.

    Spaces at the end of the context are counted to the text, because tokenizers write a space and a word as one token.
    """
    spaces = len(context) - len(context.rstrip())
    context, text = context[: len(context) - spaces], context[len(context) - spaces :] + text
    before = tokenizer.encode(context)
    after = tokenizer.encode(context + text)[len(before) :]
    if len(after) > longest:
        raise InputError(
            f"the continuation {text[:40]!r}... has {len(after)} tokens, and model.max_length={longest}; shorten it"
        )
    ids = np.concatenate([before if len(before) else _beginning(tokenizer), after])[-(longest + 1) :]
    return Span(ids=ids, first=max(len(ids) - len(after), 1))


def of_spans(model: Model, params: Params, spans: Sequence[Span], batch: int = BATCH) -> list[Likelihood]:
    """The log-likelihood of the predicted tokens of every span.  Spans of similar lengths are computed together."""
    if batch < 1:
        raise InputError(f"batch={batch} is too small; use 1 or more")
    found: dict[int, Likelihood] = {}
    order = sorted(range(len(spans)), key=lambda index: -len(spans[index].ids))
    size = max(min(batch, len(spans)), 1)
    for first in range(0, len(order), size):
        indices = order[first : first + size]
        length = padded(len(spans[indices[0]].ids) - 1, model.config.max_length)
        ids = np.zeros((size, length + 1), np.int32)
        for row, index in enumerate(indices):
            ids[row, : len(spans[index].ids)] = spans[index].ids
        logprobs, likeliest = map(np.asarray, _predicted(params, ids, model=model))
        for row, index in enumerate(indices):
            inside = slice(spans[index].first - 1, len(spans[index].ids) - 1)
            chosen = logprobs[row, inside].astype(np.float64)
            found[index] = Likelihood(
                logprob=float(chosen.sum()), tokens=len(chosen), greedy=bool(likeliest[row, inside].all())
            )
    return [found[index] for index in range(len(spans))]


@partial(jax.jit, static_argnames="model")
def _predicted(params: Params, ids: jax.Array, *, model: Model) -> tuple[jax.Array, jax.Array]:
    """ids [B, S + 1] -> (log p of each but the first [B, S], whether it is the likeliest)."""
    logits = model.apply(params, ids[:, :-1])
    nll, _ = token_nll(logits, ids[:, 1:])
    return -nll, jnp.argmax(logits, axis=-1) == ids[:, 1:]


def _beginning(tokenizer: Tokenizer) -> np.ndarray:
    """What a text is read after: the end of another."""
    return np.asarray([] if tokenizer.end is None else [tokenizer.end], np.int32)


def _joined(parts: Sequence[Likelihood]) -> Likelihood:
    return Likelihood(
        logprob=sum(part.logprob for part in parts),
        tokens=sum(part.tokens for part in parts),
        greedy=all(part.greedy for part in parts),
    )
