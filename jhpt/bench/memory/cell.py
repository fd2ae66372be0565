"""Steps of a plan in a process of its own, whose environment sets its share of the device's memory.

    python -m jhpt.bench.memory.cell SPEC FILE

SPEC is JSON: preset, overrides, plan, steps.  The process writes the seconds of every step and the peak bytes after
each.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jhpt.core.load import load_config, with_nominal_vocabulary
from jhpt.core.plan import Plan
from jhpt.training.compile import compile_step
from jhpt.training.data.batches import shuffled, training_batches
from jhpt.training.programs import global_batch
from jhpt.training.runtime import allow_pinned_memory, configure_runtime
from jhpt.training.setup import prepare


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """The results that the process writes."""
    config = with_nominal_vocabulary(load_config(spec["preset"], spec["overrides"]))
    plan = Plan.model_validate(spec["plan"])
    allow_pinned_memory(config.memory)
    setup = prepare(config, plan)
    step = compile_step(setup)
    size = config.data.batch_size
    batches = training_batches(shuffled(setup.train_windows, config.seed), size, setup.layout.own_rows(size), 0)
    state, seconds, peaks = step.init(), list[float](), list[int]()
    for _ in range(spec["steps"]):
        windows = jax.block_until_ready(global_batch(setup, next(batches)))
        start = time.perf_counter()
        state, metrics = step.step(state, windows)
        loss = float(np.asarray(metrics.loss))
        seconds.append(time.perf_counter() - start)
        peaks.append((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))
    return {"seconds": seconds, "peaks": peaks, "loss": loss, "memory": step.memory, "host": step.host_bytes}


def main(arguments: list[str]) -> int:
    """The process."""
    spec, out = arguments
    configure_runtime()
    Path(out).write_text(json.dumps(run(json.loads(spec))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
