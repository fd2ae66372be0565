"""What every emulated host runs (`jhpt.bench.emulated.worker`):

    work     a layer of each variant without communication, timed with the quota on, every host a share of them
    bytes    sent by a step of each variant, counted at the interface
    travel   sums alone, at every rate
    steps    of all variants, in turn, at every rate

All programs are compiled first, with quotas lifted.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jhpt.bench.comms.blocks import Blocks, meshes
from jhpt.bench.comms.costs import REPEATS, predicted, sent_bytes, step_bytes, travel, travel_key
from jhpt.bench.comms.task import VARIANTS, Task, Variant
from jhpt.bench.emulated.hosts import Hosts
from jhpt.bench.emulated.turns import Call, in_turn
from jhpt.bench.emulated.worker import take_part
from jhpt.measure.layers import typical_seconds
from jhpt.measure.timer import steady

Programs = dict[str, tuple[Callable[[], jax.stages.Lowered], Callable[[], Any]]]
"""How to lower, how to make arguments."""

Work = dict[str, dict[str, float]]
"""Seconds, forward and both, by what is computed."""


def ready(hosts: Hosts[Task], programs: Programs, lane: Mesh) -> dict[str, Call]:
    """Calls, compiled for the devices of this lane."""
    compiled = hosts.compiled({name: lower for name, (lower, _) in programs.items()}, list(lane.devices.flat))
    return {name: partial(compiled[name], *make()) for name, (_, make) in programs.items()}


def lane_calls(hosts: Hosts[Task], blocks: Blocks, lanes: Sequence[Mesh]) -> dict[str, list[Call]]:
    """The step of every variant, a call for each of its lanes."""
    found: dict[str, list[Call]] = {variant.name: [] for variant in VARIANTS}
    for index, lane in enumerate(lanes):
        own = {one.name: blocks.step(one, lane) for one in VARIANTS if index < one.lanes}
        for name, call in ready(hosts, own, lane).items():
            found[name].append(call)
    return found


def together(calls: Sequence[Call], apart: float, pool: ThreadPoolExecutor) -> Call:
    """All calls as one, each so many seconds after the one before."""

    def late(call: Call, seconds: float) -> Any:
        time.sleep(seconds)
        return jax.block_until_ready(call())

    def run() -> Any:
        running = [pool.submit(late, call, index * apart) for index, call in enumerate(calls)]
        return [one.result() for one in running]

    return run if len(calls) > 1 else calls[0]


def measured_work(hosts: Hosts[Task], blocks: Blocks) -> Work:
    """Seconds of a layer by what is computed.  Every host times a share, so that all are busy at the same time."""
    kinds = {travel_key(variant): variant for variant in VARIANTS}
    own = list(kinds)[hosts.rank :: hosts.count]
    calls = {f"{key}|{which}": call for key in own for which, call in blocks.work(kinds[key]).items()}
    hosts.limit(None)
    found: Work = {}
    for one in hosts.everyone(typical_seconds(calls, hosts.task.parts_rounds) if calls else {}):
        for name, seconds in one.items():
            key, _, which = name.partition("|")
            found.setdefault(key, {})[which] = seconds
    return found


def counted_bytes(hosts: Hosts[Task], steps: dict[str, Call]) -> dict[str, float]:
    """Bytes that a host sends in each step, on average over the hosts; waiting itself sends some, which are counted
    apart."""

    def sent(call: Call) -> int:
        hosts.wait()
        before = sent_bytes()
        jax.block_until_ready(call())
        hosts.wait()
        return sent_bytes() - before

    nothing = min(sent(lambda: ()) for _ in range(3))
    mine = {name: sent(call) - nothing for name, call in steps.items()}
    everyone = hosts.everyone(mine)
    return {name: sum(one[name] for one in everyone) / len(everyone) for name in mine}


def processor_seconds(hosts: Hosts[Task], calls: dict[str, Call]) -> dict[str, float]:
    """Seconds of processor that each call takes on a host, on average over the hosts."""

    def spent(call: Call) -> float:
        hosts.wait()
        before = time.process_time()
        jax.block_until_ready(call())
        return time.process_time() - before

    mine = {name: min(spent(call) for _ in range(3)) for name, call in calls.items()}
    everyone = hosts.everyone(mine)
    return {name: sum(one[name] for one in everyone) / len(everyone) for name in mine}


def run(hosts: Hosts[Task]) -> list[dict[str, Any]]:
    """All rows of a task."""
    task = hosts.task
    blocks = Blocks(task=task, hosts=hosts.count)
    lanes = meshes(jax.devices(), hosts.count)
    hosts.free()
    calls = lane_calls(hosts, blocks, lanes)
    hosts.say("steps compiled")
    messages = ready(hosts, {travel_key(one): travel(task, hosts.count, one, lanes[0]) for one in VARIANTS}, lanes[0])
    hosts.say("sums compiled")
    work = measured_work(hosts, blocks)
    hosts.say("work timed")
    pool = ThreadPoolExecutor(len(lanes))
    steps = {one.name: together(calls[one.name], work[travel_key(one)]["forward"] / 2, pool) for one in VARIANTS}
    hosts.limit(None)
    for call in steps.values():
        jax.block_until_ready(call())
    found = counted_bytes(hosts, steps)
    rows: list[dict[str, Any]] = [{"row": "work", "what": key, **seconds} for key, seconds in work.items()]
    rows += [
        {
            "row": "bytes",
            "variant": variant.name,
            "counted": found[variant.name],
            "formula": step_bytes(task, hosts.count, variant),
        }
        for variant in VARIANTS
    ]
    hosts.say("bytes counted")
    for rate in task.rates:
        hosts.limit(rate)
        alone, busy = steady(in_turn(hosts, messages, task.parts_rounds)), processor_seconds(hosts, messages)
        sums = {key: {"seconds": alone[key] / REPEATS, "busy": busy[key] / REPEATS} for key in messages}
        hosts.say(f"sums alone at {rate / 1e6:.0f} Mbit/s")
        rows += [{"row": "travel", "bits_per_s": rate, "what": key, **parts} for key, parts in sums.items()]
        samples = in_turn(hosts, steps, task.rounds)
        rows += [_step_row(task, variant, rate, samples, work, sums) for variant in VARIANTS]
        hosts.say(f"steps at {rate / 1e6:.0f} Mbit/s")
    return rows


def _step_row(
    task: Task,
    variant: Variant,
    rate: float,
    samples: dict[str, list[float]],
    work: Work,
    sums: dict[str, dict[str, float]],
) -> dict[str, Any]:
    key = travel_key(variant)
    return {
        "row": "step",
        "bits_per_s": rate,
        "variant": variant.name,
        "lanes": variant.lanes,
        "compression": variant.how.model_dump(mode="json") if variant.how else None,
        "predicted_s": predicted(task, variant, work[key], sums[key]),
        "samples_s": samples[variant.name],
    }


if __name__ == "__main__":
    take_part(Task, run)
