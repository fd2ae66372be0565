"""What the hosts are asked arrives as it was written, and so does what they found."""

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from benchmarks.emulated.task import Launch


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A shape."""

    width: int


@dataclass(frozen=True, kw_only=True)
class Asked(Launch):
    """A task of a benchmark."""

    rates: tuple[float, ...]
    names: tuple[str, ...]
    inner: Inner
    deep: bool


ASKED = Asked(
    tag="jhpt-lab-1-1-0", cpu=0.5, folder="/tmp", rates=(1e8, 2e9), names=("mlp",), inner=Inner(width=3), deep=True
)


def test_a_task_is_its_text():
    assert Asked.parse(ASKED.text()) == ASKED


def test_a_text_of_another_task_is_refused():
    with pytest.raises(ValidationError, match="rates"):
        Asked.parse(Launch(tag="jhpt-lab-1-1-0", cpu=0.5, folder="/tmp").text())


def test_what_was_left_is_the_result(tmp_path):
    task = Launch(tag="jhpt-lab-1-1-0", cpu=0.5, folder=str(tmp_path))
    task.leave([{"row": "step", "samples_s": [0.5, 1e-3]}])
    assert task.result() == [{"row": "step", "samples_s": [0.5, 1e-3]}]
