"""Optimizers by name, in numbers: what the planner and the configuration have to know about an update rule.

The rules themselves are registered with `jhpt.training.optimizer.register_optimizer`, which also fills this table.
"""

from dataclasses import dataclass

from jhpt.core.divisors import one_of
from jhpt.core.errors import did_you_mean


@dataclass(frozen=True, kw_only=True)
class OptimizerNumbers:
    """What an update rule stores and what it allows.

    moments: numbers that it stores for every parameter from step to step.
    coded: its moments can be stored in 8 bits.
    offloaded: it can update blocks while they stream from host memory (`memory.offload`).
    """

    moments: int
    coded: bool = False
    offloaded: bool = False


OPTIMIZERS: dict[str, OptimizerNumbers] = {"adamw": OptimizerNumbers(moments=2, coded=True, offloaded=True)}


def optimizer_numbers(name: str) -> OptimizerNumbers:
    """The numbers of a registered optimizer.

    Raises:
      ValueError: nothing is registered under that name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer.name={name!r}{did_you_mean(name, OPTIMIZERS)}; use {one_of(OPTIMIZERS)}")
    return OPTIMIZERS[name]
