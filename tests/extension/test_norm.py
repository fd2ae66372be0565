"""A new norm, through the public registry alone."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jhpt.core.load import load_config
from jhpt.models.family import build
from jhpt.models.layers import register_norm

# Layer norm without a bias, as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311).
register_norm("unbiased_layernorm", partial(nn.LayerNorm, use_bias=False), parameters=1)

SMALL = {"model.num_layers": 1, "model.d_model": 16, "model.num_heads": 2, "model.d_ff": 32, "model.max_length": 8}


def test_it_is_computed_and_its_parameters_are_counted():
    config = load_config("gpt-tiny", SMALL | {"model.norm": "unbiased_layernorm", "data.sequence_length": 8}).model
    model = build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.parameter_count().allocated
    tokens = jnp.arange(8)[None]
    plain = build(config.model_copy(update={"norm": "layernorm"}))
    expected = plain.apply(plain.init(jax.random.key(0)), tokens)  # whose biases begin as zero
    assert jnp.allclose(model.apply(params, tokens), expected, atol=1e-5)


def test_one_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter"):
        register_norm("bare_layernorm", partial(nn.LayerNorm, use_scale=False, use_bias=False), parameters=0)
