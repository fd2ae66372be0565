"""Measurements that are repeated until they can be right, and refused if they never are."""

import sys
from collections.abc import Callable
from typing import TypeVar

from jhpt.core.errors import InputError

ResultT = TypeVar("ResultT")

TRIES = 3
"""Each try after the first has twice the rounds of the one before."""


def until_plausible(
    what: str, measure: Callable[[int], tuple[ResultT, list[str]]], rounds: int, remedy: str = ""
) -> ResultT:
    """The result of the first try without faults.

    Args:
      what: is measured, for messages.
      measure: rounds -> (result, what cannot be right about it).
      remedy: what else to do than to stop other programs.

    Raises:
      InputError: every try has faults; the message says which, and what to do.
    """
    faults: list[str] = []
    for number in range(TRIES):
        result, faults = measure(rounds << number)
        if not faults:
            return result
        if number + 1 < TRIES:
            note(f"{what}: {faults[0]}, which cannot be right; measured again, with {rounds << number + 1} rounds")
    raise InputError(
        f"{what}: {TRIES} tries, the last with {rounds << TRIES - 1} rounds, gave measurements that cannot be right:\n"
        + "\n".join(f"  {fault}" for fault in faults)
        + f"\nnothing of it is kept; stop other programs on this machine{remedy}, and run it again; or plan from "
        "datasheets: jhpt plan --cluster h100x8x1, with the name of your devices"
    )


def note(text: str) -> None:
    """Says it beside the output of the command."""
    print(f"note: {text}", file=sys.stderr)
