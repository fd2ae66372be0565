"""The small models that are trained: every parallel layout and memory option that a run can have, on eight devices.

They are in the names of the old tree.  `stopped`: the run is also resumed from its middle, in another tree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = 20
MIDDLE = 10

COMMON: dict[str, object] = {
    "data.validation_fraction": 0.25,
    "data.sequence_length": 32,
    "data.batch_size": 16,
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 8,
    "model.d_ff": 128,
    "model.max_length": 32,
    "train.steps": STEPS,
    "optimizer.warmup_steps": 4,
    "optimizer.clip_norm": 0.5,
    "checkpoint.every": MIDDLE,
    "log.every": 1,
    "log.tensorboard": False,
    "evaluation.sample_tokens": 0,
    "evaluation.batches": 2,
}
"""Settings of all runs; the gradients of the first steps are clipped."""

LLAMA: dict[str, object] = {
    "model.positions": "rotary",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.num_kv_heads": 4,
    "model.bias": False,
    "model.tied": False,
}


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run.  plan: JSON of a plan, in place of the settings under `parallel`."""

    name: str
    preset: str = "gpt-tiny"
    settings: Mapping[str, object] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    stopped: bool = False


def run(name: str, preset: str = "gpt-tiny", *, stopped: bool = False, **settings: object) -> TrainingRun:
    """A run with these settings, whose sections are separated by two underscores."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return TrainingRun(name=name, preset=preset, settings=named, stopped=stopped)


def planned(name: str, *runs: Mapping[str, object], **settings: object) -> TrainingRun:
    """A run of a plan of one stage on eight devices.  runs: neighbouring layers, embedding and head included."""
    stage = {"device": 0, "devices": 8, "chunks": [{"first": 0, "runs": list(runs)}]}
    plan = {"model": "any", "cluster": "any", "batch": 16, "micro_batches": 1, "stages": [stage], **settings}
    return TrainingRun(name=name, plan=plan)


ONE: dict[str, Any] = {"parallel__data": 1}

RUNS = (
    run("one device", **ONE, stopped=True),
    run("data 4, tensor 2", parallel__data=4, parallel__tensor=2, stopped=True),
    run("data 2, tensor 4", parallel__data=2, parallel__tensor=4),
    run(
        "pipe 2, tensor 2, data 2",
        parallel__pipe=2,
        parallel__tensor=2,
        parallel__data=2,
        parallel__micro_batches=4,
        stopped=True,
    ),
    run(
        "interleaved",
        model__num_layers=4,
        parallel__pipe=2,
        parallel__data=2,
        parallel__chunks=2,
        parallel__micro_batches=4,
        parallel__zero=1,
    ),
    run(
        "gpipe",
        model__num_layers=4,
        parallel__pipe=4,
        parallel__data=2,
        parallel__schedule="gpipe",
        parallel__micro_batches=4,
        optimizer__clip="layer",
    ),
    run("data 8, zero 0, dropout", parallel__data=8, parallel__zero=0, model__dropout=0.1),
    run("data 8, zero 1", parallel__data=8, parallel__zero=1),
    run("data 4, tensor 2, zero 3", parallel__data=4, parallel__tensor=2, parallel__zero=3, parallel__micro_batches=2),
    run("sequence", parallel__data=2, parallel__tensor=4, parallel__sequence=True),
    run("sample chunks", parallel__data=2, parallel__tensor=4, parallel__sample_chunks=2),
    run("compression, 8 bits", parallel__data=2, parallel__tensor=4, parallel__compression__bits=8),
    run(
        "compression, tokens 0.3",
        parallel__data=2,
        parallel__tensor=4,
        parallel__compression__bits=8,
        parallel__compression__tokens=0.3,
        parallel__compression__steps=2,
    ),
    run("gradients quantize", parallel__data=8, parallel__gradient_compression__kind="quantize"),
    run(
        "gradients topk",
        parallel__data=4,
        parallel__zero=1,
        parallel__gradient_compression__kind="topk",
        parallel__gradient_compression__momentum=0.9,
        parallel__gradient_compression__block=64,
    ),
    run("offload parameters", **ONE, memory__offload="parameters"),
    run("offload optimizer, clip previous", **ONE, memory__offload="optimizer", optimizer__clip="previous"),
    run("offload both", **ONE, memory__offload="both", stopped=True),
    run(
        "offload both, clip previous, data 2",
        parallel__data=2,
        parallel__micro_batches=2,
        memory__offload="both",
        optimizer__clip="previous",
    ),
    run("offload both, clip layer", **ONE, memory__offload="both", memory__recompute="full", optimizer__clip="layer"),
    run("recompute full", parallel__data=4, parallel__tensor=2, memory__recompute="full"),
    run(
        "recompute by names",
        parallel__pipe=2,
        parallel__data=2,
        parallel__micro_batches=2,
        memory__recompute="qkv,mlp_hidden",
    ),
    run(
        "kahan and int8",
        parallel__data=4,
        parallel__tensor=2,
        optimizer__weights="bfloat16_kahan",
        optimizer__moments="int8",
        stopped=True,
    ),
    run("stochastic rounding", parallel__data=2, parallel__zero=1, optimizer__weights="bfloat16_stochastic"),
    run("micro-batches", **ONE, parallel__micro_batches=4, optimizer__z_loss=1e-4, optimizer__clip="previous"),
    TrainingRun(name="llama", settings=LLAMA | {"parallel.data": 2, "parallel.tensor": 4, "parallel.zero": 1}),
    run("bert", "bert-tiny", **ONE, stopped=True),
    run(
        "bert, pipe 2, tensor 2",
        "bert-tiny",
        parallel__pipe=2,
        parallel__data=2,
        parallel__tensor=2,
        parallel__micro_batches=2,
        model__dropout=0.1,
    ),
    planned(
        "plan of two tensor degrees",
        {"layers": 2, "tensor": 2},
        {"layers": 1, "tensor": 4},
        {"layers": 1, "tensor": 2},
        zero=1,
    ),
    planned(
        "plan that keeps on the host",
        {"layers": 4, "tensor": 2},
        recompute=True,
        kept={"device": ["qkv"], "host": ["residual_in"]},
    ),
)
