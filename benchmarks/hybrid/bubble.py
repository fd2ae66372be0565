"""The idle share (bubble) of pipelines on links without a limit.

A perceptron of equal blocks with a small embedding and head is divided into as many stages as there are hosts.  T:
seconds of the gradients of M micro-batches.  W: seconds of the same M micro-batches through the blocks of one stage,
with embedding and head, without communication, on all hosts at the same time, in the mean over the hosts.
idle = 1 - W / T, which for 1F1B is (S-1) / (M+S-1) at best.

What is not the schedule's is kept small.  Hosts that share a core leave a part of it unused, so that one runs no faster
while the other waits, and quotas hold over a short period (`netlab.quotas.shortest_period`).  An exchange of x[b, d]
takes processor time, which a GPU would not spend; passes grow with d^2 and messages with d, so wider blocks
(`task.WIDTHS`) show less of it.
"""

import itertools
import statistics
from typing import Any

import jax

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, by_host_in_turn
from benchmarks.hybrid.models import ClassSubject, Subject
from benchmarks.hybrid.steps import Traced, ready, traced
from benchmarks.hybrid.task import CHUNKS, WIDTHS, Task
from benchmarks.netlab.quotas import shortest_period
from benchmarks.networks.mlp import MLP
from jhpt.core.plan import Chunk, Plan, Schedule, Stage, runs_of
from jhpt.sharding.mesh import make_device_mesh

MICRO_BATCHES = 8
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "zb-h1", "eager-1f1b", "interleaved")

ALONE = "alone"
"""The work without communication, as a competitor."""

BLOCKS = 2
"""Blocks of a stage, of which each of interleaved's chunks has a half.  With four, bubbles came out no closer to their
formulas (docs/reports/hybrid.md)."""


def subject_of(blocks: int, width: int = WIDTHS[0]) -> ClassSubject:
    """The perceptron with this number of blocks, whose hidden layers are four times as wide as what stages exchange, as
    in a transformer."""
    network = MLP(inputs=32, width=width, hidden=4 * width, num_blocks=blocks, classes=32)
    return ClassSubject(name="bubble", batch=256 * MICRO_BATCHES, network=network)


def plan_of(blocks: int, stages: int, schedule: Schedule) -> Plan:
    """A plan of equal chunks, the embedding with the first and the head with the last."""
    chunks = CHUNKS if schedule == "interleaved" else 1
    each = blocks // (stages * chunks)
    edges = [0, *(1 + each * part for part in range(1, stages * chunks)), blocks + 2]
    parts = [Chunk(first=first, runs=runs_of([1] * (stop - first))) for first, stop in itertools.pairwise(edges)]
    return Plan(
        model="bubble",
        cluster=f"{stages} hosts",
        batch=subject_of(blocks).batch,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        stages=tuple(Stage(device=s, devices=1, chunks=tuple(parts[s::stages])) for s in range(stages)),
    )


def run_bubble(hosts: Hosts[Task], width: int) -> list[dict[str, Any]]:
    """A row for every schedule, and one for the work without communication, of blocks of this width."""
    hosts.free()
    blocks = BLOCKS * hosts.count
    programs: dict[str, Traced] = {
        name: traced(subject_of(blocks, width), plan_of(blocks, hosts.count, name), jax.devices(), update=False)
        for name in SCHEDULES
    }
    steps = ready(hosts, programs) | {ALONE: _alone(subject_of(BLOCKS, width))}
    cpu = hosts.task.cpu
    hosts.limit(None, shortest_period(cpu))
    hosts.say(f"bubble, width {width}")
    shared = {
        "row": "bubble",
        "cpu": cpu,
        "width": width,
        "blocks": BLOCKS,
        "stages": hosts.count,
        "micro_batches": MICRO_BATCHES,
    }
    samples = {
        name: [statistics.mean(each) if name == ALONE else max(each) for each in by_host]
        for name, by_host in by_host_in_turn(hosts, steps, hosts.task.rounds).items()
    }
    return [shared | {"competitor": name, "samples_s": times} for name, times in samples.items()]


def _alone(subject: Subject) -> Call:
    """The gradients of one stage's blocks on this host's device."""
    plan = plan_of(BLOCKS, 1, "1f1b")
    execution = subject.execution(plan, make_device_mesh(plan, jax.local_devices()[:1]))
    params = jax.jit(subject.init)(jax.random.key(0))
    rows = jax.tree.map(jax.numpy.asarray, subject.rows(subject.batch))
    program = jax.jit(execution.gradients).lower(params, rows, jax.random.key(0)).compile()
    return lambda: program(params, rows, jax.random.key(0))
