"""Meshes, rules, and where everything lies: from the model's tree to what devices hold and back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.sharding.layout import TABLE, Layout
from jhpt.sharding.mesh import Axes, make_device_mesh
from jhpt.sharding.partition import parameter_spec, path_name
from jhpt.training.compile import compile_step
from jhpt.training.device_step import abstract_state
from jhpt.training.programs import global_batch
from jhpt.training.setup import prepare
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import batch, by_path, laid_out, mixed, on_host, piped, random_params, spread, stored


def ids(device_mesh):
    """Numbers of the devices, in the mesh's shape."""
    return np.vectorize(lambda device: device.id)(device_mesh.mesh.devices)


# Meshes.


def test_tensor_groups_are_neighbours():
    device_mesh = make_device_mesh(piped([4], 1, data=2, tensor=4), jax.devices())
    assert dict(device_mesh.mesh.shape) == {"pipe": 1, "data": 2, "tensor": 4}
    assert ids(device_mesh)[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_stages_own_consecutive_devices():
    device_mesh = make_device_mesh(piped([2, 2], 2, data=2, tensor=2), jax.devices())
    assert ids(device_mesh).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert device_mesh.stages == 2


def test_devices_beyond_the_plan_are_idle():
    device_mesh = make_device_mesh(piped([2, 2, 2], 3, data=2), jax.devices())
    assert ids(device_mesh).ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_mixed_degrees_factorise_the_stage():
    """Of degrees 1, 2 and 8 on eight devices: a layer of degree 2 takes what only degree 8 cuts for data."""
    device_mesh = make_device_mesh(mixed([1, 2, 8, 2, 1]), jax.devices())
    assert dict(device_mesh.mesh.shape) == {"pipe": 1, "data": 1, "tensor8": 4, "tensor2": 2}
    assert device_mesh.degrees == (1, 2, 8)
    assert device_mesh.axes(1) == Axes(data=("data", "tensor8", "tensor2"), tensor=(), degree=1)
    assert device_mesh.axes(2) == Axes(data=("data", "tensor8"), tensor=("tensor2",), degree=2)
    assert device_mesh.axes(8) == Axes(data=("data",), tensor=("tensor8", "tensor2"), degree=8)
    for degree in device_mesh.degrees:
        axes = device_mesh.axes(degree)
        assert device_mesh.size(axes.tensor) == degree and device_mesh.size(axes.data) == 8 // degree


@pytest.mark.parametrize("degree", [2, 4])
def test_groups_of_every_degree_are_neighbours(degree):
    """Ranks of a group differ in the fastest axes only."""
    device_mesh = make_device_mesh(mixed([2, 4, 4, 2]), jax.devices())
    names = ("pipe", *device_mesh.axes(degree).data, *device_mesh.axes(degree).tensor)
    assert names == device_mesh.mesh.axis_names
    assert ids(device_mesh).reshape(-1, degree).tolist() == np.arange(8).reshape(-1, degree).tolist()


def test_one_degree_has_plain_axes():
    for plan, degree in ((piped([4], 1, data=4, tensor=1), 1), (mixed([4, 4, 4]), 4)):
        expected = Axes(data=("data",), tensor=("tensor",), degree=degree)
        assert make_device_mesh(plan, jax.devices()).axes(degree) == expected


def stages_of(*devices_and_degrees):
    """A stage of one layer for each (devices, tensor degree)."""
    stages, start = [], 0
    for first, (devices, tensor) in enumerate(devices_and_degrees):
        chunks = (Chunk(first=first, runs=(Run(layers=1, tensor=tensor),)),)
        stages.append(Stage(device=start, devices=devices, chunks=chunks))
        start += devices
    return Plan(model="any", cluster="any", batch=8, micro_batches=2, stages=tuple(stages))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            stages_of((4, 1), (4, 1)).model_copy(update={"space": "general"}),
            "of the space general.*plan with space=spmd",
        ),
        (stages_of((4, 1), (2, 1)), r"the same number of devices in every stage, found \[4, 2\]"),
        (stages_of((4, 1), (4, 2)), r"one tensor degree, found \[1, 2\]"),
        (mixed([2, 3, 2], devices=6), "degrees 2 and 3 cannot share a device mesh: 2 does not divide 3"),
        (piped([2, 2], 2, data=4, tensor=2), "needs 16 devices, and there are 8; .*JAX_NUM_CPU_DEVICES=16"),
    ],
    ids=["general", "devices", "degrees in a pipeline", "degrees that do not divide", "too many"],
)
def test_what_is_no_program_is_refused(plan, words):
    with pytest.raises(InputError, match=words):
        make_device_mesh(plan, jax.devices())


# Rules.

PLAIN = Axes(data=("data",), tensor=("tensor",), degree=4)
T, D, TD = ("tensor",), ("data",), ("tensor", "data")


@pytest.mark.parametrize(
    ("path", "shape", "whole", "zero"),
    [
        ("embedding/tokens", (256, 64), P(T, None), P(TD, None)),
        ("embedding/positions", (32, 64), P(None, None), P(D, None)),
        ("embedding/types", (2, 63), P(None, None), P(D, None)),
        ("head/norm/scale", (63,), P(None), P(None)),
        ("head/bias", (256,), P(T), P(T)),
        ("blocks/attention/qkv/kernel", (5, 64, 8, 3, 8), P(None, None, T, None, None), P(None, D, T, None, None)),
        ("blocks/attention/qkv/bias", (5, 8, 3, 8), P(None, T, None, None), P(None, T, None, None)),
        ("blocks/attention/projection/kernel", (5, 64, 64), P(None, T, None), P(None, TD, None)),
        ("blocks/mlp/up/kernel", (5, 64, 2, 128), P(None, None, None, T), P(None, D, None, T)),
        ("blocks/mlp/down/kernel", (5, 128, 64), P(None, T, None), P(None, TD, None)),
        ("blocks/mlp/down/kernel", (5, 4, 64), P(None, T, None), P(None, T, D)),
        ("blocks/mlp/up/kernel", (5, 63, 128), P(None, None, T), P(None, None, TD)),
        ("blocks/mlp_norm/scale", (5, 64), P(None, None), P(None, None)),
        ("1/mu/blocks/mlp/down/kernel", (5, 128, 64), P(None, T, None), P(None, TD, None)),
    ],
)
def test_rules(path, shape, whole, zero):
    """ZeRO over two data ranks and four tensor ranks; dimensions that these do not divide are not cut."""
    stacked = "blocks/" in path
    for over_data, expected in ((1, whole), (2, zero)):
        assert parameter_spec(path, shape, PLAIN, stacked=stacked, pipe=False, over_data=over_data) == expected
        if stacked:
            piped = parameter_spec(path, shape, PLAIN, stacked=True, pipe=True, over_data=over_data)
            assert piped == P("pipe", *expected[1:])


# Stored and back.

PRESETS = {
    "gpt": ("gpt-tiny", {}),
    "untied": ("gpt-tiny", {"model.tied": False, "model.positions": "rotary", "model.bias": False}),
    "bert": ("bert-tiny", {}),
}
PLANS = {
    "as it is": piped([6], 1, data=2, tensor=2),
    "several degrees": mixed([2, 1, 1, 4, 4, 2], zero=1),
    "two stages": piped([3, 3], 2),
    "uneven": piped(spread(4, 3), 3, data=2, zero=3),
    "bare entry": piped(spread(4, 4, "bare entry"), 4, tensor=2),
    "bare exit": piped(spread(4, 4, "bare exit"), 4, data=2, zero=1),
    "interleaved": piped(spread(4, 4), 2, micro_batches=2, schedule="interleaved"),
    "interleaved, uneven": piped([1, 3, 1, 1], 2, data=2, tensor=2, micro_batches=2, schedule="interleaved"),
}
"""Of four blocks."""


@pytest.fixture
def setup_of(tiny):
    """Makes a setup of four blocks."""

    def make(name, **changes):
        preset, overrides = PRESETS[name]
        return prepare(tiny(preset, **{"model.num_layers": 4}, **overrides, **changes))

    return make


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_stored_comes_back(setup_of, name, kind):
    """Parameters, and anything of the same tree."""
    setup = laid_out(setup_of(name), PLANS[kind])
    params = random_params(setup)
    tree = setup.layout.stored(jax.tree.map(jnp.asarray, params))
    back = on_host(setup.layout.model_tree(tree, setup.training.tied))
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    used = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(np.count_nonzero(leaf) for leaf in jax.tree.leaves(tree)) == used + copied(setup, params)


def copied(setup, params):
    """Entries of the last stage's copy of a shared table."""
    return params["embedding"]["tokens"].size if setup.layout.stages > 1 and setup.training.tied else 0


@pytest.mark.parametrize("kind", PLANS)
def test_every_shard_has_the_shape_that_devices_expect(setup_of, kind):
    """Every dimension is divided evenly, and all stages hold as much."""
    setup = laid_out(setup_of("untied"), PLANS[kind])
    params = stored(setup, random_params(setup))
    for leaf in jax.tree.leaves(params):
        shapes = {shard.data.shape for shard in leaf.addressable_shards}
        assert len(shapes) == 1
    stages = setup.layout.stages
    if stages > 1:
        rows = jax.tree.leaves(params["blocks"])[0].shape[0]
        assert rows == setup.layout.chunks[1].size * setup.layout.chunks[1].max()
        assert rows % stages == 0


def test_rows_lie_device_after_device_chunk_after_chunk():
    """Blocks 0 1 | 2 | 3 | 4 of two stages with two chunks each: device 0 holds 0 1 and 3, device 1 holds 2 and 4."""
    plan = piped([3, 1, 1, 2], 2, micro_batches=2, schedule="interleaved")
    layout = Layout(plan=plan, device_mesh=make_device_mesh(plan, jax.devices()), num_layers=5)
    first, count = layout.chunks
    assert (first.tolist(), count.tolist()) == ([[0, 3], [2, 4]], [[2, 1], [1, 1]])
    assert layout.rows.tolist() == [0, 1, 4, 2, 6]
    tree = {
        "embedding": {"tokens": jnp.full((2, 1), 7.0)},
        "blocks": {"w": jnp.arange(1.0, 6.0)},
        "head": {"tokens": jnp.full((2, 1), 9.0)},
    }
    stored = layout.stored(tree)
    assert stored["blocks"]["w"].tolist() == [1, 2, 4, 0, 3, 0, 5, 0]
    assert stored["embedding"]["tokens"][:, 0, 0].tolist() == [7, 9]  # the head's own table has the last slot
    assert "tokens" not in stored["head"]


def test_runs_are_neighbours_of_one_degree():
    plan = mixed([4, 1, 1, 2, 1, 4])
    layout = Layout(plan=plan, device_mesh=make_device_mesh(plan, jax.devices()), num_layers=4)
    assert layout.runs == (("0", 1, range(0, 2)), ("1", 2, range(2, 3)), ("2", 1, range(3, 4)))
    assert layout.degrees == (4, 1, 1, 2, 1, 4)
    apart = Layout(plan=plan, device_mesh=layout.device_mesh, num_layers=4, alike=False)
    assert [name for name, *_ in apart.runs] == ["0", "1", "2", "3"]


# Training.


@pytest.mark.parametrize("name", quick_and_exhaustive(["gpt", "bert"], ["gpt"]))
def test_padding_stays_zero_and_copies_stay_equal(setup_of, name):
    """After two steps with weight decay, in parameters and moments: rows and slots that no block or end uses are zero,
    and a shared table is the same at both ends."""
    changes = {"optimizer.weight_decay": 0.5, "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 1}
    plan = piped(spread(4, 3), 3, batch=16, micro_batches=4, zero=1, data=2)
    setup = laid_out(setup_of(name, **changes), plan)
    step = compile_step(setup)
    state, windows = step.init(), global_batch(setup, batch(setup, 16))
    before = by_path(setup.layout.model_tree(on_host(state.params), setup.training.tied))
    for _ in range(2):
        state, metrics = step.step(state, windows)
    assert int(metrics.skipped) == 0
    unused = np.setdiff1d(np.arange(6), setup.layout.rows)
    assert unused.tolist() == [3, 5]
    (moments,) = (part for part in state.optimizer if hasattr(part, "mu"))
    for tree in map(on_host, (state.params, moments.mu, moments.nu)):
        for path, leaf in by_path(tree).items():
            if path.startswith("blocks/"):
                assert leaf.shape[0] == 6 and not leaf[unused].any(), path
            elif path == "/".join(TABLE):
                np.testing.assert_array_equal(leaf[0], leaf[-1])
                assert leaf[0].any() and not leaf[1].any()
            else:
                end = 0 if path.startswith(TABLE[0]) else -1
                assert not np.delete(leaf, range(3)[end], axis=0).any(), path
    after = by_path(setup.layout.model_tree(on_host(state.params), setup.training.tied))
    assert all(np.any(after[path] != leaf) for path, leaf in before.items() if not path.startswith("pooler/"))


@pytest.mark.parametrize(("zero", "share"), [(0, 2), (1, 8), (3, 8)])
def test_zero_divides_matrices_and_moments(tiny, zero, share):
    """Bytes of matrices per device on data 4 x tensor 2: the tensor axis always halves what it shards."""
    setup = prepare(tiny(**{"parallel.data": 4, "parallel.tensor": 2, "parallel.zero": zero}))
    state = abstract_state(setup)
    (moments,) = (part for part in state.optimizer if hasattr(part, "mu"))
    for tree in (state.params, moments.mu, moments.nu):
        leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for name in ("embedding/tokens", "mlp/up/kernel", "mlp/down/kernel", "qkv/kernel", "projection/kernel"):
            leaf = next(leaf for path, leaf in leaves.items() if path.endswith(name))
            assert leaf.size == share * np.prod(leaf.sharding.shard_shape(leaf.shape))


@pytest.mark.parametrize("zero", [0, 1])
def test_stages_divide_the_blocks(tiny, zero):
    """On pipe 2 x data 2 x tensor 2 a device holds half the blocks, half of each, and with ZeRO half of that."""
    parallel = {"parallel.pipe": 2, "parallel.data": 2, "parallel.tensor": 2, "parallel.micro_batches": 2}
    setup = prepare(tiny(**parallel, **{"parallel.zero": zero, "model.num_layers": 4}))
    kernel = abstract_state(setup).params["blocks"]["mlp"]["down"]["kernel"]
    assert kernel.size == 4 * 64 * 128
    assert np.prod(kernel.sharding.shard_shape(kernel.shape)) == kernel.size / (8 if zero else 4)


WHOLE = {  # a plan of so many blocks, and how many of them a device has meanwhile
    "data, not cut": (piped([6], 1, data=4), 4, 4),
    "ZeRO": (piped([6], 1, data=4, zero=1), 4, 1),
    "tensor": (piped([6], 1, tensor=2), 4, 2),
    "both": (piped([6], 1, data=2, tensor=2, zero=3), 4, 1),
    "more devices than layers": (piped([6], 1, data=2, tensor=4, zero=1), 4, 1),
    "one device has fewer": (piped([7], 1, data=4, zero=1), 5, 2),
    "those of a stage": (piped([3, 3], 2, data=2, zero=1), 4, 1),
    "those of an uneven stage": (piped([4, 3], 2, data=2, zero=1), 5, 2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_matrices_are_whole_while_layers_are_shared_out(name):
    """Products of each matrix with itself; on every device, whole rows and columns of its layers."""
    plan, blocks, layers = WHOLE[name]
    layout = Layout(plan=plan, device_mesh=make_device_mesh(plan, jax.devices()), num_layers=blocks)
    rng, rows = np.random.default_rng(0), int(layout.chunks[1].max()) * layout.stages
    kernels = {"qkv": (rows, 16, 4, 3, 2), "down": (rows, 24, 8)}
    tree = {name: {"kernel": rng.normal(size=shape).astype(np.float32)} for name, shape in kernels.items()}
    tree = {"blocks": {"attention": {"qkv": tree["qkv"]}, "mlp": {"down": tree["down"]}}}
    there, inside = jax.device_put(tree, layout.shardings(tree)), []

    def squared(leaf):
        jax.debug.inspect_array_sharding(leaf, callback=lambda place: inside.append(place.shard_shape(leaf.shape)))
        matrices = leaf.reshape(*leaf.shape[:2], -1)
        return jnp.einsum("lij,lkj,lkm->lim", matrices, matrices, matrices).reshape(leaf.shape)

    function = lambda tree: layout.on_whole_layers(lambda tree: jax.tree.map(squared, tree), tree)  # noqa: E731
    program = jax.jit(function, out_shardings=layout.shardings(tree)).lower(there).compile()
    assert sorted(inside) == sorted((layers, *shape[1:]) for shape in kernels.values())
    collectives = set() if name.startswith("data") else {"all-to-all"}
    assert set(re.findall(r" (all-[\w-]+|collective-permute|reduce-scatter)\(", program.as_text())) == collectives
    expected = jax.jit(lambda tree: jax.tree.map(squared, tree))(jax.tree.map(jnp.asarray, tree))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), program(there), expected)


@pytest.mark.parametrize("kind", [kind for kind in PLANS if kind != "as it is"])
def test_checkpoints_lie_in_shares(setup_of, kind):
    """The model's own tree on its way to disk: with ZeRO or without, no device has to hold it whole."""
    layout = laid_out(setup_of("gpt"), PLANS[kind]).layout
    shapes = jax.eval_shape(setup_of("gpt").model.init, jax.random.key(0))
    axes = layout.device_mesh.axes(layout.device_mesh.degrees[0])
    shares = layout.device_mesh.size(axes.data) * layout.device_mesh.size(axes.tensor)
    shares *= layout.stages if 4 % layout.stages == 0 else 1
    kernel, sharding = (tree["blocks"]["mlp"]["up"]["kernel"] for tree in (shapes, layout.model_shardings(shapes)))
    assert kernel.size == shares * np.prod(sharding.shard_shape(kernel.shape))
