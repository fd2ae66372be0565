"""Which plan a run executes, and which it refuses."""

import fcntl
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import jhpt
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.errors import InputError
from jhpt.core.load import load_config, run_config
from jhpt.core.plan import Chunk, Plan, Run
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.measure.hosts import grouped
from jhpt.planner.api import RESERVE
from jhpt.planner.cost.estimate import evaluate as evaluate_plan
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve
from jhpt.training import auto, planning, programs, run
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.compile import compile_step
from jhpt.training.console import Display, plan_text
from jhpt.training.device_step import abstract_state
from jhpt.training.loop import evaluate
from jhpt.training.metrics import read_metrics
from jhpt.training.planning import Past, candidates, differences
from jhpt.training.room import Room
from jhpt.training.run_dir import write_config, write_plan
from jhpt.training.sampling import sample
from jhpt.training.setup import prepare
from jhpt.training.step import RandomStream, random_key
from tests.sharding.plans import piped
from tests.sharding.stages.plans import general

QUICK = {"train.steps": 2, "checkpoint.every": 100, "evaluation.every": 100}
SHORT = QUICK | {
    "model.num_layers": 1,
    "train.steps": 1,
    "data.validation_fraction": 0.0,
    "optimizer.schedule": "constant",  # a program does not depend on the number of steps
}
"""Of runs that are trained for what they write."""


def here(devices: int = 8) -> Cluster:
    device = Device(name="cpu", peak_flops={"float32": 1e11}, memory=4e9, memory_bandwidth=1e10)
    link = Link(bandwidth=1e9, latency=1e-5)
    node = Node(device=device, devices=devices, inside=link, host=link, host_memory=1e10)
    return Cluster(name="here", nodes=(node,), network=link, overlap=False)


@pytest.fixture
def measured(monkeypatch):
    """Planning without measuring; counts how often it is asked."""
    measured_for = []

    def profile(config, device_mesh):
        measured_for.append(config.name)
        return analytic_profile(config, here().nodes[0].device, "float32"), None, False

    monkeypatch.setattr(auto, "cached_profile", profile)
    monkeypatch.setattr(auto, "cached_cluster", lambda rounds: (here(), None, False))
    return measured_for


def decided(source, out, plan=None, overrides=None):
    """What `jhpt.train` decides, says and writes before it compiles."""
    decision = run._resolved(load_config(run_config(source, out), overrides), plan, out, Display(1))
    print(*decision.notes, sep="\n")
    out.mkdir(exist_ok=True)
    write_config(out, decision.setup.config)
    write_plan(out, decision.setup.plan)


def trained(source, out, plan=None, overrides=None):
    """The run itself, which goes on where it stopped."""
    jhpt.train(source, out=out, plan=plan, overrides=overrides)


@pytest.fixture(params=[decided, pytest.param(trained, marks=pytest.mark.exhaustive)], ids=lambda way: way.__name__)
def go(request):
    """Decides as a run does; in the exhaustive suite also trains."""
    return request.param


@pytest.fixture
def said(capsys):
    """Lines with these words among all that was printed since the last time."""
    return lambda words: [line for line in capsys.readouterr().out.splitlines() if words in line]


def test_auto_plans_once_and_keeps_the_plan(tiny, tmp_path, measured, go):
    config, out = tiny(**QUICK, parallel="auto"), tmp_path / "run"
    go(config, out)
    plan = Plan.load(out / "plan.json")
    assert (plan.devices, plan.device, plan.batch) == (8, "cpu", 16) and plan.seconds
    assert plan.origin == "auto" and len(measured) == 1
    go(config, out, overrides={"train.steps": 3})
    assert Plan.load(out / "plan.json") == plan and len(measured) == 1


def test_a_run_trains_with_the_plan_of_auto_and_resumes_with_it(tiny, tmp_path, measured, monkeypatch):
    monkeypatch.setattr(auto, "cached_cluster", lambda rounds: (here(1), None, False))
    config, out = tiny(**SHORT, parallel="auto"), tmp_path / "run"
    result = jhpt.train(config, out=out)
    plan = Plan.load(out / "plan.json")
    assert (plan.origin, plan.devices) == ("auto", 1) and result.predicted_seconds == plan.seconds > 0
    again = jhpt.train(config, out=out, overrides={"train.steps": 2})
    assert again.step == 2 and set(again.losses) == {1, 2} and len(measured) == 1
    assert Plan.load(out / "plan.json") == plan


@pytest.mark.parametrize(("bandwidth", "fewer"), [(1e9, False), (1e4, True)])
def test_a_note_says_that_fewer_processes_would_be_faster(tiny, tmp_path, measured, monkeypatch, bandwidth, fewer):
    """Every process has to take part, even where the link between them costs more than they gain."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    cluster = here(8)
    slow = Link(bandwidth=bandwidth, latency=1e-5)
    node = cluster.nodes[0].model_copy(update={"inside": slow})
    profile, said = analytic_profile(tiny(**QUICK), node.device, "float32"), []
    cluster = cluster.model_copy(update={"nodes": (node,), "network": slow})
    config = tiny(**QUICK, parallel="auto")
    (found,) = auto._solved(config, profile, cluster, 1, {}, said.append)
    assert found.plan.devices == 8 and len(said) == fewer
    assert not fewer or (said[0].startswith("note: 1 of the 8 devices") and "start fewer processes" in said[0])


def test_a_program_for_each_stage_is_tried_where_one_stage_is_predicted_to_be_faster(tiny):
    """The search for it does not stop at the plan of one stage, which is that of one program."""
    cluster, config = here(4), tiny(**QUICK, parallel="auto", **{"parallel.space": "both", "parallel.trials": 4})
    profile = analytic_profile(config, cluster.nodes[0].device, "float32")
    found = [one.plan for one in auto._solved(config, profile, cluster, 1, {}, lambda line: None)]
    assert len(found[0].stages) == 1 and found[0].space == "spmd"
    assert any(len(plan.stages) > 1 for plan in found if plan.space == "general")


def test_a_given_plan_is_executed_and_reported(tiny, tmp_path, said):
    config, out = tiny(**SHORT | {"train.steps": 3}), tmp_path / "run"
    requested = request(config.data.batch_size, 2, schedules=("eager-1f1b",))
    profile = analytic_profile(config, here().nodes[0].device, "float32")
    plan = solve(profile, here(2), requested).plan
    plan.save(tmp_path / "plan.json")
    result = jhpt.train(config, out=out, plan=tmp_path / "plan.json")
    saved = Plan.load(out / "plan.json")
    assert saved == plan.model_copy(update={"origin": "given"}) and saved.devices == 2
    assert result.step_seconds and result.predicted_seconds == plan.seconds
    log = log_of(out)
    assert "step time: predicted" in log and "predicted / measured" in log
    assert plan_text(plan) in log and "compiling gpt-tiny for 2 x cpu" in "".join(said("compiling"))
    again = jhpt.train(out=out, overrides={"train.steps": 4})
    assert said("resuming with the plan that this run was given")
    assert again.step == 4 and set(again.losses) == {1, 2, 3, 4} and Plan.load(out / "plan.json") == saved


@pytest.mark.exhaustive
def test_losses_under_a_given_plan_are_those_of_one_device(tiny, tmp_path):
    config = tiny(**QUICK | {"train.steps": 4})
    profile = analytic_profile(config, here().nodes[0].device, "float32")
    plan = solve(profile, here(), request(config.data.batch_size, 4, schedules=("eager-1f1b",))).plan
    result = jhpt.train(config, out=tmp_path / "run", plan=plan)
    same = jhpt.train(tiny(**QUICK | {"train.steps": 4, "parallel.data": 1}), out=tmp_path / "alone")
    assert result.losses == pytest.approx(same.losses, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({}, []),
        ({"memory.offload": "both", "memory.recompute": "qkv"}, []),
        ({"memory.offload": "off", "memory.recompute": "full"}, ["memory.offload=off", "memory.recompute=full"]),
        (
            {"memory.offload": "optimizer", "memory.recompute": "qkv,mlp_out"},
            ["memory.offload=optimizer", "memory.recompute=qkv,mlp_out"],
        ),
        ({"memory.recompute": "qkv", "memory.recompute_blocks": 3}, ["memory.recompute_blocks=3"]),
    ],
)
def test_what_a_given_plan_does_not_follow_is_said(settings, unread, tmp_path):
    """In one line; the plan is the more special."""
    changes = {"memory.offload": "both", "memory.recompute": "qkv", "data.batch_size": 8}
    plan, messages = plan_by_hand(load_config("gpt-tiny", changes), 1), []
    nothing = Past(run_dir=tmp_path, plan=None, parallel=None, memory=None)
    candidates(load_config("gpt-tiny", {"data.batch_size": 8} | settings), plan, nothing, messages.append)
    assert len(messages) == bool(unread) and all(one in messages[0] for one in unread)


def test_a_plan_for_something_else_is_refused_with_the_difference(tiny, tmp_path):
    config = tiny(**QUICK)
    plan = plan_by_hand(config, 8)
    assert differences(plan, config) == []
    strange = {
        "the plan is for 8 x NVIDIA H100": plan.model_copy(update={"device": "NVIDIA H100"}),
        "a batch of 32, data.batch_size is 16": plan.model_copy(update={"batch": 32}),
        "6 layers with embedding and head, gpt-tiny has 4": plan_by_hand(tiny(**{"model.num_layers": 4}), 8),
        "the plan uses 16 devices, and there are 8 here": plan_by_hand(tiny(**{"parallel.data": 16}), 16),
    }
    for words, other in strange.items():
        assert any(words in line for line in differences(other, config)), words
        with pytest.raises(InputError, match="the plan does not fit"):
            jhpt.train(config, plan=other, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    few = tiny(**{"model.num_heads": 2})
    wide = plan_by_hand(tiny(**{"parallel.tensor": 8}), 8)
    assert any("tensor degree 8, which does not divide 2 heads" in line for line in differences(wide, few))


def test_what_programs_of_stages_cannot_do_is_refused(tiny, tmp_path):
    plan = plan_by_hand(tiny(), 8).model_copy(update={"space": "general"})
    refused = {
        "zero=1 and sequence=false; use zero=0": (plan.model_copy(update={"zero": 1}), {}),
        "optimizer.clip=layer .*use optimizer.clip=global": (plan, {"optimizer.clip": "layer"}),
        "degrees 2 and 3 cannot share a device mesh": (general([2, 2], [6, 2], [2, 3, 1, 1]), {}),
        "guards.replicas_every .*leave it out": (plan, {"guards.replicas_every": 2}),
    }
    for words, (other, settings) in refused.items():
        with pytest.raises(InputError, match=words):
            jhpt.train(tiny(**QUICK | settings), plan=other, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_cluster_of_another_size_is_refused(tiny, tmp_path, measured):
    config = tiny(**QUICK, **{"parallel.auto": True, "parallel.cluster": "h100x8x2"})
    with pytest.raises(InputError, match="has 16 devices, and there are 8 here"):
        jhpt.train(config, out=tmp_path / "run")
    assert jax.device_count() == 8 and not (tmp_path / "run").exists()


# What is no plan, though it fits layers, batch and devices.

FOUR_BLOCKS = {"model.num_layers": 4}


PIPED = piped([3, 3], 2, batch=16, micro_batches=2)
PARTS = [2, 1, 1, 2]
"""Layers of two chunks on each of two stages."""


def with_last(plan: Plan, first: int, layers: int) -> Plan:
    """The last stage holds one chunk, of so many layers."""
    chunk = Chunk(first=first, runs=(Run(layers=layers),))
    last = plan.stages[-1].model_copy(update={"chunks": (chunk,)})
    return plan.model_copy(update={"stages": (*plan.stages[:-1], last)})


def on_three() -> Plan:
    plan = piped([6], 1, tensor=2, batch=16)
    return plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"devices": 3}),)})


NO_PLANS = {
    "a gap": (with_last(PIPED, 4, 2), "cover layers 0 to 5 in order"),
    "stages in reverse": (PIPED.model_copy(update={"stages": PIPED.stages[::-1]}), "cover layers 0 to 5 in order"),
    "gpipe with chunks": (piped(PARTS, 2, batch=16, micro_batches=2, schedule="gpipe"), "schedule=gpipe with 2"),
    "1f1b with chunks": (piped(PARTS, 2, batch=16, micro_batches=2), "schedule=1f1b with 2"),
    "interleaved, odd": (
        piped(PARTS, 2, batch=16, schedule="interleaved"),
        "micro_batches divisible by stages=2, found 1",
    ),
    "different chunks": (
        with_last(piped(PARTS, 2, batch=16, micro_batches=2, schedule="interleaved"), 2, 4),
        "the same number of chunks",
    ),
    "one stage of chunks": (piped([3, 3], 1, batch=16), "join them into one chunk"),
    "batch and micro-batches": (piped([6], 1, batch=16, micro_batches=3), "batch=16 is not divisible by micro_batches"),
    "batch and data": (piped([6], 1, data=3, batch=16), "a micro-batch of 16 is not divisible by data=3"),
    "tensor and devices": (on_three(), "tensor=2 does not divide the 3 devices"),
    "prefetch": (piped([6], 1, data=2, batch=16, zero=3, prefetch=1000), "prefetch=1000"),
}


@pytest.mark.parametrize("name", NO_PLANS)
def test_what_is_no_plan_is_refused(tiny, tmp_path, name):
    plan, words = NO_PLANS[name]
    with pytest.raises(InputError, match=f"the plan does not fit:(.|\\n)*{words}"):
        jhpt.train(tiny(**QUICK, **FOUR_BLOCKS), plan=plan, out=tmp_path / "runs" / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_padded_vocabulary_must_divide(tiny):
    """BERT-base's, 30522 rows padded to 30592, at degree 3."""
    shape = {"model.num_heads": 6, "model.d_model": 96, "model.d_ff": 96, "model.vocab_size": 30522}
    unlike = differences(piped([4], 1, tensor=3, batch=16), tiny("bert-tiny", **shape))
    assert unlike == ["the plan has tensor degree 3, which does not divide 30592 rows of the padded vocabulary"]


# From one call to the next.


def log_of(folder) -> str:
    return (folder / "train.log").read_text()


def test_a_run_resumes_with_the_plan_it_was_given(tiny, tmp_path, said, go):
    config, out = tiny(**QUICK), tmp_path / "run"
    plan = piped([2, 2], 2, data=2, batch=16, micro_batches=4)
    go(config, out, plan)
    saved = Plan.load(out / "plan.json")
    assert saved == plan.model_copy(update={"origin": "given"})
    said("")
    for steps, source in ((3, None), (4, config)):
        go(source, out, overrides={"train.steps": steps})
        assert Plan.load(out / "plan.json") == saved
        lines = "".join(said("the plan"))
        assert "resuming with the plan that this run was given" in lines and "has changed" not in lines
    # Another section `parallel` is another wish; so is another plan.
    go(None, out, overrides={"train.steps": 5, "parallel.data": 4})
    assert Plan.load(out / "plan.json").devices == 4
    assert said("the plan has changed") == [
        "note: the plan has changed: data 4 x tensor 1, zero 0, 1 micro-batch; "
        "before pipe 2 x data 2 x tensor 1, 1f1b, zero 0, 4 micro-batches"
    ]
    go(None, out, plan.model_copy(update={"prefetch": 2}), {"train.steps": 6})
    assert len(said("the plan has changed")) == 1
    go(None, out, plan, {"train.steps": 7})
    (line,) = said("the plan has changed")
    assert "in the placement or the strategy of layers" in line


def test_a_run_whose_given_plan_does_not_fit_any_more_is_refused(tiny, tmp_path, go):
    config, out = tiny(**QUICK), tmp_path / "run"
    go(config, out, piped([4], 1, data=2, batch=16))
    tree = json.loads((out / "plan.json").read_text())
    (out / "plan.json").write_text(json.dumps(tree | {"device": "NVIDIA H100"}))
    with pytest.raises(InputError, match=r"does not fit any more(.|\n)*NVIDIA H100(.|\n)*--plan"):
        jhpt.train(out=out, overrides={"train.steps": 3})


def test_a_plan_by_hand_is_no_plan_for_auto(tiny, tmp_path, measured, said, go):
    config, out = tiny(**QUICK, **{"parallel.data": 2}), tmp_path / "run"
    go(config, out)
    go(None, out, overrides={"train.steps": 3, "parallel.auto": True})
    assert len(measured) == 1 and Plan.load(out / "plan.json").origin == "auto"
    assert said("the plan has changed")


@pytest.mark.parametrize("content", ["{", "", '{"model": "x"}', "[]"])
def test_a_damaged_plan_is_made_anew(tiny, tmp_path, measured, monkeypatch, said, go, content):
    monkeypatch.setattr(auto, "cached_cluster", lambda rounds: (here(1), None, False))
    config, out = tiny(**QUICK, parallel="auto"), tmp_path / "run"
    go(config, out)
    plan = Plan.load(out / "plan.json")
    (out / "plan.json").write_text(content)
    go(None, out, overrides={"train.steps": 3})
    (line,) = said("it is ignored")
    assert str(out / "plan.json") in line
    assert Plan.load(out / "plan.json") == plan and len(measured) == 2


# Before anything is measured.


@pytest.mark.parametrize(
    "wrong", [{"data.path": "no.txt"}, {"data.tokenizer": "no.json"}, {"data.validation_path": "n"}]
)
def test_data_is_missed_before_measuring(tiny, tmp_path, measured, wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=name):
        jhpt.train(tiny(**QUICK, parallel="auto", **wrong), out=tmp_path / "runs" / "run")
    assert not measured and list(tmp_path.iterdir()) == []


def test_a_locked_run_is_refused_before_measuring(tiny, tmp_path, measured):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is training"):
            jhpt.train(tiny(**QUICK, parallel="auto"), out=tmp_path)
    assert not measured


@pytest.mark.parametrize(
    ("kind", "cluster", "fits"),
    [
        ("NVIDIA H100 80GB HBM3", "v100x8x1", False),
        ("NVIDIA H100 80GB HBM3", "h100pciex8x1", False),
        ("NVIDIA A100-SXM4-40GB", "a100x8x1", False),
        ("NVIDIA H100 80GB HBM3", "h100x8x1", True),
        ("NVIDIA A100-PCIE-40GB", "a100pciex8x1", True),
        ("cpu", "h100x8x1", True),  # to try it out
    ],
)
def test_a_cluster_of_other_devices_is_refused(tiny, tmp_path, measured, monkeypatch, kind, cluster, fits):
    monkeypatch.setattr(auto, "device_info", lambda: replace(device_info(), kind=kind))
    config = tiny(**QUICK, **{"parallel.auto": True, "parallel.cluster": cluster})
    if fits:
        assert auto.named_cluster(config).num_devices == 8
        return
    with pytest.raises(InputError, match=f"parallel.cluster={cluster} is of .*, and this machine has 8 x {kind}"):
        jhpt.train(config, out=tmp_path / "run")
    assert not measured and not (tmp_path / "run").exists()


# Remedies that have an effect.


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"device": 1 << 30}, "2.0 GiB on each device, which has 1.0 GiB"),
        (
            {"one_memory": True},
            "on each of 8 devices: 16.0 GiB in all of this host's memory, of which 4.0 GiB is avail",
        ),
    ],
)
def test_a_step_that_is_too_large(limits, words):
    room = Room(**{"device": None, "host": 4 << 30, "devices": 8, "one_memory": False} | limits)
    with pytest.raises(InputError, match=words):
        programs.check_memory(room, "a step", {"state": 2 << 30})
    programs.check_memory(room, "a step", {"state": 1 << 29})


def test_all_that_may_not_fit_is_compiled_before_the_first_step(tiny, monkeypatch):
    """Where a device's memory is known: evaluating and saving, too, are refused at the start or run later."""
    setup = prepare(tiny(**{"parallel.pipe": 2, "parallel.data": 1}))
    checked, known = [], replace(setup, device=replace(setup.device, memory=1 << 40))
    monkeypatch.setattr(programs, "check_memory", lambda room, what, memory, host: checked.append((what, memory)))
    step = compile_step(known)
    assert [what for what, _ in checked] == ["a step", "evaluating", "saving a checkpoint"]
    assert checked[2][1]["temporary"] >= checked[2][1]["state"] / 2, "the copy that is saved counts"
    state = step.init()
    assert np.isfinite(evaluate(known, step.evaluate, state.params).loss)


def test_a_sequence_that_is_cut_unevenly(tiny):
    config = tiny(**{"data.sequence_length": 31})
    plan = plan_by_hand(tiny(**{"parallel.tensor": 2, "parallel.sequence": True}), 8)
    with pytest.raises(
        InputError, match=r"parallel.sequence=true cuts data.sequence_length=31 .* leave parallel.sequence out"
    ):
        prepare(config, plan)
    with pytest.raises(InputError, match=r"sequence=true cuts .* leave sequence out"):
        prepare(config, plan.model_copy(update={"origin": "given"}))


def test_the_sample_needs_the_parameters_alone(tiny, tmp_path, monkeypatch):
    """The whole state is converted for the one checkpoint, whose parameters the sample is drawn with."""
    converted, saved = [], []

    def counted(setup):
        step = compile_step(setup)
        saved = lambda state: converted.append(1) or step.conversion.saved(state)  # noqa: E731
        return replace(step, conversion=replace(step.conversion, saved=saved))

    save = Checkpoints.save
    monkeypatch.setattr(run, "compile_step", counted)
    monkeypatch.setattr(Checkpoints, "save", lambda *arguments: saved.append(1) or save(*arguments))
    piped_in_two = {"model.num_layers": 2, "parallel.pipe": 2, "parallel.data": 1}
    config = tiny(**SHORT | piped_in_two, **{"evaluation.sample_tokens": 4})
    result = jhpt.train(config, out=tmp_path / "run")
    assert len(converted) == len(saved) == 1
    setup = prepare(load_config(config, {"parallel.pipe": 1}))
    with Checkpoints(tmp_path / "run" / "checkpoints", config.checkpoint) as checkpoints:
        params = checkpoints.restore(1, abstract_state(setup)).params
    key, prompt = random_key(config.seed, RandomStream.SAMPLE), setup.tokenizer.encode(config.evaluation.prompt)
    assert result.sample == setup.tokenizer.decode(sample(setup.model, params, prompt, 4, key).tolist())


def test_auto_plans_with_blocks_on_the_host(tiny, tmp_path, measured, go):
    """Where the configuration says that they live there."""
    config, out = tiny(**QUICK, parallel="auto", **{"memory.offload": "both"}), tmp_path / "run"
    go(config, out)
    plan = Plan.load(out / "plan.json")
    assert plan.origin == "auto" and plan.offload is not None and plan.offload.kind == "both"


def test_a_plan_by_hand_that_does_not_fit_is_made_to(monkeypatch):
    """On a device that the catalogue knows; on others, and where the section memory decides, it stays."""
    monkeypatch.setattr("jhpt.training.runtime.host_memory", lambda: 200 << 30)
    config = load_config("gpt-6.7b", {"data.batch_size": 8, "memory.host_budget_bytes": "200GiB"})
    plan, messages = plan_by_hand(config, 1), list[str]()
    info = DeviceInfo(
        kind="NVIDIA H100 80GB HBM3", platform="gpu", memory=70 << 30, peak_bf16_flops=None, capability=9.0
    )
    changed = planning.within_memory(plan, config, info, messages.append)
    assert changed.offload is not None and changed.stages == plan.stages and "70.0 GiB" in messages[0]
    assert planning.within_memory(plan, config, replace(info, kind="abacus"), messages.append) is plan
    closed = load_config(config, {"memory.offload": "off", "memory.recompute": "none"})
    assert planning.within_memory(plan, closed, info, messages.append) is plan
    many = plan_by_hand(load_config(config, {"data.batch_size": 32, "parallel.data": 16}), 16)
    assert planning.within_memory(many, config, info, messages.append) is many, "more than a node of the catalogue has"
    assert len(messages) == 1
    few = {"optimizer.weights": "bfloat16_stochastic", "optimizer.moments": "int8"}
    shorter = planning.within_memory(plan, load_config(config, few), info, lambda line: None)
    assert shorter == plan.model_copy(update={"recompute": True}), "state in few bits fits where float32 does not"
    small = load_config(config, {"memory.host_budget_bytes": "20GiB"})
    assert planning.within_memory(plan, small, info, messages.append) is plan, "no room on the host"
    for identities, fits in (([(7, 1)] * 16, True), ([(7, host) for host in range(16)], False)):
        with monkeypatch.context() as patch:
            patch.setattr(planning, "hosts", lambda identities=identities: grouped(identities, 0))
            other = planning.within_memory(plan, config, info, lambda line: None)
        assert (other is not plan) == fits, "16 processes of a host share its memory; 16 hosts divide it"
    monkeypatch.setattr("jhpt.training.runtime.host_memory", lambda: 20 << 30)
    assert planning.within_memory(plan, config, info, messages.append) is plan, (
        "nor where the host has less than is said"
    )


def test_auto_lets_activations_wait_on_the_host(tiny, tmp_path, measured, monkeypatch, go):
    """On a device with less memory than any plan takes that does not."""
    changes = {"model.num_layers": 4, "data.batch_size": 4}
    config = tiny(**QUICK, **changes, parallel="auto", **{"memory.host_budget_bytes": "1GiB", "memory.offload": "off"})
    profile = analytic_profile(config, here().nodes[0].device, "float32")
    bare = piped([6], 1, batch=4, micro_batches=4, recompute=True)
    inputs = 4 * profile.kinds["embedding"].boundary_bytes
    memory = evaluate_plan(bare, profile, here(1)).stages[0].total_bytes - inputs / 2
    device = here(1).nodes[0].device.model_copy(update={"memory": memory / (1 - RESERVE)})
    small = here(1).model_copy(update={"nodes": (here(1).nodes[0].model_copy(update={"device": device}),)})
    monkeypatch.setattr(auto, "cached_cluster", lambda rounds: (small, None, False))
    go(config, tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.origin == "auto" and plan.saved is not None and "residual_in" in plan.saved.host
    with pytest.raises(InputError, match="fits no plan"):
        jhpt.train(load_config(config, {"memory.host_budget_bytes": "auto"}), out=tmp_path / "none")
    with pytest.raises(InputError, match=r"residual_in.*need .* MiB on each host.*host_budget_bytes"):
        jhpt.train(load_config(config, {"memory.host_budget_bytes": "1KiB"}), out=tmp_path / "less", plan=plan)
    assert not (tmp_path / "less").exists() and not (tmp_path / "none").exists()
    if go is trained:  # it learns what others do
        jhpt.train(tiny(**QUICK, **changes, **{"parallel.data": 1}), out=tmp_path / "alone")
        losses, alone = (
            [record["loss"] for record in read_metrics(tmp_path / name) if "loss" in record]
            for name in ("run", "alone")
        )
        assert losses == pytest.approx(alone, rel=1e-4) and len(losses) == 2
