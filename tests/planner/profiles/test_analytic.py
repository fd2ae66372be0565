"""Analytic profiles agree with the exact counts of `jhpt.core.families`, and nothing in them comes for free.

Seconds add up operation by operation and never improve with a larger micro-batch.
"""

import itertools
import math

import pytest

from jhpt.core.catalogue import device_named
from jhpt.core.cluster import Device
from jhpt.core.errors import InputError
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.family import masked_positions
from jhpt.core.families.transformer import NAMED_TENSORS, fused_attention_rate
from jhpt.core.load import load_config
from jhpt.core.presets import PRESETS
from jhpt.core.profile import load_profile
from jhpt.core.work import Operation, Work, matmul, stream, transposed
from jhpt.planner.profiles.analytic import BATCHES, Runner, analytic_profile, check_dtype, sizes_of, timings

ENDLESS = Device(name="endless", peak_flops={"bfloat16": 1.0, "float32": 1.0}, memory=1.0, memory_bandwidth=1e300)
"""One FLOP a second, and memory that costs nothing."""

UNHURRIED = Device(name="unhurried", peak_flops={"bfloat16": 1e300}, memory=1.0, memory_bandwidth=1.0)
"""One byte a second, and products that cost nothing."""

TOY = Device(name="toy", peak_flops={"bfloat16": 10.0}, memory=1.0, memory_bandwidth=2.0)


@pytest.fixture(params=[name for name in PRESETS if load_config(name).model.reads == "text"])
def config(request):
    return load_config(request.param)


def predicted_share(config):
    if not isinstance(config.model, BERTConfig):
        return 1.0
    length = config.data.sequence_length
    return masked_positions(length, config.data.mask_fraction) / length


def test_parameters_are_those_in_memory(config):
    profile = analytic_profile(config, ENDLESS)
    count = config.model.parameter_count()
    assert profile.parameters == count.allocated
    assert profile.kinds["block"].parameters == count.per_layer
    table = config.model.padded_vocab * config.model.d_model
    head, tied = profile.kinds["head"], isinstance(config.model, BERTConfig) or config.model.tied
    assert profile.kinds["embedding"].parameters >= table
    assert head.tied_parameters == (table if tied else 0)
    if not tied:
        assert head.parameters == table + config.model.d_model


def test_layers_are_embedding_blocks_head(config):
    profile = analytic_profile(config, ENDLESS)
    assert profile.layers == ("embedding", *["block"] * config.model.num_layers, "head")
    assert str(config.data.sequence_length) in profile.sample


def flops_of(config, name, **options):
    """(forward, backward) FLOP of a layer, one sample on one device."""
    sizes = sizes_of(config, ENDLESS, "bfloat16", **options)
    work = getattr(config.model, f"{name}_cost")(sizes).work(1, 1)
    return tuple(sum(operation.flops for operation in operations) for operations in work)


def test_the_forward_pass_has_the_exact_flops(config):
    """Of the padded vocabulary, whose columns are multiplied too."""
    model = config.model.model_copy(update={"vocab_size": config.model.padded_vocab})
    exact = model.flops_per_token(config.data.sequence_length, predicted_share=predicted_share(config))
    found = model.num_layers * flops_of(config, "block")[0] + flops_of(config, "head")[0]
    assert found == pytest.approx(exact.forward * config.data.sequence_length)


def test_seconds_are_those_of_the_flops_where_memory_is_free(config):
    """Fused attention is slower by its rate, the rest is not."""
    block = analytic_profile(config, ENDLESS).kinds["block"]
    attention = next(tensor.flops for tensor in block.tensors if tensor.name == "attention_out")
    rate = fused_attention_rate(config.data.sequence_length, config.model.head_dim)
    assert block.seconds(1, 1)[0] == pytest.approx(flops_of(config, "block")[0] + attention * (1 / rate - 1))


def test_backward_multiplies_twice_and_makes_the_scores_again(config):
    forward, backward = flops_of(config, "block")
    block = analytic_profile(config, ENDLESS).kinds["block"]
    attention = next(tensor.flops for tensor in block.tensors if tensor.name == "attention_out")
    assert backward == pytest.approx(2 * forward + attention / 2)


def test_scores_that_are_kept_are_not_made_again():
    plain = load_config("gpt2-124m", {"model.attention": "xla"})
    forward, backward = flops_of(plain, "block", keeps_scores=True)
    assert backward == 2 * forward < flops_of(plain, "block")[1]


def test_products_divide_by_the_tensor_degree(config):
    profile = analytic_profile(config, ENDLESS)
    for name in ("block", "head"):
        kind = profile.kinds[name]
        whole, part = kind.seconds(2, 1)[0], kind.seconds(2, kind.max_tensor)[0]
        if isinstance(config.model, BERTConfig) and name == "head":
            assert whole / kind.max_tensor <= part <= whole  # the transform before the logits is not divided
        else:
            assert part == pytest.approx(whole / kind.max_tensor)


def test_the_residual_stream_does_not(config):
    block = analytic_profile(config, UNHURRIED).kinds["block"]
    stream = config.data.sequence_length * config.model.d_model * 2
    assert block.seconds(1, block.max_tensor)[0] > 10 * stream


@pytest.mark.parametrize("device", ["v100", "a100", "h100"])
def test_larger_batches_never_take_less_and_higher_degrees_never_more(config, device):
    profile = analytic_profile(config, device_named(device))
    for kind in profile.kinds.values():
        for timing in kind.timings:
            assert timing.batches == (1, 2, 4, 8, 16, 32, 64)
            assert list(timing.forward) == sorted(timing.forward)
            assert list(timing.backward) == sorted(timing.backward)
            assert all(b > f for f, b in zip(timing.forward, timing.backward, strict=True))
        for lower, higher in itertools.pairwise(kind.timings):
            assert all(a >= b for a, b in zip(lower.forward, higher.forward, strict=True))
            assert all(a >= b for a, b in zip(lower.backward, higher.backward, strict=True))
            # Nor is a degree more than proportionally faster.
            gain = higher.tensor / lower.tensor
            assert all(a <= gain * b * (1 + 1e-9) for a, b in zip(lower.forward, higher.forward, strict=True))


def test_degrees_are_the_divisors_of_what_the_axis_divides(config):
    model, profile = config.model, analytic_profile(config, ENDLESS)
    sizes = (model.num_heads, model.kv_heads, model.ffn_width, model.padded_vocab)
    for kind in profile.kinds.values():
        assert all(size % kind.max_tensor == 0 for size in sizes)
        assert all(any(size % degree for size in sizes) for degree in range(kind.max_tensor + 1, model.num_heads + 1))
        assert [timing.tensor for timing in kind.timings] == [d for d in range(1, 65) if kind.max_tensor % d == 0]


def test_what_is_kept_is_what_the_runtime_keeps(config):
    block = analytic_profile(config, ENDLESS).kinds["block"]
    assert tuple(tensor.name for tensor in block.tensors) == NAMED_TENSORS
    model, stream = config.model, config.data.sequence_length * config.model.d_model * 2
    sizes = {tensor.name: tensor.bytes / stream for tensor in block.tensors}
    gates = 2 if getattr(model, "activation", "gelu") == "swiglu" else 1
    assert sizes == pytest.approx(
        {
            "residual_in": 1,
            "qkv": 1 + 2 * model.kv_heads / model.num_heads,
            "attention_out": 1,
            "projection_out": 1,
            "mlp_hidden": gates * model.ffn_width / model.d_model,
            "mlp_out": 1,
        }
    )
    # Behind the last sum BERT has a norm, which reads it.
    unread = [] if config.model.family == "bert" else ["mlp_out"]
    assert [tensor.name for tensor in block.tensors if not tensor.read] == unread
    assert block.replicated_bytes == (3 - len(unread)) * stream
    saved = sum(tensor.bytes for tensor in block.tensors if tensor.read)
    assert block.activation_bytes + block.replicated_bytes == saved
    # All of it made again is the forward pass.
    assert sum(tensor.flops for tensor in block.tensors) == pytest.approx(flops_of(config, "block")[0])


def test_sums_over_the_tensor_axis(config):
    profile = analytic_profile(config, ENDLESS)
    stream = config.data.sequence_length * config.model.d_model * 2
    sums = {
        name: (kind.tensor_forward_bytes / stream, kind.tensor_backward_bytes / stream)
        for name, kind in profile.kinds.items()
    }
    assert sums["embedding"] == (1, 0)
    assert sums["block"] == (2, 2)
    assert sums["head"] == (0, pytest.approx(predicted_share(config)))
    assert profile.kinds["embedding"].boundary_bytes == profile.kinds["block"].boundary_bytes == stream


def test_the_head_keeps_float32_logits(config):
    head = analytic_profile(config, ENDLESS).kinds["head"]
    tokens = predicted_share(config) * config.data.sequence_length
    assert head.activation_bytes == pytest.approx(4 * tokens * config.model.padded_vocab)


def test_the_optimizer_moves_every_byte_of_its_state(config):
    """Of 16 bytes: reads all but the weight, writes all but the gradient; clipping reads the gradient again."""
    clip = 0 if config.optimizer.clip_norm is None else 2
    assert analytic_profile(config, UNHURRIED).update_seconds == 14 + 14 + clip


def test_plain_attention_is_slower_than_flash():
    flash = load_config("gpt2-124m")
    plain = load_config("gpt2-124m", {"model.attention": "xla"})
    device = device_named("h100")
    for batch in (1, 8, 64):
        fast, slow = (analytic_profile(c, device).kinds["block"].seconds(batch, 1) for c in (flash, plain))
        assert fast[0] < slow[0] and fast[1] < slow[1]


def test_v100_has_no_flash_attention():
    config, plain = load_config("gpt2-124m"), load_config("gpt2-124m", {"model.attention": "xla"})
    device = device_named("v100")
    assert analytic_profile(config, device).kinds == analytic_profile(plain, device).kinds


def test_float32_keeps_twice_the_bytes():
    config = load_config("gpt2-124m")
    half, full = (analytic_profile(config, ENDLESS, dtype) for dtype in ("bfloat16", "float32"))
    assert full.kinds["block"].activation_bytes == 2 * half.kinds["block"].activation_bytes
    assert full.bytes_per_weight == 4


@pytest.mark.parametrize("name", ["gpt2-1.5b", "llama-8b", "bert-large"])
def test_utilisation_is_that_of_well_tuned_training(name):
    """Published utilisations of one H100: 0.4 to 0.55 of the peak.  BERT draws masks and has short sequences."""
    config, device = load_config(name), device_named("h100")
    profile = analytic_profile(config, device)
    length = config.data.sequence_length
    seconds = sum(sum(profile.kinds[kind].seconds(16, 1)) for kind in profile.layers)
    flops = 16 * length * config.model.flops_per_token(length, predicted_share=predicted_share(config)).total
    assert 0.25 < flops / seconds / device.peak_flops["bfloat16"] < 0.6


def test_profiles_survive_a_file(config, tmp_path):
    profile = analytic_profile(config, device_named("h100"))
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    assert all(math.isfinite(second) for kind in profile.kinds.values() for t in kind.timings for second in t.forward)


def test_a_product_reads_its_operands_and_writes_its_result():
    # [3, 5] [5, 7]: 2 x 3 x 5 x 7 FLOP; 15 + 35 + 21 numbers of 2 bytes; all of it four times.
    assert matmul(3, 7, 5, 2, count=4) == Operation(4 * 210, 4 * 142, result=(3, 7, 4))


def test_backward_multiplies_twice():
    # [3, 5] [5, 7]: dx = [3, 7] [7, 5] and dw = [5, 3] [3, 7], with the FLOP and bytes of the product.
    product = matmul(3, 7, 5, 2)
    assert transposed([product]) == (matmul(3, 5, 7, 2), matmul(5, 7, 3, 2))
    assert {operation[:2] for operation in transposed([product])} == {product[:2]}


def test_seconds_are_the_sum_of_the_slower_of_both_limits():
    # 100 FLOP at 10 FLOP/s beside 2 bytes at 2 bytes/s: 10 s; 6 bytes alone: 3 s.
    work = Work((Operation(100, 2), stream(6)), (stream(8),))
    (timing,) = timings(lambda batch, tensor: work, [1], Runner(device=TOY, dtype="bfloat16"))
    assert set(timing.forward) == {13.0}
    assert set(timing.backward) == {4.0}


def test_sizes_between_those_of_the_curve_keep_the_order():
    device = device_named("h100")
    product = matmul(1.13 * 2**9, 2**9, 2**7, 2)

    def work(batch, tensor):
        part = Operation(product.flops * batch**0.25 / tensor**0.25, 0)
        return Work((part,), (part, part))

    found = timings(work, [1, 2, 4, 8], Runner(device=device, dtype="bfloat16"))
    for timing in found:
        assert timing.batches == BATCHES
        assert list(timing.forward) == sorted(timing.forward)
        assert list(timing.backward) == sorted(timing.backward)
    for lower, higher in itertools.pairwise(found):
        assert all(a >= b for a, b in zip(lower.forward, higher.forward, strict=True))


def test_unknown_dtypes_are_refused():
    check_dtype(TOY, "bfloat16")
    with pytest.raises(InputError, match="dtype=float32; use bfloat16"):
        check_dtype(TOY, "float32")
