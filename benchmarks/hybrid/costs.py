"""What plans are made of: seconds of layers and the network, measured on the hosts themselves; and the plans."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.emulated.hosts import Hosts
from benchmarks.hybrid.layer_times import alone, layer_calls, shard_of, timings, typical_seconds
from benchmarks.hybrid.models import Subject
from benchmarks.hybrid.steps import train_step
from benchmarks.hybrid.task import Task, run_key
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.config import OptimizerConfig
from jhpt.core.plan import Plan
from jhpt.core.profile import ModelProfile
from jhpt.measure.probe import ring_link
from jhpt.models.family import Sums
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.choice import plan_to_run
from jhpt.planner.search.request import Request, request
from jhpt.planner.search.solve import solve
from jhpt.training.optimizer import make_optimizer
from jhpt.training.step import init_state

LINK_SIZES = tuple(1 << exponent for exponent in range(14, 23, 2))
"""Bytes that are summed: 16 KiB ... 4 MiB."""

MOST_MICRO_BATCHES = 32
"""Of a pipeline's step: GPT and BERT then have one sequence in each, and four stages idle 9 % of the time at best."""

MEMORY = float(1 << 40)
"""Bytes of a device: nothing here is short of memory."""


def measured_profile(hosts: Hosts[Task], subject: Subject) -> tuple[ModelProfile, list[dict[str, Any]]]:
    """The subject's profile with the seconds of its layers, and these as rows.

    Every host times a share of the layers, so that all are busy at the same time and no time is wasted.
    """
    hosts.free()
    profile = subject.profile()
    calls = _calls(hosts, subject, profile)
    hosts.say(f"{subject.name}: {len(calls)} programs of layers")
    hosts.limit(None)
    everything: dict[str, float] = {}
    for one in hosts.everyone(typical_seconds(calls, hosts.task.layer_rounds)):
        everything |= one
    found: dict[tuple[str, int, int], tuple[float, float]] = {}
    for name, forward in everything.items():
        if name.endswith(" forward"):
            kind, tensor, batch = name.removesuffix(" forward").split("|")
            found[kind, int(tensor), int(batch)] = forward, everything[name.removesuffix("forward") + "both"]
    measured = timings(found)
    kinds = {name: kind.model_copy(update={"timings": measured[name]}) for name, kind in profile.kinds.items()}
    changes = {
        "kinds": kinds,
        "update_seconds": everything["update"] / profile.parameters,
        "source": f"layers timed alone on {hosts.count} busy hosts",
    }
    rows = [
        {"row": "layer", "model": subject.name, "layer": kind, "tensor": t, "batch": b, "forward_s": f, "both_s": both}
        for (kind, t, b), (f, both) in found.items()
    ]
    return profile.model_copy(update=changes), rows


def _calls(hosts: Hosts[Task], subject: Subject, profile: ModelProfile) -> dict[str, Callable[[], Any]]:
    shapes = jax.eval_shape(subject.init, jax.random.key(0))
    calls: dict[str, Callable[[], Any]] = {}
    number = 0
    for tensor in (t for t in (1, 2, 4, 8) if t <= hosts.count):
        parts, params = subject.parts(alone(tensor)), shard_of(shapes, tensor)
        for batch in batches(subject, tensor, hosts.count):
            names = [kind for kind in profile.kinds if profile.kinds[kind].max_tensor % tensor == 0]
            mine = {kind for index, kind in enumerate(names, number) if index % hosts.count == hosts.rank}
            number += len(names)
            found = layer_calls(parts, params, subject.rows(batch), profile.layers, mine)
            for name, call in found.items():
                kind, _, which = name.rpartition(" ")
                calls[f"{kind}|{tensor}|{batch} {which}"] = call
    if hosts.rank == number % hosts.count:
        calls["update"] = _update(subject)
    return calls


def batches(subject: Subject, tensor: int, hosts: int) -> list[int]:
    """Rows that a host works on at once: those of many small micro-batches, and of few."""
    if not subject.piped:  # one stage: its rows are divided by hosts / tensor
        most = subject.batch * tensor // hosts
        return [most // 4, most]
    most = counts_of(subject)[-1]
    return [subject.batch // count for count in (most, most // 2, 4, 1)]


def counts_of(subject: Subject) -> tuple[int, ...]:
    """Numbers of micro-batches to choose from."""
    powers = (1 << power for power in range(MOST_MICRO_BATCHES.bit_length()))
    return tuple(count for count in powers if subject.batch % count == 0) if subject.piped else (1, 2, 4)


def _update(subject: Subject) -> Callable[[], Any]:
    """What a step does once gradients are there, for all parameters."""
    state = jax.jit(lambda key: init_state(subject.init(key), make_optimizer(OptimizerConfig())))(jax.random.key(0))
    gradients = jax.tree.map(lambda leaf: 1e-3 * jnp.ones_like(leaf), state.params)
    zero, one = jnp.zeros(()), jnp.ones(())
    step = train_step(lambda params, rows, key: (rows, Sums(zero, zero, one)), None)
    program = jax.jit(step, donate_argnums=0).lower(state, gradients).compile()

    def run() -> Any:
        nonlocal state
        state, metrics = program(state, gradients)
        return metrics

    return run


def measured_links(hosts: Hosts[Task]) -> dict[float, Link]:
    """The network at every rate: an all-reduce over all hosts, read as a ring."""
    links = {}
    for rate in hosts.task.rates:
        hosts.limit(rate)
        links[rate] = no_faster(ring_link(jax.devices(), hosts.task.link_rounds, LINK_SIZES), rate / 8)
    return links


def no_faster(link: Link, bandwidth: float) -> Link:
    """The same link where no size is faster than the wire.

    A message after a pause is: the link has saved up a burst.  Those of a step follow each other.
    """
    assert link.measured is not None
    values = tuple(min(value, bandwidth) for value in link.measured.values)
    curve = link.measured.model_copy(update={"values": values})
    return link.model_copy(update={"bandwidth": min(link.bandwidth, bandwidth), "measured": curve})


def cluster_of(link: Link, hosts: int) -> Cluster:
    """The lab as the planner sees it."""
    device = Device(name="emulated host", peak_flops={"float32": 1.0}, memory=MEMORY, memory_bandwidth=1.0)
    node = Node(device=device, devices=1, inside=link, host=link, host_memory=MEMORY, count=hosts)
    return Cluster(name=f"{hosts} emulated hosts", nodes=(node,), network=link, overlap=False)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A competitor at one rate: its plan and the seconds that it is predicted to take."""

    rate: float
    name: str
    plan: Plan
    predicted: float

    @property
    def key(self) -> str:
        """Equal where plans run equally."""
        return run_key(self.plan)

    def to_json(self) -> dict[str, Any]:
        """A row without samples."""
        plan = self.plan.model_dump(mode="json", exclude_none=True)
        return {"bits_per_s": self.rate, "competitor": self.name, "plan": plan, "predicted_s": self.predicted}

    @staticmethod
    def from_json(tree: dict[str, Any]) -> "Variant":
        """`to_json` backwards."""
        plan = Plan.model_validate(tree["plan"])
        return Variant(rate=tree["bits_per_s"], name=tree["competitor"], plan=plan, predicted=tree["predicted_s"])


def planned(subject: Subject, profile: ModelProfile, link: Link, rate: float, hosts: int) -> list[Variant]:
    """Competitors at one rate, the first of them twice; the plan is what `parallel: auto` would run on all hosts."""
    asked, model = asked_of(subject), CostModel(profile, cluster_of(link, hosts))
    whole = [m for m in asked.micro_batches if subject.batch // m % hosts == 0]
    found = {one.name: one.plan for one in baselines(replace(asked, micro_batches=tuple(whole)), model)}
    plans = {"data parallel": found["data parallel"], "data parallel again": found["data parallel"]}
    if subject.piped:
        found = {one.name: one.plan for one in baselines(asked, model)}
        plans["gpipe"] = found["gpipe, equal layers"]
    plans["plan"] = plan_to_run(solve(profile, model.cluster, asked, "spmd"), asked, hosts)
    return [
        Variant(rate=rate, name=name, plan=plan, predicted=price(plan, model).seconds)
        for name, plan in plans.items()
        if plan is not None
    ]


def asked_of(subject: Subject) -> Request:
    """ZeRO and recomputation save memory, of which there is enough."""
    return request(
        subject.batch, counts_of(subject), zero=(0,), recompute=(False,), max_stages=1 << 30 if subject.piped else 1
    )
