"""GPT-2 (`GPT2LMHeadModel`)."""

from typing import Any

from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.text import TextConfig
from jhpt.huggingface.settings import Settings
from jhpt.huggingface.tensors import Heads, Part, fused_qkv, layer_norm, same, table

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}

BLOCK = "transformer.h.{}"


def settings(there: Settings) -> TextConfig:
    """`config.json` -> the model, without dropout of attention probabilities, which fused kernels do not offer."""
    there.only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False)
    there.only(add_cross_attention=False)
    width = there.number("n_embd", 768)
    return GPTConfig(
        vocab_size=there.number("vocab_size", 50257),
        num_layers=there.number("n_layer", 12),
        d_model=width,
        num_heads=there.number("n_head", 12),
        d_ff=there.number("n_inner", 4 * width),
        max_length=there.number("n_positions", 1024),
        dropout=there.get("resid_pdrop", 0.1),
        norm_eps=there.positive("layer_norm_epsilon", 1e-5),
        activation=there.one_of("activation_function", ACTIVATIONS, "gelu_new"),
        tied=there.get("tie_word_embeddings", True),
    )


def why_not(model: GPTConfig) -> str | None:
    """Why a model is none of this architecture; None: it is."""
    wanted: dict[str, tuple[object, object]] = {
        "model.positions": (model.positions, "learned"),
        "model.norm": (model.norm, "layernorm"),
        "model.bias": (model.bias, True),
        "model.num_kv_heads": (model.kv_heads, model.num_heads),
        "model.window": (model.window, None),
    }
    if model.activation not in ACTIVATIONS.values():
        return f"model.activation={model.activation}"
    return next((f"{name}={value}" for name, (value, want) in wanted.items() if value != want), None)


def config(model: GPTConfig) -> dict[str, Any]:
    """The inverse of `settings`."""
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab,
        "n_layer": model.num_layers,
        "n_embd": model.d_model,
        "n_head": model.num_heads,
        "n_inner": model.ffn_width,
        "n_positions": model.max_length,
        "activation_function": activation,
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": model.tied,
    }


def parts(model: GPTConfig) -> tuple[Part, ...]:
    """GPT-2's weights are [in, out], like ours."""
    rows, padded = model.vocab, model.padded_vocab
    heads = Heads(kv=model.num_heads, group=1, width=model.head_dim)
    linears = {"attention/projection": "attn.c_proj", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    return (
        table("embedding/tokens", "transformer.wte.weight", rows, padded),
        same("embedding/positions", "transformer.wpe.weight"),
        *layer_norm("blocks/attention_norm", f"{BLOCK}.ln_1"),
        *fused_qkv(heads, f"{BLOCK}.attn.c_attn"),
        *layer_norm("blocks/mlp_norm", f"{BLOCK}.ln_2"),
        *(same(f"blocks/{ours}/kernel", f"{BLOCK}.{theirs}.weight") for ours, theirs in linears.items()),
        *(same(f"blocks/{ours}/bias", f"{BLOCK}.{theirs}.bias") for ours, theirs in linears.items()),
        *layer_norm("head/norm", "transformer.ln_f"),
        *(() if model.tied else (table("head/tokens", "lm_head.weight", rows, padded),)),
    )
