"""The section `guards`: what is done about a loss that jumps, and about copies of the state that differ."""

from typing import Annotated, Literal

from pydantic import Field

from jhpt.core.section import Count, Positive, Section

FEWEST = 5
"""Losses before, without which nothing is called a spike."""


class GuardsConfig(Section):
    """What is done about a loss that jumps (a spike), and about copies of the state that differ."""

    spike: Literal["keep", "skip", "rewind"] = Field(
        "keep",
        description="keep: the checkpoint from before a spike is kept for good; skip: the update of a step whose loss "
        "is a spike is left out; rewind: training goes back to a checkpoint from before it and leaves out the data "
        "since. keep looks at the losses that are reported, the others at the loss of every step",
    )
    sigmas: Positive = Field(
        10.0, description="a loss is a spike if it is so many standard deviations above the median of those before"
    )
    window: Annotated[int, Field(ge=FEWEST, le=10_000, strict=True)] = Field(
        20, description="losses before that are compared with"
    )
    rewind_steps: Count = Field(
        100, description="with rewind: go back to the newest checkpoint at least so many steps before the spike"
    )
    max_rewinds: Count = Field(5, description="with rewind: stop at a spike after so many rewinds")
    replicas_every: Count | None = Field(
        None,
        description="steps between comparisons of what devices hold copies of (parameters, and optimizer state where "
        "it is not divided); each save compares too; null: never",
    )
    repair_replicas: bool = Field(
        False, description="a copy that differs is overwritten with what most devices hold, instead of stopping"
    )


def rewind_conflict(guards: GuardsConfig, *, every: int, keep: int, log_every: int) -> str | None:
    """Why this run could not go back far enough: the checkpoint that is needed would have been removed; None: it could.

    A spike is seen up to `log_every` - 1 steps after it, and the checkpoint is up to `every` - 1 steps older than it
    has to be.

    Args:
      every, keep: of checkpoints.
    """
    needed = 1 - (-(guards.rewind_steps + log_every - 1) // every)
    if guards.spike != "rewind" or keep >= needed:
        return None
    return (
        f"guards.spike=rewind goes back guards.rewind_steps={guards.rewind_steps} steps, and with checkpoint.every="
        f"{every} and checkpoint.keep={keep} the checkpoint from then may be gone; set checkpoint.keep={needed} or "
        "more, or a smaller guards.rewind_steps"
    )
