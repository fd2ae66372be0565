"""The planned step in a budget on a GPU, measured in turn with the usual choices without a planner.

    planned       the plan for the budget
    synchronous   everything on the host, nothing fetched ahead, with the number of micro-batches that is fastest
    optimizer     the whole optimizer state on the host
    resident      everything on the device, if it fits

Each runs in processes of its own, which may use no more of the device's memory than the budget.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jhpt.bench.results import last_lines
from jhpt.core.divisors import divisors
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Offload, OffloadKind, Plan
from jhpt.planner.api import Task, prepare
from jhpt.planner.cost.estimate import price

SETUPS = (("gpt2-1.5b", 8, 16 << 30), ("gpt2-1.5b", 16, 24 << 30), ("gpt-6.7b", 16, 24 << 30))
"""(preset, batch, budget)."""

STEPS, WARM = 12, 2
"""Steps of a process, and how many of them are not counted."""

TIMEOUT = 900.0
"""Seconds after which a process is ended, so that one that hangs does not hold the device."""


def competitors(task: Task) -> dict[str, Plan]:
    """Plans by name; those that do not fit are left out."""
    answer = task.solve()
    plans = {"planned": answer.plan}
    others: dict[str, OffloadKind | None] = {"synchronous": "both", "optimizer": "optimizer", "resident": None}
    for name, kind in others.items():
        try:
            plan = replace(task, request=replace(task.request, offload=(kind,))).solve().plan
        except InputError:
            continue
        plans[name] = plan
    if "synchronous" in plans:
        plans["synchronous"] = _synchronous(plans["synchronous"], answer.model)
    if "optimizer" in plans:
        plans["optimizer"] = plans["optimizer"].model_copy(update={"offload": Offload(kind="optimizer")})
    return {
        name: plan.model_copy(update={"seconds": price(plan, answer.model).seconds}) for name, plan in plans.items()
    }


def device_memory() -> float | None:
    """All bytes of an NVIDIA GPU; None: there is none.  Another process reads them, because it has to reserve
    memory."""
    ask = "import jax; d = jax.local_devices()[0]; print(d.platform, (d.memory_stats() or {}).get('bytes_limit', 0))"
    half = os.environ | {"XLA_CLIENT_MEM_FRACTION": "0.5"}
    done = subprocess.run([sys.executable, "-c", ask], env=half, capture_output=True, text=True, timeout=TIMEOUT)
    words = done.stdout.split()[-2:]
    return 2 * float(words[1]) if done.returncode == 0 and words[0] in ("gpu", "cuda") else None


def _synchronous(plan: Plan, model: Any) -> Plan:
    """The plan without prefetch and without resident blocks, with the micro-batches that are predicted to be
    fastest."""
    bare = plan.model_copy(update={"offload": Offload(ahead=0)})
    plans = [bare.model_copy(update={"micro_batches": count}) for count in divisors(plan.batch)]
    fitting = [each for each in plans if price(each, model).fits] or [bare]
    return min(fitting, key=lambda each: price(each, model).seconds)


def measured(
    memory: float,
    rounds: int,
    setups: Sequence[tuple[str, int, int]] = SETUPS,
    names: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for every set-up and competitor.

    Args:
      memory: bytes of the device.
      names: of competitors; None: all.
    """
    for preset, batch, budget in setups:
        task = prepare(preset, cluster="h100x1x1", budget=budget, batch=batch)
        plans = {name: plan for name, plan in competitors(task).items() if names is None or name in names}
        rows = {name: _row(preset, batch, budget, name, plan) for name, plan in plans.items()}
        for _ in range(rounds):
            for name, plan in plans.items():
                cell = in_process(preset, {"data.batch_size": batch}, plan, STEPS, budget / memory)
                rows[name]["samples_s"] += cell.get("seconds", [])[WARM:]
                rows[name]["peaks"] += cell.get("peaks", [])
                rows[name]["failed"] = cell.get("failed")
        yield from rows.values()


def _row(preset: str, batch: int, budget: int, name: str, plan: Plan) -> dict[str, Any]:
    """A competitor before its first step."""
    return {
        "kind": "steps",
        "setup": f"{preset}, batch {batch}, {budget / 2**30:.0f} GiB",
        "competitor": name,
        "plan": plan.model_dump(mode="json", exclude_defaults=True),
        "predicted_s": plan.seconds,
        "tokens": batch * load_config(preset).data.sequence_length,
        "samples_s": [],
        "peaks": [],
        "failed": None,
    }


def in_process(preset: str, overrides: dict[str, Any], plan: Plan, steps: int, share: float | None) -> dict[str, Any]:
    """The results of `cell`, or why it failed.  share: of the device's memory that the process may take."""
    spec = {"preset": preset, "overrides": overrides, "plan": plan.model_dump(mode="json"), "steps": steps}
    limit = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"} | ({"XLA_CLIENT_MEM_FRACTION": f"{share:.4f}"} if share else {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        command = [sys.executable, "-m", "jhpt.bench.memory.cell", json.dumps(spec), str(out)]
        try:
            done = subprocess.run(command, env=os.environ | limit, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {TIMEOUT:.0f} s"}
        if done.returncode:
            return {"failed": last_lines(done.stderr)}
        result: dict[str, Any] = json.loads(out.read_text())
        return result
