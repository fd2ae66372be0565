"""The planner's traffic against what real steps send: compiled for eight CPU devices here, for GPUs where marked.

A GPU's compiler is reached without a GPU: `pytest -m deviceless`, with the extra `deviceless` installed.
"""

import json
import os

import jax
import pytest

from jhpt import cli
from jhpt.compiled import deviceless
from jhpt.compiled.comparison import compare
from jhpt.compiled.modelled import Clock
from jhpt.compiled.program import read_compiled
from jhpt.compiled.quiet import quiet
from jhpt.compiled.targets import chip_of, target_config
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import InputError, NotHere
from jhpt.core.load import load_config
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.measure.device import device_info
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.cost.traffic import traffic
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training import compile as training_compile
from jhpt.training.compile import compiled_step, lower_step
from jhpt.training.setup import design_step, fitting_tokenizer
from tests.covers import quick_and_exhaustive

CLUSTER = find_cluster("h100x8x1")
BLOCKS = 9
"""Too many to be unrolled on CPU: in one long program the compiler would gather once what is gathered twice."""

SHAPE = {
    "model.num_layers": BLOCKS,
    "model.d_model": 128,
    "model.num_heads": 8,
    "model.d_ff": 512,
    "model.max_length": 32,
    "data.sequence_length": 32,
    "data.batch_size": 32,
}

BY_HAND = {
    "data": {},
    "data, accumulated": dict(micro_batches=2),
    "ZeRO-1": dict(zero=1, micro_batches=2),
    "ZeRO-2": dict(zero=2, micro_batches=4),
    "ZeRO-3": dict(zero=3, micro_batches=2),
    "hybrid, ZeRO-1": dict(tensor=2, zero=1, zero_ranks=2),
    "hybrid, ZeRO-2": dict(zero=2, zero_ranks=4, micro_batches=2),
    "hybrid, ZeRO-3": dict(zero=3, zero_ranks=4, micro_batches=2),
    "tensor": dict(tensor=8),
    "tensor, recomputed": dict(tensor=4, recompute=True, micro_batches=2),
    "sequence": dict(tensor=4, sequence=True),
    "sequence, recomputed": dict(tensor=4, sequence=True, recompute=True),
    "1f1b": dict(pipe=2, tensor=2, micro_batches=4),
    "gpipe": dict(pipe=4, micro_batches=2, schedule="gpipe", zero=1),
    "1f1b, uneven": dict(pipe=3, micro_batches=4),
    "1f1b, ZeRO-2": dict(pipe=2, tensor=2, zero=2, micro_batches=4),
    "1f1b, ZeRO-3": dict(pipe=2, tensor=2, zero=3, micro_batches=2),
    "1f1b, hybrid, ZeRO-1": dict(pipe=2, zero=1, zero_ranks=2, micro_batches=4),
    "1f1b, hybrid, ZeRO-3": dict(pipe=2, zero=3, zero_ranks=2, micro_batches=2),
    "four stages": dict(pipe=4, micro_batches=2),
    "interleaved": dict(pipe=2, tensor=2, chunks=2, micro_batches=4),
    "gradients in 8 bits": dict(gradient_compression="quantize", micro_batches=2),
    "gradients in 8 bits, ZeRO-1": dict(gradient_compression="quantize", zero=1, tensor=2),
    "gradients by top-k": dict(gradient_compression="topk", pipe=2),
}


def by_hand(name: str, **shape):
    """(configuration, plan) of the section `parallel`, and of `memory.recompute`."""
    settings = {f"parallel.{key}": value for key, value in BY_HAND[name].items() if key != "recompute"}
    settings |= {"memory.recompute": "full"} if "recompute" in BY_HAND[name] else {}
    config = load_config("gpt-tiny", SHAPE | settings | shape)
    return config, plan_by_hand(config, 8)


def mixed(degrees, **settings):
    """(configuration, plan) of one stage whose layers differ."""
    runs = tuple(Run(layers=1, tensor=t) for t in degrees)
    stage = Stage(device=0, devices=8, chunks=(Chunk(first=0, runs=runs),))
    plan = Plan(model="any", cluster="any", batch=32, stages=(stage,), **{"micro_batches": 2} | settings)
    return load_config("gpt-tiny", SHAPE), plan


def check_traffic(stages, predicted, share: float = 0.04):
    """Bytes of every stage, in all and of each kind that carries more than 2 % of them."""
    for number, (stage, expected) in enumerate(zip(stages, predicted, strict=True)):
        total = sum(sent.bytes for sent in expected.values())
        assert (1 - share) * total <= stage.bytes <= (1 + share) * total, (number, stage.bytes, total)
        assert stage.guessed == 0
        for way in {*expected, *stage.traffic}:
            compiled = stage.traffic[way].bytes if way in stage.traffic else 0.0
            planned = expected[way].bytes if way in expected else 0.0
            if max(compiled, planned) > 0.02 * total:
                assert 0.9 * planned <= compiled <= 1.1 * planned, (number, way, compiled, planned)


def read_here(config, plan):
    """The step as this machine's CPU devices would run it."""
    design = design_step(config, plan, fitting_tokenizer(config), jax.devices(), device_info())
    compiled = lower_step(design).compile()
    return read_compiled(compiled, dict(design.layout.device_mesh.mesh.shape), Clock(CLUSTER))


FEW = ("ZeRO-1", "ZeRO-2", "sequence, recomputed", "1f1b, ZeRO-3", "four stages")
"""Between them: every kind of sum, gather and exchange but the compressed ones, in loops and in a pipeline."""


def test_all_cases_are_known():
    assert set(FEW) | set(COMPILED) <= set(BY_HAND)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.exhaustive) for name in BY_HAND]
)
def test_steps_send_what_the_planner_says(name):
    # Norms and biases, which are left out, weigh four times as much beside codes.
    config, plan = by_hand(name, **({"model.d_model": 512} if "gradients" in name else {}))
    profile = analytic_profile(config, CLUSTER.nodes[0].device, "float32")
    reading = read_here(config, plan)
    check_traffic(reading.stages, traffic(plan, profile, overlap=False))
    check_rows_and_json(reading, compare(reading, plan, evaluate(plan, profile, CLUSTER), profile))


def check_rows_and_json(reading, both):
    """The comparison, written down and read."""
    tree = json.loads(json.dumps(both.to_json()))
    assert tree["memory"]["device"] == reading.memory.device and len(tree["stages"]) == len(reading.stages)
    for stage in tree["stages"]:
        assert stage["wire_bytes"] == pytest.approx(sum(one["bytes"] for one in stage["collectives"]))
        assert {"kind", "axis", "count", "planned_bytes", "hidden_seconds"} <= set(stage["collectives"][0])


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        pytest.param((1, *(2,) * 5, *(1,) * 5), dict(zero=1), marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 2, *(8,) * 4, 2, 2, 2, 8), dict(zero=3), marks=pytest.mark.exhaustive),
        pytest.param((8, 4, 4, *(1,) * 7, 2), {}, marks=pytest.mark.exhaustive),
        pytest.param((4, 4, 4, *(1,) * 4, *(2,) * 4), dict(sequence=True), marks=pytest.mark.exhaustive),
    ],
)
def test_steps_of_several_degrees_send_what_the_planner_says(degrees, settings):
    config, plan = mixed(degrees, **settings)
    profile = analytic_profile(config, CLUSTER.nodes[0].device, "float32")
    check_traffic(read_here(config, plan).stages, traffic(plan, profile, overlap=False))


# What needs no plugin.


def test_chips_by_the_drivers_names():
    for cluster, capability in (
        ("h100x8x1", 9),
        ("h200x8x1", 9),
        ("h100pciex8x1", 9),
        ("b200x8x1", 10),
        ("a100x8x1", 8),
    ):
        device = find_cluster(cluster).nodes[0].device
        assert chip_of(device).capability == (capability, 0)
        config = target_config(device)
        assert f'"{device.name}"' in config and config.count("{") == config.count("}")
        assert ("ACCELERATED" in config) == (capability >= 9)


@pytest.mark.parametrize(("cluster", "word"), [("v100x8x1", "bfloat16"), ("v100pciex8x1", "bfloat16")])
def test_chips_that_cannot_be_compiled_for(cluster, word):
    with pytest.raises(InputError, match=word):
        deviceless.compile_only_devices(find_cluster(cluster))


def test_a_missing_plugin_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(deviceless, "PLUGINS", ("jax_plugins.none",))
    with pytest.raises(NotHere, match=r"jhpt\[deviceless\]") as caught:
        deviceless.compile_only_devices(CLUSTER)
    assert caught.value.status == 3


def test_plans_that_are_no_program_are_refused():
    config, plan = by_hand("data")
    with pytest.raises(InputError, match="space general"):
        compiled_step(config, plan.model_copy(update={"space": "general"}), CLUSTER)
    with pytest.raises(InputError, match="needs 8 devices, h100x4x1 has 4"):
        compiled_step(config, plan, find_cluster("h100x4x1"))
    with pytest.raises(InputError, match="11 layers with embedding and head, gpt-tiny has 6"):
        compiled_step(load_config("gpt-tiny"), plan, CLUSTER)
    with pytest.raises(InputError, match="schedule=interleaved with 1 chunk"):
        compiled_step(config, plan.model_copy(update={"schedule": "interleaved"}), CLUSTER)


def test_quiet_keeps_to_itself_what_libraries_write_unless_something_fails(capfd):

    with quiet():
        os.write(2, b"no driver\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(RuntimeError), quiet():
        os.write(2, b"the cause\n")
        raise RuntimeError
    assert capfd.readouterr().err == "the cause\n"


# What a GPU's compiler makes of steps.

LARGER = {
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.max_length": 256,
    "data.sequence_length": 256,
    "data.batch_size": 64,
    "model.vocab_size": 4096,
}

COMPILED = (
    "gradients in 8 bits",
    "gradients in 8 bits, ZeRO-1",
    "data",
    "ZeRO-1",
    "ZeRO-3",
    "tensor",
    "sequence",
    "1f1b",
)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", quick_and_exhaustive(COMPILED, ["gradients in 8 bits, ZeRO-1", "ZeRO-3", "1f1b"]))
def test_steps_compiled_for_gpus_send_and_need_what_the_planner_says(name):
    config, plan = by_hand(name, **LARGER)
    profile = analytic_profile(config, CLUSTER.nodes[0].device)
    reading = compiled_step(config, plan, CLUSTER)
    both = compare(reading, plan, evaluate(plan, profile, CLUSTER), profile)
    check_traffic(reading.stages, both.predicted)
    assert 0.3 <= both.memory_ratio <= 2  # of a small model most is what an estimate leaves out
    # Parameters and two moments in float32, of the fullest stage.
    assert reading.memory.arguments == pytest.approx(both.fullest.bytes["optimizer"], rel=0.15)
    assert reading.memory.host == 0
    work = sum(stage.flops for stage in reading.stages) * plan.stages[0].devices
    tokens = plan.batch * config.data.sequence_length
    assert work >= 6 * 0.9 * tokens * sum(profile.kinds["block"].parameters for _ in range(BLOCKS))


@pytest.mark.deviceless
@pytest.mark.parametrize("cluster", quick_and_exhaustive(["b200x8x1", "a100x8x1", "h100x8x2"], ["b200x8x1"]))
def test_other_devices(cluster):
    config, plan = by_hand("data", **LARGER)
    reading = compiled_step(config, plan, find_cluster(cluster))
    assert reading.memory.device > 0 and reading.stages[0].flops > 0


@pytest.mark.deviceless
def test_the_command_prints_and_writes_both(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readings = []

    def once(*arguments):
        readings.append(readings[0] if readings else compiled_step(*arguments))
        return readings[-1]

    monkeypatch.setattr(training_compile, "compiled_step", once)
    arguments = ["plan", "gpt-tiny", "--cluster", "h100x8x1", "--batch", "64", "--compile", "--model.num_heads", "8"]
    assert cli.main(arguments) == 0
    out, error = capfd.readouterr()
    assert error == ""
    for words in ("planned", "temporaries", "MB compiled", "hidden behind matrix products"):
        assert words in out
    assert cli.main([*arguments, "--json"]) == 0
    tree = json.loads(capfd.readouterr().out)
    assert tree["compiled"]["memory"]["device"] > 0
    assert len(tree["compiled"]["stages"]) == len(tree["plan"]["stages"])
