"""Trials: several plans take a few steps, and the one that is measured to be the fastest trains (`parallel.trials`).

Which are tried: plans of unlike kinds (`jhpt.planner.search.choice.first_to_try`), and then those of them that are
`close` to the fastest with half and with twice as many micro-batches (`jhpt.planner.search.choice.nearby`).  One of
these takes the lead only if it is faster once more.

Predictions order plans that lie within their error no better than chance, and what they do not know (another job on the
network, a compiler that hides less communication than it could) may be worth more.  A trial knows it.  It costs
compiling each plan and `UNTIMED` + `TIMED` steps of it.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan
from jhpt.planner.report.words import shape_text
from jhpt.planner.search.choice import Candidate, complexity, different
from jhpt.sharding.gather import gathered
from jhpt.training.compile import compile_step
from jhpt.training.console import Display
from jhpt.training.loop import training_rows
from jhpt.training.planning import check_host_room, with_tried_offload
from jhpt.training.preflight import ran_out_of_memory, refuse_impossible
from jhpt.training.programs import Step, global_batch
from jhpt.training.stages_setup import AnySetup, prepare_run
from jhpt.training.watch import watch

T = TypeVar("T")

UNTIMED, TIMED = 2, 5
"""Steps of a trial: those whose time does not count, and those of which the median does."""

NOISE = 0.03
"""By how much two measurements of one plan may differ: a plan has to gain more to be worth its complication, or to take
the place of an equally simple one that leads (`jhpt bench hybrid` measures it: what runs the same lies 3 to 11 % apart,
by the machine).  Of seven plans that a trial measured up to 3 % faster than data parallelism or GPipe, five were slower
in the steps after it."""

CLOSE = 0.15
"""By how much longer than the fastest a plan may take to be tried with other numbers of micro-batches.  Where these are
predicted to gain at most 2 %, they gained 15 % or more in 12 of 1,083 comparisons (`jhpt bench hybrid`).  mlp at 2,000
Mbit/s: data parallelism with four took 314 ms, with two 273, and the fastest other plan 276."""


def runnable(config: Config, plan: Plan, say: Callable[[str], None]) -> Plan:
    """The plan as this machine can run it.  All processes must call this.

    Raises:
      InputError: it needs more memory than there is.
    """
    plan = with_tried_offload(plan, say)
    check_host_room(plan, config)
    refuse_impossible(config, plan)
    return plan


def fastest(config: Config, candidates: Sequence[Candidate], display: Display) -> Plan:
    """The simplest of the plans that are measured to be about as fast as the fastest.  All processes must call this.

    After the candidates, the plans near those that are `close` to the fastest are tried.  An equally simple one of them
    has to be faster than the one that led before by more than `NOISE`, and again when both are timed once more: of
    several measurements the fastest is in part the luckiest.  A plan that cannot be compiled or does not fit is left
    out.  If no plan has been measured, because all are left out or a signal came, it is the first one, as if none had
    been tried.
    """
    plans = [one.plan for one in candidates]
    measured = _measured(config, plans, range(len(plans)), display)
    if not measured:
        return runnable(config, plans[0], display.say)
    leading = decided(plans, measured)
    plans = list(different(plans + [plan for at in close(measured) for plan in candidates[at].nearby]))
    measured |= _measured(config, plans, range(len(candidates), len(plans)), display)
    kept = decided(plans, measured, leading)
    if kept != leading:
        again = _measured(config, plans, (leading, kept), display, again=True)
        kept = decided(plans, again, leading) if again else leading
    display.say(f"trial {kept + 1} decides: {shape_text(plans[kept])}")
    return runnable(config, plans[kept], display.say)


def _measured(
    config: Config, plans: Sequence[Plan], numbers: Iterable[int], display: Display, *, again: bool = False
) -> dict[int, float]:
    """Seconds of a step of the plans with these numbers, without those that are left out.  again: whether they have
    been tried before."""
    measured = dict[int, float]()
    for number in numbers:
        if watch.stops_after(0):
            break
        plan, name = plans[number], f"{number + 1} of {len(plans)}{' again' if again else ''}"
        with watch.phase(f"trying plan {name}"):
            found = step_seconds(config, plan, display)
        if isinstance(found, str):
            display.say(f"trial {name}: {shape_text(plan)}: left out, {found}")
            continue
        measured[number] = found
        predicted = f", predicted {plan.seconds * 1e3:.1f} ms" if plan.seconds else ""
        display.say(f"trial {name}: {shape_text(plan)}: {found * 1e3:.1f} ms a step{predicted}")
    return measured


def close(seconds: Mapping[int, float]) -> list[int]:
    """Which of the plans that have been measured took at most `CLOSE` longer than the fastest, the fastest first."""
    limit = (1 + CLOSE) * min(seconds.values())
    return sorted((at for at, its in seconds.items() if its <= limit), key=lambda at: seconds[at])


def decided(plans: Sequence[Plan], seconds: Mapping[int, float], leading: int | None = None) -> int:
    """Which of the plans that have been measured is the simplest of those about as fast as the fastest (`NOISE`).  Of
    equally simple ones it is the one that was `leading` before others were tried, else the fastest."""
    limit = (1 + NOISE) * min(seconds.values())
    as_fast = (at for at, its in seconds.items() if its <= limit)
    return min(as_fast, key=lambda at: (complexity(plans[at]), at != leading, seconds[at]))


def step_seconds(config: Config, plan: Plan, display: Display) -> float | str:
    """Seconds of a step of the plan on the slowest process, or why it has none; the same on all processes."""
    plan = with_tried_offload(plan, display.say)

    def compiled() -> tuple[AnySetup, Step[Any]]:
        setup = prepare_run(config, plan, progress=display.tokenising)
        return setup, compile_step(setup)

    ready = _attempted(compiled)
    if isinstance(ready, str):
        return ready
    setup, step = ready
    seconds = _attempted(lambda: _median(setup, step))
    return seconds if isinstance(seconds, str) else float(np.max(gathered(np.float64(seconds))))


def _attempted(function: Callable[[], T]) -> T | str:
    """The result; text, if a process cannot or has too little memory."""
    result, reason = None, ""
    try:
        result = function()
    except (InputError, MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, InputError) and not ran_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
    everywhere = bool(np.all(gathered(np.bool_(not reason))))
    return result if everywhere and result is not None else reason or "it fails on another process"


def _median(setup: AnySetup, step: Step[Any]) -> float:
    """Seconds of a step here."""
    state, rows, samples = step.init(), training_rows(setup), list[float]()
    for _ in range(UNTIMED + TIMED):
        start = time.perf_counter()
        state, metrics = step.step(state, global_batch(setup, rows))
        jax.block_until_ready((state, metrics))
        samples.append(time.perf_counter() - start)
    for leaf in jax.tree.leaves(state):  # there may be no room for the state of the next plan
        leaf.delete()
    return statistics.median(samples[UNTIMED:])
