"""Everything that is decided before the first step: data, mesh, model, objective, optimizer.

Nothing is written here except token caches, so a configuration that cannot work leaves nothing behind.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jhpt.core.config import BERTConfig, Config
from jhpt.core.errors import InputError
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.models.attention import AttentionChoice, choose_attention
from jhpt.models.build import Model, build
from jhpt.models.hooks import Hooks
from jhpt.models.layers import NAMED_TENSORS
from jhpt.sharding.layout import Layout
from jhpt.sharding.mesh import make_mesh
from jhpt.sharding.remat import save_named
from jhpt.training.data.cache import TokenCache, token_cache
from jhpt.training.data.tokenizer import Tokenizer, load_tokenizer
from jhpt.training.data.windows import Windows, causal_windows, check_masked, masked_windows
from jhpt.training.objective import Objective, make_objective
from jhpt.training.optimizer import make_optimizer


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The pieces of a run, ready to be compiled."""

    config: Config
    device: DeviceInfo
    tokenizer: Tokenizer
    cache: TokenCache
    train_windows: Windows
    validation_windows: Windows | None
    layout: Layout
    attention: AttentionChoice
    model: Model
    objective: Objective
    optimizer: optax.GradientTransformation


def prepare(config: Config, say: Callable[[str], None] = lambda line: None) -> Setup:
    """Opens the data, builds the mesh and chooses kernels; `say` hears of what takes long.

    Raises:
      InputError: data, tokenizer, device count or attention kernel do not fit the configuration.
    """
    # Data comes last: reading a large text for the first time takes long, and a refusal should not.
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise InputError(
            f"data.tokenizer has {tokenizer.vocab_size} ids and model.vocab_size={config.model.vocab_size}; "
            f"set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    if isinstance(config.model, BERTConfig):
        check_masked(tokenizer, config.data.sequence_length)
    device = device_info()
    layout = Layout(mesh=make_mesh(config.parallel, config.data.batch_size, jax.devices()), zero=config.parallel.zero)
    dtype = compute_dtype(config, device)
    attention = choose_attention(config.model, device.platform, dtype, device.capability)
    model = build(
        config.model,
        dtype=dtype,
        implementation=attention.implementation,
        hooks=layer_hooks(config, device, layout),
    )
    cache = token_cache(config.data, tokenizer, say)
    train_windows = _windows(config, tokenizer, cache.train, "training")
    validation_windows = _windows(config, tokenizer, cache.validation, "validation") if cache.validation.size else None
    return Setup(
        config=config,
        device=device,
        tokenizer=tokenizer,
        cache=cache,
        train_windows=train_windows,
        validation_windows=validation_windows,
        layout=layout,
        attention=attention,
        model=model,
        objective=make_objective(model, config.data, tokenizer, config.optimizer.z_loss),
        optimizer=make_optimizer(config.optimizer),
    )


def compute_dtype(config: Config, device: DeviceInfo) -> jnp.dtype:
    """`model.dtype`, with "auto" resolved: bfloat16 on a GPU, float32 elsewhere."""
    name = config.model.dtype
    return jnp.dtype(("bfloat16" if device.is_gpu else "float32") if name == "auto" else name)


MOST_UNROLLED_LAYERS = 8
"""Compile time grows with unrolled layers; beyond this many the layer loop stays a loop."""


def layer_hooks(config: Config, device: DeviceInfo, layout: Layout) -> Hooks:
    """How the layers are run.

    On CPU a loop copies every layer's residuals in and out of stacked buffers, a quarter of a gpt-tiny step
    (docs/cpu-performance.md), so a few layers are unrolled.  Elsewhere they stay a loop, and its backward pass keeps
    only the named tensors (`jhpt.sharding.remat`).
    """
    layers = config.model.num_layers
    if not device.is_gpu and layers <= MOST_UNROLLED_LAYERS:
        return Hooks(constrain=layout.constrain, unroll=layers)
    return Hooks(constrain=layout.constrain, block=save_named(NAMED_TENSORS))


def _windows(config: Config, tokenizer: Tokenizer, tokens: np.ndarray, name: str) -> Windows:
    if isinstance(config.model, BERTConfig):
        return masked_windows(tokens, config.data.sequence_length, name, tokenizer)
    return causal_windows(tokens, config.data.sequence_length, name)
