"""The output of a run: one table at the start, a line per logging interval, a summary at the end."""

import io
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from jhpt.core.families.family import LOGIT_BYTES
from jhpt.core.plan import Plan
from jhpt.planner.report.words import gradients_text, offload_text, recomputation_text, samples_text
from jhpt.training.data.mixture import Mixture
from jhpt.training.metrics import MetricsWriter
from jhpt.training.processes import is_main, launcher
from jhpt.training.programs import Step
from jhpt.training.stages_setup import AnySetup

UNITS = "tokens", "images"
"""What models read (`ModelConfig.unit`)."""

SECONDS_BETWEEN_LINES = 10
"""While text is tokenised, if there is no terminal."""


def bytes_text(count: float) -> str:
    """`"1.5 GiB"`."""
    power = min(int(math.log(max(count, 1), 1024)), 4)
    return f"{count / 1024**power:.{0 if power < 2 else 1}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def start_table(setup: AnySetup, step: Step[Any], first_step: int) -> Table:
    """The run in one table."""
    config = setup.config
    model, count = config.model, config.model.parameter_count()
    images = model.reads == "images"
    table = Table(title=f"jhpt · {config.name}", show_header=False, title_justify="left")
    plan = setup.plan
    compresses = (plan.compression.on and max(plan.degrees) > 1) or plan.gradient_compression.on
    kernels = {"kernels": f"{setup.kernels.implementation} ({setup.kernels.reason})"} if compresses else {}
    rows = {
        "model": f"{model.family}, {model.summary}, "
        f"{setup.model.dtype.name} compute"
        + (", float8 matrix products" if model.matmul_dtype == "float8" else "")
        + (
            f", {setup.model.dtype.name} logits"
            if model.bytes_per_logit(setup.model.dtype.itemsize) < LOGIT_BYTES
            else ""
        ),
        "parameters": f"{count.total:,}" + (f" (+ {count.padding:,} padding rows)" if count.padding else ""),
        "plan": plan_text(setup.plan),
        "devices": _devices_text(setup),
        "memory": " + ".join(f"{name} {bytes_text(size)}" for name, size in step.memory.items())
        + " per device"
        + (f", {bytes_text(step.host_bytes)} offloaded to the host" if step.host_bytes else ""),
        "data": data_text(setup),
        "batch": (
            f"{config.data.batch_size} images"
            if images
            else f"{config.data.batch_size} sequences of {config.data.sequence_length} tokens"
        )
        + ("" if setup.visible_keys is None else f", documents apart: a token sees {setup.visible_keys:.3g} keys"),
        **({} if images else {"attention": f"{setup.attention.implementation} ({setup.attention.reason})"}),
        **kernels,
        "steps": f"{first_step} -> {config.train.steps}" if first_step else f"{config.train.steps}",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def data_text(setup: AnySetup) -> str:
    """What every source holds, and how often the run reads it."""
    config, windows = setup.config, setup.train_windows
    parts = windows.sources if isinstance(windows, Mixture) else (windows,)
    total = sum(source.weight for source in setup.sources)
    lines = []
    for source, part in zip(setup.sources, parts, strict=True):
        share = source.weight / total
        epochs = config.train.steps * config.data.batch_size * share / len(part)
        mixed = f", weight {source.weight:g} ({share:.1%} of the sequences)" if len(parts) > 1 else ""
        path = source.path if isinstance(source.path, str) else ", ".join(source.path)
        plural = "" if round(epochs, 2) == 1 else "s"
        lines.append(f"{source.cache.summary} of {path}{mixed}, {epochs:,.2f} epoch{plural}")
    tokenizer = f", tokenizer {config.data.tokenizer}" if config.model.reads == "text" else ""
    return "\n".join([*lines[:-1], f"{lines[-1]}{tokenizer}"])


def plan_text(plan: Plan) -> str:
    """`"pipe 4 x data 2 x tensor 1, 1f1b, zero 1, 8 micro-batches"`, or `"pipe of 3 | 1 devices, tensor 1 ..."`."""
    degrees = plan.degrees
    per_stage = plan.stages[0].devices
    if len(degrees) == 1:
        mesh = f"data {per_stage // degrees[0]} x tensor {degrees[0]}"
    else:
        mesh = f"{per_stage} devices, tensor {' and '.join(map(str, degrees))} by layer"
    piped = len(plan.stages) > 1
    if plan.space == "general":
        sizes = " | ".join(str(stage.devices) for stage in plan.stages)
        mesh = f"{'pipe of ' if piped else ''}{sizes} devices, tensor {' and '.join(map(str, degrees))}"
    elif piped:
        mesh = f"pipe {len(plan.stages)} x {mesh}"
    parts = [
        mesh,
        (plan.schedule + (f" with {plan.chunks} chunks" if plan.chunks > 1 else "")) if piped else "",
        "sequence" if plan.sequence else "",
        samples_text(plan),
        f"zero {plan.zero}" + (f" over {plan.zero_ranks} ranks" if plan.zero_ranks else ""),
        f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}",
        recompute_text(plan),
        offload_text(plan),
        gradients_text(plan.gradient_compression),
    ]
    return ", ".join(filter(None, parts))


def recompute_text(plan: Plan) -> str:
    """`recompute`, `recompute except qkv`, `recompute in 12 of 32 blocks`; empty if all activations are saved."""
    return recomputation_text(plan, "recompute", "except")


def plan_change(before: Plan, now: Plan) -> str:
    """The difference between the plan and the one that the run had before, in one line."""
    first, second = plan_text(before), plan_text(now)
    if first == second:
        return f"note: the plan has changed in the placement or the strategy of layers: {second}"
    drops = before.gradient_compression.on and not now.gradient_compression.on
    lost = "; the residuals of gradient compression are dropped" if drops else ""
    return f"note: the plan has changed: {second}; before {first}{lost}"


def _devices_text(setup: AnySetup) -> str:
    used, attached = len(setup.layout.devices), jax.device_count()
    idle = [str(device.id) for device in jax.devices() if device not in set(setup.layout.devices)]
    text = f"{used} x {setup.device.kind}, {jax.process_count()} process{'es' if jax.process_count() > 1 else ''}"
    return text if used == attached else f"{text}; idle: {', '.join(idle)}"


def step_line(step: int, steps: int, values: dict[str, float | None]) -> str:
    """One logging interval in one line; unknown values are left out."""
    mfu, memory, between = values.get("mfu"), values.get("memory_bytes"), values.get("between_steps")
    parts = [
        f"step {step}/{steps}",
        f"loss {values['loss']:.4f}",
        f"grad norm {values['grad_norm']:.3f}",
        f"lr {values['learning_rate']:.2e}",
        *(f"{unit}/s {values[name]:,.0f}" for unit in UNITS if (name := f"{unit}_per_s") in values),
        f"TFLOP/s {(values['flops_per_s'] or 0) / 1e12:.3g}",
        f"MFU {mfu:.1%}{' (causal)' if 'tokens_per_s' in values else ''}" if mfu else "",
        f"memory {bytes_text(memory)}" if memory else "",
        f"data wait {values['data_wait']:.1%}",
        f"saves and evaluation {between:.1%}" if between else "",
    ]
    return "  ".join(part for part in parts if part)


class Display:
    """Prints on the main process only: on a terminal a progress bar above the newest metrics, elsewhere plain lines."""

    def __init__(self, steps: int, *, quiet: bool = False):
        self._console = Console(
            quiet=quiet or not is_main(),
            highlight=False,
            soft_wrap=True,
            # mpirun gives processes a terminal of its own, whatever becomes of the output.
            force_terminal=False if launcher(os.environ) else None,
        )
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(), console=self._console
        )
        self._task = self._bar.add_task("", total=steps)
        self._live = Live(self._bar, console=self._console, transient=True) if self._console.is_terminal else None
        self._writer: MetricsWriter | None = None

    def log_to(self, writer: MetricsWriter | None) -> None:
        """From now on, everything is also written to the log file of the run."""
        self._writer = writer

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def advance(self, step: int, line: str) -> None:
        """The newest metrics."""
        self._log(line)
        self._bar.update(self._task, completed=step)
        if self._live:
            self._live.update(Group(self._bar, Text(line, no_wrap=False, overflow="fold")))
        else:
            self._console.print(line, markup=False)

    @contextmanager
    def tokenising(self, total: int) -> Iterator[Callable[[int], None]]:
        """How many of `total` bytes of text are tokenised: a bar on a terminal, elsewhere a line now and then."""
        if self._console.is_terminal:
            columns = (
                TextColumn("tokenising"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self._console, transient=True) as bar:
                task = bar.add_task("", total=total)
                yield lambda count: bar.update(task, advance=count)
            return
        done, said = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, said
            done += count
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                self.say(f"tokenised {bytes_text(done)} of {bytes_text(total)}")

        yield advance

    def say(self, message: str | Table) -> None:
        """A line or table that stays on the screen."""
        self._log(message)
        self._console.print(message, markup=False)

    def _log(self, message: str | Table) -> None:
        if self._writer is None:
            return
        if isinstance(message, Table):
            page = Console(width=120, file=io.StringIO(), highlight=False)
            with page.capture() as text:
                page.print(message)
            message = text.get().rstrip()
        self._writer.log(message)
