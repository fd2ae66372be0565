"""Models by name.  Each preset is what it changes from the defaults of `jhpt.core.config.Config`.

Shapes: GPT-2 from Radford et al. 2019, table 2 (774M and 1.5B with the head counts of the released weights);
gpt-6.7b and gpt-13b from Brown et al. 2020, table 2.1; llama-8b from Dubey et al. 2024, table 3 (Llama 3 8B);
bert-base and bert-large from Devlin et al. 2018, section 3; bert-tiny from Turc et al. 2019.  Learning rates from the
same papers; batches are sized for one node and are meant to be overridden.  `nominal_vocab` is the vocabulary of the
released models, which is planned with; a run takes that of its tokenizer.  vgg16-cifar: column D of Simonyan &
Zisserman 2014, table 1, on images of the size of CIFAR-10's; vgg16-tiny: an eighth of its widths.
"""

from typing import Any

DEFAULT = "gpt-tiny"


SHARDED = dict(zero=3, micro_batches=2)
"""Models whose state is several times as large as a GPU's memory start out with ZeRO-3."""


def _gpt(layers: int, width: int, heads: int, learning_rate: float, batch: int, length: int = 1024) -> dict[str, Any]:
    return {
        "model": dict(
            family="gpt", nominal_vocab=50257, num_layers=layers, d_model=width, num_heads=heads, max_length=length
        ),
        "data": dict(sequence_length=length, batch_size=batch),
        "optimizer": dict(learning_rate=learning_rate, warmup_steps=700),
        "train": dict(steps=20_000),
    }


def _bert(layers: int, width: int, heads: int, learning_rate: float, batch: int) -> dict[str, Any]:
    return {
        "model": dict(
            family="bert",
            nominal_vocab=30522,
            num_layers=layers,
            d_model=width,
            num_heads=heads,
            max_length=512,
            dropout=0.1,
        ),
        "data": dict(sequence_length=512, batch_size=batch),
        "optimizer": dict(learning_rate=learning_rate, warmup_steps=1_000, schedule="linear", final_fraction=0.0),
        "train": dict(steps=20_000),
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt-tiny": {"model": dict(family="gpt")},
    "gpt2-124m": _gpt(12, 768, 12, 6e-4, 32),
    "gpt2-350m": _gpt(24, 1024, 16, 3e-4, 32),
    "gpt2-774m": _gpt(36, 1280, 20, 2.5e-4, 16),
    "gpt2-1.5b": _gpt(48, 1600, 25, 2e-4, 16),
    "gpt-6.7b": _gpt(32, 4096, 32, 1.2e-4, 64, 2048) | {"parallel": SHARDED},
    "gpt-13b": _gpt(40, 5120, 40, 1e-4, 64, 2048) | {"parallel": SHARDED},
    "llama-8b": {
        "model": dict(
            family="gpt",
            nominal_vocab=128256,
            num_layers=32,
            d_model=4096,
            num_heads=32,
            num_kv_heads=8,
            d_ff=14336,
            max_length=8192,
            positions="rotary",
            rope_theta=500_000.0,
            norm="rmsnorm",
            activation="swiglu",
            bias=False,
            tied=False,
        ),
        "data": dict(sequence_length=8192, batch_size=16),
        "parallel": SHARDED,
        "optimizer": dict(learning_rate=3e-4, warmup_steps=2_000),
        "train": dict(steps=20_000),
    },
    "bert-tiny": {
        "model": dict(family="bert", num_layers=2, d_model=128, num_heads=2, max_length=128),
        "data": dict(sequence_length=128, batch_size=32),
        "optimizer": dict(learning_rate=2e-3, warmup_steps=100),
        "train": dict(steps=1_000),
    },
    "bert-base": _bert(12, 768, 12, 1e-4, 64),
    "bert-large": _bert(24, 1024, 16, 1e-4, 32),
    "vgg16-cifar": {
        "model": dict(family="vgg"),
        "data": dict(batch_size=128),
        "optimizer": dict(learning_rate=3e-4, warmup_steps=200, weight_decay=5e-4),
        "train": dict(steps=4_000),
    },
    "vgg16-tiny": {
        "model": dict(
            family="vgg",
            convolutions=((8, 8), (16, 16), (32, 32, 32), (64, 64, 64), (64, 64, 64)),
            dense=(128, 128),
        ),
        "data": dict(batch_size=32, images=5_000),
        "optimizer": dict(learning_rate=1e-3, warmup_steps=50),
        "train": dict(steps=300),
    },
}
