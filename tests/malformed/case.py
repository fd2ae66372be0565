"""What a case is, and the valid things that cases copy and spoil."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from jhpt.core.catalogue import cluster_named
from jhpt.core.load import load_config, to_yaml
from jhpt.core.manifest import write_manifest
from jhpt.planner.profiles.analytic import analytic_profile

TEXT = "".join(f"the mesh maps layer {n} to device {n * 7 % 16}, and each step adds up.\n" for n in range(80))

TINY = {
    "name": "tiny",
    "model": {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 32, "max_length": 16},
    "data": {"sequence_length": 16, "batch_size": 4},
    "train": {"steps": 2},
    "parallel": {"data": 1},
    "evaluation": {"batches": 1, "sample_tokens": 0},
    "log": {"every": 1, "tensorboard": False},
}
"""One layer on one device, for two steps."""

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "unk_token": "a", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """Over a folder: a small file system of its own, or itself, but read-only.  bytes: None: read-only."""

    folder: Path
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command.

    environment: variables that it has beside the usual ones.  mounts: file systems that only its process sees.
    """

    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()


def command(words: str, *more: str) -> Case:
    return Case(arguments=[*words.split(), *more])


Maker = Callable[[random.Random, Path], Case]
"""Makes the files of a case in its folder, where the command runs."""


@dataclass(frozen=True, kw_only=True)
class Valid:
    """Valid things, in the folder that all cases copy them from."""

    folder: Path

    def copied(self, name: str, here: Path) -> Path:
        """A copy, in the folder of a case."""
        source, target = self.folder / name, here / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        return target

    def tree(self, name: str) -> dict:
        return yaml.safe_load((self.folder / name).read_text())


def make_valid(folder: Path, run: Callable[[list[str]], object]) -> Valid:
    """run: runs a command in the folder."""
    data = TINY["data"] | {"path": str(folder / "text.txt")}
    (folder / "text.txt").write_text(TEXT)
    (folder / "tiny.yaml").write_text(to_yaml(load_config(TINY | {"data": data})))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    device = cluster_named("h100x2x1").nodes[0].device
    analytic_profile(load_config(TINY), device, "bfloat16").save(folder / "profile.json")
    cluster_named("h100x2x2").save(folder / "cluster.json")
    run(["plan", "gpt-tiny", "--cluster", "h100x2x1", "--model.num_layers", "1", "--out", "plan.json"])
    run(["train", "tiny.yaml", "--out", "run"])
    run(["export", "hf", "run", "hf"])
    return Valid(folder=folder)


def agree(step: Path) -> None:
    """Writes the manifest anew, so that it agrees with what has been spoiled."""
    (step / "manifest.json").unlink(missing_ok=True)
    write_manifest(step)
