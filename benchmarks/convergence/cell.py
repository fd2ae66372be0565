"""One cell in a process of its own: trains, evaluates twice, writes its results.

    python -m benchmarks.convergence.cell SETTINGS FILE

The key `training` has the losses of the run, `validation` the loss of the final parameters with compression off, and
`own` their loss with the compression of the training.  The final parameters of an uncompressed cell lie beside its
file.  All cells of one preset and seed share text, order of batches, initial parameters and masks.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convergence.cells import COMPRESSION, HEADLINE, Cell
from benchmarks.convergence.choices import GROUP, controlled
from benchmarks.convergence.leak import leak
from jhpt.bench.results import machine, versions
from jhpt.core.config import Config
from jhpt.core.load import load_config
from jhpt.models.family import build
from jhpt.training.compile import compile_step
from jhpt.training.console import Display
from jhpt.training.device_step import evaluate_program
from jhpt.training.loop import evaluate, fit
from jhpt.training.runtime import configure_runtime
from jhpt.training.setup import Setup, execution, prepare

MATMULS = "model.matmul_dtype"


def run(cell: Cell) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(results of the cell, its final parameters by their paths in the model's tree)."""
    start = time.perf_counter()
    config = load_config(cell.preset, {"seed": cell.seed, **cell.changes})
    setup = prepared(config)
    step = compile_step(setup)
    unseen = replace(setup, validation_windows=None)  # no evaluation on the way
    display = Display(config.train.steps, quiet=True)
    state, progress = fit(unseen, step, step.init(), save=lambda step, state: None, writer=None, display=display)
    if progress.interrupted:
        raise SystemExit(f"{cell.name}: stopped by a signal")
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": cell.settings,
        "training": {str(step): loss for step, loss in progress.losses.items()},
        "skipped": int(state.skipped),
    }
    plain = prepared(load_config(config, {f"{COMPRESSION}bits": 16, f"{COMPRESSION}tokens": 1.0}))
    results["validation"] = evaluate(plain, evaluate_program(plain), state.params).loss
    results["own"] = (
        evaluate(setup, step.evaluate, state.params).loss if setup.plan.compression.on else results["validation"]
    )
    if cell.group != GROUP and looks_at_leaks(setup):
        results["leaks"] = {kind: leak(other, state.params) for kind, other in by_rule(setup).items()}
    params = step.parameters(state)
    assert params is not None
    return results | {"seconds": time.perf_counter() - start}, flat(params)


def prepared(config: Config) -> Setup:
    """The setup of a run.  Products in 8 bits, which a run refuses on a CPU, are computed there by conversion."""
    setup = prepare(load_config(config, {MATMULS: "same"}))
    model = build(config.model, dtype=setup.model.dtype, implementation=setup.model.implementation)
    training, evaluation = (
        execution(config, model, setup.layout, setup.tokenizer, train=train, kernels=setup.kernels.implementation)
        for train in (True, False)
    )
    return replace(setup, config=config, model=model, training=training, evaluation=evaluation)


def looks_at_leaks(setup: Setup) -> bool:
    """Whether leaks are measured: for causal models with the headline's share of tokens."""
    compression = setup.plan.compression
    return setup.config.model.causal and (compression.tokens, compression.bits) == (HEADLINE.tokens, HEADLINE.bits)


def by_rule(setup: Setup) -> dict[str, Setup]:
    """Setups for the same parameters with each choice of tokens, and with the other tokens dropped or sent."""
    setups = {}
    for importance in ("own", "attention"):
        for rest_bits in (0, 4):
            changes = {f"{COMPRESSION}importance": importance, f"{COMPRESSION}rest_bits": rest_bits}
            setups[f"{importance}, {rest_bits} bits"] = prepare(load_config(setup.config, changes))
    return setups


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, np.ndarray]:
    """Leaves by path."""
    leaves: dict[str, np.ndarray] = {}
    for name, part in tree.items():
        leaves |= flat(part, f"{above}{name}/") if isinstance(part, Mapping) else {above + name: np.asarray(part)}
    return leaves


def unflat(leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `flat`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = leaf
    return tree


def main(arguments: list[str]) -> int:
    """The process."""
    configure_runtime()
    settings, out = arguments
    cell = Cell(**json.loads(settings))
    with controlled(cell.control):
        results, params = run(cell)
    if cell.plain:
        np.savez(Path(out).with_suffix(".npz"), allow_pickle=False, **params)
    beside = Path(f"{out}.part")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
