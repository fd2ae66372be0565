"""The task of the hosts."""

from dataclasses import dataclass

from benchmarks.emulated.task import Launch
from jhpt.core.plan import Plan

MODELS = ("vgg", "mlp", "gpt", "bert")
"""Names of the models (`benchmarks.hybrid.models`), in the order of the table."""

CHUNKS = 2
"""Chunks of a stage in the measurement of the bubble of interleaved 1F1B."""


BY_SPEED = "by speed"
"""The plan on hosts of different quotas (`benchmarks.hybrid.mixed`), as a competitor."""


def run_key(plan: Plan) -> str:
    """A key that is equal for plans that run the same."""
    return plan.model_dump_json(exclude={"seconds", "lower_bound", "device", "origin"})


@dataclass(frozen=True, kw_only=True)
class Task(Launch):
    """One launch.

    rates: bits per second.
    rounds: how often a step is timed.  layer_rounds, link_rounds: how often a layer, a message is.
    bubble: whether the bubble of a pipeline is measured too.  general: whether general plans compete, for which
    dispatch is measured.
    """

    models: tuple[str, ...]
    rates: tuple[float, ...]
    rounds: int
    layer_rounds: int
    link_rounds: int
    bubble: bool
    general: bool = False
