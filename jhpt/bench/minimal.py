"""The hand-written competitor: GPT and its AdamW step in plain jax, with no framework around it.

Same mathematics and initial shapes as `jhpt.models.gpt` for GPT-2 configurations; one device; nothing configurable.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jhpt.core.families.gpt import GPTConfig
from jhpt.models.attention import Implementation


def init(config: GPTConfig, key: jax.Array) -> Any:
    """Parameters, layers stacked."""
    d, f, n, e = config.d_model, config.ffn_width, config.num_layers, config.padded_vocab
    shapes = {"qkv": (n, d, 3 * d), "out": (n, d, d), "up": (n, d, f), "down": (n, f, d)}
    keys = iter(jax.random.split(key, 6))
    blocks = {name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    blocks |= {f"{name}_bias": jnp.zeros((n, shape[-1])) for name, shape in shapes.items()}
    blocks |= {f"norm{i}": jnp.ones((n, d)) for i in (1, 2)} | {f"norm{i}_bias": jnp.zeros((n, d)) for i in (1, 2)}
    return {
        "tokens": 0.02 * jax.random.normal(next(keys), (e, d)),
        "positions": 0.02 * jax.random.normal(next(keys), (config.max_length, d)),
        "norm": jnp.ones(d),
        "norm_bias": jnp.zeros(d),
        "blocks": blocks,
    }


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    y = (y - mean) * jax.lax.rsqrt(jnp.var(y, -1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def loss(
    config: GPTConfig, dtype: Any, implementation: Implementation, unroll: int, params: Any, windows: jax.Array
) -> jax.Array:
    """Mean next-token loss of windows[B, S + 1]."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    batch, length = tokens.shape
    x = params["tokens"][tokens].astype(dtype) + params["positions"][:length].astype(dtype)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        w = {name: value.astype(dtype) for name, value in p.items()}
        h = _norm(x, p["norm1"], p["norm1_bias"])
        qkv = (h @ w["qkv"] + w["qkv_bias"]).reshape(batch, length, 3, config.num_heads, config.head_dim)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        x = x + a.reshape(batch, length, -1) @ w["out"] + w["out_bias"]
        h = _norm(x, p["norm2"], p["norm2_bias"])
        h = jax.nn.gelu(h @ w["up"] + w["up_bias"])
        return x + h @ w["down"] + w["down_bias"], None

    x, _ = jax.lax.scan(layer, x, params["blocks"], unroll=unroll)
    x = _norm(x, params["norm"], params["norm_bias"])
    table = params["tokens"].astype(dtype)
    logits = jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)
    logits = jnp.where(jnp.arange(table.shape[0]) < config.vocab, logits, -jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(
    config: GPTConfig, dtype: Any, implementation: Implementation, unroll: int
) -> tuple[Callable[..., Any], Any]:
    """(jitted donated step (state, windows) -> (state, loss), initial state)."""
    decayed = {"qkv", "out", "up", "down", "tokens", "positions"}

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in decayed, params)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1, mask=mask))
    params = init(config, jax.random.key(0))

    @partial(jax.jit, donate_argnums=0)
    def step(state: tuple[Any, Any], windows: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state
        value, grads = jax.value_and_grad(partial(loss, config, dtype, implementation, unroll))(params, windows)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, (params, optimizer.init(params))
