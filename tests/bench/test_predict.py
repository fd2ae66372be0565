"""`jhpt bench predict`: what it predicts was not timed."""

import pytest

from jhpt.bench.predict import CPU_CASES, GPU_CASES
from jhpt.measure.profile import depths


@pytest.mark.parametrize("case", [*CPU_CASES, *GPU_CASES], ids=str)
def test_no_case_times_the_program_that_it_predicts(case):
    assert case.micro_batch not in case.timed
    assert case.config.model.num_layers not in depths(case.config.model.num_layers)


def test_cases_lie_between_and_beyond_what_is_timed():
    beyond = [case for case in CPU_CASES if case.micro_batch > max(case.timed)]
    assert 1 < len(beyond) < len(CPU_CASES)
    assert all(case.micro_batch > min(case.timed) for case in CPU_CASES)
