"""What `jhpt bench hybrid` makes of its samples, its models, and one small run on emulated hosts."""

import re
import statistics
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.emulated.entries import numbered
from benchmarks.emulated.launch import rows_of
from benchmarks.hybrid import run as hybrid
from benchmarks.hybrid import text
from benchmarks.hybrid.baselines import swept
from benchmarks.hybrid.bubble import BLOCKS, plan_of, subject_of
from benchmarks.hybrid.competitors import planned, predicted_seconds, prices_by_rate, request_of, unpriced_messages
from benchmarks.hybrid.costs import batches, cluster_of, measured_exchange, saved_by_pipelines
from benchmarks.hybrid.layer_times import Passes, alone, layer_programs, shard_of, timings
from benchmarks.hybrid.models import SUBJECTS, ClassSubject
from benchmarks.hybrid.programs import calls_of, drawn
from benchmarks.hybrid.quota import Host, Quota, compute, pipeline_seconds, placement
from benchmarks.hybrid.steps import ready, traced
from benchmarks.hybrid.task import DATA_PARALLEL, JUDGED, MODELS, ONE_HOST, TRIALS, Task
from benchmarks.netlab import Lab, LabError, why_not
from benchmarks.networks.mlp import MLP
from jhpt.core.calibration import order_error
from jhpt.core.cluster import Link
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.core.profile import ModelProfile, Timing
from jhpt.models.hooks import Hooks
from jhpt.planner.cost.estimate import StageTimes, check, price
from jhpt.planner.cost.model import CostModel
from jhpt.training.trials import TIMED

LINK = Link(bandwidth=500e6 / 8, latency=2e-4)
QUOTA = Quota(share=0.5, period=1e-2, exchange=1e-4, cores=2)


def timed(profile: ModelProfile) -> ModelProfile:
    """Seconds in proportion to parameters and a sample."""
    kinds = {
        name: kind.model_copy(
            update={
                "timings": (
                    Timing(batches=(1.0,), forward=(1e-9 * kind.parameters,), backward=(2e-9 * kind.parameters,)),
                )
            }
        )
        for name, kind in profile.kinds.items()
    }
    return profile.model_copy(update={"kinds": kinds, "update_seconds": 1e-8})


def step_row(model: str, rate: float, competitor: str, samples: list[float], predicted: float) -> dict:
    plan = plan_of(BLOCKS, 1, "1f1b").model_dump(mode="json") | {
        "micro_batches": {"plan": 2, "gpipe": 4, "general": 8, "by speed": 16, "samples by speed": 32}.get(
            competitor, 1
        )
    }
    return {
        "row": "step",
        "model": model,
        "bits_per_s": rate,
        "competitor": competitor,
        "plan": plan,
        "predicted_s": predicted,
        "samples_s": samples,
    }


ROWS = [
    step_row("vgg", 1e8, "data parallel", [2.0, 4.0, 2.2], 2.0),
    step_row("vgg", 1e8, "data parallel again", [2.1, 4.2, 2.31], 2.0),
    step_row("vgg", 1e8, "plan", [1.0, 2.0, 1.1], 1.21),
    step_row("gpt", 5e8, "data parallel", [1.0, 1.0, 1.0], 1.2),
    step_row("gpt", 5e8, "data parallel again", [0.99, 0.99, 0.99], 1.2),
    step_row("gpt", 5e8, "gpipe", [3.0, 3.0, 3.0], 3.0),
    step_row("gpt", 5e8, "plan", [1.02, 1.02, 1.02], 1.02),
    {"row": "bubble", "competitor": "1f1b", "stages": 4, "micro_batches": 8, "samples_s": [1.1, 1.1]},
    {"row": "bubble", "competitor": "zb-h1", "stages": 4, "micro_batches": 8, "samples_s": [0.9, 0.9]},
    {"row": "bubble", "competitor": "eager-1f1b", "stages": 4, "micro_batches": 8, "samples_s": [1.25, 1.25]},
    {"row": "bubble", "competitor": "interleaved", "stages": 4, "micro_batches": 8, "samples_s": [1.0, 1.0]},
    {"row": "bubble", "competitor": "alone", "stages": 4, "micro_batches": 8, "samples_s": [0.8, 0.8]},
    *(
        {
            "row": "bubble",
            "cpu": 0.3,
            "width": 1024,
            "blocks": 4,
            "competitor": name,
            "stages": 4,
            "micro_batches": 8,
            "samples_s": [s],
        }
        for name, s in (("1f1b", 4.0), ("interleaved", 3.6), ("alone", 3.0))
    ),
]


def test_candidates_are_timed_as_often_as_by_train():
    assert hybrid.TRIAL_ROUNDS == TIMED


def test_claims_are_medians_of_ratios_round_by_round():
    claims = hybrid.claims(ROWS)
    assert claims["vs_data_parallel_max"].value == pytest.approx(2.0)  # although the second round was slow
    assert claims["vs_data_parallel_max"].setup.startswith("vgg at 100 Mbit/s")
    assert claims["vs_gpipe_max"].value == claims["worst_vs_gpipe"].value == pytest.approx(3.0 / 1.02)
    assert claims["vs_data_parallel_geomean"].value == pytest.approx((2.0 / 1.02) ** 0.5)
    assert claims["worst_vs_best_baseline"].value == pytest.approx(1 / 1.02)
    assert claims["worst_vs_best_baseline"].setup.startswith("gpt at 500 Mbit/s against data parallel")
    assert claims["spread_max"].value == pytest.approx(0.05)
    # vgg: 2.0 / 2.2, 1.21 / 1.1; gpt: 1.2, 1, 1; data parallelism counts once
    baselines, plans = [0.2 / 2.2, 0.2, 0.0], [0.1, 0.0]
    assert claims["prediction_error_median"].value == pytest.approx(statistics.median(baselines + plans))
    assert claims["prediction_error_baselines_median"].value == pytest.approx(statistics.median(baselines))
    assert claims["prediction_error_plan_median"].value == pytest.approx(0.05)
    assert claims["prediction_error_plan_max"].value == pytest.approx(0.1)
    assert not [name for name in claims if "apart" in name], "there was one launch"


def test_the_baseline_is_the_faster_one():
    """Of both baselines, and not the first, the last or the slower one."""
    for fast, slow in (("data parallel", "gpipe"), ("gpipe", "data parallel")):
        for order in ((fast, slow), (slow, fast)):
            seconds = {fast: 0.9, slow: 1.8, "plan": 0.6}
            rows = [step_row("gpt", 1e8, name, [seconds[name]] * 3, 1.0) for name in (*order, "plan")]
            (entry,) = hybrid.entries([*rows, step_row("gpt", 1e8, "data parallel again", [0.1] * 3, 1.0)])
            assert entry.baseline == fast
            assert entry.ratio(entry.baseline, "plan") == pytest.approx(1.5)


def launched(rows: list[dict], launch: int, slower: float) -> list[dict]:
    steps = [{**row, "samples_s": [slower * seconds for seconds in row["samples_s"]]} for row in rows]
    return numbered(steps, launch)


def test_messages_that_cross_are_measured():
    """Each device sends what its neighbour receives; the claim is the ratio of the medians."""
    limits = []
    everyone = SimpleNamespace(
        task=SimpleNamespace(rates=(5e8, 1e8), link_rounds=3),
        count=len(jax.devices()),
        limit=limits.append,
        wait=lambda: None,
        everyone=lambda mine: [mine],
    )
    row = measured_exchange(everyone)
    assert limits == [1e8] == [row["bits_per_s"]]
    assert {name: len(samples) for name, samples in row["samples_s"].items()} == {"one way": 3, "both ways": 3}
    row["samples_s"] = {"one way": [1.0, 9.0, 2.0], "both ways": [5.0, 4.0, 1.0]}
    assert hybrid.claims([row])["exchange_both_ways"].value == 2.0
    assert "exchange_both_ways" not in hybrid.claims(ROWS)


def test_claims_are_over_launches():
    """A second launch in which everything takes 1.2 times as long changes no ratio, and one in which only the plan does
    counts in every ratio."""
    once = hybrid.claims(ROWS)
    twice = hybrid.claims(launched(ROWS, 0, 1.0) + launched(ROWS, 1, 1.2))
    for name in once:
        if "vs_" in name or "spread" in name or "bubble" in name:
            assert twice[name].value == pytest.approx(once[name].value), name
    assert twice["launches_apart_max"].value == twice["launches_apart_median"].value == pytest.approx(0.2)
    assert twice["prediction_error_median"].setup.startswith("10 steps")

    plans = [row for row in ROWS if row.get("competitor") == "plan"]
    others = [row for row in ROWS if row.get("competitor") != "plan"]
    rows = launched(plans, 1, 1.21) + launched(others, 1, 1.0) + launched(ROWS, 0, 1.0)
    assert hybrid.claims(rows)["vs_data_parallel_max"].value == pytest.approx(2.0 / 1.1)


def test_a_competitor_that_a_launch_lacks_is_left_out():
    more = [*ROWS, step_row("vgg", 1e8, "one host", [1.5] * 3, 1.5)]
    assert hybrid.claims(launched(more, 1, 1.0))["vs_one_host_max"].value == pytest.approx(1.5 / 1.1)
    for rows in (launched(ROWS, 0, 1.0) + launched(more, 1, 1.0), launched(more, 0, 1.0) + launched(ROWS, 1, 1.0)):
        claims = hybrid.claims(rows)
        assert "vs_one_host_max" not in claims
        assert claims["vs_gpipe_max"].value == hybrid.claims(ROWS)["vs_gpipe_max"].value


def test_every_launch_measures_everything(monkeypatch):
    """Rows carry the number of their launch; a launch that fails ends the benchmark, and what came before is kept."""
    asked, written = [], {}

    def measured(models, *, bubble, rates, quick, mixed=False):
        asked.append((models, bubble, mixed))
        if len(asked) == 10:
            raise LabError("host 2 is gone")
        return [step_row(model, rate, "plan", [1.0, 1.0], 1.0) for model in models for rate in rates]

    monkeypatch.setattr(hybrid, "why_not", lambda: None)
    monkeypatch.setattr(hybrid, "measure", measured)
    monkeypatch.setattr(hybrid, "claims", lambda rows: {})
    monkeypatch.setattr(hybrid, "check_writable", lambda path: None)
    monkeypatch.setattr(hybrid, "write_json", lambda *given, **_: written.update(settings=given[2], rows=given[3]))
    assert hybrid.run(quick=False, json_path="file", launches=3) == 1
    equal = [((), True, False), *(((model,), False, False) for model in MODELS)]
    assert asked[:8] == [*equal, (("gpt",), False, True)] and asked[8:] == asked[:2]
    assert [row["launch"] for row in written["rows"]] == [0] * (6 * 3 + 1 + 3)
    assert (written["settings"]["launches"], written["settings"]["failure"]) == (3, "host 2 is gone")
    asked.clear()
    assert hybrid.run(quick=False, json_path=None, launches=1, only=["mixed", "vgg"]) == 0
    assert asked == [(("vgg",), False, False), (("gpt",), False, True)]
    with pytest.raises(InputError, match="--only mlq: no such part"):
        hybrid.run(quick=False, json_path=None, only=["mlq"])


def test_a_plan_that_is_a_baseline_is_one_more_measurement_of_it():
    """Its ratio to that is 1, and how far their measurements lie apart counts in the spread."""
    rows = [dict(row) for row in ROWS if row.get("model") == "vgg"]
    rows[-1]["plan"] = rows[0]["plan"] | {"seconds": 1.21, "device": "emulated host"}
    claims = hybrid.claims(rows)
    assert claims["spread_max"].value == pytest.approx(1.1)  # 2.1 / 1.0
    assert claims["vs_data_parallel_max"].value == claims["worst_vs_best_baseline"].value == 1.0
    # In another launch the plan is another one, and what it took counts.
    different = numbered([row for row in ROWS if row.get("model") == "vgg"], 1)
    assert hybrid.claims([*numbered(rows, 0), *different])["vs_data_parallel_max"].value == pytest.approx(2.0**0.5)


def test_predictions_for_the_machine_minutes_before_have_claims_of_their_own():
    """If they were kept: of launches that did not keep them there are none."""
    rows = [row | {"planned_s": 2 * row["predicted_s"]} if row["row"] == "step" else row for row in ROWS]
    claims, without = hybrid.claims(rows), hybrid.claims(ROWS)
    assert claims["prediction_error_max"].value == without["prediction_error_max"].value == pytest.approx(0.2)
    assert claims["prediction_error_when_planned_max"].value == pytest.approx(1.4)  # 2.4 predicted, 1.0 measured
    assert "prediction_error_when_planned_max" not in without


def test_idle_shares():
    claims = hybrid.claims(ROWS)
    assert claims["bubble_1f1b"].value == pytest.approx(1 - 0.8 / 1.1)
    assert claims["bubble_eager_1f1b"].value == pytest.approx(1 - 0.8 / 1.25)
    assert claims["bubble_1f1b_ideal"].value == pytest.approx(3 / 11)
    assert claims["bubble_zb_h1"].value == pytest.approx(1 - 0.8 / 0.9)
    assert "bubble_zb_h1_ideal" not in claims
    assert claims["bubble_interleaved"].value == pytest.approx(0.2)
    assert claims["bubble_interleaved_ideal"].value == pytest.approx(3 / 19)
    assert claims["bubble_1f1b_width_1024"].value == pytest.approx(0.25)
    assert claims["bubble_interleaved_width_1024"].value == pytest.approx(1 - 3.0 / 3.6)
    assert claims["bubble_interleaved_ideal_width_1024"].value == pytest.approx(3 / 19)
    assert "bubble_zb_h1_width_1024" not in claims
    assert claims["bubble_1f1b"].setup.endswith("links without a limit, 4 emulated hosts of 0.5 cores")
    assert claims["bubble_1f1b_width_1024"].setup.endswith("blocks of width 1024, 4 emulated hosts of 0.3 cores")
    assert claims["bubble_1f1b_width_1024"].setup.startswith("4 stages of 4 blocks, 8 micro-batches")


def test_claims_that_were_not_measured_are_absent():
    assert hybrid.claims([]) == {}
    only_vgg = [row for row in ROWS if row.get("model") == "vgg"]
    assert "vs_gpipe_max" not in hybrid.claims(only_vgg) and "bubble_1f1b" not in hybrid.claims(only_vgg)


def test_plans_in_words():
    assert hybrid.in_words(plan_of(8, 4, "interleaved")) == "interleaved x8: 2, 1 | 1, 1 | 1, 1 | 1, 2"
    subject, profile = SUBJECTS["vgg"](), timed(SUBJECTS["vgg"]().profile())
    plan = next(
        one.plan for one in planned(subject, prices_by_rate(profile, {1e8: LINK}, QUOTA, 4)) if one.name == "spmd"
    )
    assert hybrid.in_words(plan).startswith("one stage x") and " t4" in hybrid.in_words(plan)


def test_table_is_printed(capsys):
    hybrid.print_entries(hybrid.entries(ROWS))
    printed = capsys.readouterr().out
    assert "data parallel again" in printed and "+10 %" in printed  # 1.21 predicted, 1.1 measured


def test_a_task_is_its_text():
    task = Task(
        tag="jhpt-lab-1-1-0",
        cpu=0.5,
        folder="/tmp",
        models=("mlp",),
        rates=(1e8,),
        rounds=1,
        often=3,
        trial_rounds=1,
        layer_rounds=1,
        link_rounds=1,
        bubbles=(512, 1024),
    )
    assert Task.parse(task.text()) == task


@pytest.mark.parametrize("name", MODELS)
def test_profiles_count_the_parameters_there_are(name):
    subject = SUBJECTS[name]()
    shapes = jax.eval_shape(subject.init, jax.random.key(0))
    assert subject.profile().parameters == sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(("name", "published"), [("gpt2-like", "gpt2-124m"), ("bert-like", "bert-base")])
def test_published_proportions(name, published):
    """Layers : width, what of a block depends on the width, and the head's share of the multiplications."""
    ours, theirs = (config.model for config in (SUBJECTS[name]().config, load_config(published)))
    assert ours.d_model / ours.num_layers == theirs.d_model / theirs.num_layers
    assert (ours.ffn_width, ours.head_dim) == (4 * ours.d_model, theirs.head_dim)
    assert ours.tied_table and theirs.tied_table
    lengths = (SUBJECTS[name]().config.data.sequence_length, load_config(published).data.sequence_length)
    shares = [
        2 * model.d_model * model.vocab / model.flops_per_token(length).forward
        for model, length in zip((ours, theirs), lengths, strict=True)
    ]
    assert abs(shares[0] - shares[1]) < 0.03


@pytest.mark.parametrize("name", ["gpt2-like", "bert-like"])
def test_rows_are_text(name):
    """Consecutive windows of one text, in ids of a tokenizer with as many ids as the model knows; always the same."""
    subject = SUBJECTS[name]()
    tokenizer, length, rows = subject._tokenizer, subject.config.data.sequence_length, subject.rows(4).windows
    assert tokenizer.vocab_size == subject.config.model.vocab
    ids = tokenizer.encode(text.everything())
    inside = rows[:, 1:-1] if subject.config.model.masked else rows[:, :-1]
    np.testing.assert_array_equal(inside.ravel(), ids[: inside.size])
    np.testing.assert_array_equal(subject.rows(4).windows, SUBJECTS[name]().rows(4).windows)
    assert rows.shape == (4, subject.config.model.row_length(length)) and rows.dtype == np.int32
    words = tokenizer.decode(inside[1]).split()
    assert sum(word in text.everything().split() for word in words) > len(words) / 2


def test_gradients_of_16_bits():
    """The same step within the rounding of float16, whose all-reduces of gradients are float16, and of nothing else."""
    network = MLP(inputs=8, width=16, hidden=32, num_blocks=2, classes=8)
    subject = ClassSubject(name="mlp", batch=16, network=network)
    chunk = Chunk(first=0, runs=runs_of([1] * 4))
    stage = Stage(device=0, devices=4, chunks=(chunk,))
    plan = Plan(model="mlp", cluster="lab", batch=16, micro_batches=2, stages=(stage,))
    found = []
    for short in (False, True):
        one = traced(subject, plan, jax.devices()[:4], update=False, short=short)
        sent = re.findall(r"all_reduce.*?->\s*tensor<(?:\d+x)*(f\d+)>", one.step().as_text(), re.S)
        state = one.fresh().compile()(jax.random.key(0))
        found.append((set(sent), one.step().compile()(state, one.rows())[0]))
    (types, whole), (short_types, rounded) = found
    assert types == {"f32"} and short_types == {"f32", "f16"}  # the sums of the loss stay
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(rounded), strict=True):
        np.testing.assert_allclose(one, other, atol=4 * np.finfo(np.float16).eps * np.abs(one).max())
    assert any(np.any(one != other) for one, other in zip(*map(jax.tree.leaves, (whole, rounded)), strict=True))


def test_programs_whose_states_lie_alike_share_one():
    """Whatever the number of micro-batches; each goes on from where the other has left it."""
    hosts = SimpleNamespace(compiled=lambda programs: {name: lower().compile() for name, lower in programs.items()})
    network = MLP(inputs=8, width=16, hidden=32, num_blocks=2, classes=8)
    subject = ClassSubject(name="mlp", batch=16, network=network)

    def program(stages, count):
        plan = plan_of(2, stages, "gpipe" if stages > 1 else "1f1b")
        plan = plan.model_copy(update={"batch": 16, "micro_batches": count})
        return traced(subject, plan, jax.devices()[:stages])

    programs = {f"x{count}": program(1, count) for count in (1, 2)}
    assert programs["x1"].held == programs["x2"].held != program(2, 2).held
    steps = ready(hosts, programs)
    losses = [float(steps[name]().loss) for name in ("x1", "x2", "x1")]
    assert losses[0] > losses[1] > losses[2]


def test_vgg_has_the_shape_of_its_name():
    kinds = [name.split()[0] for name in SUBJECTS["vgg"]().profile().layers]
    assert kinds.count("dense") == 3 and len(kinds) == 16 and kinds[-3:] == ["dense"] * 3
    profile = SUBJECTS["vgg"]().profile()
    dense = sum(kind.parameters for name, kind in profile.kinds.items() if name.startswith("dense"))
    assert dense > 0.75 * profile.parameters


@pytest.mark.parametrize("name", MODELS)
def test_plans_are_ones_that_all_hosts_can_run(name):
    """But for the host that is alone."""
    subject = SUBJECTS[name]()
    profile = timed(subject.profile())
    variants = planned(subject, prices_by_rate(profile, {5e8: LINK}, QUOTA, 4))
    names = list(dict.fromkeys(variant.name for variant in variants))
    assert names == [
        "data parallel",
        *(["gpipe"] if subject.piped else []),
        "one host",
        "3-D grid",
        "data parallel 16 bits",
        "spmd",
        "plan",
    ]
    model = CostModel(profile, cluster_of(LINK, 4))
    for variant in variants:
        check(variant.plan, model)
        assert variant.plan.devices == (1 if variant.name == "one host" else 4)
        assert variant.plan.zero == 0 and not variant.plan.recompute
    everywhere = [variant for variant in variants if variant.name != "one host"]
    seconds = {variant.name: price(variant.plan, model).seconds for variant in everywhere}
    assert seconds["spmd"] <= min(seconds.values()) * (1 + order_error())
    (simplest,) = (variant.plan for variant in variants if variant.name == "spmd")
    candidates = [variant for variant in variants if variant.name == "plan"]
    assert candidates[0].plan == simplest and len({one.key for one in candidates}) == len(candidates) <= TRIALS
    assert min(one.predicted for one in candidates) in [one.predicted for one in candidates[:2]]


def test_sums_of_scalars_are_counted():
    """Of the loss over four hosts, and of the norm if they are stages: 2 (4 - 1) messages each."""
    assert unpriced_messages(plan_of(8, 4, "eager-1f1b")) == 12
    subject = SUBJECTS["mlp"]()
    plan = planned(subject, prices_by_rate(timed(subject.profile()), {5e8: LINK}, QUOTA, 4))[0].plan
    assert plan.devices == 4 and unpriced_messages(plan) == 6


def test_small_messages_of_a_divided_head_are_counted():
    """Of four ranks, in each of two micro-batches: two sums of 6 messages each, and 3 that gather the rows."""
    plan = plan_of(8, 1, "1f1b").model_copy(update={"micro_batches": 2})
    (stage,) = plan.stages
    chunk = stage.chunks[0].model_copy(update={"runs": runs_of([4] * len(stage.chunks[0].tensor))})
    stage = stage.model_copy(update={"devices": 4, "chunks": (chunk,)})
    assert unpriced_messages(plan.model_copy(update={"stages": (stage,)})) == 6 + 2 * (2 * 6 + 3)


def test_batches_cover_what_a_host_may_work_on():
    mlp, vgg = SUBJECTS["mlp"](), SUBJECTS["vgg"]()
    assert batches(mlp, 1, 4) == [mlp.batch // 32, mlp.batch // 16, mlp.batch // 4, mlp.batch]
    assert mlp.batch // max(request_of(mlp).micro_batches) == batches(mlp, 1, 4)[0]
    assert [batches(vgg, t, 4)[1] for t in (1, 2, 4)] == [vgg.batch // 4, vgg.batch // 2, vgg.batch]
    assert max(request_of(vgg).micro_batches) == vgg.batch // 4 // batches(vgg, 1, 4)[0]
    assert batches(vgg, 1, 4)[-1] == vgg.batch  # of a stage of one host


@pytest.mark.parametrize(
    ("name", "tensor"), [("vgg", 4), ("mlp", 2), ("gpt", 4), ("bert", 2), ("gpt2-like", 4), ("bert-like", 2)]
)
def test_a_rank_alone_holds_its_share(name, tensor):
    """Shapes of the parameters are those of one of `tensor` ranks, and every layer runs on them."""
    subject = SUBJECTS[name]()
    parts, shapes = subject.parts(alone(tensor)), jax.eval_shape(subject.init, jax.random.key(0))
    share, whole = shard_of(shapes, tensor), shard_of(shapes, 1)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (share, whole)]
    assert 1 / tensor <= sizes[0] / sizes[1] < 1.1 / tensor

    rows, keys = subject.rows(2), jax.random.split(jax.random.key(0), 2)
    context = parts.context(rows, keys)
    x = jax.eval_shape(parts.embed, share, rows, context)
    assert x.shape == jax.eval_shape(subject.parts(Hooks()).embed, whole, rows, context).shape


def calls_of_layers(subject, layers, wanted, passes=None):
    """Of one of two tensor ranks, four rows."""
    shapes = jax.eval_shape(subject.init, jax.random.key(0))
    place = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("all",)), PartitionSpec())
    parts, share = subject.parts(alone(2)), shard_of(shapes, 2)
    programs = layer_programs(parts, share, subject.rows(4), layers, wanted, place, passes)
    return calls_of(programs, {name: one.lower().compile() for name, one in programs.items()})


def test_layers_are_timed_once_a_kind():
    subject = SUBJECTS["mlp"]()
    layers = subject.profile().layers
    calls = calls_of_layers(subject, layers, {"block", "last"})
    assert list(calls) == ["block forward", "block backward", "last forward", "last both"]
    y, saved = calls["block forward"]()
    assert y.shape == (4, 256) and any(leaf.shape == (4, 512) for leaf in saved)
    assert calls["last forward"]().shape == ()


def test_gradients_of_micro_batches_are_added_up():
    subject = SUBJECTS["mlp"]()
    layers = subject.profile().layers
    calls = calls_of_layers(subject, layers, {"block", "last"})
    for name in ("block backward", "last both"):
        first, second = (jax.tree.map(np.array, calls[name]()[0]) for _ in range(2))
        for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_allclose(two, 2 * one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "bert"])
def test_passes_of_a_stage_are_those_of_its_blocks(name):
    """What leaves the last micro-batch, the sum of the gradients of all, and the error of the first; against one
    function of all micro-batches."""
    subject, count = SUBJECTS[name](), 3
    kinds = subject.profile().layers
    calls = calls_of_layers(subject, kinds, {kinds[1]}, Passes(count=count, recompute=saved_by_pipelines(subject)))
    assert list(calls) == [f"{kinds[1]}{piped} {way}" for piped in ("", " piped") for way in ("forward", "backward")]
    (y, ring), (gradients, (error,)) = calls[f"{kinds[1]} piped forward"](), calls[f"{kinds[1]} piped backward"]()
    gradients = jax.tree.map(np.array, gradients)
    _, everything = calls[f"{kinds[1]} forward"]()
    assert {leaf.shape[:2] for leaf in ring} == {(count, 2)}
    assert sum(leaf[0, 0].size for leaf in ring) <= sum(leaf.size for leaf in everything)

    parts, share = subject.parts(alone(2)), shard_of(jax.eval_shape(subject.init, jax.random.key(0)), 2)
    rows = subject.rows(4)
    context = parts.context(rows, jax.random.split(jax.random.key(0), 4))
    layer = jax.tree.map(lambda leaf: leaf[0], share["blocks"]["0"] if "0" in share["blocks"] else share["blocks"])
    xs = drawn(jax.ShapeDtypeStruct((count, *y.shape), y.dtype))

    def both(layers, xs):
        for at in range(2):
            block = jax.tree.map(lambda leaf, at=at: leaf[at], layers)
            xs = jnp.stack([parts.block(block, x, (context, jnp.int32(at))) for x in xs])
        return xs

    ys, pull = jax.vjp(jax.jit(both), jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), layer), xs)
    expected, errors = pull(xs)
    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-4)
    close(y, ys[-1])
    close(error, errors[0])
    jax.tree.map(close, gradients, expected)


def test_pipelines_of_one_program_take_what_blocks_take_in_passes():
    """A profile of passes changes what pipelines of one program are predicted to take, and nothing else."""
    subject = SUBJECTS["mlp"]()
    profile = timed(subject.profile())
    block = profile.kinds["block"]
    slower = tuple(
        timing.model_copy(update={"forward": tuple(2 * each for each in timing.forward)}) for timing in block.timings
    )
    passes = profile.model_copy(
        update={"kinds": profile.kinds | {"block": block.model_copy(update={"timings": slower})}}
    )
    one, other = (
        {
            (variant.name, variant.key): variant
            for variant in planned(subject, prices_by_rate(profile, {5e8: LINK}, QUOTA, 4, pipeline=pipeline))
        }
        for pipeline in (None, passes)
    )
    both = set(one) & set(other)
    assert {len(one[each].plan.stages) > 1 for each in both} == {True, False}
    for each in both:
        assert (other[each].predicted > one[each].predicted) == (len(one[each].plan.stages) > 1)


def drawn_times(stages: int, chunks: int) -> StageTimes:
    """Passes of 1 to 10 ms and transfers of 1 to 4 ms."""
    rng = np.random.default_rng(stages + chunks)
    forward, backward = rng.uniform(1e-3, 1e-2, (2, stages, chunks))
    cut, nothing = rng.uniform(1e-3, 4e-3, stages * chunks - 1), np.zeros(stages)
    return StageTimes(forward=forward, backward=backward, cut=cut, sync=nothing, update=nothing + 1e-3)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("eager-1f1b", 1), ("interleaved", 2)])
def test_a_host_that_saves_nothing_is_a_slower_processor(stages, schedule, chunks):
    """Then a step takes what the planner says, and never more than that if hosts save while they wait."""
    plan, times = plan_of(8, stages, schedule), drawn_times(stages, chunks)
    planned_seconds = times.step_seconds(plan, overlap=False)
    for share, period, cores in ((1.0, 1e-2, 8), (0.5, 0.0, 2)):
        quota = Quota(share=share, period=period, exchange=0.0, cores=cores)
        assert pipeline_seconds(plan, times, quota) == pytest.approx(planned_seconds)
    assert pipeline_seconds(plan, times, replace(QUOTA, exchange=0.0)) <= planned_seconds


def test_a_host_that_waited_computes_at_full_speed():
    """Half a core in 10 ms.  Stages of 8 and 1 ms forward, 1 and 8 backward, one micro-batch, exchanges of 1 ms.  Stage
    0 has nothing saved: F 0..8, exchange 8..9.  Both exchange errors, 9..10.  Stage 1 has saved all that it can, 2.5 ms
    of processor time: F in 0.5, 10..10.5, exchange 10.5..11.5, and 2.5 are saved again.  B needs 4 ms: 2.5 last 5 ms at
    full speed, in which it needs no more than 4: 11.5..15.5.  Exchange until 16.5; stage 0 has waited, B in 0.5."""
    plan = plan_of(2, 2, "eager-1f1b").model_copy(update={"micro_batches": 1})
    times = StageTimes(
        forward=np.array([[8e-3], [1e-3]]),
        backward=np.array([[1e-3], [8e-3]]),
        cut=np.array([1e-3]),
        sync=np.zeros(2),
        update=np.zeros(2),
    )
    assert pipeline_seconds(plan, times, replace(QUOTA, exchange=0.0)) == pytest.approx(17e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe"])
def test_a_step_takes_as_long_as_its_hosts_do(schedule):
    """All of half the pace: half the seconds.  One of them alone: as long as a step with less work in its stage."""
    plan, times = plan_of(8, 4, schedule), drawn_times(4, 1)
    times = replace(times, cut=0 * times.cut, update=0 * times.update)
    quota = Quota(share=0.5, period=0.0, exchange=0.0, cores=2)
    slowest = pipeline_seconds(plan, times, quota)
    assert pipeline_seconds(plan, times, replace(quota, paces=(0.5,) * 4)) == pytest.approx(slowest / 2)
    (host,) = (rank for rank, number in enumerate(placement(4, 1, quota)) if number == 3)
    half = np.where(np.arange(4) == host, 0.5, 1.0)[:, None]
    less = replace(times, forward=half * times.forward, backward=half * times.backward)
    one = pipeline_seconds(plan, times, replace(quota, paces=(1.0, 1.0, 1.0, 0.5)))
    assert one == pytest.approx(pipeline_seconds(plan, less, quota)) and one < slowest


def test_one_host_takes_its_own_seconds():
    subject = SUBJECTS["bert"]()
    model = CostModel(timed(subject.profile()), cluster_of(LINK, 4))
    plan = swept(subject, model, lambda plan: [1.0])[ONE_HOST][0]
    seconds = predicted_seconds(plan, model, replace(QUOTA, paces=(0.8, 1.0, 1.0, 1.0)))
    assert seconds == pytest.approx(0.8 * predicted_seconds(plan, model, QUOTA))


def seconds_by_the_kernel(work: float, share: float, period: float, begun: float) -> float:
    """Of so much processor time under a quota, from a moment of the period on: what a period leaves is lost."""
    seconds, left, room = 0.0, work, period - begun
    while left > min(share * period, room):
        left -= min(share * period, room)
        seconds += room
        room = period
    return seconds + left


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6])
def test_a_long_wait_saves_what_the_kernel_leaves(share):
    """A pass after a long wait takes as long as by the kernel's rule, in the mean over moments and passes."""
    rng, period = np.random.default_rng(0), 1e-2
    quota = Quota(share=share, period=period, exchange=0.0, cores=2)
    work, begun = rng.uniform(0.02, 0.06, 4000), rng.uniform(0, period, 4000)
    kernel = [seconds_by_the_kernel(each, share, period, at) for each, at in zip(work, begun, strict=True)]
    modelled = []
    for each in work:
        host = Host(quota, 0)
        host.wait(1.0)
        compute([host], [each / share])
        modelled.append(host.time - 1.0)
    assert np.mean(modelled) == pytest.approx(np.mean(kernel), rel=5e-3)


def test_a_host_that_computes_alone_is_faster():
    """Stages of one micro-batch take turns; replicas of one stage all compute."""
    plan, times = plan_of(8, 4, "gpipe").model_copy(update={"micro_batches": 1}), drawn_times(4, 1)
    times = replace(times, cut=0 * times.cut, update=0 * times.update)
    quota = Quota(share=0.5, period=0.0, exchange=0.0, cores=2, alone=1.25)
    assert pipeline_seconds(plan, times, quota) == pytest.approx((times.forward.sum() + times.backward.sum()) / 1.25)
    assert [quota.gain(busy) for busy in (0.5, 1.25, 2.0)] == pytest.approx([1.25, 1.125, 1.0])
    assert replace(quota, share=1.0, cores=1).gain(1.0) == 1.0
    model = CostModel(timed(SUBJECTS["bert"]().profile()), cluster_of(LINK, 4))
    for baseline, gain in ((ONE_HOST, 1.25), (DATA_PARALLEL, 1.0)):
        one = swept(SUBJECTS["bert"](), model, lambda plan: [1.0])[baseline][0]
        seconds = predicted_seconds(one, model, replace(quota, alone=1.0))
        communication = unpriced_messages(one) * LINK.latency
        assert predicted_seconds(one, model, quota) - communication == pytest.approx((seconds - communication) / gain)


def test_hosts_of_one_core_share_it():
    """Two stages compute at the same time in most ticks, so what they have saved helps less on one core."""
    plan, times = plan_of(8, 2, "eager-1f1b"), drawn_times(2, 1)
    apart, shared = (pipeline_seconds(plan, times, replace(QUOTA, exchange=0.0, cores=cores)) for cores in (2, 1))
    assert apart < shared <= times.step_seconds(plan, overlap=False)


def test_replicas_of_a_stage_sum_their_gradients():
    """From the start of the last backward pass on, before the update."""
    plan, times = plan_of(8, 2, "eager-1f1b"), drawn_times(2, 1)
    quota = Quota(share=0.5, period=0.0, exchange=0.0, cores=2)
    for seconds in (1e-3, 0.1):
        summed = replace(times, sync=np.full(2, seconds))
        assert pipeline_seconds(plan, summed, quota) == pytest.approx(summed.step_seconds(plan, overlap=False))


def test_timings_never_fall_with_the_batch():
    (timing,) = timings({("block", 1, 8): (2.0, 5.0), ("block", 1, 2): (1.0, 6.0), ("block", 1, 4): (1.5, 5.5)})[
        "block"
    ]
    assert timing.batches == (2.0, 4.0, 8.0)
    assert timing.forward == (1.0, 1.5, 2.0)
    assert np.allclose(np.add(timing.forward, timing.backward), 6.0)


def test_bubble_has_equal_stages():
    plan = plan_of(BLOCKS * 4, 4, "interleaved")
    assert plan.schedule == "interleaved"
    blocks = [sum(run.layers for chunk in stage.chunks for run in chunk.runs) for stage in plan.stages]
    assert blocks == [BLOCKS + 1, BLOCKS, BLOCKS, BLOCKS + 1]  # the ends lie with the first and the last
    assert subject_of(1).batch % plan.micro_batches == 0


def test_says_why_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(hybrid, "why_not", lambda: "emulated hosts need root")
    assert hybrid.run(quick=True, json_path=None) == 3
    assert "emulated hosts need root" in capsys.readouterr().err


SMALL = """
from dataclasses import replace
from benchmarks.hybrid import models, worker
from benchmarks.networks.mlp import MLP
network = MLP(inputs=8, width=16, hidden=32, num_blocks=2, classes=8)
models.SUBJECTS["mlp"] = lambda: models.ClassSubject(name="mlp", batch=16, network=network)
worker.take_part(worker.Task, worker.run)
"""


@pytest.mark.exhaustive
def test_small_run_on_two_hosts(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with Lab(hosts=2, cpu=0.5) as lab:
        lab.quota(1.0)
        task = Task(
            tag=lab.tag,
            cpu=0.5,
            folder=str(tmp_path),
            models=("mlp",),
            rates=(1e9,),
            rounds=2,
            often=2,
            trial_rounds=1,
            layer_rounds=1,
            link_rounds=1,
            general=True,
        )
        rows = rows_of(lab, task, ["-c", SMALL], devices=1, limit_s=240)
    (entry,) = hybrid.entries(rows)
    assert {"data parallel", "data parallel again", "data parallel 16 bits", "gpipe", "plan"} <= set(entry.samples)
    assert all(min(samples) > 0 for (samples,) in entry.samples.values())
    assert {name: len(samples) for name, (samples,) in entry.samples.items()} == {
        name: 4 if name in JUDGED else 2 for name in entry.samples
    }
    assert {row["row"] for row in rows} == {
        "link",
        "quota",
        "exchange",
        "meeting",
        "dispatch",
        "layer",
        "layer in rotation",
        "update",
        "paces",
        "pace",
        "trial",
        "nearby",
        "step",
    }
    assert {row["plan"]["micro_batches"] for row in rows if row["row"] == "trial"} >= {1, 2, 4, 8, 16}
