"""What a training framework's program does beside the products of a model, in numbers: a property of the software, as
`Device` and `Link` hold properties of the hardware.

jhpt's own program is one of them (`jhpt.core.calibration.ours`); published runs are other frameworks'
(`jhpt.bench.frameworks`).  `IDEAL` does nothing that it need not do, and hides all communication that can be hidden:
profiles of unknown origin count as its.
"""

from pydantic import Field

from jhpt.core.section import NonNegative, Positive, Section

Share = NonNegative
"""A share of communication that runs beside computation, by which the computation takes longer."""


class Framework(Section):
    """The program that a profile's seconds hold for."""

    name: str = "ideal"
    traffic: Positive = Field(
        1.0, description="bytes that element-wise kernels move, relative to reading each input and writing each output"
    )
    draw_bytes: NonNegative = Field(0.0, description="bytes moved for each random number that dropout draws")
    fused_attention: Positive = Field(1.0, description="rate of its fused attention, relative to FlashAttention-2")
    keeps_scores: bool = Field(True, description="plain attention saves its probabilities for the backward pass")
    accumulation: NonNegative = Field(
        0.0, description="bytes moved per parameter and micro-batch to add up gradients over several micro-batches"
    )
    gradient_bytes: Positive | None = Field(
        None,
        description="bytes on the wire of a gradient that was added up over several micro-batches; null: as weights",
    )
    all_reduces_shares: bool = Field(
        False, description="ZeRO-1 sums gradients by an all-reduce, though every rank needs only its share"
    )
    broadcasts_shares: bool = Field(
        False, description="ZeRO-1 broadcasts the weights of each rank in turn, instead of one all-gather"
    )
    exposed_gathers: Share = Field(0.0, description="of ZeRO-3's communication beside a pass: share that adds to it")
    exposed_gradients: Share = Field(
        0.0,
        description="of the reduction of gradients beside the last backward pass, and with ZeRO-1 of the all-gather of "
        "weights beside the first forward pass: share that adds to it; more than 1 counts as 1",
    )
    exposed_regathers: Share = Field(
        0.0,
        description="of the all-gathers that sequence parallelism repeats in the backward pass, beside gradients of "
        "weights: share that adds to it",
    )
    stage_dispatch: NonNegative = Field(
        0.0,
        description="seconds that a process takes, for each pass of a stage that has a program of its own, to start it "
        "and hand over what it receives and passes on",
    )
    exposed_transfers: bool = Field(False, description="stages wait while activations and errors are sent")


IDEAL = Framework()
