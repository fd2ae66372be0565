"""What a framework's program adds to a plan's seconds, reckoned by hand on a toy model."""

import pytest

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.framework import IDEAL, Framework
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.cost.estimate import evaluate

LINK = Link(bandwidth=1.0, latency=0.0)
DEVICE = Device(name="toy", peak_flops={"bfloat16": 1.0}, memory=1e9, memory_bandwidth=2.0)
KIND = LayerKind(
    parameters=8,
    boundary_bytes=3.0,
    activation_bytes=0.0,
    timings=(Timing(batches=(1.0, 2.0), forward=(100.0, 200.0), backward=(200.0, 400.0)),),
)


def seconds(framework, *, devices=2, stages=1, micro_batches=1, zero=0, link=LINK):
    """A step of two layers, one sample a data rank and micro-batch, in programs of their own for each stage."""
    profile = ModelProfile(
        name="toy", device="toy", source="by hand", kinds={"layer": KIND}, layers=("layer",) * 2, framework=framework
    )
    node = Node(device=DEVICE, devices=devices, inside=link, host=link, host_memory=1.0)
    cluster = Cluster(name="toy", nodes=(node,), network=link)
    each, layers = devices // stages, 2 // stages
    parts = tuple(
        Stage(
            device=s * each,
            devices=each,
            chunks=(Chunk(first=s * layers, runs=(Run(layers=layers, tensor=1),)),),
        )
        for s in range(stages)
    )
    plan = Plan(
        model="toy",
        cluster="toy",
        space="general",
        batch=each * micro_batches,
        micro_batches=micro_batches,
        stages=parts,
        zero=zero,
    )
    return evaluate(plan, profile, cluster).seconds


BASE = 2 * 300.0


def test_ideal_programs_hide_what_can_be_hidden():
    # Gradients of 8 numbers of 2 bytes over two ranks: 16 s beside the other layer's backward pass; the last one's not.
    assert seconds(IDEAL) == BASE + 16
    # ZeRO-3: all-gathers of 8 s and 16 s hide behind 100 and 200 s.
    assert seconds(IDEAL, zero=3) == BASE


def test_a_share_of_what_is_hidden_adds():
    assert seconds(Framework(exposed_gathers=0.25), zero=3) == BASE + 2 * 0.25 * (8 + 16)
    # Half of both reductions adds to the step, and the other half of the last one still follows it.
    assert seconds(Framework(exposed_gradients=0.5)) == BASE + 0.5 * 2 * 16 + 0.5 * 16
    assert seconds(Framework(exposed_gradients=1.0)) == seconds(Framework(exposed_gradients=1.5)) == BASE + 2 * 16


def test_gradients_are_added_up_over_micro_batches():
    # 8 parameters of 10 bytes at 2 bytes/s: 40 s for each layer and micro-batch.
    adding = Framework(accumulation=10.0)
    assert seconds(adding) == seconds(IDEAL)
    assert seconds(adding, micro_batches=3) == seconds(IDEAL, micro_batches=3) + 3 * 2 * 40
    # ZeRO-3 adds up a rank's share only.
    assert seconds(adding, micro_batches=3, zero=3) == seconds(IDEAL, micro_batches=3, zero=3) + 3 * 2 * 20


def test_sums_may_travel_in_float32():
    wide = Framework(gradient_bytes=4.0)
    assert seconds(wide) == seconds(IDEAL)
    assert seconds(wide, micro_batches=2) == seconds(IDEAL, micro_batches=2) + 16


def test_shares_may_be_all_reduced():
    # ZeRO-1 scatters 16 bytes in 8 s, and gathers weights beside the next forward pass.
    assert seconds(IDEAL, zero=1) == BASE + 8
    assert seconds(Framework(all_reduces_shares=True), zero=1) == BASE + 16


def test_weights_may_be_broadcast_rank_by_rank():
    # Two broadcasts over a ring of two, each of which takes 50 s until its first byte arrives.
    late = LINK.model_copy(update={"latency": 50.0})
    gathers, broadcasts = (
        seconds(Framework(broadcasts_shares=turns, exposed_gradients=1.0), zero=1, link=late) for turns in (False, True)
    )
    assert broadcasts == gathers + 2 * 50


def test_stages_may_wait_for_transfers():
    # Two stages of one device: 3 bytes forward, 3 back; each stage waits for its part of both.
    hidden = seconds(IDEAL, stages=2)
    assert hidden == BASE + 2 * 3
    assert seconds(Framework(exposed_transfers=True), stages=2) == BASE + 4 * 3


def test_a_framework_survives_a_file(tmp_path):
    profile = ModelProfile(
        name="toy",
        device="toy",
        source="by hand",
        kinds={"layer": KIND},
        layers=("layer",),
        framework=Framework(traffic=2),
    )
    profile.save(tmp_path / "profile.json")
    assert ModelProfile.model_validate_json((tmp_path / "profile.json").read_text()) == profile
    with pytest.raises(ValueError):
        Framework(traffic=0)
