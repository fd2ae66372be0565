"""`jhpt import hf` and `jhpt export hf`: weights between runs and folders in Hugging Face's layout.

Neither holds more in host memory than a layer, a table or a shard: tensors are mapped from their files, layers are
written to a checkpoint one after the other, and read from it in the same way.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from jhpt.core.amounts import gib
from jhpt.core.config import CheckpointConfig
from jhpt.core.errors import InputError
from jhpt.core.load import CONFIG_FILE, load_config, to_yaml
from jhpt.huggingface.architectures import CONFIG, exported
from jhpt.huggingface.files import Writable, write_tensors
from jhpt.huggingface.folder import Folder, open_folder
from jhpt.huggingface.tensors import Part
from jhpt.models.family import Params, build
from jhpt.sharding.partition import path_name
from jhpt.training.checkpoint import FOLDER, Checkpoints, newest
from jhpt.training.data.tokenizer import load_tokenizer
from jhpt.training.data.tokenizer_files import FILES, TOKENIZER_FILE, lies_in
from jhpt.training.init_from import weights_at
from jhpt.training.layered import Layered
from jhpt.training.record import make_record
from jhpt.training.step import TrainState

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
"""Numbers that weights can be exported in."""

SHARD_BYTES = 5e9
"""Largest shard, as the transformers library writes them."""

TOKENIZER_SETTINGS = "tokenizer_config.json"
"""Names the special tokens."""

Say = Callable[[str], None]


def import_folder(folder: Path, out: Path, say: Say) -> None:
    """Writes a run directory with the weights of a folder: a checkpoint of step 0 without optimizer state.

    Raises:
      InputError: the folder cannot be read, or `out` is in use; nothing is left behind.
    """
    weights = weights_at(folder)
    source = open_folder(folder)
    for note in source.notes:
        say(f"note: {note}")
    with replaced_folder(out, "--out") as partial_out:
        _copy_tokenizer(folder, partial_out)
        changes = {} if weights.tokenizer is None else {"data.tokenizer": str(out)}
        config = load_config(None, changes, weights=weights)
        zero = jnp.zeros((), jnp.int32)
        state = TrainState(step=zero, skipped=zero, bad_steps=zero, params=_by_layer(source, config.seed), optimizer={})
        record = make_record(config, "", "float32", weights_only=True)
        with Checkpoints(partial_out / FOLDER, CheckpointConfig()) as checkpoints:
            checkpoints.save(0, state, record)
        (partial_out / CONFIG_FILE).write_text(to_yaml(config))
    say(f"{config.model.parameter_count().total:,} parameters of {folder} are in {out}")


def _by_layer(source: Folder, seed: int) -> Params:
    """The model's own tree, whose leaves of blocks are read from the files while they are written."""
    shapes = jax.eval_shape(build(source.model).init, jax.random.key(0))
    others = source.parameters({name: part for name, part in shapes.items() if name != "blocks"}, seed)

    def layered(path: Any, shape: jax.ShapeDtypeStruct) -> Layered:
        return Layered(shape.shape, np.dtype(np.float32), partial(source.read, f"blocks/{path_name(path)}"))

    return {**others, "blocks": jax.tree_util.tree_map_with_path(layered, shapes["blocks"])}


def _copy_tokenizer(folder: Path, out: Path) -> None:
    """The tokenizer's files come along, whichever there are."""
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def export_run(run: Path, folder: Path, say: Say, *, dtype: str = "float32", shard_bytes: float = SHARD_BYTES) -> None:
    """Writes the weights of a run's newest checkpoint, `config.json` and the tokenizer's files.

    Raises:
      InputError: there is no checkpoint, no architecture is this model, or `folder` is in use; nothing is left behind.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if not (run / CONFIG_FILE).is_file():
        raise InputError(f"{run} holds no run ({CONFIG_FILE}); give the directory of one")
    model = load_config(run / CONFIG_FILE).model
    architecture, tree = exported(model)
    step = newest(run)
    if step is None:
        raise InputError(f"{run} has no checkpoint yet; train it until it has saved one")
    with Checkpoints(run / FOLDER, None) as checkpoints:
        leaves = lru_cache(maxsize=None)(partial(checkpoints.opened, step))
    with replaced_folder(folder, "the folder") as out:
        tensors = list(_writable(architecture.parts(model), model.num_layers, leaves, np.dtype(DTYPES[dtype])))
        write_tensors(out, tensors, int(shard_bytes))
        _copy_tokenizer(run, out)
        ids = _special_ids(out)
        _write_tokenizer_settings(out, ids)
        of_model = {f"{name}_id": number for name, number in ids.items() if name in ("bos_token", "eos_token")}
        (out / CONFIG).write_text(_json({**tree, **of_model, "torch_dtype": dtype}))
    size = gib(sum(tensor.bytes for tensor in tensors))
    say(f"step {step} of {run} is in {folder}: {tree['architectures'][0]}, {size} of {dtype}")


def _special_ids(folder: Path) -> dict[str, int | None]:
    """The ids of special tokens by their names in settings, of the tokenizer in the folder.

    Without one, text has no beginning and no end.  The transformers library would take those of the first released
    model.
    """
    none: dict[str, int | None] = {"bos_token": None, "eos_token": None}
    if not lies_in(folder):
        return none
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.mask is None:
        return {"bos_token": tokenizer.start, "eos_token": tokenizer.end}
    return {"cls_token": tokenizer.start, "sep_token": tokenizer.separator, "mask_token": tokenizer.mask}


def _write_tokenizer_settings(folder: Path, ids: Mapping[str, int | None]) -> None:
    """Names the special tokens, unless the tokenizer came with settings of its own."""
    if not (folder / TOKENIZER_FILE).is_file() or (folder / TOKENIZER_SETTINGS).is_file():
        return
    library = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    usual = {"pad_token": library.token_to_id("[PAD]"), "unk_token": library.token_to_id("[UNK]")}
    tokens = {name: library.id_to_token(id_) for name, id_ in {**ids, **usual}.items() if id_ is not None}
    (folder / TOKENIZER_SETTINGS).write_text(_json({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}))


def _json(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def _writable(
    parts: tuple[Part, ...], layers: int, leaves: Callable[[str], Any], dtype: np.dtype[Any]
) -> Iterator[Writable]:
    """The tensors of a model, layer after layer."""

    @lru_cache(maxsize=1)  # the tensors of a part are written one after the other
    def split(part: Part, layer: int) -> list[np.ndarray]:
        leaf = leaves(part.leaf)
        try:
            array = np.asarray((leaf[layer] if part.layered else leaf).read().result(), np.float32)
        except ValueError as error:
            raise InputError(f"{part.leaf} in the checkpoint cannot be read: {error}; jhpt verify tells more") from None
        return [tensor.astype(dtype) for tensor in part.split(array)]

    def tensors(part: Part, layer: int) -> Iterator[Writable]:
        shape = leaves(part.leaf).shape[1:] if part.layered else leaves(part.leaf).shape
        sizes = [array.size for array in part.split(np.broadcast_to(np.float32(0), shape))]
        for index, (name, size) in enumerate(zip(part.of_layer(layer), sizes, strict=True)):
            make = lambda index=index: split(part, layer)[index]  # noqa: E731
            yield Writable(name=name, bytes=size * dtype.itemsize, make=make)

    whole, layered = ([part for part in parts if part.layered == of] for of in (False, True))
    for part in whole:
        yield from tensors(part, 0)
    for layer in range(layers):
        for part in layered:
            yield from tensors(part, layer)


@contextmanager
def replaced_folder(folder: Path, name: str) -> Iterator[Path]:
    """A new folder that gets its name only when everything is in it.

    Raises:
      InputError: something lies there, or it cannot be written.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InputError(f"{name} {folder} is {'a link' if folder.is_symlink() else 'not empty'}; give a new one")
    hidden = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{name} {folder} cannot be written: {error}; give another one") from None
    try:
        yield hidden
        hidden.replace(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
