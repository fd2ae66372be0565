"""Update rules: each is optax's, its state is what the planner counts, and plans do not change what it computes."""

import shutil
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jhpt
from jhpt.core.config import OptimizerConfig
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.training.optimizer import make_optimizer
from tests.conftest import tiny_overrides
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import mixed
from tests.training.test_resume import final_state, same_bits

NEW = ("lion", "sgd", "adafactor", "muon")
DECAY = 0.1


def tree(key: int, layers: int = 3):
    """A gated block with grouped queries, as a model lays it out: [D, K, G + 2, E] and [D, 2, F]."""
    shapes = {
        "embedding": {"tokens": (12, 6)},
        "blocks": {
            "attention": {"qkv": {"kernel": (layers, 6, 2, 4, 5), "bias": (layers, 2, 4, 5)}},
            "mlp": {"up": {"kernel": (layers, 6, 2, 9)}, "down": {"kernel": (layers, 9, 6)}},
            "norm": {"scale": (layers, 6)},
        },
        "head": {"norm": {"scale": (6,)}},
    }
    keys = iter(jax.random.split(jax.random.key(key), 20))
    normal = lambda shape: jax.random.normal(next(keys), shape)  # noqa: E731
    return jax.tree.map(normal, shapes, is_leaf=lambda x: isinstance(x, tuple))


def apart(params):
    """Every matrix [n, m] and every vector by itself: what optax's rules are written for."""
    parts = {"tokens": params["embedding"]["tokens"], "norm": params["head"]["norm"]["scale"]}
    block = params["blocks"]
    for layer in range(3):
        parts[f"qkv {layer}"] = block["attention"]["qkv"]["kernel"][layer].reshape(6, -1)
        parts[f"bias {layer}"] = block["attention"]["qkv"]["bias"][layer].ravel()
        parts[f"gate {layer}"], parts[f"up {layer}"] = jnp.moveaxis(block["mlp"]["up"]["kernel"][layer], 1, 0)
        parts[f"down {layer}"] = block["mlp"]["down"]["kernel"][layer]
        parts[f"scale {layer}"] = block["norm"]["scale"][layer]
    return parts


def decays(parts):
    return jax.tree.map(lambda leaf: leaf.ndim == 2, parts)


MUON = {
    name: optax.contrib.MuonDimensionNumbers() if name.split()[0] in ("qkv", "gate", "up", "down") else None
    for name in apart(tree(0))
}
muon = partial(optax.contrib.muon, adam_b2=0.95, consistent_rms=0.2, muon_weight_dimension_numbers=MUON)

REFERENCES = {
    "adamw": ({}, partial(optax.adamw, b1=0.9, b2=0.95, weight_decay=DECAY, mask=decays)),
    "lion": ({"b2": 0.98}, partial(optax.lion, b1=0.9, b2=0.98, weight_decay=DECAY, mask=decays)),
    "sgd": ({"weight_decay": 0.0}, partial(optax.sgd, momentum=0.9)),
    "sgd, Nesterov": (
        {"weight_decay": 0.0, "momentum": 0.8, "nesterov": True},
        partial(optax.sgd, momentum=0.8, nesterov=True),
    ),
    "adafactor": (
        {"weight_decay": 0.0},
        partial(optax.adafactor, min_dim_size_to_factor=1, multiply_by_parameter_scale=False),
    ),
    "muon": ({}, partial(muon, beta=0.95, weight_decay=DECAY)),
    "muon, plain momentum": (
        {"momentum": 0.8, "nesterov": False, "weight_decay": 0.0},
        partial(muon, beta=0.8, nesterov=False),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_rules_are_those_of_optax(name):
    """Five steps on stacked layers, against optax on every matrix and vector by itself."""
    settings, reference = REFERENCES[name]
    rule = make_optimizer(OptimizerConfig(name=name.split(",")[0], **{"weight_decay": DECAY} | settings))
    rate = 0.05
    reference = reference(rate)
    params = tree(0)
    parts = apart(params)
    state, expected = rule.init(params), reference.init(parts)
    update, other = jax.jit(rule.update), jax.jit(reference.update)
    for step in range(5):
        gradients = tree(step + 1)
        directions, state = update(gradients, state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, directions)
        updates, expected = other(apart(gradients), expected, parts)
        parts = optax.apply_updates(parts, updates)
    for part, leaf in apart(params).items():
        if name == "muon" and MUON[part] is None:
            continue  # beside Muon with Nesterov's momentum optax has Adam with it
        np.testing.assert_allclose(leaf, parts[part], rtol=2e-4, atol=2e-5, err_msg=part)


RUN = {
    "model.d_model": 32,
    "model.num_heads": 8,
    "model.activation": "swiglu",
    "model.num_kv_heads": 4,
    "train.steps": 4,
    "optimizer.warmup_steps": 1,
    "optimizer.learning_rate": 1e-3,
    "data.validation_fraction": 0.0,
    "checkpoint.every": 2,
}
PLANS = {
    "data": {"data": 2},
    "ZeRO-1": {"data": 2, "zero": 1},
    "ZeRO-3": {"data": 2, "zero": 3},
    "hybrid": {"data": 4, "zero": 3, "zero_ranks": 2},
    "tensor": {"data": 1, "tensor": 2},
    "pipe": {"data": 1, "pipe": 2, "micro_batches": 2},
    "all": {"data": 2, "tensor": 2, "pipe": 2, "micro_batches": 2, "zero": 1},
}
QUICK = [("muon", "all"), ("adafactor", "all")]
"""The others compute number by number."""


def trained(corpus, out, name: str, **parallel):
    by_hand = {f"parallel.{key}": value for key, value in parallel.items()}
    overrides = tiny_overrides(corpus) | RUN | by_hand | {"optimizer.name": name}
    return jhpt.train("gpt-tiny", out=out, overrides=overrides)


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """Optimizer -> its run on one device."""

    @cache
    def run(name: str):
        return trained(corpus, tmp_path_factory.mktemp(name) / "run", name, data=1)

    return run


@pytest.mark.parametrize(
    ("name", "plan"), quick_and_exhaustive([(name, plan) for name in NEW for plan in PLANS], QUICK)
)
def test_plans_change_no_loss(corpus, alone, tmp_path, name, plan):
    there = trained(corpus, tmp_path / "run", name, **PLANS[plan])
    assert len(there.losses) == 4
    assert list(there.losses.values()) == pytest.approx(list(alone(name).losses.values()), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_blocks_of_several_degrees_change_no_loss(corpus, alone, tmp_path, name):
    plan = mixed([2, 2, 4, 2], devices=4, zero=1, batch=16)
    overrides = tiny_overrides(corpus) | RUN | {"optimizer.name": name}
    there = jhpt.train("gpt-tiny", out=tmp_path / "run", overrides=overrides, plan=plan)
    assert list(there.losses.values()) == pytest.approx(list(alone(name).losses.values()), rel=1e-5)


@pytest.mark.parametrize("setting", ["optimizer.moments", "memory.offload"])
@pytest.mark.parametrize("name", NEW)
def test_what_only_adamw_does_is_refused(name, setting):
    value = {"optimizer.moments": "int8", "memory.offload": "both"}[setting]
    with pytest.raises(InputError, match=rf"{setting}={value}\S* is not available with optimizer.name={name}; use"):
        load_config("gpt-tiny", {"optimizer.name": name, setting: value})


@pytest.mark.parametrize("name", quick_and_exhaustive(NEW, ["muon"]))
def test_a_run_resumes_bit_for_bit(alone, tmp_path, name):
    """From step 2, as if it had been killed before step 4 was saved."""
    whole = alone(name)
    folder = shutil.copytree(whole.run_dir, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "4")
    resumed = jhpt.train(out=folder)
    assert resumed.losses == whole.losses
    same_bits(final_state(folder, 4), final_state(whole.run_dir, 4))
