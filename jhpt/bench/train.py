"""`jhpt bench train`: the loop of `jhpt.train` compared with a hand-written minimal loop of the same model.

One trial runs a fixed number of steps.  jhpt's trial is its real loop (`jhpt.training.loop.fit`: data pipeline, step,
metrics); the minimal loop feeds prepared batches to one jitted step.  On a CPU competitors run in turn in one process;
on a GPU each has a process of its own.  If PyTorch is installed, the same model in PyTorch (eager on CPU, compiled on
GPU) runs too; it is BERT's only competitor.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.bench import minimal
from jhpt.bench.ratios import ratio_unit, speed_claim, times_as_fast
from jhpt.bench.results import Claim, Report, Row, chosen, last_lines, print_claims, print_rows
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.load import load_config, with_nominal_vocabulary
from jhpt.measure.timer import interleaved, spread
from jhpt.training.compile import compile_step
from jhpt.training.console import Display
from jhpt.training.data.batches import shuffled, training_batches
from jhpt.training.loop import fit, training_flops_per_token
from jhpt.training.runtime import configure_runtime
from jhpt.training.setup import Setup, prepare

GPU_PRESETS: dict[str, dict[str, Any]] = {"bert-base": {}, "gpt2-124m": {}, "gpt2-1.5b": {"data.batch_size": 8}}
"""Presets and changes of them: at batch 16 the minimal loop of gpt2-1.5b needs 127 GB."""

CPU_PRESETS: dict[str, dict[str, Any]] = {"gpt-tiny": {}}

Trial = Callable[[], Any]


def run(*, quick: bool, json_path: str | None, only: Sequence[str] = ()) -> int:
    """Runs the benchmark on the first device; returns the exit status.  only: presets."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes need their share of the GPU
    configure_runtime()
    on_gpu = jax.default_backend() == "gpu"
    rounds, steps = _length(quick=quick, on_gpu=on_gpu)
    presets = GPU_PRESETS if on_gpu else CPU_PRESETS
    report = Report(
        path=json_path, bench="train", settings={"rounds": rounds, "steps_per_trial": steps, "quick": quick}
    )
    for preset in chosen(list(presets), only):
        setup = _setup(preset, presets[preset], steps)
        measured = (_in_processes if on_gpu else _in_turn)(setup, preset, presets[preset], rounds, steps)
        samples: dict[str, list[float]] = {}
        for new in measured:
            samples |= new
            # Claims are those of the last, largest preset; rows are those of all.
            report.add(_rows(setup, preset, steps, new), _claims(setup, preset, steps, samples))
    print_rows("bench train", report.rows)
    print_claims(report.claims)
    return 0


def _length(*, quick: bool, on_gpu: bool) -> tuple[int, int]:
    """(rounds, steps of a trial).

    On a GPU a trial has many steps.  Reading the first batch and updating CUDA graphs keep the device waiting once in a
    trial as they do once in a run: on an H200, trials of ten steps took 66.1 ms a step of which the device was busy for
    63.5.
    """
    if on_gpu:
        return (5, 20) if quick else (7, 50)
    return (5, 4) if quick else (15, 10)


def _setup(preset: str, changes: dict[str, Any], steps: int) -> Setup:
    overrides = {"parallel.data": 1, "log.every": steps, "log.tensorboard": False}
    return prepare(with_nominal_vocabulary(load_config(preset, overrides | changes)))


def _competitors(setup: Setup, steps: int) -> dict[str, Callable[[], Trial]]:
    """Functions that make the trial of each competitor."""
    competitors = {"jhpt": lambda: _jhpt_trial(setup, steps)}
    if isinstance(setup.config.model, GPTConfig):
        competitors["minimal"] = lambda: _minimal_trial(setup, steps)
    if importlib.util.find_spec("torch"):
        competitors["torch"] = lambda: _torch_trial(setup, steps)
    return competitors


def _in_turn(
    setup: Setup, preset: str, changes: dict[str, Any], rounds: int, steps: int
) -> Iterator[dict[str, list[float]]]:
    """Seconds of every competitor's trials, taken in turn in this process."""
    trials = {name: make() for name, make in _competitors(setup, steps).items()}
    yield interleaved(trials, rounds, warmup=1)


def _in_processes(
    setup: Setup, preset: str, changes: dict[str, Any], rounds: int, steps: int
) -> Iterator[dict[str, list[float]]]:
    """Seconds of one competitor's trials after the other, each in a process of its own, because a GPU may not have room
    for all.

    A competitor that fails is named on stderr and left out.
    """
    for name in _competitors(setup, steps):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "samples.json"
            spec = {"preset": preset, "changes": changes, "competitor": name, "rounds": rounds, "steps": steps}
            command = [sys.executable, "-m", "jhpt.bench.train", json.dumps(spec), str(file)]
            child = subprocess.run(command, capture_output=True, text=True)
            if child.returncode:
                print(f"bench train: {preset}, {name}: not measured: {last_lines(child.stderr)}", file=sys.stderr)
            else:
                yield {name: json.loads(file.read_text())}


def main(arguments: Sequence[str]) -> int:
    """One competitor in this process: `python -m jhpt.bench.train SPEC FILE`."""
    text, file = arguments
    spec = json.loads(text)
    configure_runtime()
    setup = _setup(spec["preset"], spec["changes"], spec["steps"])
    trial = _competitors(setup, spec["steps"])[spec["competitor"]]()
    (samples,) = interleaved({spec["competitor"]: trial}, spec["rounds"], warmup=1).values()
    Path(file).write_text(json.dumps(samples))
    return 0


def _jhpt_trial(setup: Setup, steps: int) -> Trial:
    step = compile_step(setup)
    state = step.init()

    def trial() -> Any:
        nonlocal state
        last = int(state.step) + steps
        config = setup.config.model_copy(update={"train": setup.config.train.model_copy(update={"steps": last})})
        block = dataclasses.replace(setup, config=config, validation_windows=None)
        display = Display(last, quiet=True)
        state, _ = fit(block, step, state, save=lambda step, state: None, writer=None, display=display)
        return state

    return trial


def _minimal_trial(setup: Setup, steps: int) -> Trial:
    config = setup.config.model
    assert isinstance(config, GPTConfig)
    unroll = config.num_layers if setup.training.unroll else 1
    step, state = minimal.make_step(config, setup.model.dtype, setup.attention.implementation, unroll)
    batches = _ready_batches(setup, steps)

    def trial() -> Any:
        nonlocal state
        for windows in batches:
            state, loss = step(state, jnp.asarray(windows))
        return state, loss

    return trial


def _torch_trial(setup: Setup, steps: int) -> Trial:
    import torch

    from jhpt.bench.torch_models import make_step

    compiled = torch.cuda.is_available()
    model = setup.config.model
    assert isinstance(model, GPTConfig | BERTConfig)
    step = make_step(model, setup.config.data, setup.tokenizer, compiled=compiled)
    batches = _ready_batches(setup, steps)

    def trial() -> float:
        for windows in batches:
            loss = step(windows)
        return float(loss)  # waits for the device

    return trial


def _ready_batches(setup: Setup, steps: int) -> list[Any]:
    size = setup.config.data.batch_size
    batches = training_batches(shuffled(setup.train_windows, setup.config.seed), size, slice(0, size), 0)
    return [next(batches) for _ in range(steps)]


def _tokens(setup: Setup, steps: int) -> int:
    return steps * setup.config.data.batch_size * setup.config.data.sequence_length


def _rows(setup: Setup, preset: str, steps: int, samples: dict[str, list[float]]) -> list[Row]:
    tokens = _tokens(setup, steps)
    flops = tokens * training_flops_per_token(setup)
    return [
        Row(setup=preset, competitor=name, samples_s=times, tokens=tokens, flops=flops)
        for name, times in samples.items()
    ]


def _claims(setup: Setup, preset: str, steps: int, samples: dict[str, list[float]]) -> dict[str, Claim]:
    """Claims of a preset, against every competitor that was measured."""
    if "jhpt" not in samples:
        return {}
    tokens, place = _tokens(setup, steps), f"{preset} on {setup.device.kind}, batch {setup.config.data.batch_size}"
    rate = tokens / spread(samples["jhpt"])[0]
    claims = {"tokens_per_s": Claim(value=rate, unit="tokens/s", setup=place)}
    claims |= ratio_claims(samples, place)
    if setup.device.peak_bf16_flops:
        mfu = rate * training_flops_per_token(setup) / setup.device.peak_bf16_flops
        claims["mfu"] = Claim(value=mfu, unit="of peak bf16, causal convention", setup=place)
    return claims


def ratio_claims(samples: dict[str, list[float]], place: str) -> dict[str, Claim]:
    """How much faster jhpt is than every competitor that was measured.  samples: seconds of the rounds."""
    words = {"minimal": "the minimal loop", "torch": "PyTorch"}
    return {
        f"vs_{name}": speed_claim(
            times_as_fast(samples[name], samples["jhpt"]), unit=ratio_unit(words[name], "jhpt"), setup=place
        )
        for name in words
        if name in samples
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
