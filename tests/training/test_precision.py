"""State in few bits: the rules of rounding, the codes of moments, and that no plan, skip or resumption changes what
they make of a step."""

import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from pydantic import ValidationError

import jhpt
from jhpt.core.config import Config, MemoryConfig, OptimizerConfig
from jhpt.core.errors import InputError
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.load import load_config
from jhpt.core.plan import Offload
from jhpt.core.state import LEAST
from jhpt.models.family import Rows, Sums
from jhpt.sharding.partition import IN_FLOAT32, MATRICES
from jhpt.training.clipping import Clipping
from jhpt.training.device_step import abstract_state, fresh_state, make_conversion
from jhpt.training.moments import (
    SIGNED,
    UNSIGNED,
    block_of,
    coded_moments,
    decode,
    decode_square,
    encode,
    encode_square,
)
from jhpt.training.offloaded_training import OffloadedTraining
from jhpt.training.optimizer import make_optimizer
from jhpt.training.profiling import default_grid, measure_layers
from jhpt.training.record import check_resumable, make_record
from jhpt.training.setup import prepare
from jhpt.training.step import init_state, make_train_step
from jhpt.training.weights import Weights, kahan, stochastic, widened
from tests.conftest import tiny_overrides
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import batch, by_path, laid_out, mixed, on_host, piped, random_params, stored

FEW = "bfloat16", "bfloat16_kahan", "bfloat16_stochastic"
FEWEST = {"optimizer.weights": "bfloat16_stochastic", "optimizer.moments": "int8"}


# Rounding.


def moved(storage, start, changes):
    """A matrix of this start, kept like this, after all changes [n, ...]: (parameters, remainder), compiled."""
    weights = Weights(storage=storage, keys=lambda key: {"kernel": jax.random.key_data(key)})
    params = weights.stored({"kernel": jnp.asarray(start, jnp.float32)})

    @jax.jit
    def run(params, changes):
        def one(state, inputs):
            change, key = inputs
            return weights.lowered(state[0], {"kernel": change}, state[1], key), None

        keys = jax.random.split(jax.random.key(1), len(changes))
        return jax.lax.scan(one, (params, weights.remainder(params)), (changes, keys))[0]

    params, remainder = run(params, jnp.asarray(changes, jnp.float32))
    assert params["kernel"].dtype == jnp.bfloat16
    return (np.asarray(tree["kernel"], np.float64) if tree else None for tree in (params, remainder))


def test_what_bfloat16_rounds_away_kahan_adds_up():
    """1,000 changes of 2^-11 and less, parameters from 1 to 2: to nearest nothing ever moves."""
    rng, steps = np.random.default_rng(0), 1000
    start = np.asarray(rng.uniform(1, 2, (8, 64)), jnp.bfloat16).astype(np.float64)
    changes = -rng.uniform(0.5, 1, (steps, *start.shape)).astype(np.float32) * 2.0**-11
    exact = start - changes.astype(np.float64).sum(0)

    stuck, nothing = moved("bfloat16", start, changes)
    assert nothing is None and np.array_equal(stuck, start) and np.all(exact - start > 0.3)

    params, remainder = moved("bfloat16_kahan", start, changes)
    bound = steps * 2.0**-17 * exact.max()
    assert np.abs(params + remainder - exact).max() <= bound
    assert np.all(np.abs(params - exact) <= bound + 2.0**-8 * exact)  # the nearest bfloat16, to that
    assert np.abs(remainder).max() <= 2.0**-8 * exact.max() and np.mean(remainder != 0) > 0.9

    drawn, _ = moved("bfloat16_stochastic", start, changes)
    deviation = 2.0**-8 * exact.max() * steps**0.5
    assert np.abs(drawn - exact).max() <= 4 * deviation
    assert abs(np.mean(drawn - exact)) <= 4 * deviation / start.size**0.5  # no drift
    assert np.mean(np.abs(drawn - exact) > bound) > 0.3  # that it is noisy, and Kahan's sum is not, is the difference


def test_kahan_of_float32_is_a_sum_in_more_than_float32():
    """Nothing is rounded but the remainder, to a bfloat16 of what float32 has lost."""
    start, change, steps = jnp.float32(1), jnp.float32(-(2.0**-26)), 1 << 8
    total, left = jax.jit(
        lambda start: jax.lax.fori_loop(0, steps, lambda _, s: kahan(s[0], change, s[1]), (start, jnp.bfloat16(0)))
    )(start)
    assert total.dtype == jnp.float32 and float(total) + float(left) == 1 + steps * 2.0**-26


def test_stochastic_rounding_is_right_on_average():
    """Mean over 4,096 keys within five standard deviations of x; always one of the two neighbours."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 4096)
    x = jnp.asarray(rng.normal(size=256) * 10.0 ** rng.integers(-3, 3, 256), jnp.float32)
    drawn = np.asarray(jax.jit(jax.vmap(partial(stochastic, x)))(keys), np.float64)
    bits = np.asarray(x).view(np.uint32)
    embedding_and_head = [
        ((bits & 0xFFFF0000) + up).astype(np.uint32).view(np.float32).astype(np.float64) for up in (0, 1 << 16)
    ]
    assert np.all((drawn == embedding_and_head[0]) | (drawn == embedding_and_head[1]))
    gap, exact = np.abs(embedding_and_head[1] - embedding_and_head[0]), np.asarray(x, np.float64)
    assert np.all(np.abs(drawn.mean(0) - exact) <= 5 * gap / 2 / 64)
    nearest = np.asarray(x.astype(jnp.bfloat16), np.float64)
    assert np.mean(np.abs(nearest - exact) > 5 * gap / 2 / 64) > 0.5  # which rounding to nearest is not


def test_stochastic_rounding_leaves_what_is_representable():
    special = [0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, float(jnp.finfo(jnp.bfloat16).max), 2.0**-126]
    x = jnp.asarray([*special, *np.random.default_rng(0).normal(size=64).astype(jnp.bfloat16)], jnp.float32)
    for seed in range(8):
        drawn = stochastic(x, jax.random.key(seed))
        assert np.array_equal(np.asarray(drawn, np.float32).view(np.uint32), np.asarray(x).view(np.uint32))
    assert np.isnan(stochastic(jnp.asarray([jnp.nan]), jax.random.key(0)).astype(jnp.float32)).all()


def test_what_models_use_in_float32_stays_so(tiny):
    for storage in FEW:
        setup = prepare(tiny(**{"optimizer.weights": storage, "parallel.data": 1}))
        state = jax.eval_shape(partial(fresh_state, setup))
        assert set(by_type(state.optimizer).values()) == {"float32", "int32"}
        for path, leaf in by_type(state.params).items():
            assert leaf == ("float32" if IN_FLOAT32.search(path) else "bfloat16"), path


def test_the_optimizer_sees_parameters_in_float32():
    """Decay alone: a fifth of a parameter goes, of which bfloat16 would round 2^-9 away and the remainder 2^-17."""
    config, keep = OptimizerConfig(weights="bfloat16_kahan", weight_decay=0.7), Weights(storage="bfloat16_kahan")
    params = {"kernel": jax.random.normal(jax.random.key(0), (8, 64)).astype(jnp.bfloat16).astype(jnp.float32)}

    def nothing(params, windows, key):
        return jax.tree.map(jnp.zeros_like, widened(params)), Sums(*(jnp.float32(1),) * 3)

    rules = {"seed": 0, "max_bad_steps": 1, "weights": keep}
    step = jax.jit(make_train_step(nothing, make_optimizer(config), lambda step: jnp.float32(0.3), **rules))
    state, _ = step(init_state(params, make_optimizer(config), weights=keep), jnp.zeros((1, 1), jnp.int32))
    moved = by_path(state.params)["kernel"] + by_path(state.remainder)["kernel"]
    start = by_path(params)["kernel"]
    assert np.all(np.abs(moved - start * (1 - 0.3 * 0.7)) <= 2.0**-17 * np.abs(start))


def by_type(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype.name for path, leaf in leaves}


# Codes.


def rows_of_blocks():
    """Name -> [rows, 128], blocks of 64: random and adversarial."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(32, 128))
    lonely = np.full((4, 128), 1e-12)
    lonely[:, 5], lonely[:, 70] = 1e12, -1e12
    return {
        "normal": normal,
        "heavy tails": rng.standard_t(1, size=(32, 128)),
        "many scales": normal * 10.0 ** rng.uniform(-12, 12, normal.shape),
        "one huge": lonely,
        "zeros": np.zeros((2, 128)),
        "denormal": np.full((2, 128), 1e-40) * rng.integers(-1, 2, (2, 128)),
        "alike": np.full((2, 128), -3.7),
        "largest": np.full((1, 128), 8e37),
    }


TINY = float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize("name", rows_of_blocks())
@pytest.mark.parametrize("levels", [SIGNED, UNSIGNED])
def test_codes_keep_their_bound(name, levels):
    x = rows_of_blocks()[name].astype(np.float32)
    x = x if levels == SIGNED else np.abs(x)
    codes, scales = jax.jit(partial(encode, levels=levels), static_argnums=1)(x, 64)
    assert codes.dtype == (jnp.int8 if levels == SIGNED else jnp.uint8)
    assert codes.shape == x.shape and scales.shape == (len(x), 2) and scales.dtype == jnp.float32
    decoded = np.asarray(jax.jit(partial(decode, levels=levels))(codes, scales), np.float64)
    exact, scale = x.astype(np.float64), np.repeat(np.abs(x).reshape(len(x), 2, 64).max(-1), 64, -1).astype(np.float64)
    bound = np.sqrt(np.abs(exact) * scale) / levels + scale / (4 * levels**2)
    if levels == UNSIGNED:
        bound = np.maximum(bound, scale / levels**2)
    assert np.all(np.abs(decoded - exact) <= bound * (1 + 1e-4) + TINY)
    largest = np.abs(exact) == scale
    assert np.allclose(decoded[largest & (scale >= TINY)], exact[largest & (scale >= TINY)], rtol=3e-7, atol=0)
    assert not decoded[exact == 0].any()
    if levels == UNSIGNED:
        assert np.all(decoded[(exact > 0) & (scale > 1e-30)] > 0)


def test_codes_are_not_better_than_their_bound_by_far():
    """Else the bound would say nothing: on random blocks the worst error is more than half of it."""
    x = rows_of_blocks()["normal"].astype(np.float32)
    error = np.abs(np.asarray(decode(*encode(x, 64, SIGNED), SIGNED)) - x)
    scale = np.repeat(np.abs(x).reshape(-1, 2, 64).max(-1), 64, -1)
    assert np.max(error / (np.sqrt(np.abs(x) * scale) / SIGNED + scale / (4 * SIGNED**2))) > 0.5


def test_a_second_moment_is_coded_by_its_root():
    """Relative error of the root of what is at least a hundredth of the largest root: at most 4 %."""
    v = np.random.default_rng(0).uniform(1e-4, 1, (64, 128)).astype(np.float32) ** 2
    decoded = np.sqrt(decode_square(*encode_square(v, 64)))
    near = np.sqrt(v) > 0.01 * np.sqrt(v.reshape(64, 2, 64).max(-1)).repeat(64, -1)
    assert near.mean() > 0.9 and np.abs(decoded / np.sqrt(v) - 1)[near].max() <= 0.04


def test_what_is_coded_and_in_which_blocks():
    for path, shape, block in (
        ("blocks/mlp/up/kernel", (2, 64, 256), 64),
        ("embedding/tokens", (256, 48), 48),
        ("head/dense/kernel", (10, 1000), 50),
        ("head/dense/kernel", (10, 2 * 67), None),  # 67 is prime
        ("head/dense/kernel", (10, LEAST - 1), None),
        ("blocks/mlp/up/bias", (2, 256), None),
        ("blocks/mlp_norm/scale", (2, 64), None),
    ):
        assert block_of(path, shape) == block, path


def adam_directions(gradients, coded):
    """Adam's direction after every one of these gradients [n, ...]."""
    adam = optax.scale_by_adam(0.9, 0.95, 1e-8)
    adam = coded_moments(adam) if coded else adam

    def one(state, gradient):
        direction, state = adam.update({"kernel": gradient}, state)
        return state, direction["kernel"]

    state = adam.init({"kernel": jnp.zeros(gradients.shape[1:])})
    return np.asarray(jax.jit(partial(jax.lax.scan, one))(state, jnp.asarray(gradients, jnp.float32))[1])


def test_directions_with_coded_moments_are_adams():
    """The first has nothing to decode; of forty, entries whose gradients differ in size a hundredfold, within 5 %."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(40, 32, 128)) * 10.0 ** rng.uniform(-1, 1, (32, 128))
    exact, coded = adam_directions(gradients, False), adam_directions(gradients, True)
    assert np.array_equal(exact[0], coded[0]) and not np.array_equal(exact[1], coded[1])
    assert np.sqrt(np.mean((coded - exact) ** 2) / np.mean(exact**2)) <= 0.05


def test_no_direction_explodes():
    """One huge gradient a block, others 1e-10 of it or less, most of the time zero: no step is larger than Adam's
    largest by more than what the code of the first moment may add."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(60, 16, 128)) * 10.0 ** rng.uniform(-18, -10, (16, 128))
    gradients[:, :, ::64] = rng.normal(size=(60, 16, 2))
    gradients *= rng.uniform(size=gradients.shape) < 0.2
    exact, coded = adam_directions(gradients, False), adam_directions(gradients, True)
    assert np.isfinite(coded).all() and np.abs(coded).max() <= 1.1 * np.abs(exact).max()
    assert np.abs(exact).max() < 5


# The step, under any plan.

PLANS = {
    "data 4, ZeRO-1": piped([4], 1, data=4, zero=1),
    "data 2 x tensor 2, ZeRO-3": piped([4], 1, data=2, tensor=2, zero=3),
    "hybrid, ZeRO-3": piped([4], 1, data=4, zero=3, zero_ranks=2),
    "several degrees, ZeRO-1": mixed((1, 2, 1, 2), zero=1),
    "pipeline, ZeRO-1": piped([3, 1], 2, data=2, zero=1),
}
MODES = {
    "plain": ("bfloat16", "float32"),
    "kahan, codes": ("bfloat16_kahan", "int8"),
    "stochastic, codes": ("bfloat16_stochastic", "int8"),
    "codes": ("float32", "int8"),
}
CASES = [("data 4, ZeRO-1", mode) for mode in MODES]
CASES += [("data 2 x tensor 2, ZeRO-3", "kahan, codes"), ("several degrees, ZeRO-1", "stochastic, codes")]
CASES += [("pipeline, ZeRO-1", mode) for mode in ("kahan, codes", "stochastic, codes")]
CASES += [("data 2 x tensor 2, ZeRO-3", "stochastic, codes"), ("hybrid, ZeRO-3", "kahan, codes")]
QUICK = [("data 2 x tensor 2, ZeRO-3", "kahan, codes"), ("pipeline, ZeRO-1", "stochastic, codes")]


def update(setup):
    """A step, to be compiled, whose gradients are a function of each parameter alone, so that no sum over devices is
    rounded differently."""
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(setup))

    def gradients(params, windows, key):
        grads = jax.tree.map(lambda p: jnp.sin(37 * p.astype(jnp.float32)), params)
        return grads, Sums(jnp.float32(1), jnp.float32(1), jnp.float32(1))

    step = make_train_step(
        gradients,
        setup.optimizer,
        lambda step: jnp.float32(1e-3),
        seed=3,
        max_bad_steps=1,
        clip=Clipping(norm=lambda gradients: jnp.float32(1)),
        weights=setup.weights,
    )
    return jax.jit(step, out_shardings=(places, None))


def taken(setup, steps=3):
    """(conversion to a checkpoint, the state after so many steps, the compiled step)."""
    shapes = abstract_state(setup)
    run = update(setup).lower(shapes, jnp.zeros((1, 1), jnp.int32)).compile()
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    state = jax.jit(partial(fresh_state, setup), out_shardings=places)()
    for _ in range(steps):
        state, metrics = run(state, jnp.zeros((1, 1), jnp.int32))
    assert int(metrics.skipped) == 0
    return make_conversion(setup, shapes, lambda program, part: program), state, run


_serial: dict = {}


def serial(setup, mode):
    """Of one device."""
    if mode not in _serial:
        plan = setup.plan.model_copy(update={"stages": piped([4], 1).stages})
        conversion, state, _ = taken(laid_out(setup, plan))
        _serial[mode] = on_host(conversion.saved(state))
    return _serial[mode]


COLLECTIVES = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


@pytest.mark.parametrize(("plan", "mode"), quick_and_exhaustive(CASES, QUICK))
def test_a_step_is_that_of_one_device(tiny, plan, mode):
    """Whatever the plan, a number is rounded alike: but for one in a thousand, where the last bit of a float32 decides,
    the saved state is the same, and loading it gives back every bit.  Codes, scales, remainders and draws are made
    where they are used: nothing moves between devices.  A tied table is the same on both stages."""
    weights, moments = MODES[mode]
    setup = prepare(tiny(**{"optimizer.weights": weights, "optimizer.moments": moments, "parallel.data": 1}))
    conversion, state, step = taken(laid_out(setup, PLANS[plan]))
    assert COLLECTIVES.findall(step.as_text()) == []
    if "pipeline" in plan:
        first, last = (np.asarray(state.params["embedding"]["tokens"], np.float32)[at] for at in (0, -1))
        assert np.array_equal(first, last)
    saved = conversion.saved(state)
    actual, expected = on_host(saved), serial(setup, mode)
    assert by_type(actual) == by_type(expected)
    different, numbers = 0, 0
    for (path, leaf), other in zip(by_path(actual).items(), by_path(expected).values(), strict=True):
        scale = np.abs(other).max(initial=1e-30)
        most = {"uint8": 1, "int8": 1, "bfloat16": 2.0**-7 * scale}.get(by_type(actual)[path], 1e-5 * scale)
        assert np.abs(leaf - other).max(initial=0) <= most, path
        if by_type(actual)[path] != "float32":
            different, numbers = different + np.sum(leaf != other), numbers + leaf.size
    assert numbers > 50_000 and different <= 1e-3 * numbers

    again = conversion.loaded(saved)
    here = abstract_state(laid_out(setup, PLANS[plan]))
    assert jax.tree.map(lambda leaf: leaf.sharding, again) == jax.tree.map(lambda leaf: leaf.sharding, here)
    saved_again = on_host(conversion.saved(again))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), saved_again, actual))


@pytest.mark.parametrize(
    "plan", quick_and_exhaustive(["data 2 x tensor 2, ZeRO-3", "pipeline, ZeRO-1"], ["data 2 x tensor 2, ZeRO-3"])
)
def test_gradients_are_float32_and_those_of_the_widened_parameters(tiny, plan):
    """That parameters are kept in bfloat16 is no matter of what is computed: to 1e-6 of the largest."""
    setup = laid_out(prepare(tiny(**{"parallel.data": 1})), PLANS[plan])
    params = stored(setup, Weights(storage="bfloat16").stored(jax.tree.map(jnp.asarray, random_params(setup))))
    rows = Rows(jax.device_put(batch(setup, 16), setup.layout.batch))
    run = jax.jit(lambda params: setup.training.gradients(params, rows, jax.random.key(7))[0])
    actual, expected = on_host(run(params)), on_host(run(widened(params)))
    assert set(by_type(actual).values()) == {"float32"} and max(map(np.max, jax.tree.leaves(actual))) > 0
    for path, leaf in by_path(expected).items():
        assert np.abs(by_path(actual)[path] - leaf).max() <= 1e-6 * np.abs(leaf).max(), path


def test_parameters_blocks_and_steps_draw_apart(tiny):
    setup = prepare(tiny(**{"optimizer.weights": "bfloat16_stochastic", "parallel.data": 1}))
    keys = [
        tuple(row)
        for step in range(2)
        for leaf in jax.tree.leaves(setup.weights.keys(jax.random.key(step)))
        for row in np.asarray(leaf).reshape(-1, 2)
    ]
    leaves = jax.tree.leaves(jax.eval_shape(setup.model.init, jax.random.key(0))["blocks"])
    assert len(set(keys)) == len(keys) > 4 * len(leaves)


def test_scales_lie_where_their_codes_do(tiny):
    """Else the compiler would have to move them."""
    setup = prepare(tiny(**{"optimizer.moments": "int8", "parallel.tensor": 2, "parallel.data": 4, "parallel.zero": 1}))
    mu = abstract_state(setup).optimizer[0].mu
    codes, scales = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (mu.codes, mu.scales)
    )
    assert len(scales) >= 5
    for path, leaf in scales.items():
        assert leaf.sharding.spec == codes[path].sharding.spec and codes[path].dtype == jnp.int8, path
        assert not leaf.sharding.is_fully_replicated, path
    floats = [path for path in codes if path not in scales]
    assert floats and not any(MATRICES.search(path.replace("']['", "/").strip("[']")) for path in floats)


@pytest.mark.parametrize("weights", FEW)
def test_a_step_that_is_not_finite_leaves_every_bit(weights):
    config = OptimizerConfig(weights=weights, moments="int8")
    keep = Weights(storage=weights, keys=lambda key: {"kernel": jax.random.key_data(key)})

    def gradients(params, windows, key):
        bad = jnp.where(windows[0, 0] == 1, jnp.nan, 1.0)
        return {"kernel": params["kernel"].astype(jnp.float32) * bad}, Sums(*(jnp.float32(1),) * 3)

    rules = {"seed": 0, "clip": Clipping(limit=1.0), "max_bad_steps": 3, "weights": keep}
    step = jax.jit(make_train_step(gradients, make_optimizer(config), lambda step: jnp.float32(0.01), **rules))
    params = {"kernel": jax.random.normal(jax.random.key(0), (4, 64))}
    state, _ = step(init_state(params, make_optimizer(config), weights=keep), jnp.zeros((1, 1), jnp.int32))
    skipped, metrics = step(state, jnp.ones((1, 1), jnp.int32))
    assert int(metrics.skipped) == 1
    before, after = (on_host((each.params, each.optimizer, each.remainder)) for each in (state, skipped))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), before, after))
    further, _ = step(skipped, jnp.zeros((1, 1), jnp.int32))
    assert not np.array_equal(further.params["kernel"], state.params["kernel"])


# Runs.


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("weights", quick_and_exhaustive(["bfloat16_kahan", "bfloat16_stochastic"], ["bfloat16_kahan"]))
def test_a_run_resumes_bit_for_bit_and_only_with_its_settings(tmp_path, corpus, weights):
    """With every kind of state: remainders and codes; in two pieces, the second of which draws as the whole does."""
    settings = tiny_overrides(corpus) | {
        "model.num_layers": 1,
        "parallel.data": 1,
        "optimizer.weights": weights,
        "optimizer.moments": "int8",
        "checkpoint.every": 2,
    }
    whole = jhpt.train("gpt-tiny", out=tmp_path / "whole", overrides=settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")  # as if it had been killed before
    for other, now in (("optimizer.weights", "float32"), ("optimizer.moments", "float32")):
        with pytest.raises(InputError, match=f"{other}: the run has '{settings[other]}', now '{now}'"):
            jhpt.train(out=tmp_path / "run", overrides={other: now})
    parts = jhpt.train(out=tmp_path / "run")
    assert parts.losses == whole.losses and parts.validation_losses == whole.validation_losses
    assert 4 in whole.validation_losses
    first, second = (saved_state(tmp_path / name, 4) for name in ("whole", "run"))
    assert first.keys() == second.keys() and {leaf.dtype.name for leaf in first.values()} >= {"int8", "uint8"}
    assert any("remainder" in path for path in first) == (weights == "bfloat16_kahan")
    for path, leaf in first.items():
        assert leaf.tobytes() == second[path].tobytes(), path


def saved_state(run_dir, step):
    manager = ocp.CheckpointManager(run_dir / "checkpoints")
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    manager.close()
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def test_a_run_from_before_these_settings_resumes():
    """What it does not name had the meaning that is the default now."""
    now = make_record(Config(), "key", "float32")
    optimizer = {name: value for name, value in now.config["optimizer"].items() if name not in ("weights", "moments")}
    before = replace(now, config={**now.config, "optimizer": optimizer})
    check_resumable(before, now, "here")
    before = replace(now, config={**now.config, "model": {**now.config["model"], "matmul_dtype": "float8"}})
    with pytest.raises(InputError, match="matmul_dtype: the run has 'float8', now 'same'"):
        check_resumable(before, now, "here")
    model = {name: value for name, value in now.config["model"].items() if name != "matmul_dtype"}
    before = replace(now, config={**now.config, "model": model})
    check_resumable(before, now, "here")
    other = make_record(Config(optimizer=OptimizerConfig(moments="int8")), "key", "float32")
    with pytest.raises(InputError, match="moments: the run has 'float32', now 'int8'"):
        check_resumable(before, other, "here")


# What is refused.


@pytest.mark.parametrize("dtype", ["float8", "float8_e4m3fn", "fp8"])
def test_eight_bits_do_not_compute_all_of_a_model(dtype):
    with pytest.raises(ValidationError, match=r"use model.matmul_dtype=float8 with model.dtype=bfloat16"):
        GPTConfig(dtype=dtype)
    with pytest.raises(InputError, match=f"model.dtype={dtype} does not exist"):
        load_config("gpt-tiny", {"model.dtype": dtype})


def test_products_in_eight_bits_need_a_device_that_has_them(tiny):
    config = tiny(**{"model.matmul_dtype": "float8"})
    for refusing in (prepare, lambda config: measure_layers(config, default_grid(config))):
        with pytest.raises(InputError, match=r"the device is a cpu; use model.matmul_dtype=same"):
            refusing(config)


@pytest.mark.parametrize("few", [{"weights": "bfloat16_kahan"}, {"moments": "int8"}])
def test_the_host_keeps_float32(few):
    optimizer = OptimizerConfig(**few)
    for offload in ("parameters", "optimizer", "both"):
        Config(memory=MemoryConfig(offload=offload))
        with pytest.raises(ValidationError, match=f"memory.offload={offload}. stores blocks in float32"):
            Config(optimizer=optimizer, memory=MemoryConfig(offload=offload))
    Config(optimizer=optimizer, memory=MemoryConfig(offload="off"))
    rules = {"learning_rate": lambda step: step, "seed": 0, "max_bad_steps": 1}
    blocks = SimpleNamespace(offload=Offload())
    OffloadedTraining(blocks=blocks, config=OptimizerConfig(), **rules)
    with pytest.raises(InputError, match="use float32 for both"):
        OffloadedTraining(blocks=blocks, config=optimizer, **rules)


def test_a_plan_that_cuts_through_blocks_is_refused(tiny):
    """128 hidden units are two blocks of 64: a tensor axis of four would cut them."""
    prepare(tiny(**{"optimizer.moments": "int8", "parallel.tensor": 2}))
    with pytest.raises(InputError, match=r"codes rows of blocks/mlp/up/kernel in 2 blocks, .* into 4 pieces"):
        prepare(tiny(**{"optimizer.moments": "int8", "parallel.tensor": 4}))
    prepare(tiny(**{"parallel.tensor": 4}))
