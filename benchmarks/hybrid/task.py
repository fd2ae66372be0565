"""What the hosts are asked to measure."""

from dataclasses import dataclass

from benchmarks.emulated.task import Launch
from jhpt.core.plan import Plan

MODELS = ("vgg", "mlp", "gpt", "bert")
"""In the order of the table (`benchmarks.hybrid.models`)."""

CHUNKS = 2
"""Of a stage, where the bubble of interleaved 1F1B is measured."""


def run_key(plan: Plan) -> str:
    """Equal where plans run equally."""
    return plan.model_dump_json(exclude={"seconds", "lower_bound", "device", "origin"})


@dataclass(frozen=True, kw_only=True)
class Task(Launch):
    """One launch.

    rates: bits per second.
    rounds: samples of a step.  layer_rounds, link_rounds: of a layer, of a message.
    bubble: whether to measure that of a pipeline too.
    """

    models: tuple[str, ...]
    rates: tuple[float, ...]
    rounds: int
    layer_rounds: int
    link_rounds: int
    bubble: bool
