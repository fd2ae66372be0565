"""What is kept of a parameter: bytes by hand, and rows that a tensor axis may cut."""

import pytest

from jhpt.core.config import OptimizerConfig
from jhpt.core.load import load_config
from jhpt.core.state import State, block_size, most_cuts, state_of


def test_rows_fall_into_the_largest_blocks_there_are():
    assert [block_size(row) for row in (768, 80, 8, 7, 67, 96)] == [64, 40, 8, None, None, 48]
    assert [most_cuts(row) for row in (512, 11008, 67)] == [8, 172, 67]


def test_float32_is_what_nothing_else_is_said_of():
    assert state_of(load_config("gpt-tiny").model, OptimizerConfig()) == State()
    assert State().bytes == 12 and not State().low_precision


@pytest.mark.parametrize(
    ("weights", "moments", "size"),
    [
        ("bfloat16_kahan", "float32", 12),
        ("bfloat16_stochastic", "float32", 10),
        ("bfloat16", "float32", 10),
        ("float32", "int8", 6.13),
        ("bfloat16_kahan", "int8", 6.13),
        ("bfloat16_stochastic", "int8", 4.13),
    ],
)
def test_bytes_of_gpt2(weights, moments, size):
    """The table of docs/reports/low-precision.md, and that causes are all of it."""
    state = state_of(load_config("gpt2-124m").model, OptimizerConfig(weights=weights, moments=moments))
    assert state.bytes == pytest.approx(size, abs=0.005)
    assert sum(state.causes.values()) == pytest.approx(state.bytes)
    assert ("remainders" in state.causes) == (weights == "bfloat16_kahan")


@pytest.mark.parametrize("preset", ["gpt2-124m", "llama-8b", "bert-large"])
def test_nearly_all_parameters_are_in_matrices(preset):
    model = load_config(preset).model
    others = model.parameter_count().allocated - sum(each.numbers for each in model.matrices())
    assert 0 < model.float32_parameters() <= others < 2e-3 * model.parameter_count().allocated
