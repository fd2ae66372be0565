"""Text that continues prompts, many rows at once.

    prompts -> batches of ragged rows -> one pass over the prompts -> a token of every row, again and again

A row's random numbers are a function of (seed, number of the prompt, position), so its text does not depend on the
other rows of its batch.  Lengths are rounded up to a few sizes, so that few programs are compiled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.errors import InputError
from jhpt.interop.rows import BATCH, NOTHING, advanced, begun, padded
from jhpt.models.decoding import reader_of
from jhpt.models.drawing import Drawing
from jhpt.models.family import Model, Params, as_text
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.sampling import TEMPERATURE
from jhpt.training.step import RandomStream, random_key
from jhpt.training.weights import Weights

TOKENS = 128
"""New tokens of a row where their number is not given, or as many as fit."""

PIECE = 16
"""Tokens between two looks at what has been generated: the host checks for stops and prints."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is generated.

    tokens: the most new tokens of a row; None: `TOKENS`, or as many as fit into `model.max_length`.
    temperature, top_k, top_p: how they are drawn (`jhpt.models.drawing`); 0: greedy.
    seed: of the random numbers.
    stop: a row ends, and is cut, before any of these texts.
    stop_tokens: a row ends before any of these ids; None: the tokenizer's end of a document.
    batch: rows that are computed at once.
    """

    tokens: int | None = None
    temperature: float = TEMPERATURE
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] | None = None
    batch: int = BATCH

    def __post_init__(self) -> None:
        """Refuses impossible values, and choices that nothing would read."""
        for name, low in (("tokens", 1), ("top_k", 1), ("batch", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(f"{name}={value} is too small; use {low} or more")
            if value is not None and value >= 2**32:
                raise InputError(f"{name}={value} is too large; use less than 2**32")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature={self.temperature} is not possible; use 0 (greedy) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} is no share of the probability; use a number above 0, at most 1")
        if self.drawing.greedy and (self.top_k, self.top_p) != (None, None):
            raise InputError(
                "the greedy choice (temperature=0) takes the likeliest token, so top_k and top_p would not be read; "
                "leave them out, or give a temperature"
            )
        if not all(self.stop):
            raise InputError("stop='' is in every text; give the text at which rows end, or leave it out")

    @property
    def drawing(self) -> Drawing:
        """How tokens are drawn."""
        return Drawing(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A prompt and what follows it.

    text: without the prompt.  tokens: its ids, without the one at which it stopped.  finish: why it ended: at a stop,
    or because it has all its tokens; None: it goes on.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"] | None


def generate(
    model: Model, params: Params, tokenizer: Tokenizer, prompts: Sequence[str], settings: Settings
) -> Iterator[Generated]:
    """The continuation of every prompt, in order, as soon as its batch is done.

    Raises:
      InputError: before anything is computed: a family that does not generate, or a prompt that does not fit.
    """
    rows = _rows(model, tokenizer, prompts, settings)
    ready = prepared(model, params)

    def batches() -> Iterator[Generated]:
        size = max(min(settings.batch, len(rows)), 1)
        for first in range(0, len(rows), size):
            *_, last = _progress(model, ready, tokenizer, rows[first : first + size], size, settings)
            yield from last

    return batches()


def stream(model: Model, params: Params, tokenizer: Tokenizer, prompt: str, settings: Settings) -> Iterator[str]:
    """The continuation of one prompt in pieces, as they are generated.

    Held back are characters of which bytes are missing, and what may be the beginning of a stop.
    """
    rows, ready = _rows(model, tokenizer, [prompt], settings), prepared(model, params)

    def pieces() -> Iterator[str]:
        shown = 0
        for (row,) in _progress(model, ready, tokenizer, rows, 1, settings):
            text = row.text if row.finish else _complete(row.text, settings.stop)
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

    return pieces()


def prepared(model: Model, params: Params) -> Params:
    """The parameters in the dtype in which the model uses them, so that they are not converted for every token."""
    if model.dtype != jnp.bfloat16:
        return params
    ready: Params = jax.jit(Weights(storage="bfloat16").stored)(params)
    return ready


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A prompt to be continued by up to `limit` tokens."""

    number: int
    prompt: str
    ids: np.ndarray
    limit: int


def _rows(model: Model, tokenizer: Tokenizer, prompts: Sequence[str], settings: Settings) -> list[_Row]:
    if not model.config.generates:
        raise InputError(f"model.family={model.config.family} does not generate text; use a run of GPT")
    return [_row(model, tokenizer, prompt, number, settings) for number, prompt in enumerate(prompts)]


def _row(model: Model, tokenizer: Tokenizer, prompt: str, number: int, settings: Settings) -> _Row:
    longest, name = model.config.max_length, f"prompt {number + 1}"
    try:
        ids = tokenizer.encode(prompt)
    except UnicodeEncodeError as error:
        raise InputError(f"{name}, {prompt!r}, is not text ({error.reason}); give UTF-8") from None
    if not len(ids):
        if tokenizer.end is None:
            raise InputError(f"{name} has no tokens, and the tokenizer has no end of a document to begin with")
        ids = np.asarray([tokenizer.end], np.int32)
    room = longest - len(ids)
    if room < 1:
        raise InputError(f"{name} has {len(ids)} tokens, and model.max_length={longest} leaves no room; shorten it")
    if settings.tokens is not None and settings.tokens > room:
        raise InputError(
            f"{name} has {len(ids)} tokens, and model.max_length={longest}: {settings.tokens} more do not fit; "
            f"generate at most {room}, or shorten the prompt"
        )
    return _Row(number=number, prompt=prompt, ids=ids, limit=settings.tokens or min(TOKENS, room))


class _Batch(NamedTuple):
    """Rows as arrays, with prompts [B, S] of `lengths` [B]; and the positions that they need."""

    prompts: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    keys: jax.Array
    room: int


def _batch(rows: Sequence[_Row], size: int, longest: int, seed: int) -> _Batch:
    """`size` rows: there may be fewer, and then others are added that end at once, so that no program is compiled for
    a last batch."""
    filled = [*rows, *[rows[-1]] * (size - len(rows))]
    lengths = np.asarray([len(row.ids) for row in filled], np.int32)
    limits = np.asarray([row.limit for row in rows] + [0] * (size - len(rows)), np.int32)
    prompts = np.zeros((size, padded(int(lengths.max()), longest)), np.int32)
    for place, row in zip(prompts, filled, strict=True):
        place[: len(row.ids)] = row.ids
    numbers = jnp.asarray([row.number for row in filled])
    keys = jax.vmap(lambda number: random_key(seed, RandomStream.SAMPLE, number))(numbers)
    return _Batch(prompts, lengths, limits, keys, padded(int((lengths + limits).max()), longest))


def _progress(
    model: Model, params: Params, tokenizer: Tokenizer, rows: Sequence[_Row], size: int, settings: Settings
) -> Iterator[list[Generated]]:
    """What the rows of a batch are after their first token, and then after every `PIECE` more, until all have ended.

    size: of the batch, at least as many as there are rows.
    """
    stops, batch = _stop_tokens(tokenizer, settings), _batch(rows, size, model.config.max_length, settings.seed)
    programs: dict[str, Any] = {"reader": reader_of(as_text(model)), "drawing": settings.drawing}
    *arrays, room = batch
    state = begun(params, *arrays, stops, **programs, room=room)
    piece = np.asarray(state.tokens)[:, None]
    ids: list[list[int]] = [[] for _ in rows]
    while True:
        for so_far, new in zip(ids, piece, strict=False):
            so_far += [int(token) for token in new if token != NOTHING]
        found = [_so_far(tokenizer, row, new, stops, settings) for row, new in zip(rows, ids, strict=True)]
        yield found
        if all(row.finish for row in found):
            return
        going = np.asarray([row.finish is None for row in found] + [False] * (size - len(rows)))
        state = state._replace(left=jnp.where(going, state.left, 0))
        state, tokens = advanced(params, state, stops, **programs, count=PIECE)
        piece = np.asarray(tokens)


def _stop_tokens(tokenizer: Tokenizer, settings: Settings) -> np.ndarray:
    """The ids at which rows end."""
    if settings.stop_tokens is not None:
        return np.asarray(settings.stop_tokens, np.int32)
    return np.asarray([] if tokenizer.end is None else [tokenizer.end], np.int32)


def _so_far(tokenizer: Tokenizer, row: _Row, ids: Sequence[int], stops: np.ndarray, settings: Settings) -> Generated:
    """The row with these new tokens, the last of which may be a stop."""
    finish: Literal["stop", "length"] | None = "length" if len(ids) >= row.limit else None
    if ids and ids[-1] in stops:
        ids, finish = ids[:-1], "stop"
    text = continuation(tokenizer, row.ids, ids)
    if any(stop in text for stop in settings.stop):
        texts = ((count, continuation(tokenizer, row.ids, ids[:count])) for count in range(1, len(ids) + 1))
        count, text = next((count, text) for count, text in texts if any(stop in text for stop in settings.stop))
        text = text[: min(text.index(stop) for stop in settings.stop if stop in text)]
        ids, finish = ids[:count], "stop"
    return Generated(prompt=row.prompt, text=text, tokens=tuple(ids), finish=finish)


def continuation(tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray, ids: Sequence[int]) -> str:
    """The text of `ids` behind the prompt: some tokenizers write a token differently at the start of a text."""
    before = [int(token) for token in prompt]
    whole, start = tokenizer.decode([*before, *ids]), tokenizer.decode(before)
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(list(ids))


def _complete(text: str, stops: Sequence[str]) -> str:
    """The text up to where more tokens may still change it."""
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held]
