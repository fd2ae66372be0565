"""The loop: batches in, steps, evaluations, checkpoints and metrics out."""

import statistics
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple

import jax
import numpy as np

from jhpt.core.config import Config
from jhpt.core.errors import Exit, JhptError
from jhpt.measure.device import memory_in_use
from jhpt.models.family import Sums
from jhpt.sharding.types import Params
from jhpt.training.console import Display, step_line
from jhpt.training.data.batches import evaluation_batches, shuffled, training_batches
from jhpt.training.data.left_out import LeftOut, position
from jhpt.training.data.mixture import Mixture
from jhpt.training.metrics import MetricsWriter
from jhpt.training.programs import State, Step, global_batch
from jhpt.training.replicas import Replicas
from jhpt.training.spikes import first_spike, is_spike
from jhpt.training.stages_setup import AnySetup
from jhpt.training.step import RandomStream, StepMetrics, random_key
from jhpt.training.watch import watch


class TrainingDiverged(JhptError, RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""

    status = Exit.DIVERGED


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Wall time, in seconds, and the steps in it.  data: spent waiting for it; between: spent saving and evaluating."""

    seconds: float
    data: float
    between: float
    steps: int = 0

    @property
    def step_seconds(self) -> float:
        """Of one step, without saves and evaluations."""
        return (self.seconds - self.between) / self.steps


@dataclass
class Progress:
    """The results of the loop so far.

    intervals: between two lines of metrics, except the first, which contains the start.  rest: what follows the last
    line, which is the last save and evaluation.  spike: the step of a spike, before which training has to go back; the
    loop has ended there.
    """

    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    rest: float = 0.0
    interrupted: bool = False
    spike: int | None = None

    @property
    def steps_per_s(self) -> float | None:
        """Of all wall time, saves and evaluations included."""
        if not self.intervals:
            return None
        return sum(each.steps for each in self.intervals) / (sum(each.seconds for each in self.intervals) + self.rest)

    @property
    def step_seconds(self) -> float | None:
        """Of one step, without saves and evaluations; the median of the intervals."""
        return statistics.median(each.step_seconds for each in self.intervals) if self.intervals else None


class Clock:
    """Wall time since the last reading, and what it was spent on."""

    def __init__(self) -> None:
        self._start, self._data, self._between = time.perf_counter(), 0.0, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside is spent waiting for data."""
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Time inside is spent saving and evaluating."""
        start = time.perf_counter()
        yield
        self._between += time.perf_counter() - start

    def read(self) -> Interval:
        """The time since the last call."""
        now = time.perf_counter()
        interval = Interval(seconds=now - self._start, data=self._data, between=self._between)
        self._start, self._data, self._between = now, 0.0, 0.0
        return interval


def fit(
    setup: AnySetup,
    step: Step[State],
    state: State,
    *,
    save: Callable[[int, State], None],
    writer: MetricsWriter | None,
    display: Display,
    spiked: Callable[[int, int], None] = lambda step, good: None,
    evaluate_first: bool = False,
    left_out: LeftOut = (),
    replicas: Replicas | None = None,
) -> tuple[State, Progress]:
    """Trains from `state` to the last step of the configuration, a signal, or a spike with `guards.spike=rewind`.

    Metrics of a step are read after the next one is under way, so that the device never waits for the host.

    Args:
      step: takes the steps; see `training.programs`.
      save: called with (number of the step, flushed state) when a checkpoint is due.
      writer: None on all processes but the main one.
      spiked: called with (step, the last step reported before it) when the loss has jumped (`spikes.is_spike`).
      evaluate_first: whether to evaluate `state` before the first step.
      left_out: data that is not read.  replicas: compares copies of the state; None: nothing is compared.

    Raises:
      ReplicasDiffer: copies of the state differ.
      TrainingDiverged: `train.max_bad_steps` steps in a row were skipped.  The parameters and optimizer state of
        every checkpoint are those of the last good step.
    """
    config, first, last = setup.config, int(state.step), setup.config.train.steps
    batches = _batches(setup, first, left_out)
    progress, clock = Progress(spike=first_spike(state.losses)), Clock()
    report = _Reporter(setup, progress, clock, writer, display, spiked, reported=first, skipped=int(state.skipped))
    between = _BetweenSteps(setup, step, save, report, replicas)

    if _ends_before(first + 1, last, progress, display):
        return state, progress
    state = between.run(first, state, {"evaluation"}) if evaluate_first else state
    for number in range(first + 1, last + 1):
        watch.stepping(number)
        with clock.waiting():
            windows = global_batch(setup, next(batches))
        state, metrics = step.step(state, windows)
        report.flush()
        stop = watch.stops_after(number)
        due = _due(config, number, final=number == last, stop=stop)
        if due:
            report.pending = (number, metrics)
        if report.goes_back(due) and not stop:
            return state, progress
        state = between.run(number, state, due)
        if (epoch := _epoch_begun(setup, position(number, left_out))) is not None:
            display.say(f"step {number}: epoch {epoch} begins")
        if stop:
            display.say(f"stopped by a signal at step {number}")
            progress.interrupted = number < last or progress.spike is not None
            break
    report.flush()
    progress.rest = clock.read().seconds
    return state, progress


def _ends_before(step: int, last: int, progress: Progress, display: Display) -> bool:
    """Whether this step is not taken: a signal came while compiling or restoring, or the run ended between a spike and
    going back."""
    if step <= last and watch.stops_after(step - 1):
        display.say(f"stopped by a signal before step {step}")
        progress.interrupted = True
    return progress.interrupted or progress.spike is not None


def _epoch_begun(setup: AnySetup, step: int) -> int | None:
    """The number, from 1, of the epoch whose first sequence follows this step's batch or is in it.

    None: there is none; epochs are shorter than the lines of metrics lie apart; or there are several sources, each with
    epochs of its own.
    """
    windows, batch = setup.train_windows, setup.config.data.batch_size
    if isinstance(windows, Mixture) or len(windows) < batch * setup.config.log.every:
        return None
    before, now = ((step - back) * batch // len(windows) for back in (1, 0))
    return now + 1 if now > before else None


def evaluation_due(config: Config, step: int) -> bool:
    """Whether the configuration asks for an evaluation after this step, even if it is not the last one."""
    return step > 0 and step % config.evaluation.every == 0


Follows = Literal["metrics", "checkpoint", "evaluation"]
"""What can be due after a step."""


def _due(config: Config, step: int, *, final: bool, stop: bool) -> Set[Follows]:
    """After the last step everything is due.  Before a stop there is no evaluation, which takes long."""
    end = final or stop
    follows: dict[Follows, bool] = {
        "metrics": end or step % config.log.every == 0,
        "checkpoint": end or step % config.checkpoint.every == 0,
        "evaluation": not stop and (final or evaluation_due(config, step)),
    }
    return {name for name, due in follows.items() if due}


@dataclass(frozen=True)
class _BetweenSteps(Generic[State]):
    """Compares copies of the state, saves, and then evaluates, so that an evaluation that fails loses nothing."""

    setup: AnySetup
    step: Step[State]
    save: Callable[[int, State], None]
    report: "_Reporter"
    replicas: Replicas | None = None

    def run(self, number: int, state: State, due: Set[Follows]) -> State:
        """Does what is due; returns the state to continue with."""
        if self.replicas is not None and self.replicas.due(number, saving="checkpoint" in due):
            state = self.replicas.checked(number, state)
        if not due & {"checkpoint", "evaluation"}:
            return state
        self.report.flush()
        with self.report.clock.between_steps():
            state = self.step.flush(state)
            if "checkpoint" in due:
                with watch.phase(f"saving step {number}"):
                    self.save(number, state)
            if "evaluation" in due and self.setup.validation_windows is not None:
                with watch.phase(f"evaluating step {number}"):
                    self.report.validation(number, evaluate(self.setup, self.step.evaluate, state.params))
        return state


BatchSums = Callable[[Any, Any, Any, jax.Array], Sums]
"""(params, windows, row weights, key) -> sums over a held-out batch."""


def _batches(setup: AnySetup, first: int, left_out: LeftOut = ()) -> Iterator[np.ndarray]:
    """This process's rows of the batches after step `first`."""
    size, seed = setup.config.data.batch_size, setup.config.seed
    return training_batches(shuffled(setup.train_windows, seed), size, setup.layout.own_rows(size), first, left_out)


def training_rows(setup: AnySetup) -> np.ndarray:
    """This process's rows of the first batch."""
    return next(_batches(setup, 0))


class HeldOut(NamedTuple):
    """Results on held-out rows.  loss: mean negative log likelihood in nats per predicted token, or per classified row.
    tokens: predicted ones, or rows.  accuracy: share of rows, or pairs, whose class is the most likely one; None: no
    classes."""

    loss: float
    tokens: int
    accuracy: float | None


def evaluate(setup: AnySetup, batch_sums: BatchSums, params: Params) -> HeldOut:
    """The results on the held-out batches.

    Args:
      batch_sums: `Step.evaluate`.  params: those of a flushed state.
    """
    config, total, tokens, correct = setup.config, 0.0, 0.0, 0.0
    rows = setup.layout.own_rows(config.data.batch_size)
    assert setup.validation_windows is not None
    batches = evaluation_batches(setup.validation_windows, config.data.batch_size, rows, config.evaluation.batches)
    for index, (windows, weights) in enumerate(batches):
        key = random_key(config.seed, RandomStream.EVALUATION, index)
        sums = batch_sums(params, global_batch(setup, windows), global_batch(setup, weights), key)
        total, tokens = total + float(sums.nll), tokens + float(sums.tokens)
        correct += 0.0 if sums.correct is None else float(sums.correct)
    return HeldOut(
        total / tokens, round(tokens), correct / tokens if config.model.classifies or config.model.pairs else None
    )


@dataclass
class _Reporter:
    """Turns the metrics of a step into records and lines; holds back the metrics of one step (see `fit`)."""

    setup: AnySetup
    progress: Progress
    clock: Clock
    writer: MetricsWriter | None
    display: Display
    spiked: Callable[[int, int], None]
    reported: int
    """The last step that was reported; the first one is where this call started."""
    skipped: int
    pending: tuple[int, StepMetrics] | None = None
    in_spike: bool = False

    def flush(self) -> None:
        """Reports the step that is held back, if there is one."""
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        loss, norm, rate, skipped, bad_steps = (np.asarray(value).item() for value in metrics[:5])
        interval = self._interval(step)
        per_s = interval.steps / interval.seconds * units_of_step(self.setup)
        values = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
        values |= {"data_wait": interval.data / interval.seconds, "between_steps": interval.between / interval.seconds}
        values |= {f"{self.setup.config.model.unit}_per_s": per_s}
        values |= {"flops_per_s": per_s * training_flops_per_token(self.setup)}
        values |= {"mfu": utilisation(self.setup, per_s), "memory_bytes": memory_in_use(), "skipped": skipped}
        good = max(self.progress.losses, default=0)
        guards = self.setup.config.guards
        spike = guards.spike == "keep" and is_spike(list(self.progress.losses.values()), loss, guards)
        self.progress.losses[step] = loss
        self._emit(step, values)
        if spike and not self.in_spike:
            self.spiked(step, good)
        self.in_spike = spike
        self.progress.spike = first_spike(metrics.losses)
        jumped = " or a loss that has jumped" if metrics.losses is not None else ""
        if skipped > self.skipped and self.progress.spike is None:
            new = skipped - self.skipped
            self.display.say(
                f"step {step}: {new} update{'s' if new > 1 else ''} skipped since the last line: "
                f"loss or gradient not finite{jumped}"
            )
        self.skipped = skipped
        if bad_steps >= self.setup.config.train.max_bad_steps and self.progress.spike is None:
            raise TrainingDiverged(
                f"{int(bad_steps)} steps in a row had a loss or gradient that is not finite{jumped}, up to step "
                f"{step}; check the data, or lower optimizer.learning_rate: from a checkpoint before, with "
                "--resume-step N, or in a new run (another --out), also with a longer optimizer.warmup_steps"
            )

    def goes_back(self, due: Set[Follows]) -> bool:
        """Whether training has to go back, so that what is due is not done.  Before a checkpoint is written, the step
        that is held back is reported."""
        if "checkpoint" in due:
            self.flush()
        return self.progress.spike is not None

    def validation(self, step: int, held_out: HeldOut) -> None:
        """Reports results on held-out rows."""
        loss, accuracy = held_out.loss, held_out.accuracy
        self.progress.validation[step] = loss
        if accuracy is not None:
            self.progress.accuracy[step] = accuracy
        if self.writer:
            self.writer.write(step, {"validation_loss": loss, "validation_accuracy": accuracy})
        model = self.setup.config.model
        unit = "image" if model.reads == "images" else "row" if model.classifies else "token"
        right = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        self.display.say(f"step {step}  validation loss {loss:.4f} nats per {unit}{right}")

    def _interval(self, step: int) -> Interval:
        interval = replace(self.clock.read(), steps=step - self.reported)
        if len(self.progress.losses) > 0:  # the first interval contains start-up
            self.progress.intervals.append(interval)
        self.reported = step
        return interval

    def _emit(self, step: int, values: dict[str, float | None]) -> None:
        if self.writer:
            self.writer.write(step, values)
        line = step_line(step, self.setup.config.train.steps, values)
        self.display.advance(step, line)


def units_of_step(setup: AnySetup) -> int:
    """Tokens, or images, in the batch of a step."""
    data = setup.config.data
    return data.batch_size * setup.config.model.units(data.sequence_length)


def training_flops_per_token(setup: AnySetup) -> float:
    """Model FLOPs per token, or image, of a training step, causal convention; the head counts on predicted tokens only,
    and attention, where documents are kept apart, on the keys of a token's own document (`Setup.visible_keys`)."""
    config = setup.config
    length = config.data.sequence_length
    predicted = config.model.predicted_tokens(length, config.data.mask_fraction) / length
    return config.model.flops_per_token(length, predicted_share=predicted, keys=setup.visible_keys).total


def utilisation(setup: AnySetup, units_per_s: float) -> float | None:
    """Model FLOP/s over the mesh's peak bfloat16 FLOP/s, causal convention; None where the peak is not known."""
    peak = setup.device.peak_bf16_flops if setup.model.dtype == "bfloat16" else None
    return units_per_s * training_flops_per_token(setup) / (peak * len(setup.layout.devices)) if peak else None
