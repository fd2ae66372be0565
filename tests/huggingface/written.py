"""Folders in Hugging Face's layout with random weights, made without the transformers library."""

import json
from pathlib import Path

import jax
import numpy as np

from jhpt.huggingface.architectures import CONFIG, exported
from jhpt.huggingface.files import Writable, write_tensors
from jhpt.models.family import build
from jhpt.sharding.partition import path_name


def random_parameters(model):
    """The model's own tree of random numbers, zeros in the rows of padding."""
    shapes = jax.eval_shape(build(model).init, jax.random.key(0))
    rng = np.random.default_rng(0)

    def leaf(path, shape):
        array = (0.1 * rng.standard_normal(shape.shape)).astype(np.float32)
        if path_name(path).endswith(("/tokens", "head/bias")):
            array[model.vocab :] = 0
        return array

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def tensors_of(model, params):
    """The same numbers as tensors by name."""
    architecture, _ = exported(model)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return {
        name: np.ascontiguousarray(array)
        for part in architecture.parts(model)
        for layer in range(model.num_layers if part.layered else 1)
        for name, array in zip(
            part.of_layer(layer),
            part.split(leaves[part.leaf][layer] if part.layered else leaves[part.leaf]),
            strict=True,
        )
    }


def write_folder(folder: Path, model, params=None, *, shard_bytes=1 << 30, config=(), tensors=()):
    """Writes a folder; config, tensors: changes of it, by name; None leaves a tensor out."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = tensors_of(model, random_parameters(model) if params is None else params) | dict(tensors)
    (folder / CONFIG).write_text(json.dumps({**exported(model)[1], **dict(config)}))
    writable = [
        Writable(name=name, bytes=array.nbytes, make=lambda array=array: array)
        for name, array in arrays.items()
        if array is not None
    ]
    write_tensors(folder, writable, shard_bytes)
    return folder
