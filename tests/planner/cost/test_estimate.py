"""Prices of plans, reckoned by hand; against the simulator; and what `check` refuses."""

import itertools

import numpy as np
import pytest

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import InputError
from jhpt.core.framework import Framework
from jhpt.core.load import load_config
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.core.work import late_products
from jhpt.planner.cost.estimate import evaluate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.report.simulation import simulate
from tests.planner.brute_force import spmd_plans
from tests.planner.instances import random_cluster, random_instance, random_profile
from tests.planner.report.test_simulation import in_flight


def layer(forward=1.0, backward=2.0, **costs) -> LayerKind:
    """Seconds of one sample; two take twice as long."""
    times = {"forward": (forward, 2 * forward), "backward": (backward, 2 * backward)}
    return LayerKind(
        **{"boundary_bytes": 0.0, "activation_bytes": 0.0} | costs, timings=(Timing(batches=(1.0, 2.0), **times),)
    )


def model(*layers: LayerKind, **fields) -> ModelProfile:
    kinds = {f"layer{index}": kind for index, kind in enumerate(layers)}
    return ModelProfile(name="toy", device="toy", source="by hand", kinds=kinds, layers=tuple(kinds), **fields)


def cluster(
    devices: int,
    nodes: int = 1,
    network: float = 1.0,
    inside: float = 10.0,
    memory: float = 1e9,
    overlap: bool = True,
) -> Cluster:
    device = Device(name="toy", peak_flops={"bfloat16": 1.0}, memory=memory, memory_bandwidth=1.0)
    link = Link(bandwidth=inside, latency=0.0)
    node = Node(device=device, devices=devices, inside=link, host=link, host_memory=1.0, count=nodes)
    return Cluster(name="toy", nodes=(node,), network=Link(bandwidth=network, latency=0.0), overlap=overlap)


def between_embedding_and_head(*layers: LayerKind, **fields) -> ModelProfile:
    """Layers that are no ends of the model: what begins and ends it costs nothing."""
    nothing = layer(0.0, 0.0, max_tensor=4)
    return model(nothing, *layers, nothing, **fields)


def stage(device: int, devices: int, *chunks: tuple[int, list[int]]) -> Stage:
    """`chunks`: first layer, and every layer's tensor degree."""
    return Stage(
        device=device, devices=devices, chunks=tuple(Chunk(first=a, runs=runs_of(degrees)) for a, degrees in chunks)
    )


def plan(*stages: Stage, batch=4, micro_batches=2, **fields) -> Plan:
    return Plan(model="toy", cluster="toy", batch=batch, micro_batches=micro_batches, stages=stages, **fields)


# One stage of two data-parallel devices in one node (10 bytes/s); micro-batches of 2, one sample each; two layers with
# 10 and 30 parameters, whose gradients have 20 and 60 bytes.

PAIR = model(layer(parameters=10), layer(parameters=30), update_seconds=0.01)
BOTH = stage(0, 2, (0, [1, 1]))


def test_data_parallel():
    estimate = evaluate(plan(BOTH), PAIR, cluster(2))
    # Reductions over two take 2 * (20 / 2) / 10 = 2 and 6 s.  From the start of the last backward: layer 1's backward
    # until 2, its gradients 2..8; layer 0's backward until 4, its gradients 8..10.  Update: 40 * 0.01.
    times = estimate.times
    assert (times.forward.item(), times.backward.item(), times.sync.item()) == (2, 4, 10)
    # 2 (2 + 4) s of compute, 10 - 4 of gradients behind it, 0.4 of update.
    assert estimate.seconds == pytest.approx(12 + 6 + 0.4)
    (only,) = estimate.stages
    assert only.seconds == pytest.approx(
        {
            "compute": 12,
            "tensor communication": 0,
            "resharding": 0,
            "gradients exposed": 6,
            "update": 0.4,
            "waiting": 0,
        }
    )
    # 40 parameters, all of the ends: 4 bytes of what gradients add up to, 2 of one micro-batch's, or of the copy to
    # compute with, which is gone by then; 12 of optimizer; the gradient of layer 1.
    assert only.bytes == {
        "weights and gradients": 240,
        "optimizer": 480,
        "activations": 0,
        "working set": 60,
        "transfers": 0,
    }
    assert estimate.fits and only.total_bytes == 780


def test_gradients_hide_behind_the_backward_pass():
    # Ten times the bandwidth: layer 1's backward until 2, its gradients 2..2.6; layer 0's backward until 4, its
    # gradients 4..4.2: only these are exposed.
    estimate = evaluate(plan(BOTH), PAIR, cluster(2, inside=100.0))
    assert estimate.stages[0].seconds["gradients exposed"] == pytest.approx(0.2)
    assert estimate.seconds == pytest.approx(12 + 0.2 + 0.4)


def test_zero_1():
    # Half of each reduction, 1 and 3 s: layer 1's 2..5, layer 0's 5..6.  The update is for half of the parameters, 0.2.
    # Their gathers, as long, run beside the first forward passes of 1 s each: 0 and 2 s remain.
    estimate = evaluate(plan(BOTH, zero=1), PAIR, cluster(2))
    assert estimate.times.sync == 6
    assert estimate.times.update == pytest.approx(0.2 + 2)
    assert estimate.seconds == pytest.approx(12 + 2 + 2.2)
    # Gradients are added up over two micro-batches before they are scattered.
    assert estimate.stages[0].bytes["weights and gradients"] == 240
    assert estimate.stages[0].bytes["optimizer"] == 240
    # The same by programs of its own.
    own = evaluate(plan(BOTH, zero=1, space="general"), PAIR, cluster(2))
    assert own.seconds == estimate.seconds
    assert own.stages[0].bytes["weights and gradients"] == 240


def test_gradients_of_one_micro_batch():
    # Of the inner layers ZeRO-1 gives them away as they come, beside the backward pass: half of 2 bytes remain of each,
    # but two layers' are whole at a time.  In line they are whole until the end, and so are those of the ends,
    # whose copy to compute with is gone by then.
    for overlap, bytes_, working in ((True, 2 + 1, 2 * 60), (False, 2 + 2, 60)):
        one = evaluate(plan(INSIDE, batch=2, micro_batches=1, zero=1), INNER, cluster(2, overlap=overlap))
        assert one.stages[0].bytes["weights and gradients"] == 40 * bytes_
        assert one.stages[0].bytes["working set"] == working
    embedding_and_head = evaluate(plan(BOTH, batch=2, micro_batches=1, zero=1), PAIR, cluster(2))
    assert embedding_and_head.stages[0].bytes["weights and gradients"] == 40 * 2


INNER = between_embedding_and_head(layer(parameters=10), layer(parameters=30), update_seconds=0.01)
INSIDE = stage(0, 2, (0, [1, 1, 1, 1]))


def test_zero_2():
    # Scattering takes 1 and 3 s beside each backward pass: max(2, 1) + max(2, 3).  Gathering weights once takes as
    # long, of which the forward passes hide 1 s each.  In the last backward pass the second layer, done after 3 s, is
    # scattered until 6, and the first until 7: 2 (2 + 5) + 2 + 2 + 0.2.
    estimate = evaluate(plan(INSIDE, zero=2), INNER, cluster(2))
    assert (estimate.times.forward.item(), estimate.times.backward.item()) == (2, 5)
    assert estimate.seconds == pytest.approx(14 + 2 + 2 + 0.2)
    # Whole weights in 2 bytes, half of the sums in 4; whole are the larger layer's gradient and the one before.
    assert estimate.stages[0].bytes["weights and gradients"] == 40 * (2 + 4 / 2)
    assert estimate.stages[0].bytes["optimizer"] == 240
    assert estimate.stages[0].bytes["working set"] == 2 * 60
    # ZeRO-1 sums whole gradients, and has the last micro-batch's shares beside the sums.
    assert evaluate(plan(INSIDE, zero=1), INNER, cluster(2)).stages[0].bytes["weights and gradients"] == 40 * 7
    # A rank adds up its half only.
    adding, line = INNER.model_copy(update={"framework": Framework(accumulation=3.0)}), cluster(2, overlap=False)
    more = [
        evaluate(plan(INSIDE, zero=zero), adding, line).seconds - evaluate(plan(INSIDE, zero=zero), INNER, line).seconds
        for zero in (1, 2)
    ]
    assert more[0] == pytest.approx(2 * more[1]) and more[1] > 0
    # With one micro-batch there is nothing to add up.
    once = [evaluate(plan(INSIDE, batch=2, micro_batches=1, zero=zero), INNER, cluster(2)) for zero in (1, 2)]
    assert (once[0].seconds, once[0].stages) == (once[1].seconds, once[1].stages)
    # In a pipeline nothing hides it: 2 + 1 and 2 + 3.
    piped = stage(0, 2, (0, [1, 1])), stage(2, 2, (2, [1, 1]))
    assert [evaluate(plan(*piped, zero=2), INNER, cluster(4)).times.backward[s, 0] for s in (0, 1)] == [3, 5]


def test_zero_3():
    # Gathering takes 1 and 3 s, so does scattering.  Forward: max(1, 1) + max(1, 3); backward: max(2, 1 + 1) +
    # max(2, 3 + 3).  Nothing is left to reduce or gather after it: 2 (4 + 8) + 0.2.
    estimate = evaluate(plan(INSIDE, zero=3), INNER, cluster(2))
    assert (estimate.times.forward.item(), estimate.times.backward.item()) == (4, 8)
    assert estimate.seconds == pytest.approx(24 + 0.2)
    # Half of everything; whole are the larger layer's weights and its gradient, of which half is there at a time, those
    # of the next one, and the gradient before.
    assert estimate.stages[0].bytes["weights and gradients"] == 80
    assert estimate.stages[0].bytes["optimizer"] == 240
    assert estimate.stages[0].bytes["working set"] == 3.5 * 60


def test_ends_are_gathered_once():
    # PAIR has nothing but ends: one program holds them with ZeRO-3 as with ZeRO-1, stages of their own do not.
    once, shared = (evaluate(plan(BOTH, zero=zero), PAIR, cluster(2)) for zero in (1, 3))
    assert (shared.seconds, shared.stages) == (once.seconds, once.stages)
    assert evaluate(plan(BOTH, zero=3, space="general"), PAIR, cluster(2)).seconds == pytest.approx(24 + 0.2)


def test_without_overlap():
    # All of the above behind each other.  Gradients 2 + 6; ZeRO-1: 1 + 3 to scatter, as much to gather; ZeRO-2 scatters
    # twice; ZeRO-3: forward (1 + 1) + (1 + 3), backward (2 + 2) + (2 + 6).
    found = [evaluate(plan(INSIDE, zero=zero), INNER, cluster(2, overlap=False)) for zero in (0, 1, 2, 3)]
    expected = [12 + 8 + 0.4, 12 + 4 + 4 + 0.2, 2 * (2 + 4 + 4) + 4 + 0.2, 2 * (6 + 12) + 0.2]
    assert [each.seconds for each in found] == pytest.approx(expected)
    assert [each.stages[0].seconds["gradients exposed"] for each in found] == pytest.approx([8, 4, 0, 0])
    assert [each.stages[0].seconds["update"] for each in found] == pytest.approx([0.4, 4.2, 4.2, 0.2])


def test_zero_means_nothing_to_one_device():
    one = stage(0, 1, (0, [1, 1]))
    assert len({evaluate(plan(one, zero=zero), PAIR, cluster(1)).seconds for zero in (0, 1, 2, 3)}) == 1
    assert len({evaluate(plan(one, zero=zero), PAIR, cluster(1)).stages[0].total_bytes for zero in (0, 1, 2, 3)}) == 1


def test_two_stages():
    # 3 bytes at 1 byte/s between them, two micro-batches of one sample.  The last layer runs forward and backward in
    # the backward pass: F = (1, 0), B = (2, 3).  F0 0..1, on its way 1..4.  An exchange of errors, of which there are
    # none yet, 4..7, beside it F1 4..5, on its way 5..8; B0 on device 1 7..10, its error 10..13, B1 on device 1 13..16
    # and B0 on device 0 13..15; the error of B1 16..19, B1 on device 0 19..21.
    profile = model(layer(boundary_bytes=3, activation_bytes=5), layer(activation_bytes=7))
    halves = stage(0, 1, (0, [1])), stage(1, 1, (1, [1]))
    estimate = evaluate(plan(*halves, batch=2, schedule="eager-1f1b"), profile, cluster(1, nodes=2))
    assert estimate.times.cut == 3
    assert (estimate.times.forward.tolist(), estimate.times.backward.tolist()) == ([[1], [0]], [[2], [3]])
    assert estimate.seconds == 21
    assert [s.seconds["waiting"] for s in estimate.stages] == [21 - 6, 21 - 6]
    # In turn: F0 0..1, both exchange 1..4; F0 on device 1 takes no time, B0 4..7 beside F1 4..5; both exchange 7..10;
    # B0 on device 0 10..12 beside B1 on device 1 10..13; both exchange 13..16; B1 on device 0 16..18.
    assert evaluate(plan(*halves, batch=2, schedule="1f1b"), profile, cluster(1, nodes=2)).seconds == 18
    # Both hold two slots for what comes in or goes out, in both directions, and what two micro-batches in flight hand
    # on.  What the ends keep is there for one pass, with the last one's a gradient half as large.
    assert [s.bytes["transfers"] for s in estimate.stages] == [6, 6]
    assert [s.bytes["activations"] for s in estimate.stages] == [6, 6]
    assert [s.bytes["working set"] for s in estimate.stages] == [5, 7 + 3.5]
    # Stages of their own: F = (1, 1), B = (2, 2), a second less in each of device 1's backwards (played by hand in
    # test_simulation).  They keep what the layers keep, the second one of one micro-batch.
    own = evaluate(plan(*halves, batch=2, space="general", schedule="eager-1f1b"), profile, cluster(1, nodes=2))
    assert own.seconds == 19
    assert [s.bytes["activations"] for s in own.stages] == [10, 7]
    assert [s.bytes["working set"] for s in own.stages] == [0, 0]


# A pipeline as one program: entry, two blocks, exit; two stages of two data-parallel devices in one node (10 bytes/s);
# two micro-batches of two samples, one on each device.

SMALL = (
    layer(1.0, 1.0, parameters=40, boundary_bytes=3, activation_bytes=5),
    layer(1.0, 2.0, parameters=10, boundary_bytes=3, activation_bytes=7),
    layer(1.0, 2.0, parameters=10, boundary_bytes=3, activation_bytes=7),
    layer(2.0, 3.0, parameters=20, tied_parameters=30, activation_bytes=11),
)
GPT = model(*SMALL, update_seconds=0.01)
PIPED = stage(0, 2, (0, [1, 1])), stage(2, 2, (2, [1, 1]))


def test_pipeline_of_one_program():
    estimate = evaluate(plan(*PIPED, zero=1, schedule="eager-1f1b"), GPT, cluster(4))
    times = estimate.times
    # Stage 0: entry and block.  Stage 1: a block forward; both passes of the exit and the block backward.
    assert times.forward.tolist() == [[2], [1]]
    assert times.backward.tolist() == [[3], [2 + 5]]
    assert times.cut == pytest.approx(0.3)
    assert times.sync == pytest.approx([3, 7])  # nothing is reduced beside the last backward
    # Every stage has room for 50 = max(40, 20 + 30) parameters of the ends beside the 10 of its block, and updates half
    # of these 60.  Gathering before the step takes 5 s for 100 bytes and 1 s for 20, scattering after it as long; 60
    # bytes of the shared parameter's gradient go to and fro between the stages in 6 s.
    assert times.update == pytest.approx(2 * [0.3 + 6 + 6 + 6])
    # Device 0: F0 0..2, F1 2..4.  Device 1: F0 2.3..3.3, B0 3.3..10.3, F1 10.3..11.3, B1 11.3..18.3.  Device 0: B0
    # 10.6..13.6, B1 18.6..21.6.
    assert estimate.seconds == pytest.approx(21.6 + 18.3)
    first, second = estimate.stages
    assert first.seconds == pytest.approx(
        {
            "compute": 10,
            "tensor communication": 0,
            "resharding": 0,
            "gradients exposed": 6,
            "update": 12.3,
            "waiting": 39.9 - 28.3,
        }
    )
    # Two micro-batches are in flight: of each what the block keeps, 7, and the stage's output, 3.  A block's gradient,
    # 20, is larger than what the ends keep for a pass, 5 and 11.
    assert first.bytes == {
        "weights and gradients": 360,
        "optimizer": 360,
        "activations": 2 * (7 + 3),
        "working set": 20,
        "transfers": 6,
    }
    assert second.bytes == first.bytes


def test_zero_0_of_a_pipeline():
    # Whole gradients: 10 and 2 s; 60 parameters are updated; nothing is gathered.
    estimate = evaluate(plan(*PIPED, schedule="eager-1f1b"), GPT, cluster(4))
    assert estimate.times.update == pytest.approx(2 * [0.6 + 12 + 6])
    assert estimate.seconds == pytest.approx(21.6 + 18.6)
    assert [s.bytes["optimizer"] for s in estimate.stages] == [720, 720]


def test_zero_3_of_a_pipeline():
    # A block's weights are gathered beside the pass before, 1 s; its gradient is scattered when its backward pass is
    # over: F = max(1, 1), B = max(2, 1) + 1.  The ends are as with ZeRO-1: 5 s to gather, 5 s to scatter, 6 s between
    # the stages.
    estimate = evaluate(plan(*PIPED, zero=3), GPT, cluster(4))
    assert estimate.times.forward.tolist() == [[2], [1]]
    assert estimate.times.backward.tolist() == [[1 + 3], [3 + 5]]
    assert estimate.times.update == pytest.approx(2 * [0.3 + 5 + 5 + 6])
    assert [s.bytes["weights and gradients"] for s in estimate.stages] == [300 + 20, 300 + 20]
    # A block's 10 parameters, whole, half of its gradient in their place, and those of the next one.
    assert [s.bytes["working set"] for s in estimate.stages] == [50, 50]
    # Without overlap both gathers and the scatter are added to the block's passes.
    slow = evaluate(plan(*PIPED, zero=3), GPT, cluster(4, overlap=False))
    assert slow.times.forward.tolist() == [[3], [2]]
    assert slow.times.backward.tolist() == [[1 + 4], [4 + 5]]


def test_recompute_of_a_pipeline():
    # The blocks' forward pass again, and neither end's.  A block keeps its input, 3, beside the output of the stage.
    estimate = evaluate(plan(*PIPED, recompute=True), GPT, cluster(4))
    assert estimate.times.forward.tolist() == [[2], [1]]
    assert estimate.times.backward.tolist() == [[1 + 3], [3 + 5]]
    assert [s.bytes["activations"] for s in estimate.stages] == [12, 12]
    assert [s.bytes["working set"] for s in estimate.stages] == [20 + 7, 20 + 7]


def test_every_stage_has_a_slot():
    # Three stages, the second with blocks only; no parameter is shared, the exit has the most, 50.
    exit_ = layer(2.0, 3.0, parameters=50, activation_bytes=11)
    profile = model(*SMALL[:2], *SMALL[1:3], exit_, update_seconds=0.01)
    thirds = stage(0, 2, (0, [1, 1])), stage(2, 2, (2, [1])), stage(4, 2, (3, [1, 1]))
    estimate = evaluate(plan(*thirds), profile, cluster(6))
    assert [s.bytes["weights and gradients"] for s in estimate.stages] == [360, 360, 360]
    # All update 60 parameters and sum the gradients of their block, 2 s; those of the slot, 10 s, are at the ends.
    assert estimate.times.update == pytest.approx([12.6, 2.6, 12.6])
    assert [s.seconds["gradients exposed"] for s in estimate.stages] == pytest.approx([12, 2, 12])
    # Stages of their own have what they hold.
    own = evaluate(plan(*thirds, space="general"), profile, cluster(6))
    assert [s.bytes["weights and gradients"] for s in own.stages] == [300, 60, 360]


def test_interleaved_ends():
    # Two chunks a device: entry | block on the first, block | exit on the second.  The exit's pass is chunk 1's.
    chunks = stage(0, 2, (0, [1]), (2, [1])), stage(2, 2, (1, [1]), (3, [1]))
    estimate = evaluate(plan(*chunks, schedule="interleaved"), GPT, cluster(4))
    assert estimate.times.forward.tolist() == [[1, 1], [1, 0]]
    assert estimate.times.backward.tolist() == [[1, 2], [2, 5]]
    assert [s.bytes["weights and gradients"] for s in estimate.stages] == [360, 360]
    # min(2 x 2, 1 + 2 + 1 + 1) slots for a chunk's activations and output.
    assert [s.bytes["activations"] for s in estimate.stages] == [4 * (7 + 3), 4 * (7 + 3)]


def test_the_slower_side_of_a_cut():
    # Two senders with two samples each, one receiver of four: it takes in 4 * 3 bytes at 10 bytes/s.
    profile = model(layer(boundary_bytes=3), layer())
    wide = plan(stage(0, 2, (0, [1])), stage(2, 1, (1, [1])), batch=8, space="general")
    assert evaluate(wide, profile, cluster(3)).times.cut == pytest.approx(1.2)
    # Two to two, two samples each; from node to node both share the port: 2 * 6 bytes at 1 byte/s.
    even = plan(stage(0, 2, (0, [1])), stage(2, 2, (1, [1])), batch=8)
    assert evaluate(even, profile, cluster(4)).times.cut == pytest.approx(0.6)
    assert evaluate(even, profile, cluster(2, nodes=2)).times.cut == 12


def test_gpipe_and_1f1b():
    # 2 stages, 4 micro-batches, F = (1, 1), B = (2, 2): (4 + 2 - 1)(1 + 2) either way; GPipe keeps all four, 1F1B at
    # most 2 (2 - 1) + 1 = 3.
    profile = between_embedding_and_head(layer(activation_bytes=1), layer(activation_bytes=1))
    halves = stage(0, 1, (0, [1, 1])), stage(1, 1, (2, [1, 1]))
    for schedule, ring in {"gpipe": 4, "eager-1f1b": 3}.items():
        estimate = evaluate(plan(*halves, micro_batches=4, schedule=schedule), profile, cluster(2))
        assert estimate.seconds == 15
        assert [s.in_flight for s in estimate.stages] == [ring, ring]


def test_the_last_layer_of_gpipe():
    # In the backward pass, as one program has it, F = (1, 0), B = (2, 3): GPipe waits for the longest of each, 1 + 5 +
    # 3 (1 + 3); 1F1B runs a forward of the one device beside a backward of the other.  Device 1: B0 1..4, ..., B3
    # 10..13; device 0: B3 13..15.
    halves = stage(0, 1, (0, [1])), stage(1, 1, (1, [1]))
    for schedule, seconds in {"gpipe": 18, "eager-1f1b": 15}.items():
        drawn = plan(*halves, micro_batches=4, schedule=schedule)
        assert evaluate(drawn, model(layer(), layer()), cluster(2)).seconds == seconds
        own = drawn.model_copy(update={"space": "general"})
        assert evaluate(own, model(layer(), layer()), cluster(2)).seconds == 15


def test_recompute():
    sums = {"max_tensor": 2, "tensor_forward_bytes": 20, "tensor_backward_bytes": 20}
    profile = model(
        layer(0.0, 0.0, boundary_bytes=2, max_tensor=2),
        layer(boundary_bytes=3, activation_bytes=50, **sums),
        layer(activation_bytes=70, **sums),
        layer(2.0, 2.0, activation_bytes=8, max_tensor=2),
    )
    # Tensor degree 2, micro-batches of one sample.  A degree that was not profiled halves the seconds; 20 bytes are
    # summed in 2 * 10 / 10 s: forward 2 (0.5 + 2) + 1, backward 2 (1 + 2) + 1.
    whole = stage(0, 2, (0, [2, 2, 2, 2]))
    once = evaluate(plan(whole, batch=2), profile, cluster(2))
    assert once.seconds == 2 * (6 + 7)
    assert once.stages[0].seconds["tensor communication"] == 2 * 2 * 4
    assert once.stages[0].bytes["activations"] == (50 + 70) / 2
    # The last layer's 4 live for one pass, with 2 of their gradient.
    assert once.stages[0].bytes["working set"] == 4 + 2
    # With recomputation the inner layers' backward pass has the forward's 5 s as well.  They keep their inputs (2 and 3
    # bytes); the larger one's activations exist while it is computed again.
    twice = evaluate(plan(whole, batch=2, recompute=True), profile, cluster(2))
    assert twice.seconds == 2 * (6 + 12)
    assert twice.stages[0].seconds["tensor communication"] == 2 * 2 * 6
    assert twice.stages[0].bytes["activations"] == 2 + 3
    assert twice.stages[0].bytes["working set"] == 35
    # Programs of their own recompute the last layer, too, another second, and keep its input, 0.
    own = evaluate(plan(whole, batch=2, recompute=True, space="general"), profile, cluster(2))
    assert own.seconds == 2 * (6 + 13)
    assert own.stages[0].bytes["activations"] == 2 + 3


def test_sequence_parallelism():
    # As above, with 12 bytes that every tensor rank keeps whole.  The backward pass gathers the products' inputs again:
    # 3 s of communication a layer instead of 2, unless the framework hides it.
    inner = layer(
        boundary_bytes=4,
        activation_bytes=50,
        replicated_bytes=12,
        max_tensor=2,
        tensor_forward_bytes=20,
        tensor_backward_bytes=20,
    )
    embedding_and_head = layer(0.0, 0.0, boundary_bytes=4, max_tensor=2), layer(0.0, 0.0, max_tensor=2)
    whole = plan(stage(0, 2, (0, [2, 2, 2])), batch=2)
    hidden = model(embedding_and_head[0], inner, embedding_and_head[1], sample="a sequence of 2 tokens")
    profile = hidden.model_copy(update={"framework": Framework(exposed_regathers=1.0)})
    plain, cut = (evaluate(whole.model_copy(update={"sequence": cut}), profile, cluster(2)) for cut in (False, True))
    assert (plain.seconds, cut.seconds) == (2 * (0.5 + 2 + 1 + 2), 2 * (0.5 + 2 + 1 + 3))
    assert evaluate(whole.model_copy(update={"sequence": True}), hidden, cluster(2)).seconds == plain.seconds
    assert [one.stages[0].bytes["activations"] for one in (plain, cut)] == [25 + 12, 25 + 6]
    again = whole.model_copy(update={"sequence": True, "recompute": True})
    assert evaluate(again, profile, cluster(2)).stages[0].bytes["activations"] == 4 / 2
    # Between stages of two ranks each a sample's 4 bytes are cut in two, in transfers and in what is kept of them.
    halves = stage(0, 2, (0, [2, 2])), stage(2, 2, (2, [2, 2]))
    piped = plan(*halves, batch=2)
    profile = model(embedding_and_head[0], inner, inner, embedding_and_head[1], sample="a sequence of 2 tokens")
    plain, cut = (evaluate(piped.model_copy(update={"sequence": cut}), profile, cluster(4)) for cut in (False, True))
    assert cut.times.cut == plain.times.cut / 2
    assert [one.stages[0].bytes["transfers"] for one in (plain, cut)] == [2 * 4, 2 * 2]
    assert [one.stages[0].bytes["activations"] for one in (plain, cut)] == [2 * (37 + 4), 2 * (31 + 2)]


def test_tied_parameters():
    profile = model(layer(parameters=10), layer(tied_parameters=10), update_seconds=0.01)
    # One stage: ten parameters of 12 bytes, 6 of gradients, 2 of the last layer's, 0.1 s.
    one = evaluate(plan(stage(0, 1, (0, [1, 1]))), profile, cluster(1))
    assert one.stages[0].total_bytes == 200
    assert one.times.update == pytest.approx(0.1)
    # Two: a copy in each, both updated, and 20 bytes of gradient go between them at 1 byte/s.
    halves = stage(0, 1, (0, [1])), stage(1, 1, (1, [1]))
    two = evaluate(plan(*halves), profile, cluster(1, nodes=2))
    assert [s.total_bytes for s in two.stages] == [180, 180]
    assert two.times.update == pytest.approx([0.1 + 20, 0.1 + 20])
    # Three: the middle has room for it and no part in it.
    thirds = model(layer(parameters=10), layer(), layer(tied_parameters=10))
    pieces = [stage(i, 1, (i, [1])) for i in range(3)]
    three = evaluate(plan(*pieces), thirds, cluster(1, nodes=3))
    assert [s.total_bytes for s in three.stages] == [180, 180, 180]
    assert three.times.update == pytest.approx([20, 0, 20])
    # Stages of their own: each updates its copy, and the middle has no room for it.
    assert evaluate(plan(*halves, space="general"), profile, cluster(1, nodes=2)).times.update == pytest.approx(
        [0.1 + 20, 0.1 + 20]
    )
    own = evaluate(plan(*pieces, space="general"), thirds, cluster(1, nodes=3))
    assert [s.total_bytes for s in own.stages] == [180, 0, 180]


def test_in_line_the_directions_of_an_exchange_follow_each_other():
    """8 bytes at 1 byte/s: 8 s, or 16 where two cross: in every tick of 1f1b and zb-h1, and for a shared gradient
    between two programs.  One program sums it over both stages at once."""
    profile = between_embedding_and_head(layer(boundary_bytes=8.0), layer())
    halves = stage(0, 1, (0, [1, 1])), stage(1, 1, (2, [1, 1]))
    for schedule, space, ways in (
        ("1f1b", "spmd", 2),
        ("zb-h1", "spmd", 2),
        ("eager-1f1b", "spmd", 1),
        ("gpipe", "spmd", 1),
        ("1f1b", "general", 1),
    ):
        made = plan(*halves, micro_batches=4, schedule=schedule, space=space)
        beside, line = (evaluate(made, profile, cluster(1, nodes=2, overlap=each)).times for each in (True, False))
        assert (beside.cut, line.cut) == ([8.0], [8.0 * ways]), schedule
    tied = model(layer(parameters=10), layer(tied_parameters=10))
    for space, overlap, seconds in (
        ("spmd", True, 20),
        ("spmd", False, 20),
        ("general", True, 20),
        ("general", False, 40),
    ):
        ends = plan(stage(0, 1, (0, [1])), stage(1, 1, (1, [1])), space=space)
        assert evaluate(ends, tied, cluster(1, nodes=2, overlap=overlap)).times.update == pytest.approx([seconds] * 2)


def test_a_parameter_shared_with_an_inner_layer():
    # Two stages: the copy is the second one's own, beside the slot.
    profile = model(layer(parameters=10), layer(tied_parameters=5), layer())
    halves = stage(0, 1, (0, [1])), stage(1, 1, (1, [1, 1]))
    estimate = evaluate(plan(*halves), profile, cluster(1, nodes=2))
    assert [s.total_bytes for s in estimate.stages] == [180, 180 + 90]
    assert estimate.times.update == pytest.approx([10, 10])
    slow = profile.model_copy(update={"update_seconds": 0.01})  # ten numbers in either slot, five more in the second
    assert evaluate(plan(*halves), slow, cluster(1, nodes=2)).times.update == pytest.approx([10.1, 10.15])
    # Both layers on the first: nothing is exchanged.
    other = stage(0, 1, (0, [1, 1])), stage(1, 1, (2, [1]))
    assert evaluate(plan(*other), profile, cluster(1, nodes=2)).times.update == pytest.approx([0, 0])


def test_tied_parameters_inside_a_node():
    profile = model(layer(parameters=10), layer(tied_parameters=10))
    halves = stage(0, 1, (0, [1])), stage(1, 1, (1, [1]))
    # One node: 20 bytes at 10 bytes/s.
    assert evaluate(plan(*halves), profile, cluster(2)).times.update == pytest.approx([2, 2])


def test_resharding():
    profile = model(layer(boundary_bytes=5, max_tensor=2), layer())
    # Two devices, micro-batches of two.  Layer 0 at degree 2 works on both samples in 2 / 2 and 4 / 2 s, layer 1 on one
    # in 1 and 2 s; between them 2 * 5 bytes are gathered in one direction, 5 / 10 s, half of it in each pass.
    estimate = evaluate(plan(stage(0, 2, (0, [2, 1]))), profile, cluster(2))
    assert estimate.times.forward == 2.25
    assert estimate.times.backward == 4.25
    assert estimate.seconds == 13
    assert estimate.stages[0].seconds["resharding"] == 1
    # Equal degrees need none.
    assert evaluate(plan(stage(0, 2, (0, [1, 1]))), profile, cluster(2)).seconds == 12


def test_interleaved():
    # 2 devices of two chunks, F = B = 1 per sample: (M v + S - 1)(1 + 1) = 10 against (2 + 1)(2 + 2) = 12.
    profile = between_embedding_and_head(*[layer(1.0, 1.0, activation_bytes=1) for _ in range(4)])
    chunks = stage(0, 1, (0, [1, 1]), (3, [1])), stage(1, 1, (2, [1]), (4, [1, 1]))
    estimate = evaluate(plan(*chunks, batch=2, schedule="interleaved"), profile, cluster(2))
    assert estimate.seconds == 10
    halves = stage(0, 1, (0, [1, 1, 1])), stage(1, 1, (3, [1, 1, 1]))
    assert evaluate(plan(*halves, batch=2), profile, cluster(2)).seconds == 12


def test_uneven_samples_cost_what_the_fullest_device_has():
    profile = model(layer())
    # Three samples on two devices: two on one of them.
    estimate = evaluate(plan(stage(0, 2, (0, [1])), batch=3, micro_batches=1, space="general"), profile, cluster(2))
    assert estimate.seconds == 2 + 4


def test_a_slower_device_sets_the_pace():
    fast = cluster(1).nodes[0]
    slow = fast.model_copy(update={"device": fast.device.model_copy(update={"peak_flops": {"bfloat16": 0.5}})})
    mixed = cluster(1).model_copy(update={"nodes": (fast, slow)})
    profile = model(layer(), layer())
    # Both devices at the pace of the slower: one sample takes 4 + 8 s.
    both = plan(stage(0, 2, (0, [1, 1])), batch=2, micro_batches=1, space="general")
    assert evaluate(both, profile, mixed).seconds == 12
    # A stage each: F = (1, 2), B = (2, 4).
    halves = plan(stage(0, 1, (0, [1])), stage(1, 1, (1, [1])), batch=1, micro_batches=1, space="general")
    assert evaluate(halves, profile, mixed).seconds == 9


def apart(device: int, other: int, *chunks) -> Stage:
    """A stage on two devices that need not be neighbours."""
    return stage(device, 2, *chunks).model_copy(update={"apart": (device, other)})


def random_plan(rng: np.random.Generator, costs: CostModel, schedule: str) -> Plan | None:
    """Any plan of space="general", cuts and degrees drawn; None where there is none with this schedule."""
    n, k = costs.num_layers, costs.cluster.num_devices
    chunks = int(rng.integers(2, 4)) if schedule == "interleaved" else 1
    most = min(n // chunks, k)
    if most < (2 if chunks > 1 else 1):
        return None
    stages = int(rng.integers(2 if chunks > 1 else 1, most + 1))
    per_stage = [k // stages] * stages if chunks > 1 else _parts(rng, k, stages)
    sizes = _parts(rng, n, stages * chunks)
    firsts, devices = [0, *itertools.accumulate(sizes)], [0, *itertools.accumulate(per_stage)]

    def degrees(virtual: int, count: int) -> list[int]:
        layers = range(firsts[virtual], firsts[virtual + 1])
        return [int(rng.choice([t for t in costs.degrees(count) if costs.allowed(i, t)])) for i in layers]

    micro_batches = int(rng.integers(1, 4)) * (stages if chunks > 1 else 1)
    return Plan(
        model="toy",
        cluster="toy",
        space="general",
        batch=micro_batches * int(rng.integers(1, 5)),
        micro_batches=micro_batches,
        schedule=schedule,
        zero=int(rng.choice([0, 1, 3])),
        recompute=bool(rng.integers(2)),
        stages=tuple(
            stage(devices[s], count, *((firsts[v], degrees(v, count)) for v in range(s, stages * chunks, stages)))
            for s, count in enumerate(per_stage)
        ),
    )


def _parts(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    edges = [0, *sorted(rng.choice(np.arange(1, total), parts - 1, replace=False).tolist()), total]
    return [b - a for a, b in itertools.pairwise(edges)]


def checked(drawn: Plan, costs: CostModel) -> None:
    """The price of a plan against its step, played, and against its own parts."""
    estimate = price(drawn, costs)
    times, overlap = estimate.times, costs.cluster.overlap
    arrays = times.forward, times.backward, times.cut, times.sync, times.update
    played = simulate(drawn.schedule, drawn.micro_batches, *arrays, overlap=overlap)
    assert estimate.seconds == pytest.approx(played.seconds, rel=1e-9)
    assert estimate.seconds == times.step_seconds(drawn, overlap)
    for position, part in enumerate(estimate.stages):
        assert sum(part.seconds.values()) == pytest.approx(estimate.seconds, rel=1e-9)
        assert all(value >= -1e-9 * estimate.seconds for value in part.seconds.values())
        assert all(value >= 0 for value in part.bytes.values())
        assert part.in_flight >= in_flight(played, position)


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe", "interleaved"])
def test_against_the_simulator(schedule):
    """120 random plans of each schedule, mixed clusters among them and such without overlap."""
    found, seed = {True: 0, False: 0}, 0
    while sum(found.values()) < 120:
        rng = np.random.default_rng(seed := seed + 1)
        costs = CostModel(random_profile(rng, 10), random_cluster(rng, 8, mixed=seed % 3 == 0))
        drawn = random_plan(rng, costs, schedule)
        if drawn is None:
            continue
        found[costs.cluster.overlap] += 1
        checked(drawn, costs)
    assert min(found.values()) > 20


def test_weight_passes_have_a_price():
    """gpt2-124m in four stages of eight micro-batches: less than 1F1B, in its memory."""
    place = find_cluster("h100x4x1")
    profile = analytic_profile(load_config("gpt2-124m"), place.nodes[0].device)
    cuts = ((0, 4), (4, 3), (7, 3), (10, 4))
    prices = {}
    for name in ("1f1b", "zb-h1"):
        stages = tuple(stage(s, 1, (first, [1] * count)) for s, (first, count) in enumerate(cuts))
        drawn = plan(*stages, batch=32, micro_batches=8, space="spmd", schedule=name)
        prices[name] = evaluate(drawn, profile, place)
        times = prices[name].times
        arrays = times.forward, times.backward, times.cut, times.sync, times.update
        played = simulate(name, 8, *arrays, overlap=place.overlap, weights=times.weights)
        assert prices[name].seconds == pytest.approx(played.seconds, rel=1e-9)
    late, backward = prices["zb-h1"].times.weights, prices["zb-h1"].times.backward[:, 0]
    assert 0.2 * backward[1] < late[1] < backward[1] / 3
    assert prices["zb-h1"].seconds < prices["1f1b"].seconds
    assert [part.bytes for part in prices["zb-h1"].stages] == [part.bytes for part in prices["1f1b"].stages]


@pytest.mark.parametrize(
    ("settings", "late"),
    [
        ({}, {"mlp_hidden", "mlp_out"}),
        ({"model.num_kv_heads": 4, "model.activation": "swiglu"}, {"mlp_hidden", "mlp_out"}),
        ({"model.activation": "swiglu"}, {"mlp_hidden", "qkv"}),
    ],
)
def test_products_that_weight_passes_compute(settings, late):
    """Those whose operands fill the room of the named tensors; `test_split_backward` has what runs."""
    profile = analytic_profile(load_config("gpt2-124m", settings), find_cluster("h100x4x1").nodes[0].device)
    assert set(late_products(profile.kinds["block"].tensors)) == late


@pytest.mark.parametrize("seed", range(10))
def test_one_program_against_the_simulator(seed):
    """Plans of space="spmd", drawn from all there are."""
    rng = np.random.default_rng(600 + seed)
    instance = random_instance(rng, "spmd", layers=int(rng.integers(4, 7)), devices=4, plans=2000)
    plans = list(spmd_plans(instance.asked, instance.model))
    for index in rng.choice(len(plans), min(40, len(plans)), replace=False):
        checked(plans[index], instance.model)


FOUR = model(*[layer(max_tensor=2) for _ in range(4)])
GOOD = (stage(0, 1, (0, [1, 1])), stage(1, 1, (2, [1, 1])))
CHUNKS = (stage(0, 1, (0, [1]), (2, [1])), stage(1, 1, (1, [1]), (3, [1])))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(*GOOD, batch=5), "batch=5 is not divisible by micro_batches=2"),
        (plan(GOOD[0]), "cover layers 0 to 3 in order"),
        (plan(GOOD[1]), "cover layers 0 to 3 in order.*found 2 to 3"),
        (plan(GOOD[0], stage(1, 1, (1, [1, 1, 1]))), "cover layers 0 to 3 in order"),
        (plan(GOOD[0], stage(1, 1, (2, [1, 1, 1]))), "cover layers 0 to 3 in order"),
        (plan(stage(0, 1, (2, [1, 1])), stage(1, 1, (0, [1, 1]))), "cover layers 0 to 3 in order"),
        (plan(*GOOD, schedule="interleaved"), r"schedule=interleaved with 1 chunks? per stage"),
        (plan(*CHUNKS, schedule="eager-1f1b"), r"schedule=eager-1f1b with 2 chunks? per stage"),
        (
            plan(*CHUNKS, batch=3, micro_batches=3, schedule="interleaved"),
            "micro_batches divisible by stages=2, found 3",
        ),
        (plan(stage(0, 1, (0, [1, 1]), (2, [1, 1])), schedule="interleaved"), "several stages"),
        (plan(stage(0, 1, (0, [1, 1]), (2, [1, 1]))), "several stages"),
        (plan(*GOOD, prefetch=5), "prefetch=5 is further ahead than there are layers; use 4 or less"),
        (plan(stage(0, 2, (0, [1, 1])), stage(1, 1, (2, [1, 1])), space="general"), "overlap on device 1"),
        (plan(stage(1, 1, (0, [1, 1])), stage(0, 2, (2, [1, 1])), space="general"), "overlap on device 1"),
        (plan(apart(2, 0, (0, [1, 1])), stage(0, 1, (2, [1, 1])), space="general"), "overlap on device 0"),
        (plan(apart(2, 0, (0, [1] * 4)), batch=2), "neighbouring devices"),
        (plan(stage(0, 5, (0, [1, 1, 1, 1])), batch=10), "needs 5 devices, toy has 4"),
        (
            plan(stage(0, 1, (0, [1] * 4)).model_copy(update={"device": 9}), space="general"),
            "needs 10 devices, toy has 4",
        ),
        (plan(stage(0, 3, (0, [2, 2, 2, 2])), space="general"), "tensor=2 does not divide the 3 devices"),
        (plan(stage(0, 4, (0, [4, 4, 4, 4]))), "layer 0 cannot be cut into tensor=4 shards; use 1 or 2"),
        (plan(stage(0, 4, (0, [1, 2, 2, 2]))), "layer 0: a micro-batch of 2 is not divisible by data=4"),
        (plan(stage(0, 1, (0, [1, 1])), stage(1, 2, (2, [1, 1]))), "the same number of devices in every stage"),
        (plan(stage(0, 1, (0, [1, 1])), stage(2, 1, (2, [1, 1]))), "neighbouring devices"),
        (plan(stage(1, 1, (0, [1] * 4))), r"from device 0 on, found them to begin at \[1\]"),
        (plan(stage(0, 2, (0, [1, 1])), stage(2, 2, (2, [1, 2]))), r"one tensor degree, found \[1, 2\]"),
    ],
)
def test_check_refuses(wrong, message):
    with pytest.raises(InputError, match=message):
        evaluate(wrong, FOUR, cluster(4))


def test_check_refuses_degrees_that_cannot_share_a_mesh():
    profile = model(*[layer(max_tensor=6) for _ in range(3)])
    for degrees, fits in {(1, 2, 6): True, (3, 1, 6): True, (1, 2, 3): False, (3, 6, 2): False}.items():
        drawn = plan(stage(0, 6, (0, list(degrees))), batch=12)
        if fits:
            assert evaluate(drawn, profile, cluster(6)).seconds > 0
        else:
            with pytest.raises(InputError, match="degrees 2 and 3 cannot share a device mesh: 2 does not divide 3"):
                evaluate(drawn, profile, cluster(6))
        assert evaluate(drawn.model_copy(update={"space": "general"}), profile, cluster(6)).seconds > 0


def test_check_refuses_two_degrees_of_one_table():
    profile = model(layer(max_tensor=2), layer(max_tensor=2), layer(max_tensor=2, tied_parameters=1))
    for degrees, fits in {(1, 2, 1): True, (2, 1, 2): True, (1, 1, 2): False, (2, 2, 1): False}.items():
        drawn = plan(stage(0, 2, (0, list(degrees))))
        if fits:
            assert evaluate(drawn, profile, cluster(2)).seconds > 0
        else:
            with pytest.raises(InputError, match=r"shares a parameter with it .* have tensor degrees"):
                evaluate(drawn, profile, cluster(2))
        assert evaluate(drawn.model_copy(update={"space": "general"}), profile, cluster(2)).seconds > 0


def test_check_refuses_spmd_on_different_nodes():
    fast = cluster(1).nodes[0]
    slow = fast.model_copy(update={"device": fast.device.model_copy(update={"peak_flops": {"bfloat16": 0.5}})})
    with pytest.raises(InputError, match="space=spmd needs equal devices"):
        evaluate(plan(*GOOD), FOUR, cluster(1).model_copy(update={"nodes": (fast, slow)}))


def test_check_refuses_different_numbers_of_chunks():
    uneven = plan(stage(0, 1, (0, [1]), (2, [1, 1])), stage(1, 1, (1, [1])), schedule="interleaved")
    with pytest.raises(InputError, match="the same number of chunks"):
        evaluate(uneven, FOUR, cluster(4))


def test_interleaved_stages_of_different_size():
    uneven = plan(
        stage(0, 3, (0, [1]), (2, [1])), stage(3, 1, (1, [1]), (3, [1])), schedule="interleaved", space="general"
    )
    assert evaluate(uneven, FOUR, cluster(4)).seconds > 0


def test_a_gap_between_stages():
    # Devices 0 and 3 are on different nodes: 100 bytes at 1 byte/s.
    apart = plan(stage(0, 1, (0, [1])), stage(3, 1, (1, [1])), batch=2, space="general")
    assert evaluate(apart, model(layer(boundary_bytes=100), layer()), cluster(2, nodes=2)).times.cut == 100


def test_a_plan_that_does_not_fit_is_priced():
    estimate = evaluate(plan(BOTH), PAIR, cluster(2, memory=779))
    assert not estimate.fits
    assert estimate.seconds == pytest.approx(18.4)
    assert evaluate(plan(BOTH), PAIR, cluster(2, memory=780)).fits
