"""The section `peers`: how long the processes of a run wait for each other."""

from pydantic import Field

from jhpt.core.section import Positive, Section


class PeersConfig(Section):
    """How long the processes of a run wait for each other; one process alone waits for nobody."""

    heartbeat_seconds: Positive = Field(
        10.0, description="a process whose host answers nothing for so long is gone, and all others stop"
    )
    stall_seconds: Positive | None = Field(
        None,
        description="a process that is silent or makes no progress for so long is stopped or stuck, and all others "
        "stop; null: the larger of 60 and ten times the median step",
    )
    wait_seconds: Positive = Field(
        300.0, description="how long the processes wait until all of them are there (jhpt train --wait)"
    )
