"""Calls the planner, and records each answer as numbers by path."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flat import Flat, flatten, numbers_in, spelled
from hand_plans import CASES, Case, hand_plans
from mixed_cluster import mixed_cluster
from renamed import Names
from requests_for_plans import MIXED, PlanRequest, plan_requests

import jhpt
from jhpt.cli import main

REFUSED = 2
"""Exit status of requests that the planner refuses."""

Line = tuple[str, Flat]


def recorded_plans(folder: Path, names: Names) -> Iterator[Line]:
    """(name, numbers) of every request and of every plan by hand."""
    (folder / MIXED).write_text(json.dumps(spelled(mixed_cluster(), names)))
    for request in plan_requests():
        yield request.name, (_by_function if request.function else _by_command)(request, folder, names)
    for case in CASES:
        yield from _by_hand(case, folder, names)


def _by_command(request: PlanRequest, folder: Path, names: Names) -> Flat:
    flags = {names.flag(key): value for key, value in _placed(request, folder).items()}
    settings = {names.setting(key): names.word(key, value) for key, value in request.settings.items()}
    words = [f"--{key}={value}" for key, value in {**flags, **settings}.items()]
    out, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            status = main(["plan", *filter(None, [request.source]), *words, "--json"])
    except SystemExit as error:  # a flag that is not there
        return {"outcome": f"unknown flag, exit status {error.code}"}
    except Exception as error:
        return _failed(error)
    if status == 0:
        return {"outcome": "answered"} | flatten(json.loads(out.getvalue()), names)
    return _refused(errors.getvalue(), folder) if status == REFUSED else {"outcome": f"exit status {status}"}


def _by_function(request: PlanRequest, folder: Path, names: Names) -> Flat:
    arguments: dict[str, Any] = {}
    for key, value in _placed(request, folder).items():
        arguments[_argument(names.flag(key))] = value if key in ("cluster", "space") else yaml.safe_load(value)
    settings = {
        names.setting(key): yaml.safe_load(str(names.word(key, value))) for key, value in request.settings.items()
    }
    try:
        answer = jhpt.plan(request.source, overrides=settings or None, **arguments)
    except jhpt.InputError as error:
        return _refused(str(error), folder)
    except Exception as error:
        return _failed(error)
    return {"outcome": "answered"} | flatten(answer.model_dump(mode="json"), names)


def _by_hand(case: Case, folder: Path, names: Names) -> Iterator[Line]:
    prepare, evaluate = names.place("prepare"), names.place("evaluate")
    cluster = str(folder / MIXED) if case.cluster == MIXED else case.cluster
    task = prepare(case.model, cluster=cluster, batch=32, space=case.space)
    for number, tree in enumerate(hand_plans(case)):
        name = f"by hand: {case.model} on {case.cluster}, number {number}"
        try:
            plan = jhpt.Plan.model_validate(spelled(tree, names))
            estimate = evaluate(plan, task.profile, task.cluster)
        except jhpt.InputError as error:
            yield name, _refused(str(error), folder)
        except Exception as error:
            yield name, _failed(error)
        else:
            yield name, {"outcome": "priced"} | flatten({"estimate": _plain(asdict(estimate))}, names)


def _placed(request: PlanRequest, folder: Path) -> dict[str, str]:
    """The flags, with the path of the cluster's file."""
    flags = dict(request.flags)
    return flags | {"cluster": str(folder / MIXED)} if flags.get("cluster") == MIXED else flags


def _argument(flag: str) -> str:
    """The argument of the function for an option: the old command line had microbatches, the function micro_batches."""
    return {"microbatches": "micro_batches"}.get(flag, flag)


def _refused(message: str, folder: Path) -> Flat:
    return {"outcome": "refused", "message#": numbers_in(message.replace(str(folder), ""))}


def _failed(error: Exception) -> Flat:
    """An exception other than InputError, which should not happen: only its type is recorded."""
    return {"outcome": f"failed with {type(error).__name__}"}


def _plain(value: Any) -> Any:
    """Arrays as lists."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
