"""Bytes on the wire, worked out by hand for a model of three kinds of layers."""

import pytest

from jhpt.core.compression import wire_bytes
from jhpt.core.config import Compression
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, OtherBlocks, Plan, Run, Stage
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.cost.traffic import Sent, traffic

ONCE = (Timing(batches=(1.0,), forward=(1.0,), backward=(1.0,)),)
EMBEDDING, BLOCK, HEAD = 1000, 400, 10
"""Parameters; the head shares 960 of the embedding's."""

PROFILE = ModelProfile(
    name="m",
    device="d",
    source="by hand",
    layers=("embedding", *("block",) * 4, "head"),
    kinds={
        "embedding": LayerKind(
            parameters=EMBEDDING,
            boundary_bytes=50.0,
            activation_bytes=0.0,
            tensor_forward_bytes=50.0,
            max_tensor=8,
            timings=ONCE,
        ),
        "block": LayerKind(
            parameters=BLOCK,
            boundary_bytes=50.0,
            activation_bytes=0.0,
            tensor_forward_bytes=100.0,
            tensor_backward_bytes=100.0,
            max_tensor=8,
            timings=ONCE,
        ),
        "head": LayerKind(
            parameters=HEAD,
            tied_parameters=960,
            boundary_bytes=0.0,
            activation_bytes=0.0,
            tensor_backward_bytes=50.0,
            max_tensor=8,
            timings=ONCE,
        ),
    },
)

UNTIED = PROFILE.model_copy(
    update={
        "kinds": PROFILE.kinds
        | {
            "head": LayerKind(
                parameters=970, boundary_bytes=0.0, activation_bytes=0.0, tensor_backward_bytes=50.0, timings=ONCE
            )
        }
    }
)


def plan(*stages, micro_batches=2, zero=0, schedule="eager-1f1b", recompute=False, sequence=False, prefetch=1):
    """stages: (devices, chunks); a chunk is (first, degree of every layer)."""
    placed, device = [], 0
    for devices, chunks in stages:
        made = tuple(
            Chunk(first=first, runs=tuple(Run(layers=1, tensor=t) for t in tensor)) for first, tensor in chunks
        )
        placed.append(Stage(device=device, devices=devices, chunks=made))
        device += devices
    return Plan(
        model="m",
        cluster="c",
        batch=16,
        micro_batches=micro_batches,
        schedule=schedule,
        zero=zero,
        recompute=recompute,
        sequence=sequence,
        prefetch=prefetch,
        stages=tuple(placed),
    )


def sent(**ways):
    """`all_reduce__data=(count, bytes)`."""
    found = {}
    for name, (count, size) in ways.items():
        kind, axis = name.split("__")
        found[kind.replace("_", "-"), axis.replace("_", "+")] = Sent(count, pytest.approx(size))
    return found


ALL = EMBEDDING + 4 * BLOCK + HEAD


def whole(devices, degree, overlap=False, **options):
    return traffic(plan((devices, [(0, [degree] * 6)]), **options), PROFILE, overlap=overlap)[0]


def test_data_parallel_sums_gradients_once():
    assert whole(4, 1) == sent(all_reduce__data=(6, 2 * 3 / 4 * 2 * ALL))


def test_zero_1_gathers_weights_and_scatters_gradients_once():
    assert whole(4, 1, zero=1) == sent(all_gather__data=(6, 3 / 4 * 2 * ALL), reduce_scatter__data=(6, 3 / 4 * 2 * ALL))


def test_blocks_that_save_everything_repeat_no_all_reduce():
    """Of four blocks the first one repeats its attention's; each half of a program has its own surplus of blocks."""
    none, every = (whole(4, 2, recompute=recompute)["all-reduce", "tensor"].bytes for recompute in (False, True))
    step = plan((4, [(0, [2] * 6)]), recompute=True).model_copy(update={"other_blocks": OtherBlocks(after=1)})
    some = traffic(step, PROFILE, overlap=False)[0]
    assert some["all-reduce", "tensor"].bytes == pytest.approx(none + (every - none) / 4)
    apart, together = (traffic(one, PROFILE, overlap=True)[0] for one in (step, step.of_first_blocks))
    surplus = apart["all-reduce", "data"].bytes - together["all-reduce", "data"].bytes
    assert surplus == pytest.approx(2 * 1 / 2 * 2 * BLOCK / 2)


def test_zero_2_scatters_blocks_in_every_micro_batch():
    assert whole(4, 1, zero=2) == sent(
        all_gather__data=(6, 3 / 4 * 2 * ALL),
        reduce_scatter__data=(2 * 4 + 2, 3 / 4 * 2 * (2 * 4 * BLOCK + EMBEDDING + HEAD)),
    )


def test_zero_3_gathers_blocks_in_both_passes_of_every_micro_batch():
    blocks, embedding_and_head = 4 * BLOCK, EMBEDDING + HEAD
    assert whole(4, 1, zero=3) == sent(
        all_gather__data=(4 * 4 + 2, 3 / 4 * 2 * (4 * blocks + embedding_and_head)),
        reduce_scatter__data=(2 * 4 + 2, 3 / 4 * 2 * (2 * blocks + embedding_and_head)),
    )


def test_one_device_sends_nothing():
    assert whole(1, 1) == {}


def test_tensor_parallel_sums_activations():
    """Micro-batches of 8 on one group: 50 bytes x 8; two micro-batches; embedding 1, blocks 2 + 2, head 1."""
    assert whole(4, 4) == sent(all_reduce__tensor=(2 * (1 + 16 + 1), 2 * 3 / 4 * 2 * 400 * 18))


def test_recomputation_sums_attention_again():
    assert whole(4, 4, recompute=True) == sent(all_reduce__tensor=(2 * (1 + 20 + 1), 2 * 3 / 4 * 2 * 400 * 22))


@pytest.mark.parametrize(
    ("zero", "gathered", "summed"),
    [(0, 0, 4 + 1), (1, 4 + 1, 4 + 1), (2, 4 + 1, 2 * (4 + 1)), (3, 2 * (2 * 4 + 1), 2 * (4 + 1))],
)
def test_loops_fetch_ahead_and_give_late(zero, gathered, summed):
    """4 blocks of 2 x 400 bytes in one run, 2 micro-batches; the ends travel once."""
    found, embedding_and_head = whole(4, 1, overlap=True, zero=zero), EMBEDDING + HEAD
    kind, rounds = ("reduce-scatter", 1) if zero else ("all-reduce", 2)
    assert found[kind, "data"].bytes == pytest.approx(rounds * 3 / 4 * 2 * (summed * BLOCK + embedding_and_head))
    if zero:
        assert found["all-gather", "data"].bytes == pytest.approx(3 / 4 * 2 * (gathered * BLOCK + embedding_and_head))
        further = whole(4, 1, overlap=True, zero=zero, prefetch=3)
        more = 2 * 2 if zero == 3 else 2  # blocks, in every micro-batch or in the first
        assert further["all-gather", "data"].bytes - found["all-gather", "data"].bytes == 3 / 4 * 2 * more * BLOCK


def test_sequence_parallel_scatters_and_gathers():
    """2 micro-batches of 8 samples x 50 bytes: a block sums 2 + 2 and gathers those and its 2 inputs again."""
    found = whole(4, 4, sequence=True)
    assert found == sent(
        all_reduce__tensor=(2 * 2, 2 * 3 / 4 * 2 * 400 * 2),
        reduce_scatter__tensor=(2 * 16, 3 / 4 * 2 * 400 * 16),
        all_gather__tensor=(2 * (24 + 2), 3 / 4 * 2 * 400 * 26),
    )
    stages = [(2, [(0, [2] * 3)]), (2, [(3, [2] * 3)])]
    first, _ = traffic(plan(*stages, sequence=True), PROFILE)
    # Table divided by 2, half of 8 samples' rows x 50 bytes on each.
    assert first["collective-permute", "pipe"] == Sent(3, pytest.approx(3 * 8 * 25))
    assert first["all-reduce", "pipe"] == Sent(1, pytest.approx(4 * 960 / 2))


def test_both_axes():
    """Rows are divided by 2, and parameters but 40 of the embedding and 10 of the head."""
    assert whole(4, 2) == sent(
        all_reduce__tensor=(36, 2 * 1 / 2 * 2 * 200 * 18), all_reduce__data=(6, 2 * 1 / 2 * 2 * (ALL + 50) / 2)
    )


def test_degrees_that_differ():
    """Blocks 1 and 2 at degree 2, the rest at 1, on 4 devices: the mesh is data 2 x tensor 2.

    Where the degree rises rows are gathered forward, where it falls backward: 2 micro-batches each, 8 / 2 samples.
    """
    stage = (4, [(0, [1, 2, 2, 1, 1, 1])])
    narrow, wide = EMBEDDING + 2 * BLOCK + HEAD, 2 * BLOCK
    found = traffic(plan(stage, zero=1), PROFILE, overlap=False)[0]
    assert found == sent(
        all_reduce__tensor=(2 * 8, 2 * 1 / 2 * 2 * 200 * 8),
        all_gather__tensor=(4, 1 / 2 * 4 * 200),
        all_gather__data=(2, 1 / 2 * 2 * wide / 2),
        reduce_scatter__data=(2, 1 / 2 * 2 * wide / 2),
        all_gather__data_tensor=(4, 3 / 4 * 2 * narrow),
        reduce_scatter__data_tensor=(4, 3 / 4 * 2 * narrow),
    )


def test_three_degrees_have_an_axis_each():
    found = traffic(plan((8, [(0, [1, 2, 4, 4, 2, 1])]), zero=1), PROFILE)[0]
    assert {axis for _, axis in found} == {
        "tensor2",
        "tensor4+tensor2",
        "tensor4",
        "data",
        "data+tensor4",
        "data+tensor4+tensor2",
    }


def test_a_pipeline_sends_in_every_tick_of_a_direction():
    """2 stages x 1 device, 2 micro-batches of 8: 1 + 2 ticks of 400 bytes, and the tied table in float32."""
    first, last = traffic(plan((1, [(0, [1] * 3)]), (1, [(3, [1] * 3)])), PROFILE)
    assert first == last == sent(collective_permute__pipe=(3, 3 * 400), all_reduce__pipe=(1, 4 * 960))


def test_stages_between_send_both_ways_and_no_table():
    stages = [(1, [(0, [1] * 2)]), (1, [(2, [1] * 2)]), (1, [(4, [1] * 2)])]
    first, middle, last = traffic(plan(*stages), PROFILE)
    assert middle == sent(collective_permute__pipe=(8, 8 * 400))
    assert first == last == sent(collective_permute__pipe=(4, 4 * 400), all_reduce__pipe=(1, 4 * 960))
    assert traffic(plan(*stages), UNTIED)[0] == sent(collective_permute__pipe=(4, 4 * 400))


def test_chunks_send_around_the_ring():
    """2 stages x 2 chunks, 4 micro-batches of 4: 1 + 8 ticks each way, from both."""
    stages = [(1, [(0, [1] * 2), (3, [1])]), (1, [(2, [1]), (4, [1] * 2)])]
    first, last = traffic(plan(*stages, micro_batches=4, schedule="interleaved"), PROFILE)
    assert first == last == sent(collective_permute__pipe=(18, 18 * 200), all_reduce__pipe=(1, 4 * 960))


def test_ends_are_gathered_on_all_stages_and_summed_on_the_outer_ones():
    """3 stages x 2 devices, two blocks in the middle and room for as many on the others; ZeRO-1; 4 samples each."""
    stages = [(2, [(0, [1] * 2)]), (2, [(2, [1] * 2)]), (2, [(4, [1] * 2)])]
    first, middle, last = traffic(plan(*stages, zero=1), PROFILE)
    embedding_and_head = EMBEDDING + HEAD
    gathered = (3, 1 / 2 * 2 * (2 * BLOCK + embedding_and_head))
    assert middle == sent(
        all_gather__data=gathered,
        reduce_scatter__data=(2, 1 / 2 * 2 * 2 * BLOCK),
        collective_permute__pipe=(8, 8 * 200),
    )
    assert first == last
    assert first == sent(
        all_gather__data=gathered,
        reduce_scatter__data=gathered,
        collective_permute__pipe=(4, 4 * 200),
        all_reduce__pipe=(1, 4 * 960 / 2),
    )


def test_room_of_shorter_chunks_travels_too():
    """2 stages x 2 devices with 1 and 3 blocks, and with none and 4."""
    for stages, depth in (([[1] * 2, [1] * 4], 3), ([[1], [1] * 5], 4)):
        first = len(stages[0])
        found = traffic(plan((2, [(0, stages[0])]), (2, [(first, stages[1])]), zero=1), PROFILE)
        for stage in found:
            assert stage["all-gather", "data"].bytes == pytest.approx(1 / 2 * 2 * (depth * BLOCK + EMBEDDING + HEAD))


def test_pipelines_with_zero_2_gather_once_and_scatter_in_every_micro_batch():
    """2 stages x 2 devices with no block and 4; 2 micro-batches."""
    found = traffic(plan((2, [(0, [1])]), (2, [(1, [1] * 5)]), zero=2), PROFILE)
    for stage, blocks in zip(found, (0, 4), strict=True):
        assert stage["all-gather", "data"].bytes == pytest.approx(1 / 2 * 2 * (4 * BLOCK + EMBEDDING + HEAD))
        scattered = 1 / 2 * 2 * (2 * blocks * BLOCK + EMBEDDING + HEAD)
        assert stage["reduce-scatter", "data"].bytes == pytest.approx(scattered)


def test_plans_of_the_general_space_are_refused():
    general = plan((1, [(0, [1] * 3)]), (1, [(3, [1] * 3)])).model_copy(update={"space": "general"})
    with pytest.raises(InputError, match="space=spmd"):
        traffic(general, PROFILE)


def test_pipelines_with_zero_3_gather_as_many_blocks_as_the_longest_chunk_has_in_every_pass():
    """2 stages x 2 devices with 1 and 3 blocks; 2 micro-batches; ahead: 3 + 1 blocks a pass on both stages."""
    stages = [(2, [(0, [1] * 2)]), (2, [(2, [1] * 4)])]
    for overlap, gathers in ((False, (4, 12)), (True, (16, 16))):
        found = traffic(plan(*stages, zero=3), PROFILE, overlap=overlap)
        for stage, blocks, count in zip(found, (1, 3), gathers, strict=True):
            assert stage["all-gather", "data"].bytes == pytest.approx(1 / 2 * 2 * (count * BLOCK + EMBEDDING + HEAD))
            scattered = 1 / 2 * 2 * (2 * blocks * BLOCK + EMBEDDING + HEAD)
            assert stage["reduce-scatter", "data"].bytes == pytest.approx(scattered)


WORDS = ModelProfile.model_validate(
    PROFILE.model_dump() | {"sample": "a sequence of 5 tokens", "bytes_per_weight": 2.0, "state_bytes": 16.0}
)
"""A residual stream of 5 tokens x 5 numbers x 2 bytes."""


def compressed(devices, degree, how, samples=1, **options):
    made = plan((devices, [(0, [degree] * 6)]), **options)
    runs = (Run(layers=6, tensor=degree, sample_chunks=samples),)
    stage = made.stages[0].model_copy(update={"chunks": (Chunk(first=0, runs=runs),)})
    return traffic(made.model_copy(update={"stages": (stage,), "compression": how}), WORDS, overlap=False)[0]


PLAIN = 2 * 3 / 4 * 400
"""Bytes of a plain sum of a micro-batch over 4 ranks."""


def test_compressed_sums_travel_in_two_steps():
    """4 blocks, 2 + 2 sums, 2 micro-batches of 8 samples; the ends' two sums of each are as they were."""
    how = Compression(bits=8, steps=2)
    one = wire_bytes(4, how, 8, 5, 5)
    assert compressed(4, 4, how) == sent(
        all_to_all__tensor=(32, 32 * one / 2), all_gather__tensor=(32, 32 * one / 2), all_reduce__tensor=(4, 4 * PLAIN)
    )


def test_codes_are_gathered():
    how = Compression(bits=8, steps=1)
    assert compressed(4, 4, how)["all-gather", "tensor"] == Sent(32, pytest.approx(32 * wire_bytes(4, how, 8, 5, 5)))


def test_scores_are_summed_once_a_block_and_again_where_it_is_recomputed():
    """8 samples x 5 tokens x 4 bytes; forward sums alone are compressed, and with recomputation half of them again."""
    some = {"bits": 8, "tokens": 0.4, "rest_bits": 0, "backward": False, "steps": 2}
    how, score = Compression(**some, importance="attention"), 2 * 3 / 4 * 8 * 5 * 4
    assert compressed(4, 4, Compression(**some, importance="own"))["all-reduce", "tensor"].count == 4 + 16
    one = wire_bytes(4, how, 8, 5, 5)
    assert compressed(4, 4, how) == sent(
        all_to_all__tensor=(16, 16 * one / 2),
        all_gather__tensor=(16, 16 * one / 2),
        all_reduce__tensor=(4 + 16 + 8, (4 + 16) * PLAIN + 8 * score),
    )
    again = compressed(4, 4, how, recompute=True)
    assert again["all-gather", "tensor"].bytes == pytest.approx(24 * one / 2)
    assert again["all-reduce", "tensor"].bytes == pytest.approx((4 + 16) * PLAIN + 16 * score)


def test_every_chunk_sums_and_the_first_block_of_a_run_once_more():
    """8 samples as 3, 3, 2: the last chunk has a quarter of them.  Recomputation does not sum that again."""
    plain, once = compressed(4, 4, Compression()), 2 * PLAIN / 4
    found = compressed(4, 4, Compression(), samples=3)
    assert found["all-reduce", "tensor"] == Sent(
        4 + 3 * 32 + 2, pytest.approx(plain["all-reduce", "tensor"].bytes + once)
    )
    plain = compressed(4, 4, Compression(), recompute=True)["all-reduce", "tensor"].bytes
    found = compressed(4, 4, Compression(), samples=3, recompute=True)["all-reduce", "tensor"].bytes
    assert found == pytest.approx(plain + once)


def test_chunks_of_compressed_sums_fill_up_shares_of_their_own():
    how = Compression(bits=8, steps=2)
    sums = 32 * sum(wire_bytes(4, how, n, 5, 5) for n in (3, 3, 2)) + 2 * wire_bytes(4, how, 2, 5, 5)
    assert compressed(4, 4, how, samples=3)["all-to-all", "tensor"].bytes == pytest.approx(sums / 2)


def test_what_is_no_sequence_cannot_be_compressed():
    made = plan((4, [(0, [4] * 6)])).model_copy(update={"compression": Compression(bits=8)})
    with pytest.raises(InputError, match="sequences of tokens"):
        traffic(made, PROFILE)
