"""`jhpt bench train`: the loop of `jhpt.train` against a hand-written minimal loop of the same model.

One trial runs a fixed number of steps.  jhpt's trial is its real loop (`jhpt.training.loop.fit`: data pipeline, step,
metrics); the minimal loop feeds ready-made batches to one jitted step.  Competitors take turns on the same device in
one process.  Where PyTorch is installed, the same model in PyTorch (eager on CPU, compiled on GPU) runs too; it is
BERT's only competitor.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jhpt.bench import minimal
from jhpt.bench.results import Claim, Row, check_writable, print_rows, write_json
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.load import load_config
from jhpt.measure.timer import interleaved, spread
from jhpt.training.console import Display
from jhpt.training.data.batches import shuffled, training_batches
from jhpt.training.loop import fit, training_flops_per_token
from jhpt.training.programs import compile_programs
from jhpt.training.runtime import configure_runtime
from jhpt.training.setup import Setup, prepare

GPU_PRESETS = ("bert-base", "gpt2-124m", "gpt2-1.5b")
CPU_PRESETS = ("gpt-tiny",)


def run(*, quick: bool, json_path: str | None) -> int:
    """Runs the benchmark on the first device; returns the exit status."""
    if json_path:
        check_writable(json_path)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs its share of the GPU
    configure_runtime()
    on_gpu = jax.default_backend() == "gpu"
    rounds, steps = (5, 4) if quick else (15, 10)
    rows: list[Row] = []
    claims: dict[str, Claim] = {}  # of the last, largest preset; the rows hold all
    for preset in GPU_PRESETS if on_gpu else CPU_PRESETS:
        overrides = {"parallel.data": 1, "log.every": steps, "log.tensorboard": False}
        setup = prepare(load_config(preset, overrides))
        trials = _competitors(setup, steps)
        samples = interleaved(trials, rounds, warmup=1)
        rows += _rows(setup, preset, steps, samples)
        claims |= _claims(setup, preset, steps, samples)
    print_rows("bench train", rows)
    for name, claim in claims.items():
        print(f"{name} = {claim.value:.4g} {claim.unit}  [{claim.setup}]")
    if json_path:
        write_json(json_path, "train", {"rounds": rounds, "steps_per_trial": steps, "quick": quick}, rows, claims)
    return 0


def _competitors(setup: Setup, steps: int) -> dict[str, Callable[[], Any]]:
    competitors = {"jhpt": _jhpt_trial(setup, steps)}
    if isinstance(setup.config.model, GPTConfig):
        competitors["minimal"] = _minimal_trial(setup, steps)
    if torch_trial := _torch_trial(setup, steps):
        competitors |= torch_trial
    return competitors


def _jhpt_trial(setup: Setup, steps: int) -> Callable[[], Any]:
    programs = compile_programs(setup)
    state = programs.init()

    def trial() -> Any:
        nonlocal state
        last = int(state.step) + steps
        config = setup.config.model_copy(update={"train": setup.config.train.model_copy(update={"steps": last})})
        block = dataclasses.replace(setup, config=config, validation_windows=None)
        display = Display(last, quiet=True)
        state, _ = fit(block, programs, state, save=lambda step, state: None, writer=None, display=display)
        return state

    return trial


def _minimal_trial(setup: Setup, steps: int) -> Callable[[], Any]:
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


def _torch_trial(setup: Setup, steps: int) -> dict[str, Callable[[], Any]]:
    try:
        import torch
    except ImportError:
        return {}
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

    return {"torch compiled" if compiled else "torch eager": trial}


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
    """Ratios are medians of the ratios round by round, so that drift of the machine cancels."""
    tokens, place = _tokens(setup, steps), f"{preset} on {setup.device.kind}, batch {setup.config.data.batch_size}"
    rate = tokens / spread(samples["jhpt"])[0]
    claims = {"tokens_per_s": Claim(value=rate, unit="tokens/s", setup=place)}
    if "minimal" in samples:
        ratios = [ours / theirs for ours, theirs in zip(samples["jhpt"], samples["minimal"], strict=True)]
        claims["framework_ratio"] = Claim(value=spread(ratios)[0], unit="time of jhpt / minimal loop", setup=place)
    if setup.device.peak_bf16_flops:
        mfu = rate * training_flops_per_token(setup) / setup.device.peak_bf16_flops
        claims["mfu"] = Claim(value=mfu, unit="of peak bf16, causal convention", setup=place)
    return claims
