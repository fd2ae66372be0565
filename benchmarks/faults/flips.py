"""Flipped bits and cut ends in the files of a finished run; nothing that changes a restored value may pass."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.faults.kills import LAST, judged
from benchmarks.faults.setups import SetUp
from benchmarks.faults.zygote import run
from jhpt.core.config import Config
from jhpt.core.load import load_config
from jhpt.core.manifest import MANIFEST, files_of
from jhpt.training.data.cache import token_cache
from jhpt.training.data.tokenizer import load_tokenizer
from jhpt.training.metrics import METRICS_FILE, read_metrics
from jhpt.training.step_folders import FOLDER, newest_whole

KINDS = {"checkpoint": 0.75, "cache": 0.15, "metrics": 0.1}
"""What is damaged, and how often."""

RESUMED_EVERY = 25
"""Every so many flips of a checkpoint, a whole training run resumes from what is left."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One trial.  fault: the byte and bit, or the new length; outcome: "detected", "harmless" (what is read is what was
    written), "undetected" or "traceback"."""

    seed: int
    kind: str
    file: str
    fault: str
    outcome: str
    detail: str = ""


def damage(path: Path, rng: Random) -> str:
    """Flips a bit of a file, or cuts its end off; says which."""
    content = bytearray(path.read_bytes())
    if not content or rng.random() < 0.2:
        size = rng.randrange(len(content)) if content else 1
        path.write_bytes(content[:size] if content else b"\0")
        return f"{size} of {len(content)} bytes"
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"byte {place}, bit {bit}"


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file but the manifest."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_of(folder)}


def of_checkpoint(accepted: bool, same: bool) -> str:
    """The outcome for a damaged step.  accepted: whether it is taken as whole; same: whether its values are those that
    were saved."""
    return ("harmless" if same else "undetected") if accepted else "detected"


Digests = Mapping[int, Mapping[str, str]]
"""Of the arrays of every checkpoint, by step."""


def flips(settings: Mapping[str, object], finished: Path, expected: Digests, number: int, seed: int) -> Iterator[Flip]:
    """So many faults, each in a copy of the finished run, which had these settings, or of its token cache."""
    folder = finished.parent.parent
    config = load_config("gpt-tiny", settings)
    for trial in range(number):
        rng = Random(seed + trial)
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        scratch = folder / "flipped"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            if kind == "cache":
                file, fault, outcome, detail = _cache(rng, scratch, config)
            elif kind == "metrics":
                file, fault, outcome, detail = _metrics(rng, finished, scratch)
            else:
                resumed = settings if trial % RESUMED_EVERY == 0 else None
                file, fault, outcome, detail = _checkpoint(rng, finished, scratch, expected, resumed)
        except Exception as error:  # nothing here may raise
            file, fault, outcome, detail = "", "", "traceback", repr(error)
        yield Flip(seed=seed + trial, kind=kind, file=file, fault=fault, outcome=outcome, detail=detail)


Outcome = tuple[str, str, str, str]
"""(file, fault, outcome, detail), as in `Flip`."""


def _metrics(rng: Random, finished: Path, scratch: Path) -> Outcome:
    """Records that are whole must still be read; no value of the training depends on them."""
    scratch.mkdir()
    path = Path(shutil.copy2(finished / METRICS_FILE, scratch))
    fault, before = damage(path, rng), read_metrics(finished)
    kept = sum(record in before for record in read_metrics(scratch))
    return METRICS_FILE, fault, "harmless", f"{kept} of {len(before)} records kept"


def _checkpoint(
    rng: Random, finished: Path, scratch: Path, expected: Digests, settings: Mapping[str, object] | None
) -> Outcome:
    """A damaged last step.  settings: of the run, which then goes on from what is left; None: it does not."""
    for step in (LAST - 2, LAST):
        shutil.copytree(finished / FOLDER / str(step), scratch / FOLDER / str(step))
    for name in ("config.yaml", "plan.json", METRICS_FILE):
        shutil.copy2(finished / name, scratch / name)
    place = scratch / FOLDER / str(LAST)
    path = rng.choice([*files_of(place), place / MANIFEST])
    fault, file = damage(path, rng), str(path.relative_to(scratch / FOLDER))
    accepted = newest_whole(scratch / FOLDER, lambda line: None) == LAST
    outcome = of_checkpoint(accepted, contents(place) == contents(finished / FOLDER / str(LAST)))
    if settings is None:
        return file, fault, outcome, ""
    status, _ = run(SetUp(changes={}), settings, scratch, log=scratch.with_suffix(".log"))
    verdict, _ = judged(scratch, {step: dict(digests) for step, digests in expected.items()})
    if status or verdict != "whole" or not place.is_dir():
        outcome = "undetected"
    return file, fault, outcome, f"went on with status {status}, then {verdict}"


def _cache(rng: Random, scratch: Path, config: Config) -> Outcome:
    """A damaged token cache must not be read: it is made again, with the same tokens."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    whole = token_cache(config.data, tokenizer)
    here = config.data.model_copy(update={"cache_dir": str(scratch)})
    copy = scratch / whole.key
    shutil.copytree(whole.folder, copy)
    path = rng.choice([*files_of(copy), copy / MANIFEST])
    fault = damage(path, rng)
    again = token_cache(here, tokenizer)
    same = all(
        np.array_equal(one, other) for one, other in ((whole.train, again.train), (whole.validation, again.validation))
    )
    outcome = "undetected" if not same else "detected" if again.built else "harmless"
    return path.name, fault, outcome, ""
