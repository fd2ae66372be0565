"""What is told about an answer: names, sums, reasons; the printed report and the JSON say the same."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from jhpt.core.cluster_file import find_cluster
from jhpt.core.config import Compression
from jhpt.core.load import load_config
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.planner.cost.estimate import price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.report.alternatives import alternative, alternatives, changed, savings
from jhpt.planner.report.answer import general_lines, print_answer, summary, timeline, to_json, verdict
from jhpt.planner.report.causes import mean_causes, stage_causes
from jhpt.planner.report.words import (
    compressed,
    compression_text,
    duration,
    idle_devices,
    layer_runs,
    names_text,
    percent,
    spans,
    spans_text,
)
from jhpt.planner.search.baselines import baselines
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import Answer


def model_of(preset: str = "gpt-tiny", cluster: str = "a100x2x3", overlap: bool = True) -> CostModel:
    machine = find_cluster(cluster).model_copy(update={"overlap": overlap})
    return CostModel(analytic_profile(load_config(preset), machine.nodes[0].device), machine)


def stage(device: int, devices: int, *chunks: tuple[int, list[tuple[int, int]]]) -> Stage:
    """chunks: (first layer, [(layers, tensor)])."""
    return Stage(
        device=device,
        devices=devices,
        chunks=tuple(
            Chunk(first=first, runs=tuple(Run(layers=layers, tensor=tensor) for layers, tensor in runs))
            for first, runs in chunks
        ),
    )


def plan_of(*stages: Stage, **options) -> Plan:
    given = {"model": "gpt-tiny", "cluster": "a100x2x3", "batch": 8, "micro_batches": 4} | options
    return Plan(stages=stages, **given)


# gpt-tiny: embedding, four blocks, head.
SINGLE = plan_of(stage(0, 2, (0, [(1, 2), (4, 1), (1, 2)])), zero=3)
PIPELINE = plan_of(stage(0, 2, (0, [(3, 2)])), stage(2, 2, (3, [(3, 2)])), recompute=True)
INTERLEAVED = plan_of(
    stage(0, 2, (0, [(2, 1)]), (3, [(1, 1)])),
    stage(2, 2, (2, [(1, 1)]), (4, [(2, 1)])),
    schedule="interleaved",
    zero=1,
)
PLANS = {"single": SINGLE, "pipeline": PIPELINE, "interleaved": INTERLEAVED}


def answer_of(plan: Plan, *others: Plan, model: CostModel | None = None) -> Answer:
    model = model or model_of()
    estimate = price(plan, model)
    done = plan.model_copy(update={"seconds": estimate.seconds, "lower_bound": estimate.seconds})
    return Answer(plan=done, estimate=estimate, alternatives=others, model=model)


def printed(answer: Answer, compared=()) -> str:
    stream = io.StringIO()
    print_answer(Console(file=stream, width=120), answer, compared)
    return stream.getvalue()


def test_ranges_and_names_are_short():
    assert spans_text(spans([0, 1, 2, 5, 7, 8])) == "0-2, 5, 7-8"
    assert spans([]) == ()
    assert compressed(["embedding", "block", "block", "head"]) == ("embedding", "block x 2", "head")
    assert names_text(["a", "b"]) == "a, b"
    assert names_text(list("abcde")) == "a ... e"
    assert idle_devices(PIPELINE, 6) == (4, 5)


def test_units_of_seconds_and_ratios():
    assert [duration(x) for x in (12.5, 0.0123, 5e-5)] == ["12.500 s", "12.3 ms", "50.0 us"]
    assert duration(0.02, sign=True) == "+20.0 ms"
    assert [percent(x) for x in (1.12, 0.9, 14.84)] == ["+12.0 %", "-10.0 %", "14.8 times"]


def test_layer_runs_name_every_layer_once():
    runs = [run for part in INTERLEAVED.stages for run in layer_runs(part, model_of().profile)]
    assert sorted(layer for run in runs for layer in range(run.first, run.stop)) == list(range(6))
    assert [(run.chunk, run.names, run.data, run.tensor) for run in runs[:2]] == [
        (0, ("embedding", "block"), 2, 1),
        (1, ("block",), 2, 1),
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_causes_sum_to_the_step(name, overlap):
    plan, model = PLANS[name], model_of(overlap=overlap)
    estimate = price(plan, model)
    for position in range(len(plan.stages)):
        causes = stage_causes(plan, position, estimate, model)
        assert sum(causes.values()) == pytest.approx(estimate.seconds)
        assert min(causes.values()) > -1e-12
        assert (causes["recomputation"] > 1e-9) == plan.recompute
        if plan.zero != 3:  # ZeRO-3's traffic may hide
            assert (causes["weights gathered"] > 1e-9) == (plan.zero == 1)
    assert sum(mean_causes(plan, estimate, model).values()) == pytest.approx(estimate.seconds)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_the_played_step_takes_what_the_estimate_says(name, overlap):
    answer = answer_of(PLANS[name], model=model_of(overlap=overlap))
    assert timeline(answer).seconds == pytest.approx(answer.estimate.seconds)


def test_weights_gathered_once_are_no_update():
    # ZeRO-1 of one stage without overlap: gathered in line, as long as its gradients are scattered.
    plan = plan_of(stage(0, 2, (0, [(6, 1)])), zero=1)
    causes = stage_causes(plan, 0, price(plan, model_of(overlap=False)), model_of(overlap=False))
    assert causes["weights gathered"] == pytest.approx(causes["gradients exposed"])
    # ZeRO-2 scatters in every micro-batch, and adds up a share only.
    scattered = plan.model_copy(update={"zero": 2})
    every = stage_causes(scattered, 0, price(scattered, model_of(overlap=False)), model_of(overlap=False))
    assert every["gradients exposed"] > causes["gradients exposed"] * (1 + 1e-9)
    assert every["weights gathered"] == pytest.approx(causes["weights gathered"])
    assert every["compute"] < causes["compute"]
    # With ZeRO-3 nothing else is updated: the same share of every parameter.
    shared = plan.model_copy(update={"zero": 3})
    other = stage_causes(shared, 0, price(shared, model_of()), model_of())
    assert causes["update"] == pytest.approx(other["update"])


def test_the_causes_of_an_alternative_sum_to_the_difference():
    found = alternative("pipeline", PIPELINE, answer_of(SINGLE))
    assert sum(found.causes.values()) == pytest.approx(found.seconds * (1 - 1 / found.ratio))
    assert "recomputation +" in found.why


def test_reasons_are_sorted_and_minor_ones_left_out():
    causes = {"compute": -0.02, "waiting": 0.035, "gradients exposed": 0.08, "update": 0.0001}
    found = replace(alternative("", PIPELINE, answer_of(SINGLE)), ratio=1.12, causes=causes)
    assert found.why == "+12.0 %: gradients exposed +80.0 ms, waiting +35.0 ms; compute -20.0 ms"
    assert replace(found, missing=3.2 * 2**30).why == "does not fit by 3.2 GiB"
    assert replace(found, missing=3.2 * 2**30, ratio=0.9).why == "does not fit by 3.2 GiB; it would take -10.0 %"


def test_changes_change_one_decision_and_are_plans():
    answer = answer_of(INTERLEAVED)
    assert [each.name for each in changed(answer)] == [
        "no ZeRO",
        "ZeRO-2",
        "ZeRO-3",
        "recomputation",
        "2 micro-batches",
    ]
    for each in changed(answer):
        assert each.seconds == pytest.approx(price(each.plan, answer.model).seconds)


def test_what_is_short_of_memory_is_told():
    model = model_of("gpt2-1.5b", "v100x4x1")
    plan = plan_of(stage(0, 4, (0, [(50, 1)])), zero=3, recompute=True, cluster="v100x4x1", batch=64, micro_batches=1)
    why = {each.name: each.why for each in changed(answer_of(plan, model=model))}
    assert why["no recomputation"].startswith("does not fit by ")


def test_the_verdict_tells_the_gap():
    answer = answer_of(SINGLE)
    assert verdict(answer) == "proven optimal"
    bound = answer.estimate.seconds / 1.003
    assert verdict(replace(answer, plan=answer.plan.model_copy(update={"lower_bound": bound}))) == (
        "at most 0.3 % from optimal"
    )


def test_idle_devices_are_named():
    assert summary(answer_of(PIPELINE))[-1] == "devices: 4 of 6 work; idle: 4-5"


@pytest.mark.parametrize("name", PLANS)
def test_the_report_has_every_stage_and_every_alternative(name):
    answer = answer_of(PLANS[name], *(plan for plan in PLANS.values() if plan is not PLANS[name]))
    compared = baselines(request(8), answer.model)
    text = printed(answer, compared)
    lines = text.splitlines()
    for position, part in enumerate(answer.plan.stages):
        last = part.device + part.devices - 1
        assert any(line.startswith(f"{position}  ") and f" {part.device}-{last} " in line for line in lines), text
    for words in ("embedding", "block", "tokens/s", "proven optimal", *(each.name for each in compared)):
        assert words in text
    assert len(alternatives(answer)) == 2
    assert ("stage n" in text) == (len(answer.plan.stages) > 1)


def test_json_is_complete_and_plain():
    answer = answer_of(INTERLEAVED, SINGLE)
    tree = to_json(answer, baselines(request(8), answer.model))
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree
    assert Plan.model_validate(tree["plan"]) == answer.plan
    assert tree["devices"] == {"available": 6, "working": 4, "idle": [4, 5]}
    assert tree["tokens_per_second"] == pytest.approx(8 * 128 / answer.estimate.seconds)
    for part in tree["stages"]:
        assert sum(part["seconds"].values()) == pytest.approx(tree["seconds"])
        assert sum(part["bytes"].values()) == pytest.approx(part["total_bytes"])
    for key in ("baselines", "changes", "alternatives"):
        for each in tree[key]:
            assert each["plan"] is None or Plan.model_validate(each["plan"])
            assert each["why"]


EIGHT_BITS = Compression(bits=8)


def cut(plan: Plan, chunks: int, **changes) -> Plan:
    """The plan with so many chunks of samples."""

    def of(chunk: Chunk) -> Chunk:
        runs = tuple(run.model_copy(update={"sample_chunks": chunks}) for run in chunk.runs)
        return chunk.model_copy(update={"runs": runs})

    stages = tuple(one.model_copy(update={"chunks": tuple(of(chunk) for chunk in one.chunks)}) for one in plan.stages)
    return plan.model_copy(update={"stages": stages} | changes)


WIDE = plan_of(stage(0, 8, (0, [(34, 8)])), batch=8, micro_batches=1)


@pytest.mark.parametrize("bandwidth", [1.0, 0.01])
def test_what_chunks_and_compression_save(bandwidth):
    """Seconds of the step without them, and bytes: of 8 bits and a range for 128 a little more than half."""
    model = model_of("gpt-6.7b", "h100x8x1")
    node = model.cluster.nodes[0]
    inside = node.inside.model_copy(update={"bandwidth": node.inside.bandwidth * bandwidth})
    model = CostModel(
        model.profile, model.cluster.model_copy(update={"nodes": (node.model_copy(update={"inside": inside}),)})
    )
    seconds = {
        (chunks, how.on): price(cut(WIDE, chunks, compression=how), model).seconds
        for chunks in (1, 2)
        for how in (Compression(), EIGHT_BITS)
    }
    for (chunks, on), own in seconds.items():
        answer = answer_of(cut(WIDE, chunks, compression=EIGHT_BITS if on else Compression()), model=model)
        pieces, bits = savings(answer)
        assert (pieces.taken, bits.taken) == (chunks > 1, on)
        assert pieces.seconds == pytest.approx(seconds[1, on] - seconds[2, on])
        assert bits.seconds == pytest.approx(seconds[chunks, False] - seconds[chunks, True])
        assert 0.5 < bits.sent / bits.plain < 0.55
        assert pieces.sent >= pieces.plain
        text = "\n".join(summary(answer))
        assert ("2 sample chunks" in text, "all-reduce in 8 bits" in text) == (chunks > 1, on)
        assert duration(abs(bits.seconds)) in bits.why and bits.why in text and pieces.why in text
        assert ("compression=auto" in bits.why) == (not on and seconds[chunks, True] < own)
        names = [each.name for each in changed(answer)]
        assert ("no sample chunks" in names, "no compression" in names) == (chunks > 1, on)
        tree = to_json(answer)
        assert [each["seconds"] for each in tree["savings"]] == [pieces.seconds, bits.seconds]
        assert [run["sample_chunks"] for run in tree["stages"][0]["layers"]] == [chunks]


@pytest.mark.parametrize("cut", [False, True])
def test_sequence_parallelism_in_words(cut):
    answer = answer_of(WIDE.model_copy(update={"sequence": cut}), model=model_of("gpt-6.7b", "h100x8x1"))
    names = [each.name for each in changed(answer)]
    assert ("no sequence parallelism" in names, "sequence parallelism" in names) == (cut, not cut)
    other = next(each for each in changed(answer) if "sequence parallelism" in each.name)
    # Norms and sums of the residual stream are divided: that saves more than gathering inputs again takes.
    assert (other.seconds < answer.estimate.seconds) != cut
    assert ("tensor 8, sequence parallelism, 1 micro-batch" in summary(answer)[2]) == cut
    compression = savings(answer)[1]
    assert ("needs whole sequences" in compression.why, compression.seconds == 0) == (cut, cut)
    assert printed(answer)


def test_why_samples_are_in_one_piece():
    model = model_of("gpt-6.7b", "h100x8x1", overlap=False)
    assert "does not overlap computation" in savings(answer_of(WIDE, model=model))[0].why
    one = WIDE.model_copy(update={"micro_batches": 8})
    assert "has only one sample" in savings(answer_of(one, model=model_of("gpt-6.7b", "h100x8x1")))[0].why
    assert (
        savings(answer_of(INTERLEAVED)) == savings(answer_of(plan_of(stage(0, 2, (0, [(1, 2), (4, 1), (1, 2)]))))) == ()
    )


def test_compression_in_words():
    assert compression_text(Compression()) == ""
    assert compression_text(Compression(bits=4)) == "all-reduce in 4 bits"
    some = Compression(bits=8, tokens=0.3)
    assert compression_text(some) == "all-reduce of 30 % of the tokens in 8 bits, of the others in 4"
    assert compression_text(some.model_copy(update={"rest_bits": 0})).endswith("in 8 bits, of no others")


def test_a_general_plan_says_whether_it_can_be_trained():
    """Programs of stages hold whole states, so that ZeRO is priced alone."""
    whole = PIPELINE.model_copy(update={"space": "general", "zero": 0, "sequence": False})
    assert general_lines(whole) == general_lines(PIPELINE) == []
    (line,) = general_lines(whole.model_copy(update={"zero": 1}))
    assert line.startswith("not to be trained: ") and "use zero=0" in line
