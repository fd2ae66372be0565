"""Competitors are at their best, and the slowest host counts: a handicapped or flattered one fails here."""

import itertools
import json
import math
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.comms.measured import processor_seconds, work_seconds
from benchmarks.convergence import cell
from benchmarks.convergence.cells import SEEDS, Cell, cells
from benchmarks.convergence.compare import claims_of, gap
from benchmarks.emulated import timing
from benchmarks.emulated.entries import Measured, paired
from benchmarks.emulated.timing import Series, in_turn, orders, trial, typical_seconds
from benchmarks.hybrid import costs, worker
from benchmarks.hybrid.baselines import equal_splits
from benchmarks.hybrid.competitors import planned, predicted_seconds, prices_by_rate, request_of, with_nearby
from benchmarks.hybrid.costs import cluster_of, measured_seconds, no_faster, paces_of, profile_of
from benchmarks.hybrid.models import SUBJECTS, ClassSubject
from benchmarks.hybrid.pace import Moment, Pace, moment
from benchmarks.hybrid.steps import on_one_host
from benchmarks.hybrid.task import MODELS, PLAN, run_key
from benchmarks.hybrid.task import SHORT as SIXTEEN_BITS
from benchmarks.networks.mlp import MLP
from benchmarks.planner.worth import SHORT, Alternative, WorthRow, worth_claims
from jhpt.core.cluster import Curve, Link
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.planner.cost.estimate import price, stage_times
from jhpt.planner.cost.model import CostModel
from jhpt.planner.search.baselines import baselines
from jhpt.training.trials import NOISE, decided
from tests.benchmarks.test_hybrid import QUOTA, timed

MEASUREMENTS = Path(__file__).parents[2] / "docs/reports/measurements"

HOSTS = 4
RATES = (1e8, 2e9)


def link(rate: float) -> Link:
    """A message costs so much that the number of micro-batches matters."""
    return Link(bandwidth=rate / 8, latency=5e-3)


def slow_starting(profile):
    """Layers with a fixed part, that take more for a row the more rows there are: neither the fewest nor the most
    micro-batches are best."""
    kinds = {}
    for name, kind in timed(profile).kinds.items():
        (timing,) = kind.timings
        (forward,), (backward,) = timing.forward, timing.backward
        rows = tuple(float(1 << power) for power in range(8))
        grown = {
            way: tuple(seconds * (4 + row * row / 4) / 5 for row in rows)
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


def one_stage(subject, micro_batches: int, hosts: int = HOSTS) -> Plan:
    """Data parallelism by hand; of one host, the host alone."""
    chunk = Chunk(first=0, runs=runs_of([1] * len(subject.profile().layers)))
    stage = Stage(device=0, devices=hosts, chunks=(chunk,))
    return Plan(model=subject.name, cluster="lab", batch=subject.batch, micro_batches=micro_batches, stages=(stage,))


@pytest.mark.parametrize("name", MODELS)
def test_baselines_are_tried_with_several_plans(name):
    """Plans by hand, every number of micro-batches of the sweep, whatever is predicted, the same at every rate."""
    subject = SUBJECTS[name]()
    profile = slow_starting(subject.profile())
    variants = planned(subject, prices_by_rate(profile, {rate: link(rate) for rate in RATES}, QUOTA, HOSTS))
    data_parallel = {one_stage(subject, m) for m in (1, 2, 4)}
    gpipe = {equal_stages(subject, m) for m in (4, 8, 16, 32)} if subject.piped else set()
    for rate in RATES:
        tried = lambda name, rate=rate: {  # noqa: E731
            one.plan.model_copy(update={"cluster": "lab"}) for one in variants if (one.name, one.rate) == (name, rate)
        }
        assert tried("data parallel") == tried("data parallel 16 bits") == data_parallel
        assert tried("gpipe") == gpipe
        assert tried("one host") == {one_stage(subject, m, hosts=1) for m in (1, 4)}
        grids = {(len(plan.stages), plan.degrees) for plan in tried("3-D grid")}
        assert grids == {(1, (2,)), (1, (4,)), *([(2, (2,))] if subject.piped else [])}
    assert len({one.key for one in variants if one.name not in ("spmd", "plan", "data parallel 16 bits")}) <= 12


def test_a_plan_that_is_a_baseline_is_the_same_program():
    """What the planner calls data parallel and GPipe is among what is tried, under the same key."""
    subject = SUBJECTS["mlp"]()
    profile = slow_starting(subject.profile())
    tried = {one.key for one in planned(subject, prices_by_rate(profile, {5e8: link(5e8)}, QUOTA, HOSTS))}
    found = {
        one.name: one.plan for one in baselines(request_of(subject), CostModel(profile, cluster_of(link(5e8), HOSTS)))
    }
    for name in ("data parallel", "gpipe, equal layers"):
        assert run_key(name, found[name]) in tried


@pytest.mark.parametrize("name", ["gpt2-like", "vgg"])
def test_grids_are_the_best_of_their_shape(name):
    """The geometric mean over the rates of what is predicted; by brute force."""
    subject = SUBJECTS[name]()
    profile = slow_starting(subject.profile())
    models = [CostModel(profile, cluster_of(link(rate), HOSTS)) for rate in RATES]
    score = lambda plan: math.prod(predicted_seconds(plan, model, QUOTA) for model in models)  # noqa: E731
    variants = planned(subject, prices_by_rate(profile, {rate: link(rate) for rate in RATES}, QUOTA, HOSTS))
    for taken in {one.plan for one in variants if one.name == "3-D grid"}:
        like = [
            plan
            for plan in equal_splits(subject, models[0])["equal grid"]
            if (len(plan.stages), plan.degrees) == (len(taken.stages), taken.degrees)
        ]
        assert len(like) > 1 and score(taken) == min(map(score, like))


def test_numbers_of_16_bits_take_half_as_long_to_send():
    subject = SUBJECTS["gpt2-like"]()
    profile = timed(subject.profile())
    variants = planned(subject, prices_by_rate(profile, {1e8: link(1e8)}, QUOTA, HOSTS))
    found = {one.name: one for one in variants if one.plan.micro_batches == 1}
    whole, short = found["data parallel"], found["data parallel 16 bits"]
    sent = 2 * (HOSTS - 1) / HOSTS * 4 * profile.parameters / (1e8 / 8)
    assert whole.predicted - short.predicted == pytest.approx(sent / 2, rel=0.01)
    assert whole.plan == short.plan and whole.key != short.key


def test_one_host_needs_no_link():
    """Its step takes what its layers take, however slow links are."""
    subject = SUBJECTS["bert"]()
    profile = slow_starting(subject.profile())
    variants = planned(subject, prices_by_rate(profile, {rate: link(rate) for rate in RATES}, QUOTA, HOSTS))
    for count in (1, 4):
        found = [one for one in variants if one.name == "one host" and one.plan.micro_batches == count]
        model = CostModel(profile, cluster_of(link(RATES[0]), HOSTS))
        alone = stage_times(found[0].plan, model).step_seconds(found[0].plan, overlap=False)
        assert [one.predicted for one in found] == [alone] * len(RATES)


def test_one_host_trains_while_the_others_wait(monkeypatch):
    """Its steps train one state, and only on host 0."""
    network = MLP(inputs=8, width=16, hidden=16, num_blocks=2, classes=4)
    subject = ClassSubject(name="tiny", batch=8, network=network)
    plans = {f"x{m}": one_stage(subject, m, hosts=1) for m in (1, 4)}
    hosts = Two(1.0)
    steps = on_one_host(hosts, subject, plans)
    losses = [float(steps[name]().loss) for name in ("x1", "x4", "x1", "x4")]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4
    monkeypatch.setattr(hosts, "rank", 1, raising=False)
    assert [step() for step in on_one_host(hosts, subject, plans).values()] == [None, None]


def test_pipelines_may_have_more_micro_batches_than_stages():
    for name in set(MODELS) - {"vgg"}:
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


def test_every_round_has_an_order_of_its_own():
    """The same on all hosts; a step follows each of the others, and comes at every place."""
    rounds = orders("abcdef", 60)
    assert rounds == orders("abcdef", 60) and all(sorted(order) == [*"abcdef"] for order in rounds)
    one_after_the_other = [*itertools.chain(*rounds)]
    assert len({pair for pair in pairwise(one_after_the_other) if pair[0] != pair[1]}) == 6 * 5
    assert {(name, order.index(name)) for order in rounds for name in order} == {*itertools.product("abcdef", range(6))}


def test_some_run_several_times_in_every_round(clock):
    """At any place of the round; the samples of a round stand together."""
    rounds = orders("abc", 200, {"b": 3, "unknown": 2})
    assert all(sorted(order) == [*"abbbc"] for order in rounds) and len({"".join(order) for order in rounds}) == 20
    samples = in_turn(Two(0.5), {"a": clock(1.0), "b": clock(2.0)}, 2, times={"b": 3})
    assert samples == {"a": [1.0] * 2, "b": [2.0] * 6}


def test_ratios_compare_what_ran_in_the_same_rounds():
    """Sample by sample, or the median of a round where one of the two ran several times in it."""
    rounds = {"often": [1.0, 9.0, 2.0, 4.0, 4.0, 1.0], "too": [2.0, 9.0, 8.0, 2.0, 4.0, 2.0], "once": [4.0, 2.0]}
    measured = Measured(samples={name: [samples] for name, samples in rounds.items()}, predicted={})
    assert measured.ratios("often", "too") == [pytest.approx(0.75)]  # of 1/2, 1, 1/4, 2, 1, 1/2
    assert measured.ratios("once", "often") == [1.25]  # of 4/2 and 2/4
    assert measured.ratios("often", "once") == [1.25]
    with pytest.raises(ValueError, match="6 and 4 samples"):
        paired(rounds["often"], [1.0] * 4)


def test_the_slowest_host_of_each_round_counts(clock, monkeypatch):
    """Not the host that is slowest on the whole."""
    hosts = Two(1.0)
    monkeypatch.setattr(hosts, "everyone", lambda mine: [{"a": [1.0, 5.0]}, {"a": [3.0, 2.0]}])
    assert in_turn(hosts, {"a": clock(1.0)}, 2) == {"a": [3.0, 5.0]}


def test_a_trial_keeps_the_fastest_candidate_of_every_competitor(clock, monkeypatch):
    """By the median over rounds of the slowest host's seconds; a candidate of two competitors runs once."""
    ran = []

    def candidate(name, seconds):
        call = clock(seconds)
        return lambda: (ran.append(name), call())[1]

    steps = {name: candidate(name, seconds) for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 3.0), ("d", 9.0))}
    found = trial(Two(1.0), {"one": ["a", "b"], "other": ["c", "a"], "alone": ["d"]}, steps, 3)
    assert found.fastest == {"one": "b", "other": "a", "alone": "d"}
    assert found.samples == {"a": [2.0] * 3, "b": [1.0] * 3, "c": [3.0] * 3}
    rounds = [ran[at : at + 3] for at in range(0, 9, 3)]
    assert all(sorted(order) == [*"abc"] for order in rounds) and len(set(map(tuple, rounds))) > 1
    late = {"a": [1.0, 1.0, 9.0], "b": [2.0, 2.0, 2.0], "c": [3.0, 3.0, 3.0]}  # its median is smaller than its mean
    slow = {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [0.5, 0.5, 0.5]}  # another host
    hosts = Two(1.0)
    monkeypatch.setattr(hosts, "everyone", lambda mine: [late, slow])
    assert trial(hosts, {"one": "abc"}, steps, 3).fastest == {"one": "a"}


def test_data_parallelism_is_repeated_as_the_trial_left_it(clock):
    """With the number of micro-batches that was the fastest, also in 16 bits."""
    subject = SUBJECTS["mlp"]()
    variants = planned(subject, prices_by_rate(timed(subject.profile()), {5e8: link(5e8)}, QUOTA, HOSTS))
    seconds = {1: 3.0, 2: 1.0, 4: 2.0}
    steps = {one.key: clock(seconds.get(one.plan.micro_batches, 5.0)) for one in variants if "16" not in one.name}
    kept, _, rows = worker.fastest(Two(1.0, SimpleNamespace(trial_rounds=3)), variants, steps)
    everything = {one.name: one for one in worker.with_repeats(kept, variants)}
    again = [everything[f"data parallel{more}"] for more in ("", " again", " 16 bits")]
    assert {one.plan.micro_batches for one in again} == {2} and again[0].key == again[1].key != again[2].key
    assert [row["samples_s"] for row in rows if row["competitor"] == "data parallel"] == [
        [3.0] * 3,
        [1.0] * 3,
        [2.0] * 3,
    ]


def test_the_plan_is_tried_with_half_and_twice_as_many_micro_batches(clock):
    """Those near the candidate that a first trial has found to be the fastest, in turn with it."""
    subject = SUBJECTS["mlp"]()
    prices = prices_by_rate(timed(subject.profile()), {1e8: link(1e8)}, QUOTA, HOSTS)
    variants = planned(subject, prices)
    candidates = [one for one in variants if one.name == PLAN]
    best = next(one for one in candidates if len(one.plan.stages) > 1)
    count = best.plan.micro_batches
    near = with_nearby([best], prices[1e8])
    assert {one.plan.micro_batches for one in near} == {count // 2, count, 2 * count}
    assert near[0] == best and {one.name for one in near} == {PLAN}
    assert {one.plan.model_dump_json(include={"stages", "schedule"}) for one in near} == {
        best.plan.model_dump_json(include={"stages", "schedule"})
    }
    hosts = Two(1.0, SimpleNamespace(trial_rounds=3))
    for fastest in near:
        steps = {one.key: clock(1.0 if one is fastest else 2.0) for one in near}
        found, rows = worker.fastest_nearby(hosts, best, near, steps)
        assert found.key == fastest.key and [row["leads"] for row in rows] == [True, False, False]
    within = {one.key: clock(1.0 if one is best else 1 / (1 + 0.9 * NOISE)) for one in near}
    assert worker.fastest_nearby(hosts, best, near, within)[0] == best
    assert worker.fastest_nearby(hosts, best, [best], {}) == (best, [])


@pytest.mark.parametrize("again", [0.5, 1.0, 2.0], ids=["faster", "as fast", "slower"])
def test_a_plan_that_takes_the_lead_is_timed_once_more_with_the_one_that_had_it(clock, again):
    """The lead changes only if that shows it, too.  The report keeps both."""
    subject = SUBJECTS["mlp"]()
    prices = prices_by_rate(timed(subject.profile()), {1e8: link(1e8)}, QUOTA, HOSTS)
    leading = next(one for one in planned(subject, prices) if one.name == PLAN and len(one.plan.stages) > 1)
    near = with_nearby([leading], prices[1e8])
    lucky, slow = near[1:]
    lucks, hosts = itertools.chain([0.875] * 3, itertools.repeat(again)), Two(1.0, SimpleNamespace(trial_rounds=3))
    steps = {leading.key: clock(1.0), lucky.key: lambda: clock(next(lucks))(), slow.key: clock(2.0)}
    found, rows = worker.fastest_nearby(hosts, leading, near, steps)
    assert found.key == (lucky if again < 1 else leading).key
    assert [row.get("again_s") for row in rows] == [[1.0] * 3, [again] * 3, None]
    where = {"model": "mlp", "row": "nearby"}
    entered = {**rows[0], "model": "mlp", "row": "step", "plan": found.to_json()["plan"]}
    tried = [{**rows[0], "model": "mlp", "row": "trial"}, *({**row, **where} for row in rows)]
    best_of_trials([*tried, entered])
    with pytest.raises(AssertionError):
        best_of_trials([*tried, entered | {"plan": (leading if again < 1 else lucky).to_json()["plan"]}])


def test_the_planners_candidates_close_to_its_fastest_are_tried_with_other_numbers(clock):
    subject = SUBJECTS["mlp"]()
    prices = prices_by_rate(timed(subject.profile()), {1e8: link(1e8)}, QUOTA, HOSTS)
    variants = planned(subject, prices)
    slow, best, near, *others = (one for one in variants if one.name == PLAN)
    seconds = {slow.key: 1.2, best.key: 1.0, near.key: 1.09} | {one.key: 3.0 for one in others}
    steps = {one.key: clock(seconds.get(one.key, 2.0)) for one in variants if one.name != SIXTEEN_BITS}
    kept, leading, _ = worker.fastest(Two(1.0, SimpleNamespace(trial_rounds=3)), variants, steps)
    assert [one.key for one in leading] == [best.key, near.key]
    assert [one for one in kept if one.name == PLAN] == [best]
    both = with_nearby(leading, prices[1e8])
    assert both[:2] == leading and {one.name for one in both} == {PLAN}
    assert {one.key for one in both} == {one.key for lead in leading for one in with_nearby([lead], prices[1e8])}
    assert len({one.key for one in both}) == len(both)


def best_of_trials(rows) -> None:
    """What entered the rounds is the fastest of what was tried; of the planner's plans what `jhpt train` would take."""
    tried = [row for row in rows if row["row"] == "trial"]
    where = lambda row: (row.get("launch"), row["model"], row["bits_per_s"], row["competitor"])  # noqa: E731
    for place in {where(row) for row in tried}:
        its = [row for row in tried if where(row) == place]
        best = min(its, key=lambda row: statistics.median(row["samples_s"]))
        if place[-1] in ("plan", "by speed"):
            best = _decided(its)
        near = [row for row in rows if row["row"] == "nearby" and where(row) == place]
        if near:
            assert best["plan"] in [row["plan"] for row in near], place
            best = _decided(near)
            if again := [row | {"samples_s": row["again_s"]} for row in near if "again_s" in row]:
                assert best in [row for row in near if "again_s" in row] and not best["leads"], place
                best = _decided(again)
        (entered,) = (row for row in rows if row["row"] == "step" and where(row) == place)
        assert entered["plan"] == best["plan"], place


def _decided(rows):
    """The row of the plan that `jhpt train` would take.  Files of before 261a930 do not say which led, and up to that
    commit nothing was timed again."""
    seconds = {at: statistics.median(row["samples_s"]) for at, row in enumerate(rows)}
    leading = next((at for at, row in enumerate(rows) if row.get("leads")), None)
    return rows[decided([Plan.model_validate(row["plan"]) for row in rows], seconds, leading)]


@pytest.mark.parametrize("path", sorted(MEASUREMENTS.glob("bench-hybrid*.json")), ids=lambda path: path.stem)
def test_baselines_are_the_best_of_their_sweep(path):
    """In the reported files; those of before have no sweeps."""
    best_of_trials(json.loads(path.read_text())["rows"])


def test_a_baseline_that_is_not_the_best_would_be_seen():
    row = {"model": "gpt", "bits_per_s": 1e8, "competitor": "gpipe"}
    tried = [
        {"row": "trial", **row, "plan": plan, "samples_s": [seconds]} for plan, seconds in (("a", 2.0), ("b", 1.0))
    ]
    best_of_trials([*tried, {"row": "step", **row, "plan": "b"}])
    with pytest.raises(AssertionError):
        best_of_trials([*tried, {"row": "step", **row, "plan": "a"}])


@pytest.mark.parametrize("slower", [3.0, 0.5])
def test_layers_take_as_long_as_on_the_slowest_host(monkeypatch, slower):
    subject = SUBJECTS["mlp"]()
    names = [f"{kind}|1|{batch}" for kind in subject.profile().kinds for batch in (4, 8)]
    seconds = {f"{name} {way}": 1.0 for name in names for way in ("forward", "backward")} | {"update": 1.0}
    monkeypatch.setattr(costs, "_calls", lambda *_: {**dict.fromkeys(seconds, lambda: None), "last|2|4 both": None})
    monkeypatch.setattr(costs, "typical_seconds", lambda calls, rounds: dict(seconds))
    monkeypatch.setattr(costs, "series_of", lambda call: Series(call=call, count=1))
    by_host, pace = measured_seconds(Two(slower, SimpleNamespace(layer_rounds=1)), subject)
    assert set(pace.series) == seconds.keys() - {"update"}
    profile, rows = profile_of(subject, by_host)
    most = max(1.0, slower)
    assert {row["forward_s"] for row in rows} == {most} and {row["both_s"] for row in rows} == {2 * most}
    assert profile.update_seconds * profile.parameters == pytest.approx(most)
    assert paces_of(by_host) == pytest.approx((1.0 / most, slower / most))


def test_a_host_alone_is_timed_in_turn_with_all():
    """A machine that gets faster in one round changes neither the gain nor the pace, medians of three rounds.  Nobody
    gets slower by being alone."""
    together, alone = (
        [{f"{kind}|1|{rows} forward": s for kind in ("first", "block") for rows, s in each.items()} for each in rounds]
        for rounds in (
            ({8: 8.0, 2: 8.0}, {8: 4.0, 2: 4.0}, {8: 2.0, 2: 2.0}),
            ({8: 2.0, 2: 9.0}, {8: 2.0, 2: 4.0}, {8: 1.0, 2: 2.5}),
        )
    )
    found = moment(Two(4.0), dict.fromkeys(together[0], 4.0), together, alone)
    assert found.alone == pytest.approx({8: 2.0, 2: 1.0}) and found.pace == pytest.approx({8: 2.0, 2: 2.0})


def test_the_pace_of_a_machine_is_that_of_its_layers_now():
    """For 8 rows 2 + 4 seconds over 1 + 4, and the geometric mean over hosts, here of 1 and 4 times as much."""
    before = {"first|1|8 forward": 1.0, "block|1|8 forward": 4.0, "block|1|2 forward": 4.0, "update": 7.0}
    now = dict(zip(before, (2.0, 4.0, 1.0), strict=False))
    assert moment(Two(4.0), before, [now], [now]).pace == pytest.approx({8: 2.4, 2: 0.5})


@pytest.mark.parametrize("rank", [0, 1])
def test_layers_are_timed_among_the_steps(clock, rank):
    """In every round once by all hosts, and once by the first one alone: three times two calls of 0.5 s, of 0.25 s
    before.  Only the steps are reported."""
    called = []

    def layer():
        called.append(None)
        clock(0.5)()

    pace = Pace(series={"block|1|8 forward": Series(call=layer, count=2)}, seconds={"block|1|8 forward": 0.25})
    hosts = Two(1.0)
    hosts.rank = rank
    if rank:
        hosts.everyone = lambda mine: [mine if "faster" not in mine else mine | {"faster": [1.25]}, mine]
    samples, found = pace.among(hosts, {"a": clock(1.0), "b": clock(3.0)}, 3)
    assert samples == {"a": [1.0] * 3, "b": [3.0] * 3}
    assert len(called) == (2 if rank else 4) * 3
    assert found == Moment(pace={8: 2.0}, alone={8: 1.25 if rank else 1.0})


def test_the_pace_of_a_host_is_the_mean_over_its_programs():
    paces = paces_of([{"forward": 1.0, "backward": 8.0}, {"forward": 4.0, "backward": 4.0}])
    assert paces == pytest.approx((0.5, 0.5**0.5))


def test_latency_passes_while_bytes_move():
    """Of all messages none is faster than the wire, latency included, and slower ones take what they took."""
    sizes, wire = (1e4, 1e5, 1e6, 1e7), 1e8
    took = (2e-3, 2.2e-3, 9e-3, 0.12)  # on the wire: 0.1 ms, 1 ms, 10 ms, 0.1 s
    values = tuple(size / (seconds - 1e-3) for size, seconds in zip(sizes, took, strict=True))
    link = Link(bandwidth=values[-1], latency=1e-3, measured=Curve(sizes=sizes, values=values))
    kept = no_faster(link, wire)
    seconds = [kept.latency + size / kept.rate(size) for size in sizes]
    assert seconds == pytest.approx([2e-3, 2.2e-3, 10e-3, 0.12])
    assert kept.latency == link.latency and kept.bandwidth == values[-1]


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


def test_calls_in_rotation_are_timed_by_the_processor(monkeypatch):
    """A host with a third of a core computes a and c in one stretch and stands still during b; a slow round does not
    count, and the calls go on until the time is over."""
    now, spent = [0.0], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "process_time", lambda: spent[0])
    order = []

    def call(name: str, clock: float, processor: float):
        def run():
            order.append(name)
            slow = 100.0 if len(order) == 4 else 0.0  # a's first sample
            now[0] += clock + 3 * slow
            spent[0] += processor + slow
            return jnp.zeros(())

        return run

    calls = {"a": call("a", 1.0, 1.0), "b": call("b", 22.0, 4.0), "c": call("c", 1.0, 3.0)}
    seconds, pace = timing.in_rotation(calls, 300 + 3 * 24 + 1.0)
    assert seconds == pytest.approx({"a": 1.0, "b": 4.0, "c": 3.0}) and pace == pytest.approx(3.0)
    assert order == ["a", "b", "c"] * (1 + 4)


def test_layers_of_stages_are_dealt_out_to_hosts_in_groups(monkeypatch):
    """With the quota on; every host has the processor seconds of all groups, at its own pace."""
    asked, groups = {}, [(tensor, rows) for tensor in (1, 2) for rows in (2, 4, 8)]

    def in_rotation(calls, seconds):
        asked[rank].append((list(calls), seconds))
        return dict.fromkeys(calls, 1.0 + rank), 2.0 + rank

    monkeypatch.setattr(costs, "in_rotation", in_rotation)
    monkeypatch.setattr(costs, "batches", lambda *_: [2, 4, 8])
    monkeypatch.setattr(costs, "ROTATION_S", 6.0)
    subject, said = SUBJECTS["mlp"](), []
    for rank in (0, 1):
        asked[rank], hosts = [], Two(1.0, SimpleNamespace(layer_rounds=2))
        hosts.rank, hosts.everyone = rank, lambda mine: said.append(mine) or [mine]
        costs.seconds_in_rotation(hosts, subject)
        assert hosts.limits[-1] is None
    assert [seconds for _, seconds in asked[0]] == [3.0] * 4 and [seconds for _, seconds in asked[1]] == [4.0] * 3
    found = [{name.split(" ")[0].partition("|")[2] for name in names} for rank in (0, 1) for names, _ in asked[rank]]
    assert found == [{""}, *({f"{tensor}|{rows}"} for tensor, rows in groups[::2] + groups[1::2])]
    names = [{name for names, _ in asked[rank] for name in names} for rank in (0, 1)]
    assert {f"{kind}|1|2 forward" for kind in subject.profile().kinds} | {"update"} <= names[0]

    rank, asked[0] = 0, []
    hosts = Two(1.0, SimpleNamespace(layer_rounds=2))
    hosts.everyone = lambda mine: said[:2]
    first, second = costs.seconds_in_rotation(hosts, subject)
    for by_host, slower in ((first, 2.0), (second, 3.0)):
        assert {by_host[name] for name in names[0]} == {slower * 1.0} and {by_host[name] for name in names[1]} == {
            slower * 2
        }


def test_the_plan_is_taken_by_what_it_is_predicted_to_take_here():
    """Not by the planner's price alone, and never one that hosts cannot run."""
    subject = SUBJECTS["bert"]()
    profile = slow_starting(subject.profile())
    found = {one.name: one for one in planned(subject, prices_by_rate(profile, {5e8: link(5e8)}, QUOTA, HOSTS))}
    slow = replace(QUOTA, exchange=1.0)
    others = {one.name: one for one in planned(subject, prices_by_rate(profile, {5e8: link(5e8)}, slow, HOSTS))}
    assert len(others["spmd"].plan.stages) == 1, "where an exchange takes a second nobody runs a pipeline"
    assert others["gpipe"].predicted > 2 * found["gpipe"].predicted
    assert others["data parallel"].predicted == found["data parallel"].predicted


def test_the_plan_and_its_messages_are_predicted():
    """A step of one stage takes its price, the latency of the sums that nothing else counts, and what is lost where
    hosts meet after a period of computation: once, for the gradients."""
    subject = SUBJECTS["mlp"]()
    profile, there = slow_starting(subject.profile()), link(5e8)
    found = {one.name: one for one in planned(subject, prices_by_rate(profile, {5e8: there}, QUOTA, HOSTS))}
    plan = found["data parallel"].plan
    seconds = price(plan, CostModel(profile, cluster_of(there, HOSTS))).seconds
    lost = QUOTA.share * (1 - QUOTA.share) * QUOTA.period
    assert found["data parallel"].predicted == pytest.approx(seconds + 2 * (HOSTS - 1) * there.latency + lost)


def cell_of(group: str, seed: int = 0) -> Cell:
    return next(one for one in cells(quick=False) if (one.group, one.seed, one.preset) == (group, seed, "gpt-tiny"))


def test_the_gap_is_of_losses_with_compression_off():
    """Of the final parameters, against uncompressed ones of the same seed; not of losses as trained."""
    seed = SEEDS[0]
    plain, compressed = cell_of("plain", seed), cell_of("headline", seed)
    results = {plain: {"validation": 2.0, "own": 4.0}, compressed: {"validation": 2.2, "own": 3.0}}
    assert gap(results, [compressed]) == pytest.approx(0.1)
    assert claims_of(results)["headline_loss_gap"].value == pytest.approx(0.1)


def test_a_cell_evaluates_with_compression_off_and_on(monkeypatch):
    """`validation` without, `own` with the compression of the training."""
    losses = {True: 3.0, False: 2.0}
    state = SimpleNamespace(params={}, skipped=0)
    step = SimpleNamespace(init=lambda: state, evaluate="as trained", parameters=lambda state: {})
    progress = SimpleNamespace(interrupted=False, losses={1: 5.0})

    def setup(compressed: bool):
        compression = SimpleNamespace(on=compressed)
        return SimpleNamespace(plan=SimpleNamespace(compression=compression))

    monkeypatch.setattr(cell, "prepared", lambda config: setup(config.parallel.compression.tokens < 1))
    monkeypatch.setattr(cell, "compile_step", lambda setup: step)
    monkeypatch.setattr(cell, "evaluate_program", lambda setup: "plain")
    monkeypatch.setattr(cell, "replace", lambda setup, **changes: setup)
    monkeypatch.setattr(cell, "fit", lambda *_, **__: (state, progress))
    monkeypatch.setattr(cell, "looks_at_leaks", lambda setup: False)

    def evaluated(setup, program, params):
        assert program == ("as trained" if setup.plan.compression.on else "plain")
        return SimpleNamespace(loss=losses[setup.plan.compression.on])

    monkeypatch.setattr(cell, "evaluate", evaluated)
    results, _ = cell.run(cell_of("headline", SEEDS[0]))
    assert (results["validation"], results["own"]) == (2.0, 3.0)


def test_the_best_baseline_is_the_fastest_of_all():
    seconds = dict(zip(SHORT, (6.0, 3.0, None, 4.0, 3.5), strict=True))
    others = {
        name: Alternative(seconds=each, ratio=each and each / 2.0, reason="does not fit" if each is None else "")
        for name, each in seconds.items()
    }
    row = WorthRow(
        model="m", cluster="c", batch=8, space="spmd", plan="p", seconds=2.0, lower_bound=2.0, gap=0.0, reason="",
        others=others, search_s=0.0,
    )  # fmt: skip
    assert row.best == 1.5
    made = worth_claims([row])
    assert made["worst_vs_best_baseline"].value == 1.5 and made["vs_data_parallel_max"].value == 3.0
    assert "vs_gpipe_max" not in made, "GPipe did not fit"
