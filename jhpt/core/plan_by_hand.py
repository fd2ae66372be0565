"""The plan that a configuration lays out by hand, in its sections `parallel` and `memory`."""

from dataclasses import replace
from typing import Any

from jhpt.core.config import Config
from jhpt.core.divisors import divisors, one_of
from jhpt.core.errors import InputError
from jhpt.core.memory_config import MemoryConfig
from jhpt.core.plan import Chunk, Offload, OtherBlocks, Plan, Run, SavedTensors, Stage
from jhpt.core.rules import check


def plan_by_hand(config: Config, devices: int) -> Plan:
    """The plan that the section `parallel` describes, on so many devices.

    Blocks are divided evenly; if they do not divide, the first chunks have one more.  The embedding is in the chunk of
    the first block, and the head in that of the last.

    Raises:
      InputError: a broken rule, more devices than there are, a batch that does not divide, or a choice that is left to
        the planner.
    """
    parallel, batch, offload = config.parallel, config.data.batch_size, _offload_by_hand(config)
    pipe, tensor, micro_batches = parallel.pipe, parallel.tensor, parallel.micro_batches
    data = parallel.data or max(devices // (pipe * tensor), 1)
    used = pipe * data * tensor
    if parallel.compression.auto:
        raise InputError(
            "parallel.compression=auto leaves compression to the planner, and parallel.auto=false does without it; "
            "set parallel=auto, or choose by hand: parallel.compression.bits=8"
        )
    check(
        replace(
            parallel.choices,
            offload=offload.kind if offload else None,
            other_blocks=config.memory.recompute_blocks is not None,
        )
    )
    layout = f"parallel.pipe={pipe} x " * (pipe > 1) + f"parallel.data={data} x parallel.tensor={tensor}"
    if used > devices:
        raise InputError(
            f"{layout} needs {used} devices, and there {'is' if devices == 1 else 'are'} {devices}; "
            f"lower them, or on CPU set JAX_NUM_CPU_DEVICES={used}"
        )
    if batch % (data * micro_batches):
        degrees = [d for d in divisors(devices // (pipe * tensor)) if batch % (d * micro_batches) == 0]
        remedy = f"set parallel.data to {one_of(degrees)}" if degrees else "lower parallel.micro_batches"
        raise InputError(
            f"data.batch_size={batch} is not divisible by {data} data-parallel devices x {micro_batches} "
            f"micro-batches; {remedy}, or change the batch"
        )
    return Plan(
        model=config.name,
        cluster=f"{devices} devices",
        batch=batch,
        micro_batches=micro_batches,
        schedule="interleaved" if parallel.chunks > 1 else parallel.schedule,
        zero=parallel.zero,
        zero_ranks=parallel.zero_ranks,
        **recomputed(config.memory),
        other_blocks=_other_blocks(config),
        offload=offload,
        compression=parallel.compression.settings,
        gradient_compression=parallel.gradient_compression,
        sequence=parallel.sequence,
        origin="hand",
        stages=_even_stages(
            config.model.num_layers, pipe, parallel.chunks, data * tensor, tensor, parallel.sample_chunks
        ),
    )


def recomputed(memory: MemoryConfig) -> dict[str, Any]:
    """The keys `recompute` and `saved` of a plan, as the section `memory` says; with `auto` nothing is recomputed."""
    choice = memory.recompute
    return {
        "recompute": choice not in ("auto", "none"),
        "saved": None if isinstance(choice, str) else SavedTensors(device=choice),
    }


def _other_blocks(config: Config) -> OtherBlocks | None:
    """The blocks that save everything; None if all save the same."""
    count, blocks = config.memory.recompute_blocks, config.model.num_layers
    if count is None or config.memory.recompute in ("auto", "none"):
        return None
    if count > blocks:
        raise InputError(
            f"memory.recompute_blocks={count}, and model.num_layers={blocks}; lower it, or leave it out: then all are "
            "recomputed"
        )
    return OtherBlocks(after=count) if count < blocks else None


def _offload_by_hand(config: Config) -> Offload | None:
    """CPU offload as the section `memory` says; with `auto` there is none."""
    kind = config.memory.offload
    return (
        None if kind in ("auto", "off") else Offload(kind=kind, update_in_backward=config.optimizer.update_in_backward)
    )


def _even_stages(
    blocks: int, pipe: int, chunks: int, devices: int, tensor: int, sample_chunks: int
) -> tuple[Stage, ...]:
    parts = pipe * chunks
    counts = [blocks // parts + (part < blocks % parts) for part in range(parts)]
    edges = [0, *(1 + sum(counts[: part + 1]) for part in range(parts - 1)), blocks + 2]
    return tuple(
        Stage(
            device=stage * devices,
            devices=devices,
            chunks=tuple(
                Chunk(
                    first=edges[part],
                    runs=(Run(layers=edges[part + 1] - edges[part], tensor=tensor, sample_chunks=sample_chunks),),
                )
                for part in range(stage, parts, pipe)
            ),
        )
        for stage in range(pipe)
    )
