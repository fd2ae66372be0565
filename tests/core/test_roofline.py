"""Seconds of operations, reckoned by hand."""

import math

import pytest

from jhpt.core.cluster import Curve, Device
from jhpt.core.framework import IDEAL, Framework
from jhpt.core.roofline import TILES, fill, seconds
from jhpt.core.work import Operation, matmul, stream

DEVICE = Device(
    name="toy",
    peak_flops={"bfloat16": 1e12},
    memory=1.0,
    memory_bandwidth=1e9,
    memory_share=0.5,
    efficiency=Curve(sizes=(1.0, 1e30), values=(0.5, 0.5)),
    multiprocessors=4,
    fused_attention=0.8,
)


def test_a_full_device_and_one_tile_more():
    # Four tiles of 256 x 128 fill four multiprocessors.  64 rows more: two waves of these tiles, 0.56 full; twenty
    # tiles of 128 x 64 in five waves, at 0.88 of the rate, 0.9 full.
    assert fill(512, 256, 1, 4) == 1.0
    assert fill(512 + 64, 256, 1, 4) == pytest.approx(0.88 * 0.9)
    # Seven products of one such tile: 28 smaller tiles in seven full waves are as good as two waves for 7.
    assert fill(256, 128, 7, 4) == pytest.approx(0.88)
    assert fill(256, 128, 7, 28) == pytest.approx(0.88)
    # A thin product fills an eighth of each tile of 64 rows; larger tiles would hold even less.
    assert fill(8, 64 * 4, 1, 4) == pytest.approx(0.75 / 8)


def test_the_best_tile_counts():
    for rows, columns in ((130, 4096), (4096, 130), (77, 77)):
        one_size = [
            rate * rows * columns / (math.ceil(math.ceil(rows / h) * math.ceil(columns / w) / 4) * 4 * h * w)
            for h, w, rate in TILES
        ]
        assert fill(rows, columns, 1, 4) == pytest.approx(max(one_size))


def test_products_wait_for_the_slower_of_both():
    # 512 x 256 x 1024: 2.7e8 FLOP at 0.5e12 FLOP/s, and 1.8 MB at 0.5e9 bytes/s.
    product = matmul(512, 256, 1024, 2)
    assert seconds(product, DEVICE, "bfloat16", IDEAL) == pytest.approx(product.moved / 0.5e9)
    fast = DEVICE.model_copy(update={"memory_bandwidth": 1e15})
    assert seconds(product, fast, "bfloat16", IDEAL) == pytest.approx(product.flops / 0.5e12)
    wider = matmul(512 + 64, 256, 1024, 2)
    assert seconds(wider, fast, "bfloat16", IDEAL) == pytest.approx(wider.flops / 0.5e12 / 0.88 / 0.9)
    anywhere = fast.model_copy(update={"multiprocessors": None})
    assert seconds(wider, anywhere, "bfloat16", IDEAL) == pytest.approx(wider.flops / 0.5e12)


def test_fused_attention_has_rates_of_its_own():
    attention = Operation(1e12, 0.0, "fused attention", rate=0.5)
    assert seconds(attention, DEVICE, "bfloat16", IDEAL) == pytest.approx(1e12 / 0.5e12 / 0.5 / 0.8)
    older = Framework(fused_attention=0.5)
    assert seconds(attention, DEVICE, "bfloat16", older) == 2 * seconds(attention, DEVICE, "bfloat16", IDEAL)


def test_element_wise_kernels_move_what_the_framework_makes_of_them():
    masked = stream(1e9, drawn=1e8)
    assert seconds(masked, DEVICE, "bfloat16", IDEAL) == 2.0
    assert seconds(masked, DEVICE, "bfloat16", Framework(traffic=1.5, draw_bytes=8)) == pytest.approx(3.0 + 1.6)
