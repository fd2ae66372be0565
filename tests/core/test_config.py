"""Sections are closed and immutable, impossible combinations are refused, and the remedies in the messages work."""

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jhpt.core.config import Compression, Config, DataConfig, ParallelConfig
from jhpt.core.divisors import common_divisors, divisors, one_of
from jhpt.core.errors import InputError
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.text import VOCAB_MULTIPLE
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def message(build) -> str:
    """What the refusal says."""
    with pytest.raises(ValidationError) as caught:
        build()
    return str(caught.value)


def suggested(text: str) -> list[int]:
    """The numbers in "...; use 1, 2 or 4 ..."."""
    remedy = re.search(r"; use ([\d, or]+)", text)
    assert remedy, text
    return [int(number) for number in re.findall(r"\d+", remedy[1])]


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("model", {"family": "gpt", "vocab_size": 0}),
        ("model", {"family": "gpt", "dropout": 1.0}),
        ("model", {"family": "gpt", "dtype": "float16"}),
        ("model", {"family": "gpt", "rope_theta": float("inf")}),
        ("model", {"family": "gpt", "type_vocab_size": 2}),
        ("model", {"family": "bert", "num_kv_heads": 2}),
        ("data", {"validation_fraction": -0.1}),
        ("data", {"mask_fraction": 0.0}),
        ("optimizer", {"learning_rate": 0.0}),
        ("optimizer", {"learning_rate": float("nan")}),
        ("optimizer", {"final_fraction": 1.1}),
        ("train", {"steps": 2.5}),
        ("parallel", {"zero": 4}),
        ("evaluation", {"sample_tokens": -1}),
        ("checkpoint", {"keep": 0}),
        ("log", {"evry": 1}),
    ],
)
def test_each_section_refuses_what_it_cannot_mean(section, wrong):
    with pytest.raises(ValidationError, match=section):
        Config.model_validate({section: wrong})


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_the_seed_has_32_bits(seed):
    assert "seed" in message(lambda: Config(seed=seed))
    assert Config(seed=2**32 - 1).seed == 2**32 - 1


@pytest.mark.parametrize("name", ["", "a/b", "a b", "../up"])
def test_a_name_is_one_path_component(name):
    assert "name" in message(lambda: Config(name=name))


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (GPTConfig(d_model=768, num_heads=12), 3072),  # 4 x 768
        (GPTConfig(d_model=4096, num_heads=32, activation="swiglu"), 11008),  # Llama 7B: 8/3 x 4096 = 10922.7
        (GPTConfig(d_model=96, num_heads=4, activation="swiglu"), 256),  # exactly 256: nothing to round
        (GPTConfig(d_model=99, num_heads=3, activation="swiglu"), 512),  # 264: one more multiple
        (GPTConfig(d_model=4096, num_heads=32, activation="swiglu", d_ff=14336), 14336),  # Llama 3 8B
        (BERTConfig(d_model=1024, num_heads=16), 4096),
        (BERTConfig(d_model=64, num_heads=4, d_ff=100), 100),
    ],
)
def test_width_of_the_mlp(model, width):
    assert model.ffn_width == width


@given(vocab_size=st.integers(1, 300_000))
@PROPERTY
def test_the_vocabulary_is_padded_to_the_next_multiple(vocab_size):
    padded = GPTConfig(vocab_size=vocab_size).padded_vocab
    assert padded % VOCAB_MULTIPLE == 0
    assert vocab_size <= padded < vocab_size + VOCAB_MULTIPLE


@given(width=st.integers(1, 512), heads=st.integers(1, 64))
@PROPERTY
def test_heads_divide_the_width_and_every_suggested_number_does(width, heads):
    if width % heads == 0:
        assert GPTConfig(d_model=width, num_heads=heads).head_dim * heads == width
        return
    text = message(lambda: GPTConfig(d_model=width, num_heads=heads))
    assert f"model.d_model={width}" in text and f"model.num_heads={heads}" in text
    for better in suggested(text):
        GPTConfig(d_model=width, num_heads=better)


@given(heads=st.integers(1, 48), kv_heads=st.integers(1, 48))
@PROPERTY
def test_key_value_heads_divide_the_heads(heads, kv_heads):
    width = 2 * heads
    if heads % kv_heads == 0:
        assert GPTConfig(d_model=width, num_heads=heads, num_kv_heads=kv_heads).kv_heads == kv_heads
        return
    text = message(lambda: GPTConfig(d_model=width, num_heads=heads, num_kv_heads=kv_heads))
    assert suggested(text) == divisors(heads)


def test_rotary_positions_need_an_even_head_width():
    odd = dict(d_model=9, num_heads=3)
    assert "odd" in message(lambda: GPTConfig(**odd, positions="rotary"))
    assert GPTConfig(**odd).positions == "learned"


@given(
    heads=st.sampled_from([4, 6, 12, 16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    d_ff=st.sampled_from([48, 60, 64, 100]),
    tensor=st.integers(1, 16),
)
@PROPERTY
def test_the_tensor_axis_divides_every_split_dimension(heads, kv_heads, d_ff, tensor):
    if heads % kv_heads:
        return
    model = GPTConfig(d_model=8 * heads, num_heads=heads, num_kv_heads=kv_heads, d_ff=d_ff)
    fits = all(size % tensor == 0 for size in (heads, kv_heads, d_ff, model.padded_vocab))

    def build(tensor: int) -> Config:
        return Config(model=model, parallel=ParallelConfig(tensor=tensor))

    if fits:
        assert build(tensor).parallel.tensor == tensor
        return
    text = message(lambda: build(tensor))
    assert f"parallel.tensor={tensor}" in text
    for better in suggested(text):
        build(better)


def test_the_tensor_axis_divides_the_padded_vocabulary():
    model = GPTConfig(vocab_size=200, d_model=96, num_heads=12, d_ff=96)  # 256 rows, and 12 = 3 x 4
    text = message(lambda: Config(model=model, parallel=ParallelConfig(tensor=3)))
    assert "256" in text and "parallel.tensor=3" in text
    assert suggested(text) == [1, 2, 4]


@given(
    batch=st.integers(1, 96),
    data=st.one_of(st.none(), st.integers(1, 8)),
    micro=st.integers(1, 8),
    extra=st.integers(1, 3),
)
@PROPERTY
def test_the_batch_divides_into_devices_and_micro_batches(batch, data, micro, extra):
    def build(batch: int) -> Config:
        return Config(data=DataConfig(batch_size=batch), parallel=ParallelConfig(data=data, micro_batches=micro))

    pieces = (data or 1) * micro
    if batch % pieces == 0:
        assert build(batch).data.batch_size == batch
        return
    assert f"multiple of {pieces}" in message(lambda: build(batch))
    build(extra * pieces)


def test_a_sequence_is_no_longer_than_the_model():
    def build(length: int) -> Config:
        return Config(model=GPTConfig(max_length=64), data=DataConfig(sequence_length=length))

    assert build(64).data.sequence_length == 64
    text = message(lambda: build(65))
    assert "data.sequence_length=65" in text and "model.max_length=64" in text


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4))
@PROPERTY
def test_common_divisors_are_those_and_no_others(sizes):
    divisors = common_divisors(sizes)
    assert divisors == [d for d in range(1, 401) if all(size % d == 0 for size in sizes)]


@pytest.mark.parametrize(("choices", "text"), [([1], "1"), ([1, 2], "1 or 2"), ([1, 2, 4], "1, 2 or 4")])
def test_choices_read_as_a_sentence(choices, text):
    assert one_of(choices) == text


@pytest.mark.parametrize(
    ("given", "auto", "compression"),
    [
        ("off", False, Compression()),
        (False, False, Compression()),  # as YAML reads off
        ("auto", True, Compression()),
        ({"auto": True, "bits": 8}, True, Compression()),
        ({"bits": 8, "tokens": 0.5}, False, Compression(bits=8, tokens=0.5)),
    ],
)
def test_compression_is_a_word_or_a_section(given, auto, compression):
    section = ParallelConfig.model_validate({"compression": given}).compression
    assert (section.auto, section.settings) == (auto, compression)


def test_what_is_left_to_the_planner_is_not_laid_out_by_hand():
    with pytest.raises(InputError, match="=auto leaves compression to the planner"):
        plan_by_hand(Config(parallel=ParallelConfig.model_validate({"compression": "auto"})), 1)


@pytest.mark.parametrize(("before", "now"), [(True, "full"), (False, "auto")])
def test_configurations_of_before_say_recomputation_elsewhere(tmp_path, before, now):
    """Runs whose config.yaml has it in the section `parallel` go on."""
    tree = {"parallel": {"recompute": before, "zero": 1}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    for config in (
        load_config(tree),
        load_config(file),
    ):
        assert (config.memory.recompute, config.parallel.zero) == (now, 1)
    assert load_config({**tree, "memory": "auto"}).memory.recompute == now
    named = load_config({**tree, "memory": {"recompute": ["qkv"]}})
    assert named.memory.recompute == ("qkv",)
    with pytest.raises(InputError, match="recompute"):
        load_config({"parallel": {"recompute": "yes"}})
    with pytest.raises(InputError, match=r"parallel.recompute is now called memory.recompute"):
        load_config(tree, {"parallel.recompute": not before})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["full"], "full is a word, not a list; write full without brackets"),
        (["qkv", "full"], "'full' cannot stand beside names"),
        ("", "names nothing"),
        (",", "names nothing"),
        ("qvk", "no tensor 'qvk'; did you mean qkv?; it has qkv,"),
        (["residual_in"], "residual_in is the input, which is always saved"),
        ("qkv,qkv", "a name twice"),
    ],
)
def test_what_names_no_tensors_of_a_block(given, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load_config({"memory": {"recompute": given}})


def test_names_with_commas():
    assert load_config(None, {"memory.recompute": "qkv, mlp_out,"}).memory.recompute == ("qkv", "mlp_out")


@pytest.mark.parametrize(("given", "word"), [(True, "full"), (False, "none"), (" full ", "full"), ("auto,", "auto")])
def test_words_of_recomputation(given, word):
    assert load_config(None, {"memory.recompute": given}).memory.recompute == word


@pytest.mark.parametrize("up_to", [None, 1, 5, 12, 40])
def test_divisors_are_those_and_no_others(up_to):
    for n in range(-1, 150):
        assert divisors(n, up_to) == [d for d in range(1, (up_to or n) + 1) if n > 0 and n % d == 0]
    assert divisors(10**12 + 39) == [1, 10**12 + 39]
