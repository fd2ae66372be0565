"""Llama and what is a setting of it: Mistral (a window), Qwen2 (biases of queries, keys and values)."""

from collections.abc import Mapping
from typing import Any

from jhpt.core.errors import InputError
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.text import TextConfig
from jhpt.huggingface.settings import Settings
from jhpt.huggingface.tensors import Heads, Part, gated, same, separate_qkv, table, transposed

BLOCK = "model.layers.{}"

STRETCH = {
    "rope_factor": "factor",
    "rope_stretched": "low_freq_factor",
    "rope_kept": "high_freq_factor",
    "rope_length": "original_max_position_embeddings",
}
"""Settings of stretched rotary positions: here, and in `rope_scaling`."""


def llama(there: Settings) -> TextConfig:
    """`config.json` of Llama -> the model."""
    there.only(attention_bias=False, mlp_bias=False)
    return _settings(there)


def mistral(there: Settings) -> TextConfig:
    """`config.json` of Mistral -> the model."""
    return _settings(there, window=there.get("sliding_window"))


def qwen2(there: Settings) -> TextConfig:
    """`config.json` of Qwen2 and Qwen2.5 -> the model; windows of some layers only are refused."""
    there.only(use_sliding_window=False)
    return _settings(there, qkv_bias=True)


def _settings(there: Settings, **special: Any) -> TextConfig:
    there.only(hidden_act="silu", attention_dropout=0.0, pretraining_tp=1)
    width, heads = there.number("hidden_size"), there.number("num_attention_heads")
    there.only(head_dim=width // heads)
    return GPTConfig(
        vocab_size=there.number("vocab_size"),
        num_layers=there.number("num_hidden_layers"),
        d_model=width,
        num_heads=heads,
        num_kv_heads=there.number("num_key_value_heads", heads),
        d_ff=there.number("intermediate_size"),
        max_length=there.number("max_position_embeddings", 2048),
        positions="rotary",
        norm="rmsnorm",
        norm_eps=there.positive("rms_norm_eps", 1e-6),
        activation="swiglu",
        bias=False,
        tied=there.get("tie_word_embeddings", False),
        **_rotary(there),
        **special,
    )


def _rotary(there: Settings) -> dict[str, Any]:
    """Newer files have one entry, `rope_parameters`, where older ones have `rope_theta` and `rope_scaling`."""
    rope = there.get("rope_parameters") or there.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise InputError(f"{there.place}: rope_scaling={rope!r} is not an object; repair the file")
    inner = Settings(rope, f"{there.place}, rotary positions")
    theta = inner.positive("rope_theta", there.positive("rope_theta", 10_000.0))
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise InputError(
            f"{there.place}: rotary positions of type {kind!r} are not supported; supported: default, llama3"
        )
    stretch = {ours: inner.positive(theirs, 0) for ours, theirs in STRETCH.items()}
    return {"rope_theta": theta, **stretch, "rope_length": inner.number("original_max_position_embeddings")}


def why_not(model: GPTConfig) -> str | None:
    """Why a model is none of these architectures; None: it is one."""
    wanted: dict[str, tuple[object, object]] = {
        "model.positions": (model.positions, "rotary"),
        "model.norm": (model.norm, "rmsnorm"),
        "model.activation": (model.activation, "swiglu"),
        "model.bias": (model.bias, False),
    }
    if model.window is not None and model.qkv_bias:
        return f"model.window={model.window} with model.qkv_bias=true"
    return next((f"{name}={value}" for name, (value, want) in wanted.items() if value != want), None)


def config(model: GPTConfig) -> dict[str, Any]:
    """The inverse of `llama`, `mistral` and `qwen2`."""
    name, special = "Llama", dict[str, Any](attention_bias=False, mlp_bias=False)
    if model.qkv_bias:
        name, special = "Qwen2", {"use_sliding_window": False}
    elif model.window is not None:
        name, special = "Mistral", {"sliding_window": model.window}
    rope: dict[str, Any] = {"rope_theta": model.rope_theta}
    if model.rope_factor > 1:
        stretch = {theirs: getattr(model, ours) for ours, theirs in STRETCH.items()}
        rope["rope_scaling"] = {"rope_type": "llama3", **stretch}
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "vocab_size": model.vocab,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.max_length,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied,
        **rope,
        **special,
    }


def parts(model: GPTConfig) -> tuple[Part, ...]:
    """The parameters and their tensors."""
    rows, padded = model.vocab, model.padded_vocab
    heads = Heads(kv=model.kv_heads, group=model.num_heads // model.kv_heads, width=model.head_dim)
    queries, keys, values = (f"{BLOCK}.self_attn.{name}_proj" for name in "qkv")
    return (
        table("embedding/tokens", "model.embed_tokens.weight", rows, padded),
        same("blocks/attention_norm/scale", f"{BLOCK}.input_layernorm.weight"),
        *separate_qkv(heads, (queries, keys, values), bias=model.qkv_bias),
        transposed("blocks/attention/projection/kernel", f"{BLOCK}.self_attn.o_proj.weight"),
        same("blocks/mlp_norm/scale", f"{BLOCK}.post_attention_layernorm.weight"),
        gated("blocks/mlp/up/kernel", f"{BLOCK}.mlp.gate_proj.weight", f"{BLOCK}.mlp.up_proj.weight"),
        transposed("blocks/mlp/down/kernel", f"{BLOCK}.mlp.down_proj.weight"),
        same("head/norm/scale", "model.norm.weight"),
        *(() if model.tied else (table("head/tokens", "lm_head.weight", rows, padded),)),
    )
