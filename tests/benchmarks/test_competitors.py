"""Competitors are at their best, and the slowest host counts: a handicapped or flattered one fails here."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.comms.measured import processor_seconds, work_seconds
from benchmarks.emulated import timing
from benchmarks.emulated.timing import in_turn
from benchmarks.hybrid import costs
from benchmarks.hybrid.costs import cluster_of, counts_of, measured_profile, planned, request_of
from benchmarks.hybrid.layer_times import typical_seconds
from benchmarks.hybrid.models import SUBJECTS
from benchmarks.hybrid.task import MODELS
from jhpt.core.cluster import Link
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from tests.benchmarks.test_hybrid import QUOTA, timed

HOSTS = 4
RATES = (1e8, 2e9)


def link(rate: float) -> Link:
    """A message costs so much that the number of micro-batches matters."""
    return Link(bandwidth=rate / 8, latency=5e-3)


def slow_starting(profile):
    """Layers that take a fixed part and a part per row, so that neither few nor many micro-batches are best at once."""
    kinds = {}
    for name, kind in timed(profile).kinds.items():
        (timing,) = kind.timings
        (forward,), (backward,) = timing.forward, timing.backward
        rows = tuple(float(1 << power) for power in range(8))
        grown = {
            way: tuple(seconds * (4 + row) / 5 for row in rows)
            for way, seconds in (("forward", forward), ("backward", backward))
        }
        kinds[name] = kind.model_copy(update={"timings": (timing.model_copy(update={"batches": rows, **grown}),)})
    return profile.model_copy(update={"kinds": kinds, "update_seconds": 1e-8})


def equal_stages(subject, micro_batches: int) -> Plan:
    """GPipe by hand: stages of equally many layers, the longer ones first."""
    layers, cuts = len(subject.profile().layers), [0]
    for stage in range(HOSTS):
        cuts.append(cuts[-1] + layers // HOSTS + (stage < layers % HOSTS))
    return Plan(
        model=subject.name, cluster="lab", batch=subject.batch, micro_batches=micro_batches, schedule="gpipe",
        stages=tuple(
            Stage(device=s, devices=1, chunks=(Chunk(first=first, runs=runs_of([1] * (stop - first))),))
            for s, (first, stop) in enumerate(pairwise(cuts))
        ),
    )  # fmt: skip


def one_stage(subject, micro_batches: int) -> Plan:
    """Data parallelism by hand."""
    chunk = Chunk(first=0, runs=runs_of([1] * len(subject.profile().layers)))
    stage = Stage(device=0, devices=HOSTS, chunks=(chunk,))
    return Plan(model=subject.name, cluster="lab", batch=subject.batch, micro_batches=micro_batches, stages=(stage,))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", MODELS)
def test_baselines_are_the_best_of_their_sweep(name, rate):
    """Every number of micro-batches that the hosts can share is priced; none beats the one that is timed."""
    subject = SUBJECTS[name]()
    profile = slow_starting(subject.profile())
    model = CostModel(profile, cluster_of(link(rate), HOSTS))
    variants = {one.name: one.plan for one in planned(subject, profile, link(rate), rate, QUOTA, HOSTS)}
    sweeps = {"data parallel": [one_stage(subject, m) for m in counts_of(subject) if subject.batch // m % HOSTS == 0]}
    if subject.piped:
        sweeps["gpipe"] = [equal_stages(subject, m) for m in counts_of(subject)]
    for competitor, plans in sweeps.items():
        assert len(plans) > 1
        least = min(price(plan, model).seconds for plan in plans)
        taken = variants[competitor]
        assert price(taken, model).seconds == pytest.approx(least), competitor
        assert taken.devices == HOSTS and taken.zero == 0 and not taken.recompute
    assert variants["data parallel again"] == variants["data parallel"]


def test_pipelines_may_have_more_micro_batches_than_stages():
    for name in ("mlp", "gpt", "bert"):
        subject = SUBJECTS[name]()
        assert max(request_of(subject).micro_batches) >= 4 * HOSTS


class Two:
    """Two hosts, seen from the first: the second takes `slower` times as long, whatever is exchanged."""

    rank, count = 0, 2

    def __init__(self, slower: float, task=None) -> None:
        self.slower, self.task, self.limits = slower, task, []

    def wait(self) -> None:
        pass

    free = wait

    def limit(self, rate) -> None:
        self.limits.append(rate)

    def say(self, line: str) -> None:
        pass

    def everyone(self, mine):
        def scaled(value):
            if isinstance(value, dict):
                return {name: scaled(part) for name, part in value.items()}
            return [scaled(part) for part in value] if isinstance(value, list) else self.slower * value

        return [mine, scaled(mine)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only calls move: `clock(seconds)` makes one."""
    now = [0.0]

    def taking(seconds):
        def call():
            now[0] += seconds
            return jnp.zeros(())

        return call

    for module in (timing.time,):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return taking


@pytest.mark.parametrize("slower", [3.0, 0.5])
def test_a_step_ends_when_the_slowest_host_ends(clock, slower):
    samples = in_turn(Two(slower), {"plan": clock(1.0), "gpipe": clock(2.0)}, 3)
    most = max(1.0, slower)
    assert samples == {"plan": [most] * 3, "gpipe": [2 * most] * 3}


def test_the_slowest_host_of_each_round_counts(clock, monkeypatch):
    """Not the host that is slowest on the whole."""
    hosts = Two(1.0)
    monkeypatch.setattr(hosts, "everyone", lambda mine: [{"a": [1.0, 5.0]}, {"a": [3.0, 2.0]}])
    assert in_turn(hosts, {"a": clock(1.0)}, 2) == {"a": [3.0, 5.0]}


@pytest.mark.parametrize("slower", [3.0, 0.5])
def test_layers_take_as_long_as_on_the_slowest_host(monkeypatch, slower):
    subject = SUBJECTS["mlp"]()
    names = [f"{kind}|1|{batch}" for kind in subject.profile().kinds for batch in (4, 8)]
    seconds = {f"{name} {way}": 1.0 for name in names for way in ("forward", "backward")} | {"update": 1.0}
    monkeypatch.setattr(costs, "_calls", lambda *_: {})
    monkeypatch.setattr(costs, "typical_seconds", lambda calls, rounds: dict(seconds))
    profile, rows = measured_profile(Two(slower, SimpleNamespace(layer_rounds=1)), subject)
    most = max(1.0, slower)
    assert {row["forward_s"] for row in rows} == {most} and {row["both_s"] for row in rows} == {2 * most}
    assert profile.update_seconds * profile.parameters == pytest.approx(most)


def test_work_is_the_mean_over_hosts(monkeypatch):
    """What each host computes alone, all of them busy, quotas on and links free."""
    monkeypatch.setattr("benchmarks.comms.measured.typical_seconds", lambda calls, rounds: dict.fromkeys(calls, 1.0))
    hosts = Two(3.0, SimpleNamespace(parts_rounds=1))
    assert work_seconds(hosts, {"block": lambda: {"forward": None}}) == {"block": {"forward": 2.0}}
    assert hosts.limits == [None]


def test_processor_time_is_the_least_of_several_calls_and_the_mean_over_hosts(monkeypatch):
    spent = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0])
    monkeypatch.setattr("benchmarks.comms.measured.time.process_time", lambda: next(spent))
    assert processor_seconds(Two(3.0), {"a": lambda: jnp.zeros(())}) == {"a": 2.0}


def test_typical_seconds_are_of_a_call(monkeypatch):
    """Rows of calls are divided by their number."""
    timed_calls = typical_seconds({"a": lambda: np.zeros(())}, 3)
    assert set(timed_calls) == {"a"} and 0 < timed_calls["a"] < 0.1


def test_the_plan_is_taken_by_what_it_is_predicted_to_take_here():
    """Not by the planner's price alone, and never one that hosts cannot run."""
    subject = SUBJECTS["bert"]()
    profile = slow_starting(subject.profile())
    found = {one.name: one for one in planned(subject, profile, link(5e8), 5e8, QUOTA, HOSTS)}
    slow = replace(QUOTA, exchange=1.0)
    others = {one.name: one for one in planned(subject, profile, link(5e8), 5e8, slow, HOSTS)}
    assert len(others["plan"].plan.stages) == 1, "where an exchange takes a second nobody runs a pipeline"
    assert others["gpipe"].predicted > 2 * found["gpipe"].predicted
    assert others["data parallel"].predicted == found["data parallel"].predicted
