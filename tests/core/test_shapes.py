"""Parameter counts are those of the published models; FLOPs are those counted by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.vgg import VGGConfig
from jhpt.core.load import load_config
from jhpt.core.presets import PRESETS

PUBLISHED = {
    # V d + S d + L (4 d^2 + 4 d attention, 8 d^2 + 5 d MLP, 4 d norms) + 2 d, with V 50257 and S 1024; for d 768:
    # 38 597 376 + 786 432 + 12 (2 362 368 + 4 722 432 + 3 072) + 1 536
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    # 2 x 128256 x 4096 untied tables + 32 (4096 x 6144 qkv + 4096^2 + 3 x 4096 x 14336 + 2 x 4096) + 4096
    "llama-8b": 8_030_261_248,
    # The weights of BertForPreTraining (110 106 428 and 336 226 108) without the next-sentence head of 2 d + 2:
    # (30522 + 512 + 2) d + 2 d; 12 blocks of 7 087 872; pooler d^2 + d; head d^2 + d + 2 d + 30522; for d 768:
    # 23 837 184 + 85 054 464 + 590 592 + 622 650
    "bert-base": 110_104_890,
    "bert-large": 336_224_058,
    # 14 714 688 in convolutions, as for images of any size, and 512 x 4096 + 4096^2 + 4096 x 10 with their biases.
    "vgg16-cifar": 14_714_688 + 2_101_248 + 16_781_312 + 40_970,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    assert load_config(name).model.parameter_count().total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("model", "places"),
    [
        # Tables 10 x 4 + 8 x 4.  Block: qkv 4 x 12 + 12, projection 16 + 4, up 4 x 6 + 6, down 24 + 4, two norms of 8.
        (
            GPTConfig(vocab_size=10, num_layers=3, d_model=4, num_heads=2, d_ff=6, max_length=8),
            dict(embedding=72, per_layer=60 + 20 + 30 + 28 + 16, head=8, padding=118 * 4),
        ),
        # One key/value head of width 2: qkv 4 x (4 + 2 x 2).  Gate and up 2 x 24, down 24; norms of 4; both tables pad.
        (
            GPTConfig(
                vocab_size=10,
                num_layers=3,
                d_model=4,
                num_heads=2,
                num_kv_heads=1,
                d_ff=6,
                max_length=8,
                positions="rotary",
                norm="rmsnorm",
                activation="swiglu",
                bias=False,
                tied=False,
            ),
            dict(embedding=40, per_layer=32 + 16 + 72 + 8, head=4 + 40, padding=2 * 118 * 4),
        ),
        # Tables (10 + 8 + 3) x 4 and a norm of 8; pooler 20, head 20 + 8 + one bias for each of 10 words.
        (
            BERTConfig(vocab_size=10, num_layers=3, d_model=4, num_heads=2, d_ff=6, max_length=8, type_vocab_size=3),
            dict(embedding=84 + 8, per_layer=60 + 20 + 30 + 28 + 16, head=20 + 20 + 8 + 10, padding=118 * 5),
        ),
        # With pairs, 4 x 2 + 2 more.
        (
            BERTConfig(vocab_size=10, num_layers=3, d_model=4, num_heads=2, d_ff=6, max_length=8, objective="mlm+nsp"),
            dict(embedding=80 + 8, per_layer=60 + 20 + 30 + 28 + 16, head=20 + 20 + 8 + 10 + 10, padding=118 * 5),
        ),
        # A classifier has no masked-LM head: pooler 20, and 4 x 3 + 3 for three classes.
        (
            BERTConfig(
                vocab_size=10,
                num_layers=3,
                d_model=4,
                num_heads=2,
                d_ff=6,
                max_length=8,
                task="classify",
                num_classes=3,
            ),
            dict(embedding=80 + 8, per_layer=60 + 20 + 30 + 28 + 16, head=20 + 15, padding=118 * 4),
        ),
    ],
    ids=["gpt2", "llama", "bert", "pairs", "classifier"],
)
def test_places_counted_by_hand(model, places):
    count = model.parameter_count()
    assert {place: getattr(count, place) for place in places} == places
    assert count.total == places["embedding"] + 3 * places["per_layer"] + places["head"]
    assert count.allocated == count.total + places["padding"]


def test_vgg_16_on_images_of_224_pixels_is_the_published_one():
    """138 357 544 parameters and 15.47 G multiply-adds (column D; 1000 classes); the first layer's input has no
    gradient."""
    model = VGGConfig(image_size=224, num_classes=1000)
    assert model.parameter_count().total == 138_357_544
    flops = model.flops_per_token(1)
    assert flops.forward == 2 * 15_470_264_320
    assert flops.backward == 2 * flops.forward - 2 * 224**2 * 9 * 3 * 64
    assert model.num_layers == 14 and model.layers[0] == "conv1_1" and model.layers[-3:] == ("fc6", "fc7", "fc8")


def test_a_vocabulary_of_full_rows_needs_no_padding():
    assert GPTConfig(vocab_size=256).parameter_count().padding == 0


@pytest.mark.parametrize(
    ("model", "multiplied", "keys"),
    [
        # Per layer: qkv 4 x 12, projection 16, up and down 2 x 4 x 6.  Head 10 x 4.
        (
            GPTConfig(vocab_size=10, num_layers=3, d_model=4, num_heads=2, d_ff=6),
            3 * (48 + 16 + 48) + 40,
            (1 + 2 + 3 + 4 + 5) / 5,
        ),
        # Key/value heads of width 2 make qkv 4 x 8; swiglu has three matrices.
        (
            GPTConfig(vocab_size=10, num_layers=3, d_model=4, num_heads=2, num_kv_heads=1, d_ff=6, activation="swiglu"),
            3 * (32 + 16 + 72) + 40,
            (1 + 2 + 3 + 4 + 5) / 5,
        ),
        # The masked-LM head has a d x d transform before the table, and every query sees all five keys.
        (BERTConfig(vocab_size=10, num_layers=3, d_model=4, num_heads=2, d_ff=6), 3 * (48 + 16 + 48) + 40 + 16, 5),
    ],
    ids=["gpt2", "llama", "bert"],
)
def test_flops_counted_by_hand(model, multiplied, keys):
    """Two FLOPs a multiply-add; a query meets `keys` keys and as many values, 4 numbers each, in 3 layers."""
    flops = model.flops_per_token(5)
    assert flops.forward == 2 * (multiplied + 3 * 2 * 4 * keys)
    assert flops.backward == 2 * flops.forward
    assert flops.total == 3 * flops.forward


def test_the_head_runs_on_predicted_positions_only():
    model = BERTConfig(vocab_size=10, num_layers=3, d_model=4, num_heads=2, d_ff=6)
    whole, half = model.flops_per_token(5), model.flops_per_token(5, predicted_share=0.5)
    assert whole.forward - half.forward == 0.5 * 2 * (40 + 16)


@given(
    layers=st.integers(1, 6),
    heads=st.integers(1, 6),
    head_dim=st.integers(1, 16),
    length=st.integers(1, 2048),
    vocab_size=st.integers(1, 4096),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_causal_attention_costs_the_visible_half(layers, heads, head_dim, length, vocab_size):
    """The dense square has s^2 entries, the visible triangle s (s + 1) / 2; nothing else depends on the mask."""
    model = GPTConfig(vocab_size=vocab_size, num_layers=layers, d_model=heads * head_dim, num_heads=heads)
    causal, dense = (model.flops_per_token(length, causal=flag).forward for flag in (True, False))
    hidden_entries = length**2 - length * (length + 1) // 2
    assert length * (dense - causal) == 4 * layers * model.d_model * hidden_entries


@pytest.mark.parametrize("name", [name for name in PRESETS if load_config(name).model.reads == "text"])
def test_six_flops_per_weight_and_token(name):
    """Kaplan et al. 2020 (arXiv 2001.08361): 6 N per token, N without tables of which a token reads one row."""
    model = load_config(name).model
    count = model.parameter_count()
    matrices = count.per_layer * model.num_layers
    flops = model.flops_per_token(1, predicted_share=0.0).total
    assert 0.97 < flops / (6 * matrices) < 1.01
