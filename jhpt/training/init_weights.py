"""The weights that a new run starts with, if not with those of its seed: another run's, or a folder of Hugging Face's.

Only parameters are taken.  Optimizer, data, schedule and plan are those of the new run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.huggingface.architectures import is_folder
from jhpt.huggingface.folder import open_folder
from jhpt.training.checkpoint import FOLDER, Checkpoints, newest
from jhpt.training.init_from import weights_at
from jhpt.training.step import Params


@dataclass(frozen=True, kw_only=True)
class InitWeights:
    """Weights to start with.

    read: shapes of the model's own tree -> its parameters: device arrays where a shape has a sharding, else numpy
      arrays.
    notes: what was taken, for people.
    """

    read: Callable[[Params], Params]
    notes: tuple[str, ...]


def init_weights(path: Path, config: Config) -> InitWeights:
    """Opens the weights in a run or a folder of Hugging Face's, and checks that they are the configured model's.

    Raises:
      InputError: there are none, they cannot be read, or they are of another model.
    """
    weights_at(path).check(config)
    count = f"{config.model.parameter_count().total:,}"
    if is_folder(path):
        folder = open_folder(path)
        return InitWeights(
            read=partial(folder.parameters, seed=config.seed),
            notes=(f"weights: {count} parameters of {path}", *(f"note: {note}" for note in folder.notes)),
        )
    step = newest(path)
    if step is None:
        raise InputError(f"--init {path} holds a run without a checkpoint yet; give one that has saved a step")

    def read(like: Params) -> Params:
        with Checkpoints(path / FOLDER, None) as checkpoints:
            return checkpoints.parameters(step, like)

    return InitWeights(read=read, notes=(f"weights: {count} parameters of {path}, step {step}",))
