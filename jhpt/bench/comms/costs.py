"""What a step is predicted to take, from parts measured on the hosts themselves and not from steps.

    work     a layer of a lane's samples, forward and backward, on all hosts at once with nothing sent, rounding to
             codes and decoding included
    travel   what one sum sends, of a lane's samples, on links of the rate with nothing else to do

A variant's step is `jhpt.planner.overlap.layers_seconds` of these: work and sums in line for one lane, two streams for
several.  A lane waits for its own sum with all that follows, gradients of weights too (behind=0).  Sending keeps a host's
processor busy, too (`busy`, counted while sums travel alone): beside work that is more work.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.bench.comms.task import Task, Variant
from jhpt.core.axes import TENSOR
from jhpt.core.compression import gathers, wire_bytes
from jhpt.planner.overlap import layers_seconds

REPEATS = 4
"""Sums in a program that times them, one after the other."""

SCORE_BYTES = 4
"""Of a token's importance, a float32."""


def sum_bytes(task: Task, hosts: int, how: Any, batch: int) -> float:
    """Bytes that a rank sends for one sum of so many samples."""
    if how is None:
        return 2 * (hosts - 1) / hosts * 4 * batch * task.length * task.width
    return wire_bytes(hosts, how, batch, task.length, task.width)


def score_bytes(task: Task, hosts: int, how: Any, batch: int) -> float:
    """Bytes that a rank sends so that all agree on the important tokens of a layer."""
    chooses = how is not None and how.tokens < 1
    return 2 * (hosts - 1) / hosts * SCORE_BYTES * batch * task.length if chooses else 0.0


def step_bytes(task: Task, hosts: int, variant: Variant) -> float:
    """Bytes that a host sends in a step: four sums a layer, and scores once."""
    batch = task.batch // variant.lanes
    layer = 4 * sum_bytes(task, hosts, variant.how, batch) + score_bytes(task, hosts, variant.how, batch)
    return variant.lanes * task.layers * layer


def travel_key(variant: Variant) -> str:
    """Variants of one key send the same at a time."""
    return f"{variant.sums} / {variant.lanes}"


def travel(task: Task, hosts: int, variant: Variant, mesh: Mesh) -> dict[str, tuple[Any, Any]]:
    """Programs of `REPEATS` sums of a lane's samples, and of as many agreements on tokens, with their arguments."""
    batch = task.batch // variant.lanes
    found = {"sum": _sums(task, hosts, variant.how, batch, mesh)}
    if score_bytes(task, hosts, variant.how, batch):
        found["scores"] = _chained(lambda x: jax.lax.psum(x, TENSOR), (batch * task.length,), jnp.float32, mesh)
    return found


def _sums(task: Task, hosts: int, how: Any, batch: int, mesh: Mesh) -> tuple[Any, Any]:
    if how is None:
        return _chained(lambda x: jax.lax.psum(x, TENSOR), (batch * task.length * task.width,), jnp.float32, mesh)
    assert not gathers(hosts, how), "every variant takes two steps"
    words = int(sum_bytes(task, hosts, how, batch)) // (2 * (hosts - 1)) // 2

    def two_steps(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.all_to_all(x, TENSOR, 0, 0, tiled=True)[0], TENSOR)

    return _chained(two_steps, (hosts, words), jnp.uint16, mesh)


def _chained(once: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> tuple[Any, Any]:
    """A program that does it several times on an array of every rank, and that array."""

    def run(x: jax.Array) -> jax.Array:
        for _ in range(REPEATS):
            x = once(x)
        return x

    spec = PartitionSpec(TENSOR)
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    count = mesh.shape[TENSOR]
    whole, place = (count * shape[0], *shape[1:]), NamedSharding(mesh, spec)
    given = jax.ShapeDtypeStruct(whole, dtype, sharding=place)
    own = np.zeros(shape, dtype)
    return (lambda: program.lower(given)), (lambda: (jax.make_array_from_callback(whole, place, lambda _: own),))


def predicted(task: Task, variant: Variant, work: dict[str, float], seconds: dict[str, float]) -> float:
    """Seconds of a step.

    Args:
      work: of a lane's layer, forward and both.  seconds: of one sum and, where tokens are chosen, of scores, which are
        agreed on once, forward; and for how many of them the processor is busy.
    """
    one, scores = seconds["sum"], seconds.get("scores", 0.0)
    beside = variant.lanes > 1
    busy, agreeing = (seconds.get(f"{part} busy", 0.0) / task.cpu if beside else 0.0 for part in ("sum", "scores"))
    return layers_seconds(
        layers=task.layers,
        forward=work["forward"] + 2 * busy + agreeing,
        backward=work["both"] - work["forward"] + 2 * busy,
        travel=one + scores / 2,
        travel_back=one,
        chunks=variant.lanes,
        overlap=beside,
    )


def sent_bytes() -> int:
    """Bytes that this host's link has carried away so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    return 0


def relative(found: float, expected: float) -> float:
    """|found - expected| / expected."""
    return math.fabs(found - expected) / expected
