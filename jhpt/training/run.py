"""`jhpt.train`: from a configuration to a trained model in a run directory."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jhpt.core.config import CheckpointConfig, Config
from jhpt.core.errors import InputError
from jhpt.core.load import Source, dotted, load_config, run_config
from jhpt.core.plan import Plan
from jhpt.training.activation_offload import check_host_room, with_tried_offload
from jhpt.training.checkpoint import PLACES, Checkpoints, Record, make_record
from jhpt.training.console import Display, plan_change, start_table
from jhpt.training.fitting import Programs
from jhpt.training.keys import RandomStream, random_key
from jhpt.training.loop import Progress, evaluation_due, fit, utilisation
from jhpt.training.metrics import metrics_writer, read_metrics
from jhpt.training.planning import choose_plan, read_past, same_work
from jhpt.training.processes import Processes, check_agreed, from_main, join, raise_on_all_processes, same_everywhere
from jhpt.training.programs import compile_programs
from jhpt.training.run_dir import claimed, find_resume, new_run_dir, write_config, write_plan
from jhpt.training.runtime import accelerator_present, allow_pinned_memory, configure_runtime
from jhpt.training.sampling import sample
from jhpt.training.setup import Setup, prepare


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to.

    step: optimizer steps taken in all.
    losses: training loss in nats per predicted token by logged step, of the whole run.
    validation_losses: held-out loss by step, of the whole run.
    tokens_per_s: median over this call's logging intervals, None where there was only one.
    mfu: share of the devices' peak bf16 FLOP/s, causal convention; None where the peak is not known.
    sample: text that a GPT wrote at the end.
    interrupted: whether SIGINT or SIGTERM ended it early.
    step_seconds: median over this call's logging intervals.  predicted_seconds: what the plan had promised.
    """

    step: int
    losses: Mapping[int, float]
    validation_losses: Mapping[int, float]
    run_dir: Path
    tokens_per_s: float | None = None
    mfu: float | None = None
    sample: str | None = None
    interrupted: bool = False
    step_seconds: float | None = None
    predicted_seconds: float | None = None


def closing_lines(result: RunResult, config: Config) -> list[str]:
    """What a run came to, and what to do next."""
    loss, validation = _last(result.losses), _last(result.validation_losses)
    figures = [
        f"step {result.step}",
        f"loss {loss:.4f}" if loss is not None else "",
        f"validation loss {validation:.4f}" if validation is not None else "",
        f"{result.tokens_per_s:,.0f} tokens/s" if result.tokens_per_s else "",
        f"MFU {result.mfu:.1%} (causal)" if result.mfu else "",
    ]
    more = "" if result.interrupted else f" --train.steps {2 * config.train.steps}"
    return [
        *([f"\nsample:\n{result.sample}\n"] if result.sample is not None else []),
        ("stopped at " if result.interrupted else "finished: ") + ", ".join(filter(None, figures)),
        *_promise(result),
        f"run directory: {result.run_dir}",
        f"go on:   jhpt train --out {result.run_dir}{more}",
        *([f"look:    tensorboard --logdir {result.run_dir}"] if config.log.tensorboard else []),
    ]


def _promise(result: RunResult) -> list[str]:
    """Predicted against measured."""
    if result.predicted_seconds is None or result.step_seconds is None:
        return []
    ratio = result.predicted_seconds / result.step_seconds
    milliseconds = f"{result.predicted_seconds * 1e3:.1f} ms, measured {result.step_seconds * 1e3:.1f} ms"
    return [f"step time: predicted {milliseconds} (predicted / measured {ratio:.2f})"]


def _last(losses: Mapping[int, float]) -> float | None:
    return losses[max(losses)] if losses else None


def train(
    source: Source = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    processes: Processes | None = None,
) -> RunResult:
    """Trains a model, or goes on with the run that lies in `out`.

    Args:
      source: a preset's name, a YAML file, a dict or a `Config`; None: the configuration of the run in `out`, or
        `gpt-tiny`.
      out: run directory; None: a new one, `runs/<name>-<time>`.
      overrides: values by dotted name, on top of `source`.
      plan: how to share the work, or a file of it, in the place of the section `parallel`.
      processes: how to join the other processes; None: as the launcher's environment says.

    Raises:
      InputError: anything the user can put right; nothing has been written then.
      TrainingDiverged: too many steps in a row were not finite.
    """
    configure_runtime()
    join(processes or Processes())
    with raise_on_all_processes():
        config = load_config(run_config(source, out), overrides)
        allow_pinned_memory(config.memory)
        given = plan if plan is None or isinstance(plan, Plan) else Plan.load(Path(plan))
    check_agreed(_told(config, given))
    run_dir = Path(out) if out is not None else new_run_dir(config)
    display = Display(config.train.steps)
    if accelerator_present() and jax.default_backend() == "cpu":
        display.say("warning: a GPU is here, but jax runs on the CPU; `jhpt doctor` says what to install")
    with claimed(run_dir):
        run = _resolved(config, given, run_dir, display)
        if run.step >= config.train.steps:
            return _already_done(run, display)
        return _executed(run, display)


def _told(config: Config, given: Plan | None) -> dict[str, Any]:
    """What all processes have to be told alike: not where their files lie, whose content is compared."""
    settings = dotted(config.model_dump(mode="json"))
    content = given.model_dump_json() if given else ""
    plan = f"content {hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}" if given else None
    return {name: value for name, value in settings.items() if name not in PLACES} | {"--plan": plan}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """All that is decided before anything is compiled or written.  step: where it goes on; notes: for the person."""

    directory: Path
    setup: Setup
    record: Record
    step: int
    notes: tuple[str, ...]


def _resolved(config: Config, given: Plan | None, run_dir: Path, display: Display) -> _Run:
    past = read_past(run_dir, display.say)
    plan = with_tried_offload(choose_plan(config, given, past, display.say), display.say)
    check_host_room(plan, config)
    with raise_on_all_processes():
        setup = prepare(config, plan, say=display.say)
    if not same_everywhere(setup.cache.key):
        raise InputError("the processes read different text: give all of them the same files in data.path")
    record = make_record(config, setup.cache.key, setup.model.dtype.name)
    resume = find_resume(run_dir, record)
    changes = [plan_change(past.plan, plan)] if past.plan and not same_work(past.plan, plan) else []
    return _Run(directory=run_dir, setup=setup, record=record, step=resume.step, notes=(*resume.notes, *changes))


def _executed(run: _Run, display: Display) -> RunResult:
    setup, config = run.setup, run.setup.config
    display.say(f"compiling {config.name} for {setup.layout.device_mesh.mesh.size} x {setup.device.kind}")
    programs = compile_programs(setup)
    state = _restored(run.directory, run.step, programs) if run.step else programs.init()
    with raise_on_all_processes():
        write_config(run.directory, config)
        write_plan(run.directory, setup.plan)
    with (
        Checkpoints(run.directory / "checkpoints", config.checkpoint) as checkpoints,
        metrics_writer(run.directory, run.step, config.log) as writer,
    ):
        display.log_to(writer)
        display.say(start_table(setup, programs, run.step))
        for note in run.notes:
            display.say(note)
        with display:
            state, progress = fit(
                setup,
                programs,
                state,
                save=lambda step, state: checkpoints.save(step, programs.saved(state), run.record),
                writer=writer,
                display=display,
                evaluate_first=_unevaluated(run),
            )
        text = None if progress.interrupted else _sample(setup, programs, state, display.say)
        result = _result(setup, state, progress, run.directory, text)
        for line in closing_lines(result, config):
            display.say(line)
    return result


def _unevaluated(run: _Run) -> bool:
    """Whether the run was cut off, or stopped, between a step that was saved and its evaluation."""
    due = evaluation_due(run.setup.config, run.step)
    return bool(from_main(int(due and run.step not in _history(run.directory)[1])))


def _restored(run_dir: Path, step: int, programs: Programs) -> Any:
    with Checkpoints(run_dir / "checkpoints", CheckpointConfig()) as checkpoints:
        return programs.restored(checkpoints, step)


def _sample(setup: Setup, programs: Programs, state: Any, say: Callable[[str], None]) -> str | None:
    evaluation, model = setup.config.evaluation, setup.model
    if not evaluation.sample_tokens or not model.config.generates:
        return None
    if programs.parameters is None:
        say("no sample: the parameters do not fit a device")
        return None
    prompt = setup.tokenizer.encode(evaluation.prompt)
    if not len(prompt):
        prompt = np.asarray([setup.tokenizer.end or 0], np.int32)
    plain, params = replace(model, implementation="xla"), programs.parameters(state.params)
    tokens = sample(plain, params, prompt, evaluation.sample_tokens, random_key(setup.config.seed, RandomStream.SAMPLE))
    return setup.tokenizer.decode(tokens.tolist())


def _result(setup: Setup, state: Any, progress: Progress, run_dir: Path, text: str | None) -> RunResult:
    rate = progress.tokens_per_s
    losses, validation = _history(run_dir)
    tokens = setup.config.data.batch_size * setup.config.data.sequence_length
    return RunResult(
        step_seconds=tokens / rate if rate else None,
        predicted_seconds=setup.plan.seconds,
        step=int(state.step),
        losses=losses | progress.losses,
        validation_losses=validation | progress.validation,
        run_dir=run_dir,
        tokens_per_s=rate,
        mfu=utilisation(setup, rate) if rate else None,
        sample=text,
        interrupted=progress.interrupted,
    )


def _history(run_dir: Path) -> tuple[dict[int, float], dict[int, float]]:
    records = read_metrics(run_dir)
    pick = lambda name: {int(record["step"]): record[name] for record in records if name in record}  # noqa: E731
    return pick("loss"), pick("validation_loss")


def _already_done(run: _Run, display: Display) -> RunResult:
    (losses, validation), steps = _history(run.directory), run.setup.config.train.steps
    display.say(f"{run.directory} is at step {run.step} of {steps}: nothing to do; raise --train.steps to go on")
    return RunResult(step=run.step, losses=losses, validation_losses=validation, run_dir=run.directory)
