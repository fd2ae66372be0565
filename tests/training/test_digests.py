"""Digests of arrays: any flipped bit changes them, and no layout does."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.training import digests as module
from jhpt.training.digests import MULTIPLIERS, different, digests
from jhpt.training.layered import Layered

RNG = np.random.default_rng(0)
ARRAYS = {
    "float32": RNG.normal(size=(4, 8, 6)).astype(np.float32),
    "bfloat16": RNG.normal(size=(8, 4)).astype(ml_dtypes.bfloat16),
    "int8": RNG.integers(-100, 100, (16, 2), np.int8),
    "int32": np.asarray(7, np.int32),
    "bool": np.asarray([True, False]),
}


def by_hand(array: np.ndarray) -> str:
    """The equation at the head of the module, entry by entry."""
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    bits = [int(entry) for entry in np.ascontiguousarray(array).reshape(-1).view(width)]
    sums = [sum(b * ((i * m + c) % 2**32 | 1) for i, b in enumerate(bits)) % 2**32 for m, c in MULTIPLIERS]
    return f"{array.dtype.name} {sums[0]:08x}{sums[1]:08x}"


@pytest.mark.parametrize("name", ARRAYS)
def test_they_are_the_sums_of_the_equation(name):
    assert digests({"a": ARRAYS[name]}) == {"a": by_hand(ARRAYS[name])}
    assert digests({"a": jnp.asarray(ARRAYS[name])}) == {"a": by_hand(ARRAYS[name])}


@pytest.mark.parametrize("spec", [(), ("x",), (None, "y"), ("y", "x"), (("x", "y"), None), (None, ("y", "x"))])
def test_no_layout_changes_them(spec):
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("x", "y"))
    array = RNG.normal(size=(8, 16, 3)).astype(np.float32)
    laid_out = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
    assert digests([laid_out]) == {"0": by_hand(array)}


def test_layers_one_by_one_are_the_array():
    array = ARRAYS["float32"]
    layered = Layered(shape=array.shape, dtype=array.dtype, layer=lambda index: array[index])
    assert digests([layered]) == digests([array])


def test_pieces_are_added_up(monkeypatch):
    expected = digests([ARRAYS["float32"]])
    monkeypatch.setattr(module, "PIECE", 7)
    assert digests([ARRAYS["float32"]]) == expected


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_the_program_for_a_device_adds_up_the_same(name):
    """On an accelerator the sums are taken there, of each part by itself."""
    array = ARRAYS[name]
    half = len(array) // 2
    parts = [(array[:half], [0] + [0] * (array.ndim - 1)), (array[half:], [half] + [0] * (array.ndim - 1))]
    program = partial(module._on_device, shape=array.shape)
    total = sum(np.asarray(program(jnp.asarray(a), jnp.asarray(s, jnp.uint32))) for a, s in parts).astype(np.uint32)
    assert f"{array.dtype.name} {total[0]:08x}{total[1]:08x}" == by_hand(array)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_every_single_bit_counts(name):
    array = ARRAYS[name]
    whole = digests([array])
    for bit in range(array.nbytes * 8):
        flipped = bytearray(array.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        assert different(whole, digests([np.frombuffer(flipped, array.dtype).reshape(array.shape)])) == ["0"]


def test_exchanged_entries_are_noticed():
    array = ARRAYS["float32"]
    assert different(digests([array]), digests([array[:, ::-1]]))


def test_what_is_absent_or_in_another_dtype_does_not_count():
    saved = digests({"a": ARRAYS["float32"], "b": ARRAYS["int8"]})
    assert not different(saved, digests({"a": ARRAYS["float32"].astype(ml_dtypes.bfloat16)}))
    assert not different(saved, digests({"c": ARRAYS["int8"]}))
