"""Small models of every architecture, in our settings and in those of `config.json`."""

from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig

LLAMA = dict(positions="rotary", norm="rmsnorm", activation="swiglu", bias=False)

MODELS = {
    "gpt2": GPTConfig(vocab_size=131, num_layers=2, d_model=32, num_heads=4, max_length=24),
    "gpt2 untied": GPTConfig(
        vocab_size=128, num_layers=3, d_model=48, num_heads=3, max_length=16, tied=False, activation="gelu_exact"
    ),
    "llama": GPTConfig(
        vocab_size=150,
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        d_ff=56,
        max_length=32,
        tied=False,
        **LLAMA,
    ),
    "llama stretched": GPTConfig(
        vocab_size=150,
        num_layers=2,
        d_model=64,
        num_heads=2,
        d_ff=96,
        max_length=64,
        rope_theta=500.0,
        rope_factor=8.0,
        rope_length=16,
        **LLAMA,
    ),
    "qwen2": GPTConfig(
        vocab_size=140, num_layers=2, d_model=48, num_heads=6, num_kv_heads=2, d_ff=64, qkv_bias=True, **LLAMA
    ),
    "mistral": GPTConfig(
        vocab_size=129, num_layers=2, d_model=32, num_heads=4, num_kv_heads=1, d_ff=64, window=7, tied=False, **LLAMA
    ),
    "bert": BERTConfig(vocab_size=133, num_layers=2, d_model=32, num_heads=4, max_length=24, dropout=0.0),
}
"""By name.  Their sizes differ from each other wherever they can, so that no exchange of two stays unseen."""

CLASSIFIER = BERTConfig(
    vocab_size=256,
    num_layers=2,
    d_model=32,
    num_heads=4,
    max_length=24,
    task="classify",
    num_classes=3,
    class_names=("no", "yes", "maybe"),
)


def settings_of(model):
    """All settings, with sizes that follow from others."""
    return {**model.model_dump(), **model.tensor_sizes}
