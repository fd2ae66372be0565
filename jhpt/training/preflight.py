"""Whether a run fits, before anything is written, and the nearest change with which it does.

Three times: by the planner's model before any text is read (`refuse_impossible`), where only what is certain counts; by
the compiler's figures (`compile.compile_step`, completed by `nearest_change`); and on the disk of the run
(`check_disk`).  A run that all the same runs out of memory ends in one message (`out_of_memory_explained`).
"""

import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax

from jhpt.core.amounts import enough_gib, gib
from jhpt.core.config import Config
from jhpt.core.errors import InputError, OutOfMemory
from jhpt.core.likely_mistakes import Text, likely_mistakes
from jhpt.core.plan import Plan
from jhpt.core.state import state_of
from jhpt.measure.device import device_info
from jhpt.planner.search.smaller import Needed, Smaller, needed, smaller
from jhpt.sharding.compiler_options import compiler_options
from jhpt.training.compile import host_copies, lower_step
from jhpt.training.data.mixture import Mixture
from jhpt.training.processes import is_main, raise_on_all_processes
from jhpt.training.programs import memory_of
from jhpt.training.room import DoesNotFit, Room, devices_here, room_of
from jhpt.training.runtime import host_budget
from jhpt.training.setup import budgeted, compute_dtype, design_step
from jhpt.training.stages_setup import AnySetup

MOST_COMPILED = 6
"""Changes that are compiled, at most, to find one that fits."""

SMALLER_BY = 0.8
"""After memory ran out where the compiler said it would not: a change is named that needs at most this share."""

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")
"""What XLA's errors then say: one or the other on GPUs, the second on CPU, where the kind is INTERNAL."""

Enough = Callable[[Smaller], str | None]
"""(a change) -> what a step then needs, in words; None: it does not fit."""


def refuse_impossible(config: Config, plan: Plan | None) -> None:
    """Refuses what cannot fit whatever the compiler makes of it.  All processes must call this.

    plan: None before it is made; then only the stored state counts, spread over all devices.

    Raises:
      InputError: with bytes by cause, what there is, and the nearest change.
    """
    info = budgeted(device_info(), config.memory)
    room = room_of(info, jax.local_device_count() if plan is None else devices_here(plan))
    dtype = compute_dtype(config, info).name
    try:
        if plan is None:
            _check_state(config, room)
        elif (need := needed(config, plan, info.kind, dtype)) is not None:
            _check_certain(need, room)
    except DoesNotFit as error:
        enough = _by_estimate(room, info.kind, dtype)
        raise InputError(f"{error}; {_advice(config, plan, room, enough)}") from None


def _check_state(config: Config, room: Room) -> None:
    size = state_of(config.model, config.optimizer).bytes * config.model.parameter_count().allocated
    each = size / jax.device_count()
    # Offloaded state is in the memory of the hosts.
    beside = 0.0 if room.one_memory else host_budget(config.memory) / room.devices
    on_host = room.total(each, 0) if room.one_memory else 0.0
    fits = on_host <= room.host and (room.device is None or each <= room.device + beside)
    if not fits:
        raise DoesNotFit("the stored state, spread over all devices,", room, {"weights and moments": each}, {})


def _check_certain(need: Needed, room: Room) -> None:
    """Refuses if even the least that is needed does not fit; the message has what is expected."""
    if not room.fits(need.least, sum(need.host.values()) if room.one_memory else 0.0):
        raise DoesNotFit("a step", room, need.device, need.host if room.one_memory else {})


def _by_estimate(room: Room, kind: str, dtype: str, scale: float = 1.0) -> Enough:
    """By the planner's model; scale: what its estimates are multiplied by."""

    def enough(change: Smaller) -> str | None:
        need = needed(change.config, change.plan, kind, dtype)
        if need is None:
            return None
        device = _scaled(need, scale)
        host = sum(need.host.values()) if room.one_memory else 0.0
        there = replace(room, devices=devices_here(change.plan))
        return _amount(there, device, host) if there.fits(device, host) else None

    return enough


def _scaled(need: Needed, scale: float) -> float:
    """The estimate with all that is not certain multiplied: certain + scale (expected - certain)."""
    certain = 2 * need.least - sum(need.device.values())
    return certain + scale * (sum(need.device.values()) - certain)


def _amount(room: Room, device: float, host: float) -> str:
    if room.one_memory:
        return f"{enough_gib(room.total(device, host))} of this host's memory"
    return f"{enough_gib(device)} on each device"


def _advice(config: Config, plan: Plan | None, room: Room, enough: Enough) -> str:
    """The nearest change that fits, in words."""
    changes = smaller(config, jax.device_count(), one_memory=room.one_memory)
    found = next(((change, amount) for change in changes if (amount := enough(change)) is not None), None)
    if found is None:
        return "no batch, no shorter sequence and no smaller preset fits; free memory, or use more or larger devices"
    change, amount = found
    results = ", which changes no results" if change.same_results else ""
    without = "leave out --plan and " if plan is not None and plan.origin == "given" else ""
    return f"{without}{change.text}{results}: that needs {amount}"


@contextmanager
def nearest_change(setup: AnySetup) -> Iterator[None]:
    """Completes the refusal of a program that does not fit with the nearest change that does.

    A change is compiled before it is named; with several processes, it is estimated in proportion to what the compiler
    said, because all of them would have to compile the same at the same time.
    """
    try:
        yield
    except DoesNotFit as error:
        raise InputError(f"{error}; {_advice_for(setup, error)}") from None


def _advice_for(setup: AnySetup, error: DoesNotFit) -> str:
    info, dtype = setup.device, compute_dtype(setup.config, setup.device).name
    estimated = _by_estimate(error.room, info.kind, dtype, _scale(setup, error.device))
    if jax.process_count() > 1:
        return _advice(setup.config, setup.plan, error.room, estimated)
    plausible = (change for change in _changes(setup, error.room) if estimated(change) is not None)
    compiled = _first_compiled(setup, error.room, itertools.islice(plausible, MOST_COMPILED))
    enough: Enough = lambda change: compiled.get(change.text)  # noqa: E731
    return _advice(setup.config, setup.plan, error.room, enough)


def _changes(setup: AnySetup, room: Room) -> Iterator[Smaller]:
    return smaller(setup.config, jax.device_count(), one_memory=room.one_memory)


def _scale(setup: AnySetup, memory: Mapping[str, float]) -> float:
    """How many times more the compiler says than the planner's model, of what is no stored state."""
    need = needed(setup.config, setup.plan, setup.device.kind, compute_dtype(setup.config, setup.device).name)
    if need is None:
        return 1.0
    certain = 2 * need.least - sum(need.device.values())
    return max((sum(memory.values()) - certain) / max(sum(need.device.values()) - certain, 1.0), 0.0)


def _first_compiled(setup: AnySetup, room: Room, changes: Iterable[Smaller]) -> dict[str, str]:
    """{text of the first change that the compiler fits into the room: what it needs}; empty if none does."""
    for change in changes:
        try:
            design = design_step(change.config, change.plan, setup.tokenizer, jax.devices(), setup.device)
            compiled = lower_step(design).compile(compiler_options(setup.device.platform, change.plan))
        except InputError:
            continue
        device = sum(memory_of(compiled).values())
        host = sum(host_copies(design).values())
        there = replace(room, devices=devices_here(change.plan))
        if there.fits(device, host):
            return {change.text: _amount(there, device, host)}
    return {}


def check_disk(run_dir: Path, config: Config, step: int, say: Callable[[str], None]) -> None:
    """Refuses a run whose checkpoints do not fit on its disk; `say` warns if only those kept for good do not.

    A new checkpoint is written before the oldest is removed, so `checkpoint.keep` + 1 have to fit.  All processes must
    call this.

    Args:
      step: the one that the run resumes from.

    Raises:
      InputError: with the bytes needed and free.
    """
    with raise_on_all_processes():
        if is_main():
            _check_disk(run_dir, config, step, say)


def _check_disk(run_dir: Path, config: Config, step: int, say: Callable[[str], None]) -> None:
    checkpoint, left = config.checkpoint, config.train.steps - step
    size = state_of(config.model, config.optimizer).bytes * config.model.parameter_count().allocated
    written = -(-left // checkpoint.every)
    there = min(step // checkpoint.every, checkpoint.keep) if step else 0
    most = min(checkpoint.keep + 1 - there, written)
    free = shutil.disk_usage(next(place for place in (run_dir, *run_dir.absolute().parents) if place.exists())).free
    if most * size > free:
        raise InputError(
            f"checkpoints need {enough_gib(size)} each, {enough_gib(most * size)} for "
            f"checkpoint.keep={checkpoint.keep} and the one that is being written, "
            f"and the disk of {run_dir} has {gib(free)} free; "
            f"{_less_disk(size, there, written, free)}"
        )
    forever = left // checkpoint.keep_every if checkpoint.keep_every else 0
    if (most + forever) * size > free:
        say(
            f"warning: checkpoint.keep_every={checkpoint.keep_every} keeps {forever} more checkpoints of "
            f"{enough_gib(size)}, and the disk of {run_dir} has {gib(free)} free"
        )


def _less_disk(size: float, there: int, written: int, free: float) -> str:
    keep = next((keep for keep in range(written, 0, -1) if (keep + 1 - there) * size <= free and keep > 0), None)
    if keep is not None:
        return f"set checkpoint.keep={keep}, or give an --out on a larger disk"
    if written > 1 and size <= free:
        return "set checkpoint.every to the number of train.steps, or give an --out on a larger disk"
    return "give an --out on a larger disk, or free some of it"


def mistakes(setup: AnySetup) -> tuple[str, ...]:
    """What is probably not meant (`jhpt.core.likely_mistakes`), a line each."""
    windows = setup.train_windows
    parts = windows.sources if isinstance(windows, Mixture) else (windows,)
    text = Text(
        ids=setup.tokenizer.vocab_size,
        sequences=tuple(map(len, parts)),
        weights=tuple(source.weight for source in setup.sources),
    )
    return tuple(f"warning: {line}" for line in likely_mistakes(setup.config, text))


@contextmanager
def out_of_memory_explained(setup: AnySetup, memory: Mapping[str, float], run_dir: Path) -> Iterator[None]:
    """Turns running out of memory into one message.

    Args:
      memory: bytes of a step on each device by cause, as the compiler plans them.

    Raises:
      OutOfMemory: with the bytes by cause, and the nearest change that needs clearly less.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemory(_explanation(setup, memory, run_dir, str(error))) from error


def ran_out_of_memory(error: Exception) -> bool:
    """Whether this is the reason of an error."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in OUT_OF_MEMORY)


def _explanation(setup: AnySetup, memory: Mapping[str, float], run_dir: Path, reason: str) -> str:
    info, need = setup.device, sum(memory.values())
    local = devices_here(setup.plan)
    room = Room(
        device=int(SMALLER_BY * need),
        host=int(SMALLER_BY * need * local),
        devices=local,
        one_memory=info.platform == "cpu",
    )
    enough = _by_estimate(room, info.kind, compute_dtype(setup.config, info).name, _scale(setup, memory))
    asked = re.search(r"allocat\w* (\d{4,})", reason)
    what = f", {gib(int(asked[1]))} could not be allocated" if asked else ""
    causes = " + ".join(f"{cause} {gib(size)}" for cause, size in memory.items())
    kept = f"; what was saved is in {run_dir}, from which the run goes on" if run_dir.exists() else ""
    return (
        f"memory ran out{what}: a step needs {causes} on each of {local} device{'s' * (local > 1)}, by the compiler's "
        f"account, and other programs may need some, too; {_advice(setup.config, setup.plan, room, enough)}{kept}"
    )
