"""What a run compiles, and whether that fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.amounts import gib
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.models.family import Sums
from jhpt.sharding.compiler_options import compiler_options
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.keys import RandomStream, random_key
from jhpt.training.setup import Setup
from jhpt.training.step import StepMetrics, TrainState


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled functions and the layout of their state.

    init: the state before the first step.
    train_step: (state, windows [B, W]) -> (state, metrics); the state is donated.
    evaluate: (params, windows, row weights [B], key) -> Sums.
    memory: bytes per device of the training step by cause, as the compiler plans them.
    host: bytes of blocks that this process has on its host.
    settled: the state with no step left to take, as it is evaluated and saved.
    saved: that as a checkpoint holds it, whose parameters are the model's own tree.  restored: back from one, by step.
    parameters: a state's `params` as the model's own tree; None: the devices have no room for all of them.
    """

    init: Callable[[], Any]
    train_step: Callable[[Any, jax.Array], tuple[Any, StepMetrics]]
    evaluate: Callable[..., Sums]
    memory: dict[str, int]
    settled: Callable[[Any], Any]
    saved: Callable[[Any], TrainState]
    restored: Callable[[Checkpoints, int], Any]
    parameters: Callable[[Any], Any] | None
    host: int = 0


def fitting(setup: Setup, program: Any, what: str, arguments: tuple[Any, ...], besides: int = 0) -> Any:
    """The program, compiled for these arguments where a device's memory is known; besides: bytes that are there, too.

    Raises:
      InputError: the compiler says that it needs more than there is.
    """
    if setup.device.memory is None:
        return program
    compiled = program.lower(*arguments).compile(compiler_options=compiler_options(setup.device.platform, setup.plan))
    check_memory(setup, what, memory_of(compiled) | ({"state": besides} if besides else {}))
    return compiled


def window_length(config: Config) -> int:
    """Tokens in one row of a batch: a causal model reads one more than it has inputs."""
    return config.model.row_length(config.data.sequence_length)


def global_batch(setup: Setup, rows: np.ndarray) -> jax.Array:
    """The rows of this process as its part of the global batch."""
    shape = (setup.config.data.batch_size, *rows.shape[1:])
    return jax.make_array_from_process_local_data(setup.layout.batch, rows, shape)


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes on a device by cause; nothing where the compiler does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    made = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"state": analysis.argument_size_in_bytes, "temporary": analysis.temp_size_in_bytes + made}


LESS_MEMORY = {
    "hand": "raise parallel.micro_batches, parallel.zero or parallel.tensor, or lower data.batch_size; or set "
    "memory.recompute=full, memory.offload=both (which takes neither tensor nor pipe), or parallel=auto",
    "auto": "lower data.batch_size, or lay it out by hand: parallel.auto=false and more of parallel.micro_batches, "
    "parallel.zero or parallel.tensor",
    "given": "give a plan with more micro_batches, zero or tensor, such as `jhpt plan --budget` makes, or one for a "
    "smaller batch",
}
"""What to do about a step that is too large, by where its plan came from."""


def check_memory(setup: Setup, what: str, memory: dict[str, int]) -> None:
    """Refuses what the compiler says cannot fit, before the device runs out of memory in the middle of it."""
    limit, need = setup.device.memory, sum(memory.values())
    if limit is not None and need > limit:
        causes = " + ".join(f"{name} {gib(size)}" for name, size in memory.items())
        raise InputError(
            f"{what} needs {causes} on each device, which has {gib(limit)}; "
            + LESS_MEMORY[setup.plan.origin or "given"]
        )


def windows_shape(config: Config, place: Any) -> jax.ShapeDtypeStruct:
    """Of a global batch."""
    return jax.ShapeDtypeStruct((config.data.batch_size, window_length(config)), jnp.int32, sharding=place)


def evaluated(setup: Setup, params: Any) -> tuple[Any, ...]:
    """Shapes of what `evaluate` takes."""
    batch = setup.layout.batch
    weights = jax.ShapeDtypeStruct((setup.config.data.batch_size,), jnp.float32, sharding=batch)
    return (
        params,
        windows_shape(setup.config, batch),
        weights,
        jax.eval_shape(lambda: random_key(0, RandomStream.EVALUATION)),
    )
