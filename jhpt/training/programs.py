"""The programs of a run: the protocol `Step`, and checks that they fit the devices.

The protocol has two implementations: `training.device_step`, with everything on the devices, and
`training.offloaded_step`, with blocks wholly or partly in host memory.  `training.compile` decides between them.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.config import Config
from jhpt.models.family import Sums
from jhpt.sharding.compiler_options import compiler_options
from jhpt.sharding.types import PyTree
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.record import Record
from jhpt.training.room import DoesNotFit, Room, devices_here, room_of
from jhpt.training.runtime import return_freed_memory
from jhpt.training.setup import Setup
from jhpt.training.stages_setup import AnySetup, StagesSetup
from jhpt.training.step import Params, RandomStream, StepMetrics, StepState, random_key

KEPT_HEAP = 6.0
"""A heap that keeps what is freed (`runtime.keep_heap`) grows to so many times what its programs need: glibc 2.36 does
not find a freed block again that has to be aligned.  Measured: 1.3 to 5.3 times."""

State = TypeVar("State", bound=StepState)

GlobalRows: TypeAlias = jax.Array | np.ndarray
"""Rows of a global batch: on all devices, or, where stages divide them differently, all of them on every host."""


class Step(Protocol[State]):
    """The compiled programs of a run, and the conversion between their state and a checkpoint."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of the training step on each device by cause, as the compiler plans them; empty if it does not say."""

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state that this process holds in host memory."""

    def init(self) -> State:
        """The state before the first step."""

    def started(self, read: Callable[[Params], Params]) -> State:
        """The state before the first step with other parameters than those of `init`.

        Args:
          read: shapes of the model's own tree -> its parameters; where a shape has a sharding as device arrays, else as
            numpy arrays.
        """

    def step(self, state: State, windows: Any) -> tuple[State, StepMetrics]:
        """One optimizer step on a global batch of windows [B, W].  The state is donated."""

    def flush(self, state: State) -> State:
        """The state with no update pending, as it is evaluated and saved.  The argument must not be used again."""

    def evaluate(self, params: Any, windows: Any, weights: Any, key: jax.Array) -> Sums:
        """Sums over held-out windows [B, W] with row weights [B]; params: those of a flushed state."""

    def save(self, checkpoints: Checkpoints, number: int, state: State, record: Record) -> None:
        """Writes a flushed state as the checkpoint of step `number`."""

    def load(self, checkpoints: Checkpoints, number: int) -> State:
        """The state in the checkpoint of step `number`, whatever plan wrote it."""

    def parameters(self, state: State) -> Params | None:
        """The parameters of a flushed state as the model's own tree; None if the devices have no room for them."""


def compiled_within_memory(
    setup: Setup,
    lowered: jax.stages.Lowered,
    purpose: str,
    besides: int = 0,
    host: Mapping[str, float] = MappingProxyType({}),
) -> tuple[jax.stages.Compiled, dict[str, int]]:
    """(the program, its bytes on each device by cause).  All processes must call this.

    Args:
      purpose: of the program, as the subject of a message.
      besides: bytes of state on the device that are not among the program's arguments.
      host: bytes of host memory by cause that this process takes beside its devices.

    Raises:
      DoesNotFit: the compiler says that the program needs more memory than there is.
    """
    compiled = lowered.compile(compiler_options=compiler_options(setup.device.platform, setup.plan))
    memory = memory_of(compiled) | ({"state": besides} if besides else {})
    room = room_of(setup.device, devices_here(setup.plan))
    check_memory(room, purpose, memory, host)
    if room.one_memory and KEPT_HEAP * room.total(sum(memory.values()), sum(host.values())) > room.host:
        return_freed_memory()
    return compiled, memory


def fitting(setup: Setup, program: Any, purpose: str, arguments: tuple[Any, ...], besides: int = 0) -> Any:
    """`program`, compiled for these arguments if the memory of the device is known; see `compiled_within_memory`.

    Otherwise a program that is too large would fail when it is first called, hundreds of steps later.
    """
    if setup.device.memory is None:
        return program
    return compiled_within_memory(setup, program.lower(*arguments), purpose, besides)[0]


def window_length(config: Config) -> int:
    """Tokens in one row of a batch: a causal model reads one more than it has inputs."""
    return config.model.row_length(config.data.sequence_length)


def global_batch(setup: AnySetup, rows: np.ndarray) -> GlobalRows:
    """The global batch of which this process holds these rows."""
    if isinstance(setup, StagesSetup):
        return rows
    shape = (setup.config.data.batch_size, *rows.shape[1:])
    return jax.make_array_from_process_local_data(setup.layout.batch, rows, shape)


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes on each device by cause; empty if the compiler does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    made = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"state": analysis.argument_size_in_bytes, "temporary": analysis.temp_size_in_bytes + made}


def check_memory(
    room: Room, purpose: str, memory: Mapping[str, float], host: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Refuses a program that does not fit according to the compiler, before a device or the host runs out of memory.

    Args:
      memory: bytes on each device by cause.  host: bytes of host memory beside, by cause.

    Raises:
      DoesNotFit: with the bytes by cause and what there is.
    """
    if not room.fits(sum(memory.values()), sum(host.values())):
        raise DoesNotFit(purpose, room, memory, host)


COPIES_TO_SAVE = 2
"""Of the state, in host memory while it is saved: Orbax's, so that training can go on, and the encoded chunks of files
(measured: docs/guides/faults.md)."""


def copied_to_save(state: PyTree) -> int:
    """Bytes of host memory that this process takes while it saves: `COPIES_TO_SAVE` of every piece of the state.

    state: shapes with shardings.
    """

    def pieces(leaf: jax.ShapeDtypeStruct) -> int:
        assert leaf.sharding is not None
        here = set(map(str, leaf.sharding.addressable_devices_indices_map(leaf.shape).values()))
        return len(here) * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return COPIES_TO_SAVE * sum(
        pieces(leaf) for leaf in jax.tree.leaves(state) if jax.dtypes.issubdtype(leaf.dtype, jax.numpy.number)
    )


def windows_shape(config: Config, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Shape of the windows of a global batch, [B, W]."""
    return jax.ShapeDtypeStruct((config.data.batch_size, window_length(config)), jnp.int32, sharding=sharding)


def evaluation_shapes(setup: Setup, params: PyTree) -> tuple[Any, ...]:
    """Shapes of the arguments of `Step.evaluate`."""
    batch = setup.layout.batch
    weights = jax.ShapeDtypeStruct((setup.config.data.batch_size,), jnp.float32, sharding=batch)
    key = jax.eval_shape(lambda: random_key(0, RandomStream.EVALUATION))
    return params, windows_shape(setup.config, batch), weights, key
