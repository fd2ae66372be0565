"""`jhpt bench predict`: the time of a step predicted from a measured profile, compared with that of the real step.

The compiled training step (`jhpt.training.compile`) of one device is timed in turn with the programs from which the
profile is made, in one process, so that both are measured under the same conditions.  Degrees that were not timed are
those of `bench hybrid`: devices of one machine share its processors.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jhpt.bench.results import Claim, Report, Row, chosen, print_claims
from jhpt.core.config import Config
from jhpt.core.load import load_config, with_nominal_vocabulary
from jhpt.measure.profile import Samples, predict_step
from jhpt.measure.timer import steady
from jhpt.training.compile import compile_step
from jhpt.training.data.batches import shuffled, training_batches
from jhpt.training.loop import training_flops_per_token
from jhpt.training.profiling import Grid, assemble, measure_layers
from jhpt.training.programs import global_batch
from jhpt.training.runtime import configure_runtime
from jhpt.training.setup import Setup, prepare


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration, a preset and changes of it, and the micro-batches that are timed to predict its step.

    What is predicted was not timed: neither its micro-batch nor its depth (`jhpt.measure.profile.depths`).
    """

    preset: str
    changes: Mapping[str, Any]
    timed: tuple[int, int]

    def __str__(self) -> str:
        changes = (f"{name.split('.')[-1]}={value}" for name, value in self.changes.items())
        return " ".join([self.preset, *changes, f"from {self.timed[0]} and {self.timed[1]}"])

    @cached_property
    def config(self) -> Config:
        """The configuration, on one device."""
        changes = {"parallel.data": 1, "log.tensorboard": False, **self.changes}
        return with_nominal_vocabulary(load_config(self.preset, changes))

    @property
    def micro_batch(self) -> int:
        """Samples of the micro-batch that is predicted."""
        return self.config.data.batch_size // self.config.parallel.micro_batches


CPU_CASES = (
    Case(preset="gpt-tiny", changes={"model.num_layers": 8}, timed=(16, 64)),
    Case(preset="gpt-tiny", changes={"model.num_layers": 12, "data.batch_size": 64}, timed=(8, 32)),
    Case(preset="gpt-tiny", changes={"model.num_layers": 8, "parallel.micro_batches": 4}, timed=(4, 16)),
    Case(preset="bert-tiny", changes={"model.num_layers": 6}, timed=(16, 64)),
    Case(preset="bert-tiny", changes={"model.num_layers": 12, "data.batch_size": 64}, timed=(8, 32)),
    Case(preset="gpt2-124m", changes={"data.sequence_length": 64, "data.batch_size": 4}, timed=(2, 8)),
)
"""Micro-batches between those that were timed, and twice the larger one."""

GPU_CASES = (
    Case(preset="gpt2-124m", changes={"data.batch_size": 8}, timed=(4, 16)),
    Case(preset="bert-base", changes={"data.batch_size": 32}, timed=(8, 16)),
    Case(preset="gpt2-1.5b", changes={"data.batch_size": 8}, timed=(2, 4)),
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of one step, predicted and measured, and every sample of both ("measured" is the real step)."""

    setup: Setup
    case: Case
    predicted: float
    measured: float
    samples: Samples

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.predicted / self.measured


def compare(case: Case, rounds: int) -> Prediction:
    """Predicts and measures the step of a case on the first device."""
    config, setup = case.config, prepare(case.config)
    grid = Grid(batches=case.timed, tensors=(1,), rounds=rounds)
    seconds = measure_layers(config, grid, {"measured": _real_step(setup)})
    return Prediction(
        setup=setup,
        case=case,
        predicted=predict_step(assemble(config, grid, seconds), config),
        measured=steady(seconds.samples[1])["measured"],
        samples=dict(seconds.samples[1]),
    )


def _real_step(setup: Setup) -> Callable[[], Any]:
    step = compile_step(setup)
    state = step.init()
    size = setup.config.data.batch_size
    batches = training_batches(shuffled(setup.train_windows, setup.config.seed), size, slice(0, size), 0)
    windows = global_batch(setup, next(batches))

    def call() -> Any:
        nonlocal state
        state, metrics = step.step(state, windows)
        return metrics

    return call


def run(*, quick: bool, json_path: str | None, only: Sequence[str] = ()) -> int:
    """Runs the benchmark; returns the exit status.  only: cases."""
    configure_runtime()
    cases = {str(case): case for case in (GPU_CASES if jax.default_backend() == "gpu" else CPU_CASES)}
    rounds = 5 if quick else 11
    report = Report(path=json_path, bench="predict", settings={"rounds": rounds, "quick": quick})
    names = chosen(list(cases), only)
    predictions = []
    for name in names[:1] if quick else names:
        prediction = compare(cases[name], rounds)
        predictions.append(prediction)
        print(
            f"{name:<48} predicted {prediction.predicted * 1e3:8.1f} ms   "
            f"measured {prediction.measured * 1e3:8.1f} ms   ratio {prediction.ratio:.3f}"
        )
        unit = "predicted / measured seconds of a step"
        claim = Claim(value=prediction.ratio, unit=unit, setup=name)
        report.add(_rows(prediction), {f"prediction_ratio {name}": claim})
    errors = [abs(prediction.ratio - 1) for prediction in predictions]
    setup = f"{len(errors)} steps of one device; neither their depth nor their micro-batch was timed"
    report.add(
        [],
        {
            "prediction_error_median": Claim(value=statistics.median(errors), unit="of seconds", setup=setup),
            "prediction_error_max": Claim(value=max(errors), unit="of seconds", setup=setup),
        },
    )
    print_claims(report.claims)
    return 0


def _rows(prediction: Prediction) -> list[Row]:
    """Raw samples; tokens and FLOP are those of the whole model's step, which only "measured" runs."""
    data = prediction.setup.config.data
    tokens = data.batch_size * data.sequence_length
    flops = tokens * training_flops_per_token(prediction.setup)
    return [
        Row(
            setup=str(prediction.case),
            competitor=name,
            samples_s=times,
            tokens=tokens if name == "measured" else 0,
            flops=flops if name == "measured" else 0.0,
        )
        for name, times in prediction.samples.items()
    ]
