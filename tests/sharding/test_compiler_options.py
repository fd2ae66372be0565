"""How many collectives may be on their way at once, and whose kernels products are."""

import pytest

from jhpt.core.plan import Offload, SavedTensors
from jhpt.sharding.compiler_options import ALONE, COLLECTIVES_AT_ONCE, ROWS_AT_ONCE, TENSORS_AT_ONCE, compiler_options
from tests.sharding.plans import mixed, piped

SEVERAL = {"xla_gpu_experimental_parallel_collective_overlap_limit": COLLECTIVES_AT_ONCE}


def test_sums_of_chunks_take_turns_where_nothing_else_travels():
    assert compiler_options("gpu", piped([5], 1, tensor=4, sample_chunks=2)) == {}
    assert compiler_options("cuda", piped([3, 2], 2, tensor=4, sample_chunks=2)) == {}


def test_otherwise_several_travel_at_once():
    for plan in (
        piped([5], 1, tensor=4),
        piped([5], 1, data=2, tensor=4, sample_chunks=2),
        mixed((4, 8, 8, 4, 4), sample_chunks=(1, 2, 2, 1, 1)),
    ):
        assert compiler_options("gpu", plan) == SEVERAL


@pytest.mark.parametrize(
    ("what", "copies"),
    [
        ({"offload": Offload()}, ROWS_AT_ONCE),
        ({"recompute": True, "saved": SavedTensors(host=("qkv",))}, TENSORS_AT_ONCE),
    ],
)
def test_what_waits_on_the_host_comes_and_goes_at_once(what, copies):
    plan = piped([6], 1, data=2).model_copy(update=what)
    several = {"xla_gpu_experimental_parallel_async_compute_limit": copies, "xla_gpu_enable_command_buffer": ""}
    assert compiler_options("gpu", plan) == SEVERAL | several
    in_turn = piped([6], 1, tensor=4, sample_chunks=2).model_copy(update=what)
    assert compiler_options("gpu", in_turn) == several


def test_two_transfers_of_a_ring_of_two_stages_stay_two():
    ring = piped([2, 1, 2, 1], 2, schedule="interleaved", micro_batches=2)
    assert compiler_options("gpu", ring) == SEVERAL | {"xla_gpu_collective_permute_combine_threshold_bytes": 0}
    for plan in (piped([3, 2], 2), piped([2, 1] * 3, 3, schedule="interleaved", micro_batches=3)):
        assert compiler_options("gpu", plan) == SEVERAL


def test_products_of_a_single_device_are_cublas():
    """Except where its blocks are in a loop."""
    plan = piped([5], 1)
    assert compiler_options("gpu", plan).items() >= ALONE.items()
    for one in (
        plan.model_copy(update={"recompute": True}),
        plan.model_copy(update={"offload": Offload()}),
        piped([51], 1),
        piped([5], 1, micro_batches=2),
        piped([5], 1, zero=3),
        piped([5], 1, data=2),
        piped([3, 2], 2),
    ):
        assert not compiler_options("gpu", one).keys() & ALONE.keys()


def test_a_cpu_is_told_nothing():
    assert compiler_options("cpu", piped([5], 1, data=8)) == {}
