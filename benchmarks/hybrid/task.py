"""The task of the hosts."""

from dataclasses import dataclass

from benchmarks.emulated.task import Launch
from jhpt.core.plan import Plan

MODELS = ("vgg", "mlp", "gpt", "bert", "gpt2-like", "bert-like")
"""Names of the models (`benchmarks.hybrid.models`), in the order of the table."""

CHUNKS = 2
"""Chunks of a stage in the measurement of the bubble of interleaved 1F1B."""

WIDTHS = (512, 1024, 1536)
"""Widths of the perceptrons whose bubbles are measured (`benchmarks.hybrid.bubble`).  The widest needs 12 GB of memory
for four hosts."""

DATA_PARALLEL, AGAIN, SHORT = "data parallel", "data parallel again", "data parallel 16 bits"
GPIPE, GRID, ONE_HOST = "gpipe", "3-D grid", "one host"
"""Baselines, as competitors (`benchmarks.hybrid.run`)."""

SPMD, GENERAL, PLAN = "spmd", "general", "plan"
"""The plans predicted to be the best of one program and of a program for each stage, and the planner's plan: of those
of both kinds that are predicted to be the fastest, the one that a trial chooses (`parallel.trials`)."""

JUDGED = (DATA_PARALLEL, GPIPE, PLAN)
"""Competitors between which a difference of 3 % counts, so they run more often than others."""

TRIALS = 4
"""Plans that the planner's trial compares at each rate."""

BY_SPEED = "by speed"
"""The plan on hosts of different quotas (`benchmarks.hybrid.mixed`), as a competitor."""

SAMPLES = "samples by speed"
"""On such hosts the best plan of one stage whose data ranks have samples by their speed, as a competitor."""


def run_key(competitor: str, plan: Plan) -> str:
    """A key that is equal for what runs the same: equal plans that send the same numbers."""
    key = plan.model_dump_json(exclude={"seconds", "lower_bound", "device", "origin"})
    return f"{key} in 16 bits" if competitor == SHORT else key


@dataclass(frozen=True, kw_only=True)
class Task(Launch):
    """One launch.

    rates: bits per second.
    rounds: how often a step is timed.  often: how often those of `JUDGED` are in every round.
    trial_rounds: how often that of each candidate is, before the rounds.
    layer_rounds, link_rounds: how often a layer, a message is.
    bubbles: widths of perceptrons of which the bubbles of pipelines are measured too.  general: whether general plans
    compete, for which dispatch is measured.
    """

    models: tuple[str, ...]
    rates: tuple[float, ...]
    rounds: int
    often: int
    trial_rounds: int
    layer_rounds: int
    link_rounds: int
    bubbles: tuple[int, ...] = ()
    general: bool = False
