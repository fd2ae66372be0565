"""Trains small models with `jhpt.train`, and records the contents of their run directories."""

import hashlib
import io
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from flat import Flat, flatten, nested, numbers_in, plain_leaves, spelled
from renamed import Names
from runs import COMMON, MIDDLE, RUNS, STEPS, TrainingRun

import jhpt

METRICS = ("loss", "grad_norm", "learning_rate", "skipped", "validation_loss")
"""Metrics of a step that are recorded, by their old names; the others are times."""

WORDS = ("the mesh", "maps every layer", "to a device", "and each step", "adds up", "what the others", "have seen")

Line = tuple[str, Flat]


def recorded_runs(folder: Path, names: Names, only: Sequence[str] = ()) -> Iterator[Line]:
    """(name, numbers) of every run, from the first step to the last."""
    for each in chosen(only):
        place = folder / "runs" / slug(each)
        shutil.rmtree(place, ignore_errors=True)
        yield each.name, trained(each, place, folder, names)


def stopped_runs(folder: Path, names: Names, only: Sequence[str] = ()) -> int:
    """Writes run directories to `stopped` as they are after half of the steps; returns how many.

    A run that is interrupted leaves its newest checkpoint, and metrics that may go beyond it.  The same is made from a
    whole run, which is trained here if it has not been trained before.
    """
    runs = [each for each in chosen(only) if each.stopped]
    for each in runs:
        place, stopped = folder / "runs" / slug(each), folder / "stopped" / slug(each)
        if not (place / "checkpoints" / str(MIDDLE)).is_dir():
            trained(each, place, folder, names)
        shutil.rmtree(stopped, ignore_errors=True)
        shutil.copytree(place, stopped)
        shutil.rmtree(stopped / "checkpoints" / str(STEPS))
    return len(runs)


def resumed_runs(
    recording: Path, folder: Path, names: Names, only: Sequence[str] = (), translate: bool = False
) -> Iterator[Line]:
    """(name, numbers) of runs that another recording stopped: the steps after the middle, and the final state."""
    for each in chosen(only):
        stopped, place = recording / "stopped" / slug(each), folder / "resumed" / slug(each)
        if not each.stopped or not stopped.is_dir():
            continue
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(stopped, place)
        if translate:
            translated(place, names)
        yield each.name, trained(each, place, folder, names, first=MIDDLE)


def chosen(only: Sequence[str]) -> list[TrainingRun]:
    """The runs of these names, with or without blanks and commas; without names, all."""
    wanted = {name.replace(" ", "-") for name in only}
    if unknown := wanted - {slug(each) for each in RUNS}:
        raise SystemExit(f"there is no run {', '.join(unknown)}; runs: {', '.join(map(slug, RUNS))}")
    return [each for each in RUNS if not only or slug(each) in wanted]


def trained(each: TrainingRun, place: Path, folder: Path, names: Names, first: int = 0) -> Flat:
    """Trains or resumes to the last step; returns the results of the steps after `first`."""
    data = {"data.path": str(corpus(folder)), "data.cache_dir": str(folder / "cache")}
    settings = {**data, **COMMON, **each.settings}
    overrides = {names.setting(key): names.word(key, value) for key, value in settings.items()}
    try:
        plan = None if each.plan is None else jhpt.Plan.model_validate(spelled(each.plan, names))
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            jhpt.train(each.preset, out=place, overrides=overrides, plan=plan)
    except jhpt.InputError as error:
        print(f"{each.name} is refused: {error}", flush=True)
        return {"outcome": "refused", "message#": numbers_in(str(error).replace(str(folder), ""))}
    except Exception as error:
        print(f"{each.name} fails: {error}", flush=True)
        return {"outcome": f"failed with {type(error).__name__}"}
    plan_of_run = flatten({"plan": json.loads((place / "plan.json").read_text())}, names) if not first else {}
    return {"outcome": "trained"} | plan_of_run | metrics(place, names, first) | final_state(place, names)


def metrics(place: Path, names: Names, first: int) -> Flat:
    """Losses and norms of the steps after `first`, by step."""
    numbers: Flat = {}
    for line in (place / "metrics.jsonl").read_text().splitlines():
        values = flatten(json.loads(line), names)
        step = values.pop("step")
        if isinstance(step, int) and step > first:
            numbers |= {f"step {step}.{name}": values[name] for name in METRICS if name in values}
    return numbers


def final_state(place: Path, names: Names) -> Flat:
    """A digest of every array in the last checkpoint: parameters, moments, residuals of compression."""
    numbers: Flat = {}
    for item in sorted((place / "checkpoints" / str(STEPS)).iterdir()):
        if (item / "_METADATA").is_file():
            for path, array in arrays(item):
                numbers[names.old_key(f"final.{item.name}.{path}")] = described(array)
    return numbers


def arrays(item: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(dotted path, array) of all arrays in an item of a checkpoint."""
    handler = ocp.PyTreeCheckpointHandler()
    shapes = handler.metadata(item).tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    tree = handler.restore(item, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(array)


def described(array: np.ndarray) -> str:
    """Type, shape and digest of all bits."""
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype} {array.shape} sha256 {digest}"


def corpus(folder: Path) -> Path:
    """Four files of text, always the same."""
    place = folder / "corpus"
    place.mkdir(exist_ok=True)
    for index in range(4):
        rng = random.Random(index)
        lines = (" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(150))
        (place / f"{index}.txt").write_text(".\n".join(lines))
    return place


def translated(place: Path, names: Names) -> None:
    """Translates a run's configuration, plan and record into the names of this tree, if it cannot read the old ones."""
    config = place / "config.yaml"
    config.write_text(yaml.safe_dump(_settings(yaml.safe_load(config.read_text()), names), sort_keys=False))
    plan = place / "plan.json"
    plan.write_text(json.dumps(spelled(json.loads(plan.read_text()), names)))
    for record in place.glob("checkpoints/*/record/metadata"):
        tree = json.loads(record.read_text())
        record.write_text(json.dumps(tree | {"config": _settings(tree["config"], names)}))


def _settings(tree: Any, names: Names) -> Any:
    return nested({names.setting(path): names.word(path, value) for path, value in plain_leaves(tree)})


def slug(each: TrainingRun) -> str:
    """The name of the run's folder."""
    return each.name.replace(",", "").replace(" ", "-")
