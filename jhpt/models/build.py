"""From a model configuration to a model."""

from typing import Any

import jax.numpy as jnp

from jhpt.core.config import BERTConfig, ModelConfig
from jhpt.models.attention import Implementation
from jhpt.models.bert import BERT
from jhpt.models.gpt import GPT
from jhpt.models.hooks import Hooks

Model = GPT | BERT


def build(
    config: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    implementation: Implementation = "xla",
    hooks: Hooks | None = None,
) -> Model:
    """The model of this configuration, computing in `dtype` with the given attention kernel."""
    hooks = hooks or Hooks()
    if isinstance(config, BERTConfig):
        return BERT(config=config, dtype=dtype, implementation=implementation, hooks=hooks)
    return GPT(config=config, dtype=dtype, implementation=implementation, hooks=hooks)
