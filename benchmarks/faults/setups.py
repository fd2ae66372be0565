"""The runs that faults are injected into: tiny models, so that a trial takes seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

SETTINGS: Mapping[str, object] = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.d_ff": 64,
    "model.max_length": 16,
    "model.dropout": 0.1,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "data.validation_fraction": 0.25,
    "optimizer.warmup_steps": 2,
    "train.steps": 24,
    "checkpoint.every": 2,
    "checkpoint.keep": 100,
    "evaluation.every": 10,
    "evaluation.batches": 1,
    "evaluation.sample_tokens": 0,
    "log.every": 1,
    "log.tensorboard": False,
    "parallel.data": 1,
}
"""All checkpoints are kept, so that each can be compared with that of the run that nothing disturbs."""


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A run.  devices: of each process."""

    changes: Mapping[str, object]
    devices: int = 1
    processes: int = 1


SETUPS = {
    "plain": SetUp(changes={}),
    "low precision": SetUp(changes={"optimizer.weights": "bfloat16_kahan", "optimizer.moments": "int8"}),
    "CPU offload": SetUp(changes={"memory.offload": "both"}),
    "ZeRO-3": SetUp(changes={"parallel.data": 4, "parallel.zero": 3}, devices=4),
    "pipeline": SetUp(changes={"parallel.pipe": 2, "parallel.data": 2, "parallel.micro_batches": 2}, devices=4),
    "compressed gradients": SetUp(changes={"parallel.data": 2, "parallel.gradient_compression.bits": 8}, devices=2),
    "two processes": SetUp(changes={"parallel.data": 2}, processes=2),
}

SMALL: Mapping[str, object] = {"model.num_layers": 1, "model.dropout": 0.0}
"""Changes with which a run compiles in two thirds of the time."""

WORDS = ("the mesh", "maps every layer", "to a device", "and each step", "adds up", "what the others", "have seen")


def settings_of(setup: SetUp, folder: Path) -> dict[str, object]:
    """Overrides of the preset gpt-tiny, with text and token cache below `folder`."""
    places = {"data.path": str(folder / "text"), "data.cache_dir": str(folder / "tokens"), "data.workers": 1}
    return {**SETTINGS, **places, **setup.changes}


def write_text(folder: Path) -> None:
    """Four files of prose-like text."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for number in range(4):
        words = Random(number).choices(WORDS, k=1000)
        (folder / "text" / f"{number}.txt").write_text(".\n".join(words))
