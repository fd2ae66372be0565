"""Reading compiled programs: which collectives, over which axes, how often, what they send and what hides them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jhpt.compiled import evaluate
from jhpt.compiled.hlo import read, text_of
from jhpt.compiled.modelled import Clock, products
from jhpt.compiled.program import Way, read_compiled, read_stages, wire_bytes
from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.cluster_file import find_cluster

SIZES = {"pipe": 2, "data": 2, "tensor": 2}
MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(SIZES), axis_types=(AxisType.Auto,) * 3)
CLOCK = Clock(find_cluster("h100x8x1"))
ROWS = 24
"""float32 numbers that every device has: 96 bytes."""


def compiled(function, *shapes):
    """`function` as every device of the mesh runs it on its own arguments."""
    mapped = jax.shard_map(function, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(mapped).lower(*(jnp.zeros(shape, jnp.float32) for shape in shapes)).compile()


def stages(function, *shapes):
    """Tallies by stage."""
    return read_stages(read(text_of(compiled(function, *shapes))), SIZES, CLOCK)


def counted(tally):
    """{(kind, axes): (count, bytes)}."""
    return {tuple(way): (traffic.count, traffic.bytes) for way, traffic in tally.traffic.items()}


@pytest.mark.parametrize(
    "axes", [("pipe",), ("data",), ("tensor",), ("pipe", "tensor"), ("data", "tensor"), tuple(SIZES)]
)
def test_axes_are_recognised_and_an_all_reduce_sends_twice_what_its_neighbours_lack(axes):
    n = math.prod(SIZES[axis] for axis in axes)
    for tally in stages(lambda x: jax.lax.psum(x, axes), (ROWS,)):
        assert counted(tally) == {("all-reduce", "+".join(axes)): (1, 2 * (n - 1) / n * 4 * ROWS)}


def test_every_kind_by_its_ring():
    ring = [(0, 1), (1, 0)]

    def program(x):
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        scattered = jax.lax.psum_scatter(gathered, ("data", "tensor"), tiled=True)
        swapped = jax.lax.all_to_all(x.reshape(2, -1), "tensor", 0, 0)
        return gathered.sum() + scattered.sum() + (swapped + jax.lax.ppermute(swapped, "tensor", ring)).sum()

    assert counted(stages(program, (ROWS,))[0]) == {
        ("all-gather", "data"): (1, 4 * ROWS),
        ("reduce-scatter", "data+tensor"): (1, 3 / 4 * 8 * ROWS),
        ("all-to-all", "tensor"): (1, 1 / 2 * 4 * ROWS),
        ("collective-permute", "tensor"): (1, 4 * ROWS),
    }


def test_only_senders_send():
    first, last = stages(lambda x: jax.lax.ppermute(x, "pipe", [(0, 1)]), (ROWS,))
    assert counted(first) == {("collective-permute", "pipe"): (1, 4 * ROWS)}
    assert counted(last) == {}


def test_a_device_alone_in_its_group_sends_nothing():
    """All-reduces over the first and the last of four stages."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)
    every = {"mesh": mesh, "in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    ends = jax.shard_map(lambda x: jax.lax.psum(x, "pipe", axis_index_groups=[[0, 3], [1], [2]]), **every)
    program = jax.jit(ends).lower(jnp.zeros(ROWS, jnp.float32)).compile()
    tallies = read_stages(read(text_of(program)), {"pipe": 4, "data": 2}, CLOCK)
    sent = {("all-reduce", "pipe"): (1, 4 * ROWS)}
    assert [counted(tally) for tally in tallies] == [sent, {}, {}, sent]


def test_loops_count_as_often_as_they_go_round():
    def inner(x, _):
        return jax.lax.psum(jnp.sin(x), "data"), None

    def outer(x, _):
        x = jax.lax.scan(inner, x, None, length=5)[0]
        return jax.lax.psum(jnp.cos(x), "tensor"), None

    for tally in stages(lambda x: jax.lax.scan(outer, x, None, length=7)[0], (ROWS,)):
        assert counted(tally) == {
            ("all-reduce", "data"): (35, 35 * 4 * ROWS),
            ("all-reduce", "tensor"): (7, 7 * 4 * ROWS),
        }
        assert tally.guessed == 0


def test_a_schedule_in_a_table_is_followed():
    """[ticks, stage]: what to do; a stage's branches count as often as the table says."""
    table = np.array([[0, 2], [1, 0], [1, 1], [2, 1], [1, 0], [0, 0], [1, 2]])
    branches = [lambda x: x, lambda x: jax.lax.psum(jnp.sin(x), "data"), lambda x: jax.lax.psum(x, "tensor")]

    def tick(x, now):
        x = jax.lax.switch(now[jax.lax.axis_index("pipe")], branches, x)
        return jnp.tanh(x), None

    for stage, tally in enumerate(stages(lambda x: jax.lax.scan(tick, x, jnp.asarray(table))[0], (ROWS,))):
        counts = {way[1]: count for way, (count, _) in counted(tally).items()}
        assert counts == {"data": (table[:, stage] == 1).sum(), "tensor": (table[:, stage] == 2).sum()}
        assert tally.guessed == 0


def test_conditionals_in_loops_in_conditionals():
    """Stage 1 runs the outer branch in even rounds, and there the inner one for entries below its own limit."""

    def inner(at, x):
        used = jnp.array([1, 3])[jax.lax.axis_index("pipe")]
        return jax.lax.cond(at < used, lambda x: jax.lax.psum(jnp.sin(x), "tensor"), lambda x: x * 2, x)

    def outer(round_, x):
        mine = (round_ % 2 == 0) & (jax.lax.axis_index("pipe") == 1)
        return jax.lax.cond(mine, lambda x: jax.lax.fori_loop(0, 4, inner, x), lambda x: x + 1, x)

    first, last = stages(lambda x: jax.lax.fori_loop(0, 6, outer, x), (ROWS,))
    assert counted(first) == {}
    assert counted(last) == {("all-reduce", "tensor"): (9, 9 * 4 * ROWS)}


def test_a_loop_whose_length_depends_on_the_stage():
    def program(x):
        rounds = 2 + 3 * jax.lax.axis_index("pipe")
        return jax.lax.fori_loop(0, rounds, lambda _, x: jax.lax.psum(jnp.sin(x), "data"), x)

    assert [counted(tally)[("all-reduce", "data")][0] for tally in stages(program, (ROWS,))] == [2, 5]


def test_what_depends_on_data_is_a_guess_and_says_so():
    def program(x):
        often = lambda x: jax.lax.psum(jax.lax.psum(x, "data") @ jnp.ones((ROWS, ROWS)), "data")  # noqa: E731
        return jax.lax.cond(x.sum() > 0, often, lambda x: jax.lax.psum(x, "tensor"), x)

    (tally, _) = stages(program, (ROWS,))
    assert tally.guessed == 1
    assert counted(tally)[("all-reduce", "data")][0] == 2
    (tally, _) = stages(
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jax.lax.psum(x, "data"), x), (ROWS,)
    )
    assert (tally.guessed, counted(tally)[("all-reduce", "data")][0]) == (1, 1)


def test_flop_of_matrix_products():
    def layer(x, w):
        return jnp.tanh(jax.lax.psum(x @ w, "tensor")), None

    reading = read_compiled(compiled(lambda x, w: jax.lax.scan(layer, x, w)[0], (8, 32), (5, 32, 32)), SIZES, CLOCK)
    assert reading.stages[0].flops == 5 * 2 * 8 * 32 * 32
    assert reading.memory.arguments == 4 * (8 * 32 + 5 * 32 * 32)
    assert reading.memory.device == reading.memory.arguments + reading.memory.temporaries + reading.memory.outputs


# What a GPU's program says, in the compiler's own words.

RATE, LINK = 1e12, 1e9


def small_cluster(nodes=1):
    """FLOP/s and bytes/s that can be reckoned with by hand."""
    device = Device(name="d", peak_flops={"bfloat16": RATE, "float32": RATE}, memory=1e9, memory_bandwidth=1e18)
    inside, network = Link(bandwidth=LINK, latency=0), Link(bandwidth=LINK / 10, latency=0)
    node = Node(device=device, devices=4, inside=inside, host=inside, host_memory=1e9, count=nodes)
    return Cluster(name="small", nodes=(node,), network=network)


ASYNCHRONOUS = """HloModule step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gemm (l: bf16[100,500], r: bf16[500,1000]) -> bf16[100,1000] {
  %l = bf16[100,500]{1,0} parameter(0)
  %r = bf16[500,1000]{1,0} parameter(1)
  ROOT %dot.0 = bf16[100,1000]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[100,500], w: bf16[500,1000], g: f32[50000]) -> (bf16[100,1000], f32[50000]) {
  %x = bf16[100,500]{1,0} parameter(0)
  %w = bf16[500,1000]{1,0} parameter(1)
  %g = f32[50000]{0} parameter(2)
  %first = f32[50000]{0} all-reduce-start(%g), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %second = (f32[50000]{0}, f32[100000]{0}) all-gather-start(%g), replica_groups=[2,2]<=[4], dimensions={0}
  %third = (f32[50000]{0}, f32[50000]{0}) collective-permute-start(%g), source_target_pairs={{0,2},{1,3}}
  %one = bf16[100,1000]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm, metadata={op_name="a, b=c"}
  %first.done = f32[50000]{0} all-reduce-done(%first)
  %two = bf16[100,1000]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  %second.done = f32[100000]{0} all-gather-done(%second)
  %third.done = f32[50000]{0} collective-permute-done(%third)
  ROOT %all = (bf16[100,1000]{1,0}, f32[50000]{0}) tuple(%two, %first.done)
}
"""


def test_products_between_start_and_done_hide_one_collective_of_an_axis_after_the_other():
    """Each product takes 2 x 100 x 1000 x 500 / RATE = 100 us; all three collectives take 200 us.

    Along data the first is hidden by product one (100 us), which then has nothing left for the second; that one
    has product two (100 us).  The permutation travels along another axis and has both.
    """
    sizes = {"pipe": 2, "data": 2, "tensor": 1}
    tally = read_stages(read(ASYNCHRONOUS), sizes, Clock(small_cluster()))[0]
    assert tally.flops == 2e8
    traffic_of = {
        tuple(way): (traffic.count, traffic.seconds, traffic.hidden) for way, traffic in tally.traffic.items()
    }
    assert traffic_of == {
        ("all-reduce", "data"): (1, pytest.approx(200e-6), pytest.approx(100e-6)),
        ("all-gather", "data"): (1, pytest.approx(200e-6), pytest.approx(100e-6)),
        ("collective-permute", "pipe"): (1, pytest.approx(200e-6), pytest.approx(200e-6)),
    }


PRODUCT = "fusion(%x, %w), kind=kCustom, calls=%gemm"

NESTED = (
    ASYNCHRONOUS[: ASYNCHRONOUS.index("ENTRY")]
    + """%body (s: (bf16[100,500], bf16[500,1000], f32[25000])) -> (bf16[100,500], bf16[500,1000], f32[25000]) {
  %s = (bf16[100,500]{1,0}, bf16[500,1000]{1,0}, f32[25000]{0}) parameter(0)
  %x = bf16[100,500]{1,0} get-tuple-element(%s), index=0
  %w = bf16[500,1000]{1,0} get-tuple-element(%s), index=1
  %h = f32[25000]{0} get-tuple-element(%s), index=2
  %inner = f32[25000]{0} all-reduce-start(%h), replica_groups={{0,1},{2,3}}, to_apply=%add
  %one = bf16[100,1000]{1,0} PRODUCT
  %inner.done = f32[25000]{0} all-reduce-done(%inner)
  %two = bf16[100,1000]{1,0} PRODUCT
  ROOT %next = (bf16[100,500]{1,0}, bf16[500,1000]{1,0}, f32[25000]{0}) tuple(%x, %w, %inner.done)
}

ENTRY %main (x: bf16[100,500], w: bf16[500,1000], g: f32[GRADIENTS], h: f32[25000]) -> f32[GRADIENTS] {
  %x = bf16[100,500]{1,0} parameter(0)
  %w = bf16[500,1000]{1,0} parameter(1)
  %g = f32[GRADIENTS]{0} parameter(2)
  %h = f32[25000]{0} parameter(3)
  %outer = f32[GRADIENTS]{0} all-reduce-start(%g), replica_groups={{0,1},{2,3}}, to_apply=%add
  %shift = (f32[GRADIENTS]{0}, f32[GRADIENTS]{0}) collective-permute-start(%g), source_target_pairs={{0,2},{1,3}}
  %before = (bf16[100,500]{1,0}, bf16[500,1000]{1,0}, f32[25000]{0}) tuple(%x, %w, %h)
  %loop = (bf16[100,500]{1,0}, bf16[500,1000]{1,0}, f32[25000]{0}) while(%before), condition=%none, body=%body, TRIPS
  %shift.done = f32[GRADIENTS]{0} collective-permute-done(%shift)
  ROOT %outer.done = f32[GRADIENTS]{0} all-reduce-done(%outer)
}
"""
)
NESTED = NESTED.replace("PRODUCT", PRODUCT).replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')


def test_what_hides_a_loops_own_collectives_does_not_hide_those_around_it_as_well():
    """Three rounds of two products, 600 us; each round has 100 us of its own along data, which leaves 300 us for the
    1000 us that are on their way around the loop.  Along pipe nothing else travels: all 600 us are left."""
    sizes = {"pipe": 2, "data": 2, "tensor": 1}
    tally = read_stages(read(NESTED.replace("GRADIENTS", "250000")), sizes, Clock(small_cluster()))[0]
    assert tally.seconds == pytest.approx(600e-6)
    traffic_of = {
        tuple(way): (traffic.count, traffic.seconds, traffic.hidden) for way, traffic in tally.traffic.items()
    }
    assert traffic_of == {
        ("all-reduce", "data"): (4, pytest.approx(1300e-6), pytest.approx(600e-6)),
        ("collective-permute", "pipe"): (1, pytest.approx(1000e-6), pytest.approx(600e-6)),
    }


LATE = """HloModule late, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%more (at.0: s32[]) -> s32[] {
  %at.0 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %next = s32[] add(%at.0, %one)
}

%nobody (at.1: s32[]) -> s32[] {
  %at.1 = s32[] parameter(0)
  ROOT %drawn = s32[] rng(%at.1), distribution=rng_uniform
}

%body (s: (s32[], f32[24])) -> (s32[], f32[24]) {
  %s = (s32[], f32[24]{0}) parameter(0)
  %at = s32[] get-tuple-element(%s), index=0
  %x = f32[24]{0} get-tuple-element(%s), index=1
  %clear = s32[] constant(CLEAR)
  %early = pred[] compare(%at, %clear), direction=LT
  %after = s32[] conditional(%early, %at, %at), true_computation=%more, false_computation=%nobody
  %sum = f32[24]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %both = (s32[], f32[24]{0}) tuple(%after, %sum)
}

%condition (t: (s32[], f32[24])) -> pred[] {
  %t = (s32[], f32[24]{0}) parameter(0)
  %now = s32[] get-tuple-element(%t), index=0
  %end = s32[] constant(5)
  ROOT %goes_on = pred[] compare(%now, %end), direction=LT
}

ENTRY %main (x.1: f32[24]) -> (s32[], f32[24]) {
  %x.1 = f32[24]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[24]{0}) tuple(%zero, %x.1)
  ROOT %loop = (s32[], f32[24]{0}) while(%start), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(("clear", "count", "guessed"), [(5, 5, 0), (3, 1, 2), (0, 1, 2)])
def test_a_loop_that_becomes_unclear_later_counts_once(clear, count, guessed):
    """As many rounds are clear; the loop has five.  In the one that counts nobody knows the branch either."""
    for tally in read_stages(read(LATE.replace("CLEAR", str(clear))), SIZES, CLOCK):
        assert counted(tally) == {("all-reduce", "tensor"): (count, count * 4 * ROWS)}
        assert tally.guessed == guessed


def test_a_loop_with_too_many_rounds_to_follow_is_a_guess(monkeypatch):
    for most, count, guessed in ((6, 5, 0), (4, 1, 2)):
        monkeypatch.setattr(evaluate, "MOST_ROUNDS", most)
        tally = read_stages(read(LATE.replace("CLEAR", "5")), SIZES, CLOCK)[0]
        assert (tally.traffic[Way("all-reduce", "tensor")].count, tally.guessed) == (count, guessed)


OTHERS = {
    "collective-broadcast": "%o = f32[8]{0} collective-broadcast(%x), replica_groups={{0,1}}",
    "ragged-all-to-all": "%o = f32[8]{0} ragged-all-to-all(%x, %x), replica_groups={{0,1}}",
    "send": "%o = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1",
    "recv": "%o = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=1",
    "f64": "%o = f64[4,4]{1,0} dot(%d, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "s8": "%o = s32[4,4]{1,0} dot(%i, %i), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
}

ONE = """ENTRY %main (x: f32[8], d: f64[4,4], i: s8[4,4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %d = f64[4,4]{1,0} parameter(1)
  %i = s8[4,4]{1,0} parameter(2)
  %t = token[] after-all()
  INSTRUCTION
  ROOT %y = f32[8]{0} copy(%x)
}
"""


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_price_is_a_guess(name):
    tally = read_stages(read(ONE.replace("INSTRUCTION", OTHERS[name])), {"data": 2}, CLOCK)[0]
    assert (tally.guessed, tally.traffic) == (1, {})
    assert (tally.flops, tally.seconds > 0) == ((128, True) if name in ("f64", "s8") else (0, False))


def test_a_device_without_a_rate_for_an_element_type():
    module = read(GEMM)
    tally = read_stages(module, {"data": 1}, Clock(small_cluster()))[0]
    assert tally.guessed == 0
    node = small_cluster().nodes[0]
    device = node.device.model_copy(update={"peak_flops": {"float32": RATE}})
    only = small_cluster().model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})
    other = read_stages(module, {"data": 1}, Clock(only))[0]
    assert (other.guessed, other.seconds) == (1, tally.seconds)


def test_all_to_all_sends_a_share_to_each():
    """8 members on two nodes, of 1 GB each: 4/8 leave the node, by its one port for all four."""
    clock, row = Clock(small_cluster(nodes=2)), tuple(range(8))
    assert clock.collective_seconds("all-to-all", ((0, 1, 2, 3), (4, 5, 6, 7)), 1e9) == pytest.approx(0.75)
    assert clock.collective_seconds("all-to-all", (row,), 1e9) == pytest.approx(4 * 0.5e9 / (LINK / 10))
    assert clock.collective_seconds("all-to-all", tuple((n, n + 4) for n in range(4)), 1e9) == pytest.approx(20)


def test_groups_that_leave_a_node_are_slower_and_share_its_port():
    clock, row = Clock(small_cluster(nodes=2)), tuple(range(8))
    assert clock.collective_seconds("all-reduce", ((0, 1, 2, 3), (4, 5, 6, 7)), 1e9) == pytest.approx(1.5)
    assert clock.collective_seconds("all-reduce", ((0, 4),), 1e9) == pytest.approx(10)
    assert clock.collective_seconds("all-reduce", tuple((n, n + 4) for n in range(4)), 1e9) == pytest.approx(40)
    # A ring over both nodes passes the port with 7/8 x 1 GB, there and back.
    assert clock.collective_seconds("all-reduce", (row,), 1e9) == pytest.approx(2 * 7 / 8 * 10)
    assert clock.collective_seconds("collective-permute", ((0, 1), (4, 5)), 1e9) == pytest.approx(1)
    assert clock.collective_seconds("collective-permute", tuple((n, n + 4) for n in range(4)), 1e9) == pytest.approx(40)


GEMM = """ENTRY %main (x: bf16[10,20], w: bf16[20,30]) -> (bf16[10,30], s8[64]) {
  %x = bf16[10,20]{1,0} parameter(0)
  %w = bf16[20,30]{1,0} parameter(1)
  ROOT %gemm = (bf16[10,30]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", CONFIG
}
""".replace(
    "CONFIG",
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
)

ATTENTION = """ENTRY %main (q: bf16[2,128,4,64]) -> (bf16[2,4,128,64], u8[0]) {
  %q = bf16[2,128,4,64]{3,2,1,0} parameter(0)
  ROOT %a = (bf16[2,4,128,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="TARGET", CONFIG
}
""".replace(
    "CONFIG",
    'backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": '
    '{"dimensions": ["2", "4", "128", "128"]}, "mask_type": "MASK"}}',
)


def attention(target, mask):
    return ATTENTION.replace("TARGET", target).replace("MASK", mask)


SCORES = 2 * 4 * 128
"""Queries of all heads; each meets 128 keys, or 64.5 on average where later ones are hidden."""


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        (GEMM, 2 * 10 * 20 * 30),
        (attention("__cudnn$fmhaSoftmax", "NO_MASK"), 2 * 2 * SCORES * 128 * 64),
        (attention("__cudnn$fmhaSoftmax", "CAUSAL"), 2 * 2 * SCORES * 64.5 * 64),
        (attention("__cudnn$fmhaSoftmaxBackward", "CAUSAL"), 5 * 2 * SCORES * 64.5 * 64),
    ],
)
def test_flop_of_library_calls(text, flops):
    module = read(text)
    entry = module[module.entry]
    (product,) = products(module, entry, entry[entry.root])
    assert (product.flops, product.dtype) == (flops, "bf16")


def test_wire_bytes():
    assert [wire_bytes(kind, 4, 100) for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")] == [
        150,
        300,
        75,
        75,
    ]


def test_a_way_compares_with_the_planners_pairs():
    assert {Way("all-reduce", "data"): 1} == {("all-reduce", "data"): 1}
