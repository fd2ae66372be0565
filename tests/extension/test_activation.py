"""A new activation, through the public registry alone."""

import jax
import jax.numpy as jnp

import jhpt
from jhpt.core.load import load_config
from jhpt.models.family import build
from jhpt.models.layers import register_activation


def squared_relu(hidden: jax.Array) -> jax.Array:
    """relu(x)^2 (So et al. 2021, arXiv 2109.08668)."""
    return jnp.square(jax.nn.relu(hidden))


def reglu(hidden: jax.Array) -> jax.Array:
    """relu(gate(x)) up(x) (Shazeer 2020, arXiv 2002.05202)."""
    return jax.nn.relu(hidden[..., 0, :]) * hidden[..., 1, :]


register_activation("squared_relu", squared_relu)
register_activation("reglu", reglu, matrices=2)

SMALL = {"model.num_layers": 2, "model.d_model": 16, "model.num_heads": 2, "model.d_ff": 32}


def test_it_trains(corpus, tmp_path):
    settings = (
        corpus | SMALL | {"model.max_length": 16, "data.sequence_length": 16, "data.batch_size": 4, "train.steps": 2}
    )
    quiet = {"log.every": 1, "log.tensorboard": False, "evaluation.sample_tokens": 0, "evaluation.batches": 1}
    settings |= quiet | {"model.activation": "squared_relu", "parallel.data": 1}
    result = jhpt.train("gpt-tiny", out=tmp_path / "run", overrides=settings)
    assert result.step == 2 and all(5 < loss < 6 for loss in result.losses.values())


def test_a_gated_one_is_counted():
    config = load_config("gpt-tiny", SMALL | {"model.activation": "reglu"}).model
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))
    assert shapes["blocks"]["mlp"]["up"]["kernel"].shape == (2, 16, 2, 32)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.parameter_count().allocated
    plain = load_config("gpt-tiny", SMALL).model
    extra = config.flops_per_token(16).forward - plain.flops_per_token(16).forward
    assert extra == 2 * 2 * 16 * 32  # 2 FLOP x 2 layers x one more matrix [16, 32]
