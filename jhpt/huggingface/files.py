"""Safetensors files in Hugging Face's layout: `model.safetensors`, or shards with `model.safetensors.index.json`.

Tensors are mapped into memory, so reading one takes no more anonymous memory than what is made of it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jhpt.core.errors import InputError
from jhpt.core.text_files import read_text, tree_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
"""Numbers that weights can have, by their name in a file."""

LENGTH_BYTES = 8
"""A file begins with the length of its JSON header."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.  offset: of its first byte."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """The tensor, mapped into memory."""
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name.

    Raises:
      InputError: no safetensors file, one that is missing, cut short or damaged, or numbers that weights cannot have.
    """
    if (folder / INDEX).is_file():
        return _of_shards(folder)
    if (folder / SINGLE).is_file():
        return _of_file(folder / SINGLE)
    pickled = next(iter(sorted(folder.glob("pytorch_model*.bin"))), None)
    if pickled is not None:
        raise InputError(
            f"{folder} has its weights in {pickled.name}, which is not read because unpickling runs code; write them "
            "as safetensors: AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR) with the transformers library"
        )
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with a model's weights")


def _of_shards(folder: Path) -> dict[str, StoredTensor]:
    index = read_json(folder / INDEX)
    names = index.get("weight_map")
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{folder / INDEX} has no weight_map of tensors to files; download it again")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(names.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise InputError(f"{folder / INDEX} names {shard}, which is not there; download it, too")
        tensors |= _of_file(folder / shard)
    missing = sorted(set(names) - set(tensors))
    if missing:
        raise InputError(f"{folder / INDEX} names tensors that are in no file: {listed(missing)}; download it again")
    return tensors


def _of_file(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy"):  # checks the header against the file's size
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is no complete safetensors file ({error}); download it again") from None
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    return {name: _stored(file, name, entry, start) for name, entry in header.items()}


def _stored(file: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        known = ", ".join(DTYPES)
        raise InputError(
            f"{file}: {name} has numbers of type {entry['dtype']}, and weights are read from {known}; "
            "save them in one of these, without quantization"
        )
    begin = entry["data_offsets"][0]
    return StoredTensor(file=file, dtype=np.dtype(dtype), shape=tuple(entry["shape"]), offset=start + begin)


def read_json(file: Path) -> dict[str, Any]:
    """An object in a JSON file.

    Raises:
      InputError: it cannot be read.
    """
    try:
        tree = tree_of(read_text(file))
    except FileNotFoundError:
        raise InputError(f"{file} is not there; give a folder in Hugging Face's layout") from None
    except InputError as error:
        raise InputError(f"{file} is not readable JSON ({error}); download it again") from None
    if not isinstance(tree, dict):
        raise InputError(f"{file} holds {type(tree).__name__}, not an object; download it again")
    return tree


@dataclass(frozen=True, kw_only=True)
class Writable:
    """A tensor to be written.  make: called when its shard is written."""

    name: str
    bytes: int
    make: Callable[[], np.ndarray]


def write_tensors(folder: Path, tensors: Iterable[Writable], shard_bytes: int) -> None:
    """Writes shards of at most `shard_bytes`, or of a single larger tensor; only one of them is in memory at a time."""
    shards: list[list[Writable]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {tensor.name: np.ascontiguousarray(tensor.make()) for tensor in shard}
        try:
            save_file(arrays, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise InputError(f"{folder / file} cannot be written: {error}") from None
        names |= dict.fromkeys(arrays, file)
    if len(shards) > 1:
        total = sum(tensor.bytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def listed(names: Iterable[str], most: int = 6) -> str:
    """Some of the names, and how many more there are."""
    some = list(names)
    return ", ".join(some[:most]) + (f" and {len(some) - most} more" if len(some) > most else "")
