"""The program of every emulated host (`benchmarks.emulated.worker`), for tensor parallelism and then for gradients:

    work     timed on single hosts with the quota on, a share on each: for tensor parallelism a layer of each variant
             without communication, for gradients the whole step over devices of one host, and its collectives alone
    bytes    sent in a step of each variant, counted at the interface
    travel   all-reduces alone, at every rate
    steps    of all variants, in turn, at every rate

All programs are compiled first, with quotas lifted.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.comms import gradients
from benchmarks.comms.blocks import Blocks, meshes
from benchmarks.comms.costs import REPEATS, predicted, step_bytes, sum_bytes, travel, travel_key
from benchmarks.comms.gradients import EXCHANGES, DataParallel, Exchange, data_mesh, stepping
from benchmarks.comms.measured import Seconds, counted_bytes, processor_seconds, ready, work_seconds
from benchmarks.comms.task import BASELINE, Task, Variant
from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, in_turn
from benchmarks.emulated.worker import take_part
from jhpt.measure.timer import steady


def lane_calls(hosts: Hosts[Task], blocks: Blocks, lanes: Sequence[Mesh]) -> dict[str, list[Call]]:
    """The step of every variant, a call for each of its lanes."""
    ways = hosts.task.ways
    calls: dict[str, list[Call]] = {variant.name: [] for variant in ways}
    for index, lane in enumerate(lanes):
        programs = {one.name: blocks.step(one, lane) for one in ways if index < one.lanes}
        for name, call in ready(hosts, programs, lane).items():
            calls[name].append(call)
    return calls


def staggered(calls: Sequence[Call], apart: float, pool: ThreadPoolExecutor) -> Call:
    """One call that runs all calls, each `apart` seconds after the one before."""

    def late(call: Call, seconds: float) -> Any:
        time.sleep(seconds)
        return jax.block_until_ready(call())

    def run() -> Any:
        running = [pool.submit(late, call, index * apart) for index, call in enumerate(calls)]
        return [one.result() for one in running]

    return run if len(calls) > 1 else calls[0]


def tensor_rows(hosts: Hosts[Task], lanes: Sequence[Mesh]) -> list[dict[str, Any]]:
    """Rows of every variant of tensor parallelism."""
    task, shape, ways = hosts.task, hosts.task.blocks, hosts.task.ways
    blocks = Blocks(shape=shape, hosts=hosts.count)
    hosts.free()
    calls = lane_calls(hosts, blocks, lanes)
    hosts.say("steps compiled")
    messages = ready(hosts, {travel_key(one): travel(shape, hosts.count, one, lanes[0]) for one in ways}, lanes[0])
    hosts.say("sums compiled")
    kinds = {travel_key(variant): variant for variant in ways}
    work = work_seconds(hosts, {key: partial(blocks.work, variant) for key, variant in kinds.items()})
    hosts.say("work timed")
    pool = ThreadPoolExecutor(len(lanes))
    steps = {one.name: staggered(calls[one.name], work[travel_key(one)]["forward"] / 2, pool) for one in ways}
    hosts.limit(None)
    for call in steps.values():
        jax.block_until_ready(call())
    counted, waiting = counted_bytes(hosts, steps)
    rows: list[dict[str, Any]] = [{"row": "work", "what": key, **seconds} for key, seconds in work.items()]
    rows += [
        {
            "row": "bytes",
            "variant": variant.name,
            "counted": counted[variant.name],
            "waiting": waiting,
            "formula": step_bytes(shape, hosts.count, variant),
        }
        for variant in ways
    ]
    hosts.say("bytes counted")
    for rate in task.rates:
        hosts.limit(rate)
        alone, busy = steady(in_turn(hosts, messages, task.parts_rounds)), processor_seconds(hosts, messages)
        sums = {key: {"seconds": alone[key] / REPEATS, "busy": busy[key] / REPEATS} for key in messages}
        hosts.say(f"sums alone at {rate / 1e6:.0f} Mbit/s")
        rows += [
            {
                "row": "travel",
                "bits_per_s": rate,
                "what": key,
                "bytes": sum_bytes(shape, hosts.count, kinds[key]),
                "baseline": kinds[key].name == BASELINE,
                **parts,
            }
            for key, parts in sums.items()
        ]
        samples = in_turn(hosts, steps, task.rounds)
        rows += [_step_row(task, variant, rate, samples, work, sums) for variant in ways]
        hosts.say(f"steps at {rate / 1e6:.0f} Mbit/s")
    return rows


def _step_row(
    task: Task,
    variant: Variant,
    rate: float,
    samples: dict[str, list[float]],
    work: Seconds,
    sums: dict[str, dict[str, float]],
) -> dict[str, Any]:
    key = travel_key(variant)
    return {
        "row": "step",
        "bits_per_s": rate,
        "variant": variant.name,
        "lanes": variant.lanes,
        "sample_chunks": variant.sample_chunks,
        "compression": variant.compression.model_dump(mode="json") if variant.compression else None,
        "predicted_s": predicted(task, variant, work[key], sums[key]),
        "samples_s": samples[variant.name],
    }


def gradient_rows(hosts: Hosts[Task], devices: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """Rows of every exchange of the task, over these devices, one of each host."""
    task, mesh = hosts.task, data_mesh(devices)
    chosen = {one.name: one for one in EXCHANGES if one.name in task.exchanges}
    model = DataParallel(shape=task.gradients, hosts=hosts.count)
    hosts.free()
    steps = ready(hosts, {name: model.step(one, mesh) for name, one in chosen.items()}, mesh, stepping)
    messages = ready(hosts, {name: model.travel(one, mesh) for name, one in chosen.items()}, mesh)
    hosts.say("steps of gradients compiled")
    inside = data_mesh(jax.local_devices()[: hosts.count])
    work = work_seconds(hosts, {name: partial(_inside, model, one, inside) for name, one in chosen.items()})
    rows: list[dict[str, Any]] = [{"row": "gradient work", "what": name, **seconds} for name, seconds in work.items()]
    for call in steps.values():
        jax.block_until_ready(call())
    counted, waiting = counted_bytes(hosts, steps)
    rows += [
        {
            "row": "gradient bytes",
            "variant": name,
            "counted": counted[name],
            "waiting": waiting,
            "formula": model.sent(one),
        }
        for name, one in chosen.items()
    ]
    hosts.say("bytes of gradients counted")
    for rate in task.rates:
        hosts.limit(rate)
        alone = {name: s / REPEATS for name, s in steady(in_turn(hosts, messages, task.parts_rounds)).items()}
        samples = in_turn(hosts, steps, task.rounds)
        rows += [
            {
                "row": "gradient travel",
                "bits_per_s": rate,
                "what": name,
                "bytes": model.sent(chosen[name]),
                "baseline": name == gradients.BASELINE,
                "seconds": seconds,
            }
            for name, seconds in alone.items()
        ]
        rows += [
            {
                "row": "gradient step",
                "bits_per_s": rate,
                "variant": name,
                "compression": one.compression.model_dump(mode="json") if one.compression else None,
                "predicted_s": model.predicted(work[name], alone[name]),
                "samples_s": samples[name],
            }
            for name, one in chosen.items()
        ]
        hosts.say(f"gradients at {rate / 1e6:.0f} Mbit/s")
    return rows


def _inside(model: DataParallel, exchange: Exchange, mesh: Mesh) -> dict[str, Call]:
    """A step, and its collectives alone, over the devices of one host."""
    (step, given), (bare, sent) = model.step(exchange, mesh), model.travel(exchange, mesh)
    return {"step": stepping(step().compile(), *given()), "travel": partial(bare().compile(), *sent())}


def run(hosts: Hosts[Task]) -> list[dict[str, Any]]:
    """All rows of a task."""
    lanes = meshes(jax.devices(), hosts.count)
    return tensor_rows(hosts, lanes) + gradient_rows(hosts, list(lanes[0].devices.flat))


if __name__ == "__main__":
    take_part(Task, run)
