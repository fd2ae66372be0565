"""Streamed layers, compiled for GPUs that are not here: copies run beside products, and nothing is there twice."""

import itertools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jhpt.compiled.deviceless import OnHost, compile_only_devices, compiled_for, shape_on_host
from jhpt.compiled.hlo import read
from jhpt.core.cluster_file import find_cluster
from jhpt.sharding.compiler_options import ROWS_AT_ONCE
from jhpt.sharding.offload.buckets import bucket_of
from jhpt.sharding.offload.stream import GRADIENT, RESIDENT, WEIGHTS, StreamedLoop
from jhpt.sharding.recompute import save_nothing
from tests.covers import quick_and_exhaustive

pytestmark = pytest.mark.deviceless

WIDTH, HIDDEN, ROWS = 1024, 4096, 4096
LAYER = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
MOMENTUM = "momentum"


def block(params, x, at):
    """A residual layer in bfloat16."""
    up, down = (params[name].astype(jnp.bfloat16) for name in ("up", "down"))
    return x + jnp.tanh(x @ up) @ down


def update(rows):
    """Momentum, with the gradient that the step before has left on the host."""
    momentum = 0.9 * rows[MOMENTUM] + rows[GRADIENT]
    return {**rows, WEIGHTS: rows[WEIGHTS] - 1e-3 * momentum, MOMENTUM: momentum}


def left(_, gradient, squares):
    """Its gradient goes to the host."""
    return squares + jnp.sum(jnp.square(gradient)), {GRADIENT: gradient}


@cache
def program(layers, ranks, ahead, resident):
    """A step of so many layers, shared over so many devices as by ZeRO; after each streamed one so many stay."""
    devices = np.array(compile_only_devices(find_cluster("h100x8x1"))[:ranks])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    loop = StreamedLoop(
        function=save_nothing(block),
        bucket=bucket_of(LAYER),
        first=0,
        prefetch=ahead,
        gather=lambda row: jax.lax.all_gather(row, "data", tiled=True) if ranks > 1 else row,
        finish=lambda gradient: jax.lax.psum_scatter(gradient, "data", tiled=True) if ranks > 1 else gradient,
    )

    def step(offloaded, x):
        y, passed, offloaded = loop.forward(offloaded, x[None], jnp.zeros((1, 2)), update, names, names[:2])
        _, squares, offloaded = loop.backward(offloaded, passed, y, left, jnp.float32(0))
        return offloaded, squares[None]

    names, spec = (WEIGHTS, MOMENTUM, GRADIENT), P(None, "data")
    stay = tuple(RESIDENT + name for name in names) if resident else ()
    specs = dict.fromkeys((*names, *stay), spec)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P("data")), check_vma=False)
    there, here = OnHost(mesh, spec), NamedSharding(mesh, P("data"))
    plain = NamedSharding(mesh, spec)
    groups = layers // (1 + resident)
    rows = dict.fromkeys(names, shape_on_host((groups, loop.bucket.size), jnp.float32, there))
    rows |= dict.fromkeys(stay, jax.ShapeDtypeStruct((layers - groups, loop.bucket.size), jnp.float32))
    places = dict.fromkeys(names, there) | dict.fromkeys(stay, plain)
    jitted = jax.jit(mapped, in_shardings=(places, here), out_shardings=(plain, here), donate_argnums=0)
    x = jax.ShapeDtypeStruct((ROWS * ranks, WIDTH), jnp.bfloat16)
    options = {"xla_gpu_experimental_parallel_async_compute_limit": ROWS_AT_ONCE}
    return compiled_for(jitted.lower(rows, x), options)


@pytest.mark.parametrize(("ranks", "ahead"), quick_and_exhaustive(itertools.product((1, 4), (1, 2)), [(1, 2), (4, 1)]))
def test_the_host_holds_every_row_once(ranks, ahead):
    memory = program(8, ranks, ahead, 0).memory_analysis()
    rows = 3 * 8 * 4 * 2 * WIDTH * HIDDEN // ranks
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == rows
    assert memory.host_temp_size_in_bytes == 0


@pytest.mark.parametrize("ranks", quick_and_exhaustive([1, 4], [4]))
def test_the_device_holds_as_much_for_any_number_of_layers(ranks):
    """But for what layers keep: their input."""
    few, many = (program(layers, ranks, 1, 0).memory_analysis().temp_size_in_bytes for layers in (8, 24))
    assert many - few == 16 * ROWS * WIDTH * 2
    rows, gathered = 4 * 2 * WIDTH * HIDDEN // ranks, 4 * 2 * WIDTH * HIDDEN
    assert few - 8 * ROWS * WIDTH * 2 < 10 * rows + 4 * gathered + 6 * ROWS * HIDDEN * 2


def beside(loop, copy):
    """Whether a product is computed between the start of such a copy and its end."""
    names = [match[1] for line in loop.splitlines() if (match := re.match(r"\s*(?:ROOT )?%([\w.-]+) = ", line))]
    spans = [
        (at, names.index(name.replace("-start", "-done")))
        for at, name in enumerate(names)
        if name.startswith(f"{copy}-start")
    ]
    return any(first < at < last for first, last in spans for at, name in enumerate(names) if "gemm" in name)


@pytest.mark.parametrize("ranks", [1, 4])
def test_copies_run_beside_products(ranks):
    """Forward, where an update reads and writes the same rows and products are few, fetches; backward both ways."""
    text = program(8, ranks, 1, 0).as_text()
    parts = [part for part in re.split(r"\n(?=%|ENTRY)", text) if not part.startswith("ENTRY")]
    loops = [part for part in parts if "dynamic-slice-start" in part and "gemm" in part]
    forward, backward = sorted(loops, key=lambda loop: loop.count("gemm"))
    assert beside(forward, "dynamic-slice")
    assert beside(backward, "dynamic-slice") and beside(backward, "dynamic-update-slice")
    assert not any(re.search(r"S\(5\)} copy\(", loop) for loop in loops), "the host's arrays are changed in place"


@pytest.mark.parametrize(("layers", "ranks", "resident"), [(8, 1, 0), (24, 4, 2)])
def test_gradients_come_as_changed_rows_go(layers, ranks, resident):
    """Forward, the row that is only read is on its way before the rows that are written have arrived."""
    text = program(layers, ranks, 1, resident).as_text()
    parts = [part for part in re.split(r"\n(?=%|ENTRY)", text) if not part.startswith("ENTRY")]
    writes, fetches = (
        [[match.start() for match in re.finditer(rf"%{copy}[\w.-]* = ", part)] for part in parts]
        for copy in ("dynamic-update-slice-done", "dynamic-slice-start")
    )
    forward = [at for at in range(len(parts)) if len(writes[at]) == 2 and len(fetches[at]) == 3]
    assert len(forward) == 1 and all(fetches[at][0] < writes[at][0] for at in forward)


@pytest.mark.parametrize(
    ("layers", "ranks", "ahead", "resident"),
    quick_and_exhaustive([(8, 1, 1, 0), (8, 1, 2, 0), (8, 4, 1, 0), (24, 4, 1, 2)], [(8, 1, 1, 0), (24, 4, 1, 2)]),
)
def test_rows_are_copied_by_memcpys(layers, ranks, ahead, resident):
    """XLA has found where each row begins, without which a kernel copies it.

    That is in the loops over all layers but a few, whose number of iterations it knows.
    """
    module = read(program(layers, ranks, ahead, resident).as_text())
    every = [one for computation in module.computations.values() for one in computation]
    loops = [one for one in every if one.opcode == "while" and "known_trip_count" in one.config]
    inside = [one for loop in loops for one in module[loop.called("body")]]
    fused = [module[one.called("calls")] for one in inside if one.opcode in ("fusion", "fusion-start")]
    copies = [
        one
        for computation in fused
        if any("S(5)" in computation[name].shape for name in computation.parameters)
        for one in computation
        if one.opcode in ("dynamic-slice", "dynamic-update-slice")
    ]
    assert len(copies) == 7, "forward three rows there and two back; backward one there and one back"
    assert all("dynamic_slice_config" in one.config for one in copies)


@pytest.mark.parametrize("ranks", quick_and_exhaustive([1, 4], [4]))
def test_what_stays_is_updated_in_place(ranks):
    """Two of three layers: their rows are there once, beside what streaming needs and weights that are gathered."""
    streamed, mixed = (program(24, ranks, 1, resident).memory_analysis() for resident in (0, 2))
    rows = 3 * 4 * 2 * WIDTH * HIDDEN // ranks
    assert mixed.host_argument_size_in_bytes == mixed.host_alias_size_in_bytes == 8 * rows
    assert mixed.host_temp_size_in_bytes == 0
    assert mixed.argument_size_in_bytes - streamed.argument_size_in_bytes == 16 * rows
    gathered = 4 * 2 * WIDTH * HIDDEN * (ranks > 1)
    assert mixed.temp_size_in_bytes <= streamed.temp_size_in_bytes + 2 * rows + 2 * gathered
