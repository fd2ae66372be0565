"""The weights that a new run starts with, if not with those of its seed: another run's, or a folder of Hugging Face's.

Only parameters are taken.  Optimizer, data, schedule and plan are those of the new run.  What the new model has and the
weights lack, such as the head of another task, begins fresh.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.families.family import ModelConfig
from jhpt.core.load import CONFIG_FILE
from jhpt.huggingface.folder import notes_of, open_folder
from jhpt.models.family import build
from jhpt.sharding.partition import path_name
from jhpt.sharding.types import KeyPath
from jhpt.training.checkpoint import FOLDER, Checkpoints, newest
from jhpt.training.init_from import weights_at
from jhpt.training.step import Params, RandomStream, random_key

Read = Callable[[Params], Params]
"""Shapes of a tree of parameters -> the parameters: device arrays where a shape has a sharding, else numpy arrays."""


@dataclass(frozen=True, kw_only=True)
class InitWeights:
    """Weights to start with.

    read: shapes of the model's own tree -> its parameters.  notes: what was taken, for people.
    """

    read: Read
    notes: tuple[str, ...]


def init_weights(path: Path, config: Config) -> InitWeights:
    """Opens the weights in a run or a folder of Hugging Face's, and checks that they are the configured model's.

    Raises:
      InputError: there are none, they cannot be read, or they are of another model.
    """
    weights = weights_at(path)
    weights.check(config)
    if not (path / CONFIG_FILE).is_file():
        folder = open_folder(path, pairs=config.model.pairs)
        model = folder.model
        lacks, beyond, place = folder.fresh, folder.left_out, str(path)
        read: Read = partial(folder.parameters, seed=config.seed)
    else:
        step, model = newest(path), weights.model
        if step is None:
            raise InputError(f"--init {path} holds a run without a checkpoint yet; give one that has saved a step")
        lacks, beyond, place = (), (), f"{path}, step {step}"
        read = partial(_of_run, path, step)
    ours, theirs = _shapes(config.model), _shapes(model)
    fresh = [name for name, shape in ours.items() if theirs.get(name) != shape]
    left_out = [name for name, shape in theirs.items() if ours.get(name) != shape and name not in lacks]
    begins = [*(name for name in lacks if name in ours and name not in fresh), *fresh]
    taken = config.model.parameter_count().total - sum(math.prod(ours[name]) for name in begins)
    return InitWeights(
        read=lambda like: _completed(read, like, fresh, config),
        notes=(
            f"weights: {taken:,} parameters of {place}",
            *(f"note: {note}" for note in notes_of(begins, [*beyond, *left_out])),
        ),
    )


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in _by_path(jax.eval_shape(build(model).init, jax.random.key(0))).items()}


def _completed(read: Read, like: Params, fresh: Sequence[str], config: Config) -> Params:
    """What is read, and the leaves in `fresh`, none of which is of a block, as a new run of this seed has them."""
    if not fresh:
        return read(like)
    others = jax.jit(build(config.model).init_embedding_and_head)(random_key(config.seed, RandomStream.INIT))
    leaves = _by_path(others) | _by_path(read(_without(like, fresh)))

    def placed(path: KeyPath, shape: jax.ShapeDtypeStruct) -> Any:
        leaf = leaves[path_name(path)]
        if path_name(path) not in fresh:
            return leaf
        host = np.asarray(leaf)
        if shape.sharding is None:
            return host
        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: host[index])

    completed: Params = jax.tree_util.tree_map_with_path(placed, like)
    return completed


def _by_path(tree: Params) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _without(tree: Params, names: Sequence[str], place: str = "") -> Params:
    """The tree without the leaves of these paths, and without mappings of which nothing is left."""
    kept: Params = {}
    for name, part in tree.items():
        if isinstance(part, Mapping):
            part = _without(dict(part), names, f"{place}{name}/")
        if part != {} and f"{place}{name}" not in names:
            kept[name] = part
    return kept


def _of_run(path: Path, step: int, like: Params) -> Params:
    with Checkpoints(path / FOLDER, None) as checkpoints:
        return checkpoints.parameters(step, like)
