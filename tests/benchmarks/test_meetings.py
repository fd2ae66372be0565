"""What plans of one stage lose where hosts with quotas meet."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.hybrid import costs
from benchmarks.hybrid.costs import MET_BYTES, cluster_of, measured_meetings
from benchmarks.hybrid.meetings import computed_before_collectives, lost_seconds
from benchmarks.hybrid.models import SUBJECTS, ClassSubject
from benchmarks.hybrid.steps import traced
from benchmarks.networks.mlp import MLP
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.planner.cost.model import CostModel
from tests.benchmarks.test_hybrid import LINK, QUOTA, timed

HOSTS = 4


def plan_of(degrees, count: int, batch: int = 64) -> Plan:
    stage = Stage(device=0, devices=HOSTS, chunks=(Chunk(first=0, runs=runs_of(degrees)),))
    return Plan(model="lab", cluster="lab", batch=batch, micro_batches=count, stages=(stage,))


def model_of(subject) -> CostModel:
    return CostModel(timed(subject.profile()), cluster_of(LINK, HOSTS))


def large_collectives(plan: Plan, subject) -> int:
    """In the compiled step, of more than a number for each row of a device."""
    text = traced(subject, plan, jax.devices()[:HOSTS]).step().compile().as_text()
    shapes = re.findall(r"= (.*?) (?:all-reduce|all-gather)\(", text)
    sizes = [
        sum(math.prod(map(int, re.findall(r"\d+", dims))) for dims in re.findall(r"\[.*?\]", one)) for one in shapes
    ]
    return sum(size >= plan.batch // plan.micro_batches // HOSTS for size in sizes)


@pytest.mark.parametrize("degrees", [[1, 1, 1, 1], [2, 2, 2, 2], [4, 4, 4, 4], [4, 2, 2, 1], [1, 2, 2, 4]], ids=str)
def test_collectives_are_those_of_the_compiled_step(degrees):
    """But for those that no computation is before: of rows, where degrees differ, and of the gradients of layers of
    another degree."""
    network = MLP(inputs=8, width=16, hidden=32, num_blocks=2, classes=8)
    subject = ClassSubject(name="mlp", batch=64, network=network)
    plan = plan_of(degrees, 1)
    at_once = (len(set(degrees)) > 1) + len({degree for degree in degrees if degree < HOSTS}) - 1
    found = list(computed_before_collectives(plan, model_of(subject)))
    assert len(found) == large_collectives(plan, subject) - (at_once if min(degrees) < HOSTS else 0)


def test_all_computation_is_before_a_collective():
    """But for what follows the last one, and as often as there are micro-batches."""
    subject = SUBJECTS["gpt"]()
    model = model_of(subject)
    for degrees in ([1] * 6, [2] * 6, [4, 1, 1, 1, 1, 4]):
        found = [np.array(list(computed_before_collectives(plan_of(degrees, count, 32), model))) for count in (1, 4)]
        passes = [3e-9 * model.profile.kinds[name].parameters for name in model.profile.layers]
        whole = sum(seconds * 32 / HOSTS for seconds in passes)
        assert [each.sum() for each in found] == pytest.approx([whole, whole])
        assert len(found[1]) - 1 == 4 * (len(found[0]) - 1)


def test_a_host_that_computed_for_a_period_loses_what_a_period_leaves():
    """The whole of it after a period or more, a quarter after half a period; with all of a core nothing."""
    subject = SUBJECTS["mlp"]()
    model, plan = model_of(subject), plan_of([1] * 8, 1, 2048)
    (computed,) = computed_before_collectives(plan, model)
    quota = replace(QUOTA, share=0.3)
    for period, lost in ((computed / 2, 0.21), (computed, 0.21), (2 * computed, 0.21 / 4)):
        assert lost_seconds(plan, model, replace(quota, period=period), 1.0) == pytest.approx(lost * period)
    assert lost_seconds(plan, model, replace(quota, period=2 * computed), 2.0) == pytest.approx(0.21 * 2 * computed)
    assert lost_seconds(plan, model, replace(quota, share=1.0), 1.0) == 0.0
    mixed = replace(quota, share=1.0, period=computed, shares=(1.0, 1.0, 0.5, 0.5))
    assert lost_seconds(plan, model, mixed, 1.0) == pytest.approx(0.25 * computed)


def test_meetings_are_measured_together_and_apart(monkeypatch):
    """A product that takes 1 ms is multiplied 3 times for 3 ms; seconds are those of each of the meetings in a row."""
    limits, asked = [], []

    def in_turn(hosts, calls, rounds):
        asked.append({name: int(call.args[1]) for name, call in calls.items()})
        for name, call in calls.items():
            x, numbers = call()
            size = int(name.split()[0])
            assert x.shape == (len(jax.devices()) * 192, 192) and numbers.size == len(jax.devices()) * max(1, size)
            np.testing.assert_allclose(numbers, 1.0, rtol=1e-6)
        return {name: [16 * (0.001 * count + 1e-8 * int(name.split()[0]))] * 3 for name, count in asked[-1].items()}

    monkeypatch.setattr(costs, "in_turn", in_turn)
    monkeypatch.setattr(costs, "COMPUTED_S", (0.003, 0.0301))
    monkeypatch.setattr(costs, "PRODUCTS", 2)
    hosts = SimpleNamespace(
        task=SimpleNamespace(rates=(5e8, 1e8), link_rounds=3),
        count=len(jax.devices()),
        free=lambda: limits.append(None),
        limit=limits.append,
        compiled=lambda programs: {name: lower().compile() for name, lower in programs.items()},
    )
    rows = measured_meetings(hosts)
    assert limits == [None, 5e8] and {row["bits_per_s"] for row in rows} == {5e8}
    assert asked[0] == {f"{count // 4} some": 2 for count in (0, *MET_BYTES)}
    assert {count for name, count in asked[1].items() if name.endswith(" 0.0301")} == {30}
    assert asked[1]["1 none"] == 0 and "0 none" not in asked[1] and asked[1]["0 0.003"] == 3
    assert [row["bytes"] for row in rows] == [count for count in MET_BYTES for _ in range(2)]
    assert [row["computed_s"] for row in rows] == pytest.approx([0.003, 0.03] * len(MET_BYTES))
    for row in rows:
        summed = 1e-8 * row["bytes"] / 4
        assert row["summed_s"] == pytest.approx(summed)
        assert row["samples_s"] == pytest.approx([row["computed_s"] + summed] * 3)
