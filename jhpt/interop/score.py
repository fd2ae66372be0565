"""Logits of given tokens, batch by batch into a file, so that memory does not grow with the number of rows."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.errors import InputError
from jhpt.core.files import check_writable, replacing
from jhpt.core.text_files import check_file
from jhpt.interop.rows import BATCH
from jhpt.models.context import Context
from jhpt.models.family import Model, Params

Inputs = dict[str, np.ndarray]
"""Arrays by name: tokens [N, S] and, for BERT, types [N, S] and lengths [N]."""


def score(model: Model, params: Params, inputs: Inputs, batch: int = BATCH) -> Iterator[np.ndarray]:
    """float32 logits [b, S, V] of `batch` rows after the other: of next tokens for GPT, of masked tokens for BERT; of a
    classifier [b, C].

    V: `model.vocab_size`, without padding columns.  inputs: `tokens` [N, S]; for BERT also `types` [N, S], by default
    all zero, and `lengths` [N], the tokens of each row that are not padding, by default all.

    Raises:
      InputError: before anything is computed: arrays of another kind, or ids that the model does not have.
    """
    if batch < 1:
        raise InputError(f"batch={batch} is too small; use 1 or more")
    check_inputs(model, inputs)
    return _batches(model, params, inputs, min(batch, max(len(inputs["tokens"]), 1)))


def score_file(
    model: Model, params: Params, inputs: Inputs, out: str | os.PathLike[str], batch: int = BATCH
) -> tuple[int, ...]:
    """Writes the logits of `score` to the .npy file `out`, which appears when it is complete; returns their shape."""
    check_writable("--out", out)
    pieces, shape = score(model, params, inputs, batch), logits_shape(model, inputs["tokens"])
    with replacing(out) as partial_file:
        logits = np.lib.format.open_memmap(partial_file, mode="w+", dtype=np.float32, shape=shape)
        first = 0
        for piece in pieces:
            logits[first : first + len(piece)] = piece
            first += len(piece)
        logits.flush()
    return shape


def logits_shape(model: Model, tokens: np.ndarray | jax.Array) -> tuple[int, ...]:
    """The shape of the logits of tokens [N, S]."""
    config = model.config
    return (len(tokens), config.classes) if config.classifies else (*tokens.shape, config.vocab)


def read_inputs(paths: dict[str, str]) -> Inputs:
    """The arrays in .npy files, memory-mapped, by name."""
    return {name: _read(name, path) for name, path in paths.items()}


def _read(name: str, path: str) -> np.ndarray:
    try:
        check_file(path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"--{name} {path} cannot be read: {error}; give a .npy file (numpy.save)") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"--{name} {path} has several arrays; give a .npy file with one (numpy.save)")
    return array


def check_inputs(model: Model, inputs: Inputs) -> None:
    """Refuses arrays that the model cannot read."""
    config, tokens = model.config, inputs["tokens"]
    if config.reads != "text":
        raise InputError(
            f"scores are of token ids, and model.family={config.family} reads {config.reads}; use jhpt eval"
        )
    others = [name for name in inputs if name != "tokens"]
    if others and not config.masked:
        raise InputError(f"{' and '.join(others)} are for BERT, and model.family={config.family}; leave them out")
    for name, array in inputs.items():
        dims = 1 if name == "lengths" else 2
        if array.ndim != dims or array.dtype.kind not in "iu":
            wanted = "integers [rows]" if dims == 1 else "integers [rows, positions]"
            raise InputError(f"{name} must be {wanted}; this is {array.dtype} {list(array.shape)}")
        if array.shape != tokens.shape[:dims]:
            raise InputError(f"{name} {list(array.shape)} does not belong to tokens {list(tokens.shape)}")
    length = tokens.shape[1]
    if not 1 <= length <= config.max_length:
        raise InputError(
            f"tokens have {length} positions, and the model reads 1 to model.max_length={config.max_length}"
        )
    _check_range("tokens", tokens, 0, config.vocab - 1, "model.vocab_size")
    if "types" in inputs:
        _check_range("types", inputs["types"], 0, config.type_vocab_size - 1, "model.type_vocab_size")
    if "lengths" in inputs:
        _check_range("lengths", inputs["lengths"], 1, length, "positions of tokens")


def _check_range(name: str, array: np.ndarray, low: int, high: int, why: str) -> None:
    for piece in np.array_split(array, max(1, len(array) // 4096)):
        if piece.size and (piece.min() < low or piece.max() > high):
            wrong = next(int(value) for value in piece.flat if not low <= value <= high)
            raise InputError(f"{name} has {wrong}, and only {low} to {high} are possible ({why}); correct it")


def _batches(model: Model, params: Params, inputs: Inputs, size: int) -> Iterator[np.ndarray]:
    for first in range(0, len(inputs["tokens"]), size):
        piece = {name: np.asarray(array[first : first + size], np.int32) for name, array in inputs.items()}
        rows = len(piece["tokens"])
        # A last batch with fewer rows is filled up, so that no program is compiled for it.
        filled = {name: np.concatenate([part, np.repeat(part[-1:], size - rows, 0)]) for name, part in piece.items()}
        yield np.asarray(_logits(params, filled, model=model))[:rows]


@partial(jax.jit, static_argnames="model")
def _logits(params: Params, inputs: dict[str, jax.Array], *, model: Any) -> jax.Array:
    context = Context(lengths=inputs.get("lengths"), types=inputs.get("types"))
    logits: jax.Array = model.apply(params, inputs["tokens"], context=context)
    return logits[..., : logits_shape(model, inputs["tokens"])[-1]].astype(jnp.float32)
