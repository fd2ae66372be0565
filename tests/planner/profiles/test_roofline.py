"""Seconds add up operation by operation and never improve with a larger micro-batch."""

import itertools

import pytest

from jhpt.core.catalogue import device_named
from jhpt.core.cluster import Device
from jhpt.core.errors import InputError
from jhpt.core.work import Operation, Work, matmul, stream, transposed
from jhpt.planner.profiles.roofline import BATCHES, check_dtype, timings

TOY = Device(name="toy", peak_flops={"bfloat16": 10.0}, memory=1.0, memory_bandwidth=2.0)


def test_a_product_reads_its_operands_and_writes_its_result():
    # [3, 5] [5, 7]: 2 x 3 x 5 x 7 FLOP; 15 + 35 + 21 numbers of 2 bytes; all of it four times.
    assert matmul(3, 7, 5, 2, count=4) == Operation(4 * 210, 4 * 142)


def test_backward_multiplies_twice():
    first, second = matmul(3, 7, 5, 2), matmul(1, 2, 3, 2)
    assert sorted(transposed([first, second])) == sorted([first, first, second, second])


def test_seconds_are_the_sum_of_the_slower_of_both_limits():
    # 100 FLOP at 10 FLOP/s beside 2 bytes at 2 bytes/s: 10 s; 6 bytes alone: 3 s.
    work = Work((Operation(100, 2), stream(6)), (stream(8),))
    (timing,) = timings(lambda batch, tensor: work, [1], TOY, "bfloat16")
    assert set(timing.forward) == {13.0}
    assert set(timing.backward) == {4.0}


def test_sizes_between_those_of_the_curve_keep_the_order():
    device = device_named("h100")
    product = matmul(1.13 * 2**9, 2**9, 2**7, 2)

    def work(batch, tensor):
        part = Operation(product.flops * batch**0.25 / tensor**0.25, 0)
        return Work((part,), (part, part))

    found = timings(work, [1, 2, 4, 8], device, "bfloat16")
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
