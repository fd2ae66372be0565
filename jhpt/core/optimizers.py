"""Optimizers by name, in numbers: what the planner and the configuration have to know about an update rule.

The rules themselves are registered with `jhpt.training.optimizer.register_optimizer`, which also fills this table.
"""

from dataclasses import dataclass

from jhpt.core.divisors import one_of
from jhpt.core.errors import did_you_mean

OWN_SETTINGS = ("b1", "b2", "eps", "momentum", "nesterov")
"""Settings of the section `optimizer` that some optimizers read and others do not."""


@dataclass(frozen=True, kw_only=True)
class OptimizerNumbers:
    """What an update rule stores and what it allows.

    moments: numbers that it stores for every parameter from step to step.
    moments_in_blocks: for every number in a matrix of a block, where these differ; None: as many as `moments`.
    factored: of a matrix or table it stores a number for each row and each column instead.
    orthogonal: steps of Newton and Schulz in which an update makes every matrix of a block orthogonal.
    coded: its moments can be stored in 8 bits.
    offloaded: it can update blocks while they stream from host memory (`memory.offload`).
    settings: which of `OWN_SETTINGS` it reads; the others are refused (`jhpt.core.unused`).
    """

    moments: int
    moments_in_blocks: int | None = None
    factored: bool = False
    orthogonal: int = 0
    coded: bool = False
    offloaded: bool = False
    settings: tuple[str, ...] = OWN_SETTINGS


NEWTON_SCHULZ_STEPS = 5
"""Steps of Muon, as many as Jordan et al. take."""

ADAM = ("b1", "b2", "eps")
MOMENTUM = ("momentum", "nesterov")

OPTIMIZERS: dict[str, OptimizerNumbers] = {
    "adamw": OptimizerNumbers(moments=2, coded=True, offloaded=True, settings=ADAM),
    "lion": OptimizerNumbers(moments=1, settings=("b1", "b2")),
    "sgd": OptimizerNumbers(moments=1, settings=MOMENTUM),
    "adafactor": OptimizerNumbers(moments=1, factored=True, settings=()),
    "muon": OptimizerNumbers(
        moments=2, moments_in_blocks=1, orthogonal=NEWTON_SCHULZ_STEPS, settings=(*ADAM, *MOMENTUM)
    ),
}


def optimizer_numbers(name: str) -> OptimizerNumbers:
    """The numbers of a registered optimizer.

    Raises:
      ValueError: nothing is registered under that name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer.name={name!r}{did_you_mean(name, OPTIMIZERS)}; use {one_of(OPTIMIZERS)}")
    return OPTIMIZERS[name]
