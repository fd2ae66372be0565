"""What plans are made from: seconds of layers and of the network, measured on the hosts."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.timing import Call, in_rotation, in_turn, series_of, typical_seconds
from benchmarks.hybrid.layer_times import PIPED, Passes, alone, layer_programs, shard_of, timings
from benchmarks.hybrid.models import Subject
from benchmarks.hybrid.pace import Pace, rows_of
from benchmarks.hybrid.passes import BLOCKS, MOST_PASSES
from benchmarks.hybrid.programs import LayerProgram, calls_of
from benchmarks.hybrid.quota import Quota
from benchmarks.hybrid.steps import train_step
from benchmarks.hybrid.task import Task
from benchmarks.netlab.quotas import QUOTA_PERIOD
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.config import OptimizerConfig
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.core.profile import ModelProfile
from jhpt.measure.probe import ring_link
from jhpt.models.family import Sums
from jhpt.sharding.mesh import make_device_mesh
from jhpt.sharding.model_parts import Recompute
from jhpt.training.optimizer import make_optimizer
from jhpt.training.step import init_state

LINK_SIZES = tuple(1 << exponent for exponent in range(14, 25, 2))
"""Bytes of the all-reduces that are timed: 16 KiB ... 16 MiB, more than the largest gradient."""

IN_A_ROW = 6
"""Small all-reduces of a sample, which lasts longer, so that it matters less in which moment of the quotas' period it
begins."""

ROTATION_S = 5.0
"""Seconds for which a host calls layers in rotation in each of `Task.layer_rounds`."""

EXCHANGES, EXCHANGED_BYTES = 32, 1 << 17
"""Exchanges of a sample of their processor time, and bytes of each: a micro-batch of a row of mlp or four of gpt."""

CROSSING_BYTES = 1 << 20
"""Bytes of a message that meets another one."""

MEETINGS, MATRIX, PRODUCTS = 16, 192, 64
"""Computations and sums in a row, rows of the matrices that are multiplied, and products of a computation that tells
how long one takes, about 0.1 ms on half a core."""

MET_BYTES = (4, 1 << 16, 1 << 18)
"""Bytes of an array that hosts sum when they meet."""

COMPUTED_S = (0.003, 0.006, 0.01, 0.03)
"""Seconds of computation before, about."""

MOST_MICRO_BATCHES = 32
"""The most micro-batches of a pipeline's step: GPT and BERT then have one sequence in each, and four stages idle 9 % of
the time at best."""

MEMORY = float(1 << 40)
"""Bytes of a device: more than any plan needs."""


Rows = list[dict[str, Any]]


def measured_seconds(hosts: Hosts[Task], subject: Subject) -> tuple[list[dict[str, float]], Pace]:
    """(seconds of all programs of layers, of every host; those with which to see how fast hosts compute later).

    All hosts time the same layer at the same time, as replicas run it: they share caches and memory bandwidth.
    """
    hosts.free()
    calls = _calls(hosts, subject)
    hosts.say(f"{subject.name}: {len(calls)} programs of layers")
    hosts.limit(None)
    mine = typical_seconds(calls, hosts.task.layer_rounds)
    series = {name: series_of(call) for name, call in calls.items() if "|1|" in name}
    return hosts.everyone(_of_layers(subject, mine)), Pace(series=series, seconds=mine)


def _of_layers(subject: Subject, seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of programs -> of their layers in one pass."""
    return {
        name: each / (BLOCKS * passes_of(subject, rows_of(name)) if PIPED in name else 1)
        for name, each in seconds.items()
    }


def passes_of(subject: Subject, rows: int) -> int:
    """Passes of so many rows in a call of a pipeline's stage: those of a step, as long as these are few."""
    return min(MOST_PASSES, subject.batch // rows)


def seconds_in_rotation(hosts: Hosts[Task], subject: Subject) -> list[dict[str, float]]:
    """Seconds of all programs of layers as plans with a program for each stage run them, and of the update, of every
    host.

    Programs of one tensor degree and number of rows are called in turn.  These groups are dealt out to the hosts, which
    are all busy for as long, and what takes a processor second on one of them is taken to do so on all.  A program runs
    on the host's own device alone: one over the devices of all hosts takes longer to call.
    """
    hosts.free()
    here = NamedSharding(Mesh(np.asarray(jax.local_devices()[:1]), ("all",)), PartitionSpec())
    groups = [{"update": _update(subject)}] if hosts.rank == 0 else []
    for (tensor, batch), its in list(_programs(subject, hosts.count, here, piped=False).items())[
        hosts.rank :: hosts.count
    ]:
        of_layers = calls_of(its, {name: one.lower().compile() for name, one in its.items()})
        groups.append({_named(name, tensor, batch): call for name, call in of_layers.items()})
    hosts.say(f"{subject.name}: {sum(map(len, groups))} programs of layers in rotation")
    hosts.limit(None)
    each = ROTATION_S * hosts.task.layer_rounds / len(groups)
    found = [in_rotation(calls, each) for calls in groups]
    mine = {"seconds": {name: s for seconds, _ in found for name, s in seconds.items()}}
    everyone = hosts.everyone(mine | {"pace": statistics.median(pace for _, pace in found)})
    seconds = {name: s for one in everyone for name, s in one["seconds"].items()}
    return [{name: one["pace"] * s for name, s in seconds.items()} for one in everyone]


def profile_of(
    subject: Subject, by_host: Sequence[Mapping[str, float]], *, piped: bool = False
) -> tuple[ModelProfile, Rows]:
    """(the subject's profile with the seconds of its layers, these seconds as rows).

    The slowest host counts, for which the others wait.

    Args:
      by_host: of each of some hosts that are alike, the seconds of all programs (`measured_seconds`).
      piped: whether the blocks' seconds are those of a pipeline's passes.
    """
    profile = subject.profile()
    everything = slowest(by_host)
    seconds: dict[tuple[str, int, int], tuple[float, float]] = {}
    for name, forward in everything.items():
        if name.endswith(" forward"):
            kind, tensor, batch = name.removesuffix(" forward").split("|")
            stem = name.removesuffix("forward")
            backward = everything.get(f"{stem}backward")
            both = everything[f"{stem}both"] if backward is None else forward + backward
            seconds[kind, int(tensor), int(batch)] = forward, both
    measured = timings(seconds)
    passed = {name: measured[f"{name}{PIPED}"] for name in measured if piped and f"{name}{PIPED}" in measured}
    of_kind = measured | passed
    kinds = {name: kind.model_copy(update={"timings": of_kind[name]}) for name, kind in profile.kinds.items()}
    changes = {
        "kinds": kinds,
        "update_seconds": everything["update"] / profile.parameters,
        "source": f"layers timed alone on {len(by_host)} busy hosts",
    }
    rows = [
        {"row": "layer", "model": subject.name, "layer": kind, "tensor": t, "batch": b, "forward_s": f, "both_s": both}
        for (kind, t, b), (f, both) in seconds.items()
    ]
    return profile.model_copy(update=changes), rows


def slowest(by_host: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of every program on the host that takes longest."""
    return {name: max(one[name] for one in by_host) for name in by_host[0]}


def paces_of(by_host: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Of every host, its seconds over those of the slowest host: the geometric mean over all programs, at most 1.

    Hosts with equal quotas are not equally fast, because their cores are not.
    """
    most = slowest(by_host)
    return tuple(statistics.geometric_mean(one[name] / most[name] for name in most) for one in by_host)


def _calls(hosts: Hosts[Task], subject: Subject) -> dict[str, Call]:
    """Every program of a layer, compiled by one host for all, and the update."""
    everywhere = NamedSharding(Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec())
    groups = _programs(subject, hosts.count, everywhere, piped=subject.piped)
    compiled = hosts.compiled(
        {f"{group}{name}": one.lower for group, its in groups.items() for name, one in its.items()}
    )
    calls: dict[str, Call] = {}
    for (tensor, batch), its in groups.items():
        of_layers = calls_of(its, {name: compiled[f"{(tensor, batch)}{name}"] for name in its})
        calls |= {_named(name, tensor, batch): call for name, call in of_layers.items()}
    calls["update"] = _update(subject)
    return calls


def _named(name: str, tensor: int, batch: int) -> str:
    """The name of a layer's call among those of all degrees and numbers of rows."""
    kind, _, passes = name.rpartition(" ")
    return f"{kind}|{tensor}|{batch} {passes}"


def _programs(
    subject: Subject, hosts: int, place: NamedSharding, *, piped: bool
) -> dict[tuple[int, int], dict[str, LayerProgram]]:
    """Programs of layers by tensor degree and number of rows.  piped: also of passes of a pipeline's stage."""
    shapes, profile = jax.eval_shape(subject.init, jax.random.key(0)), subject.profile()
    recompute = saved_by_pipelines(subject) if piped else None
    groups = {}
    for tensor in (t for t in (1, 2, 4, 8) if t <= hosts):
        parts, params = subject.parts(alone(tensor)), shard_of(shapes, tensor)
        kinds = {kind for kind in profile.kinds if profile.kinds[kind].max_tensor % tensor == 0}
        for batch in batches(subject, tensor, hosts):
            rows = subject.rows(batch)
            passes = Passes(count=passes_of(subject, batch), recompute=recompute) if recompute else None
            groups[tensor, batch] = layer_programs(parts, params, rows, profile.layers, kinds, place, passes)
    return groups


def saved_by_pipelines(subject: Subject) -> Recompute:
    """What blocks save in a pipeline, here of two stages."""
    layers = len(subject.profile().layers)
    cuts = 0, layers // 2, layers
    stages = tuple(
        Stage(device=s, devices=1, chunks=(Chunk(first=first, runs=runs_of([1] * (stop - first))),))
        for s, (first, stop) in enumerate(itertools.pairwise(cuts))
    )
    plan = Plan(model=subject.name, cluster="", batch=subject.batch, micro_batches=2, schedule="gpipe", stages=stages)
    return subject.execution(plan, make_device_mesh(plan, jax.devices()[: len(stages)])).recompute


def batches(subject: Subject, tensor: int, hosts: int) -> list[int]:
    """Numbers of rows that a host computes in one pass: with many small micro-batches, and with few large ones."""
    if not subject.piped:  # one stage: its rows are divided by hosts / tensor; a stage of one host has all of them
        most = subject.batch * tensor // hosts
        return [most // 4, most] if tensor > 1 else [most // 4, most, subject.batch]
    most = counts_of(subject)[-1]
    return [subject.batch // count for count in (most, most // 2, 4, 1)]


def counts_of(subject: Subject) -> tuple[int, ...]:
    """Numbers of micro-batches to choose from."""
    powers = (1 << power for power in range(MOST_MICRO_BATCHES.bit_length()))
    return tuple(count for count in powers if subject.batch % count == 0) if subject.piped else (1, 2, 4)


def _update(subject: Subject) -> Call:
    """What a step does once with all parameters: gradients become those of the mean loss, are clipped and applied."""
    state = jax.jit(lambda key: init_state(subject.init(key), make_optimizer(OptimizerConfig())))(jax.random.key(0))
    gradients = jax.tree.map(lambda leaf: 1e-3 * jnp.ones_like(leaf), state.params)
    zero, one = jnp.zeros(()), jnp.ones(())

    def mean(params: Any, rows: Any, key: jax.Array) -> Any:
        gradients, tokens = rows
        return jax.tree.map(lambda gradient: gradient / tokens, gradients), Sums(zero, zero, one)

    program = jax.jit(train_step(mean, None), donate_argnums=0).lower(state, (gradients, one)).compile()

    def run() -> Any:
        nonlocal state
        state, metrics = program(state, (gradients, one))
        return metrics

    return run


def measured_links(hosts: Hosts[Task]) -> dict[float, Link]:
    """The network at every rate, from an all-reduce over all hosts, taken for a ring."""
    links = {}
    for rate in hosts.task.rates:
        hosts.limit(rate)
        link = ring_link([jax.devices()], hosts.task.link_rounds, LINK_SIZES, in_a_row=IN_A_ROW)
        links[rate] = no_faster(link, rate / 8)
    return links


def measured_quota(hosts: Hosts[Task]) -> Quota:
    """The quota of a host, with the processor time of an exchange between neighbours: typical, of the busiest host."""
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    spec, pairs = PartitionSpec("all"), [(rank, rank + 1) for rank in range(hosts.count - 1)]

    def exchanged(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, EXCHANGES, lambda _, x: jax.lax.ppermute(x, "all", pairs), x)

    row = np.ones((1, EXCHANGED_BYTES // 4), np.float32)
    x = jax.make_array_from_callback((hosts.count, row.size), NamedSharding(mesh, spec), lambda _: row)
    program = jax.jit(jax.shard_map(exchanged, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    jax.block_until_ready(program(x))
    hosts.limit(max(hosts.task.rates))
    samples = []
    for _ in range(hosts.task.link_rounds):
        start = time.process_time()
        jax.block_until_ready(program(x))
        samples.append((time.process_time() - start) / EXCHANGES)
    busiest = max(hosts.everyone(statistics.median(samples)))
    cores = set(itertools.chain.from_iterable(hosts.everyone(sorted(os.sched_getaffinity(0)))))
    return Quota(
        share=hosts.task.cpu,
        period=QUOTA_PERIOD / 1e6,
        exchange=busiest,
        cores=len(cores),
        shares=hosts.task.shares,
    )


def measured_exchange(hosts: Hosts[Task]) -> dict[str, Any]:
    """A row: seconds of a message between neighbours, and of two in opposite directions, on the slowest links.

    `jhpt.core.cluster.Cluster.both_ways` is the ratio that prices count on.
    """
    mesh, spec = Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec("all")
    there = [(rank, rank + 1) for rank in range(0, hosts.count - 1, 2)]
    ways = {"one way": there, "both ways": [*there, *((second, first) for first, second in there)]}
    row = np.ones((1, CROSSING_BYTES // 4), np.float32)
    x = jax.make_array_from_callback((hosts.count, row.size), NamedSharding(mesh, spec), lambda _: row)

    def moving(pairs: list[tuple[int, int]]) -> Callable[[], Any]:
        move = partial(jax.lax.ppermute, axis_name="all", perm=pairs)
        return partial(jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)), x)

    calls = {name: moving(pairs) for name, pairs in ways.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    rate = min(hosts.task.rates)
    hosts.limit(rate)
    samples = in_turn(hosts, calls, hosts.task.link_rounds, warmup=False)
    return {"row": "exchange", "bits_per_s": rate, "bytes": CROSSING_BYTES, "samples_s": samples}


def measured_meetings(hosts: Hosts[Task]) -> Rows:
    """Rows: seconds of `MEETINGS` times a computation and then an all-reduce, on the fastest links, and of both apart.

    `benchmarks.hybrid.meetings` says what the two together take longer.  The computation multiplies matrices for a part
    of a quota's period, a period, or longer.
    """
    mesh, spec = Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec("all")
    place = NamedSharding(mesh, spec)
    x = jax.make_array_from_callback((hosts.count * MATRIX, MATRIX), place, lambda _: np.ones((MATRIX, MATRIX), "f4"))

    def program(size: int) -> Any:
        """products: of each of `MEETINGS` computations.  size: numbers that are summed after each; 0: none."""

        def run(x: jax.Array, products: jax.Array) -> tuple[jax.Array, jax.Array]:
            def meet(_: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                x, numbers = carry
                x = jax.lax.fori_loop(0, products, lambda _, x: x @ x / MATRIX, x)
                return x, jax.lax.psum(numbers * x[0, 0], "all") / hosts.count if size else numbers

            return jax.lax.fori_loop(0, MEETINGS, meet, (x, jnp.ones(max(1, size))))

        ends = (spec, PartitionSpec()), (spec, spec)
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=ends[0], out_specs=ends[1], check_vma=False))

    hosts.free()
    sizes = [count // 4 for count in MET_BYTES]
    compiled = hosts.compiled({f"{size}": partial(program(size).lower, x, jnp.int32(0)) for size in (0, *sizes)})
    rate = max(hosts.task.rates)
    hosts.limit(rate)

    def calls(products: Mapping[str, int]) -> dict[str, Call]:
        return {
            f"{size} {name}": partial(compiled[f"{size}"], x, jnp.int32(count))
            for size in (0, *sizes)
            for name, count in products.items()
            if size or count
        }

    product = statistics.median(in_turn(hosts, calls({"some": PRODUCTS}), 3)["0 some"]) / MEETINGS / PRODUCTS
    products = {"none": 0} | {f"{seconds}": max(1, round(seconds / product)) for seconds in COMPUTED_S}
    samples = in_turn(hosts, calls(products), hosts.task.link_rounds)
    each = {name: statistics.median(times) / MEETINGS for name, times in samples.items()}
    return [
        {
            "row": "meeting",
            "bits_per_s": rate,
            "bytes": 4 * size,
            "computed_s": each[f"0 {seconds}"],
            "summed_s": each[f"{size} none"],
            "samples_s": [sample / MEETINGS for sample in samples[f"{size} {seconds}"]],
        }
        for size in sizes
        for seconds in COMPUTED_S
    ]


def no_faster(link: Link, bandwidth: float) -> Link:
    """The same link, on which no message takes less time than at `bandwidth`, its latency included.

    The first frames after a pause pass at once (`benchmarks.netlab.links`), so small messages seem faster.  Latency
    passes while the bytes move: with links of 2 Gbit/s an all-reduce of 0.9 MB over four hosts takes as long as one of
    16 KiB, 10 ms.  So a rate beyond the latency may be higher than `bandwidth`.
    """
    assert link.measured is not None
    sizes = link.measured.sizes
    seconds = [
        max(size / value, size / bandwidth - link.latency)
        for size, value in zip(sizes, link.measured.values, strict=True)
    ]
    values = tuple(size / each for size, each in zip(sizes, seconds, strict=True))
    curve = link.measured.model_copy(update={"values": values})
    return link.model_copy(update={"bandwidth": min(link.bandwidth, bandwidth), "measured": curve})


def cluster_of(link: Link, hosts: int, shares: Sequence[float] | None = None) -> Cluster:
    """The lab as the planner sees it.  shares: of the quota, what each host has; None: all of it."""
    nodes = []
    for share, same in itertools.groupby(shares or [1.0] * hosts):
        name = "emulated host" if shares is None else kind_name(share)
        device = Device(name=name, peak_flops={"float32": share}, memory=MEMORY, memory_bandwidth=share)
        count = len(list(same))
        nodes.append(Node(device=device, devices=1, inside=link, host=link, host_memory=MEMORY, count=count))
    return Cluster(name=f"{hosts} emulated hosts", nodes=tuple(nodes), network=link, overlap=False)


def kind_name(share: float) -> str:
    """The name of the hosts with this share of the quota."""
    return f"emulated host x{share:g}"
