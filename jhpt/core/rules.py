"""Which choices exclude each other: every such rule once, in `RULES`.

A configuration by hand, a plan, a request to the planner and the program that runs all describe themselves as
`Choices`.  `conflict` returns the message of the first rule that they break, with the values and a remedy.  A choice
that is still open is `None`, and rules that depend on it do not apply.

`jhpt.core.unused` lists the settings that nothing reads.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jhpt.core.divisors import divisors, one_of
from jhpt.core.errors import InputError

SETTINGS: Mapping[str, str] = {
    "batch": "data.batch_size",
    "stages": "parallel.pipe",
    "data": "parallel.data",
    "chunks": "parallel.chunks",
    "sample_chunks": "parallel.sample_chunks",
    "schedule": "parallel.schedule",
    "micro_batches": "parallel.micro_batches",
    "tensor": "parallel.tensor",
    "zero": "parallel.zero",
    "zero_ranks": "parallel.zero_ranks",
    "sequence": "parallel.sequence",
    "compression": "parallel.compression",
    "gradient_compression": "parallel.gradient_compression",
    "offload": "memory.offload",
    "saved": "memory.recompute",
    "other_blocks": "memory.recompute_blocks",
}
"""The setting of a configuration for each choice; a plan uses the names of `Choices`."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is chosen so far, in the words of a plan.

    space: spmd or general.  devices: that the stages need; available: those there are, of the cluster or machine
    `place`.  mixed: the cluster's nodes differ.  data: data ranks.  tensor: the tensor degrees in use, ascending.
    alike: whether blocks have the same shapes.  sample: what a sample is, where it is no sequence of tokens.
    block_kinds: kinds of layers between embedding and head.  saved_in_host_memory: names of saved activations.
    documents: whether rows hold documents that are kept apart.
    optimizer: name of the update rule; optimizer_offloads: whether blocks can take its steps in CPU offload.
    storage: how weights and moments are stored, where that is not float32.  update_in_backward: the plan's, clip: the
    optimizer's rule, which allows it or does not.  tied: tensor degrees of the two layers that share a parameter.
    runs: whether it is to be run, and not only priced.  names: what messages call the choices.
    """

    space: str = "spmd"
    batch: int | None = None
    stages: int | None = None
    chunks: int | None = None
    sample_chunks: tuple[int, ...] = (1,)
    schedule: str | None = None
    micro_batches: int | None = None
    data: int | None = None
    tensor: tuple[int, ...] = ()
    tied: tuple[int, int] | None = None
    sequence_length: int | None = None
    documents: bool = False
    devices: int | None = None
    available: int | None = None
    place: str = ""
    mixed: bool = False
    alike: bool = True
    sample: str | None = None
    block_kinds: tuple[str, ...] | None = None
    zero: int | None = None
    zero_ranks: int | None = None
    sequence: bool = False
    compression: bool = False
    gradient_compression: bool = False
    offload: str | None = None
    update_in_backward: bool | None = None
    clip: str | None = None
    clip_allows_update_in_backward: bool | None = None
    optimizer: str | None = None
    optimizer_offloads: bool | None = None
    storage: tuple[str, str] | None = None
    recompute: bool | None = None
    saved: bool = False
    saved_in_host_memory: tuple[str, ...] = ()
    other_blocks: bool = False
    runs: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, choice: str) -> str:
        """What the user calls this choice."""
        return self.names.get(choice, choice)

    def off(self, choice: str) -> str:
        """What the user does to turn it off: set a word in a configuration, leave out the key in a plan."""
        if not self.names:
            return f"take {choice} out of the plan"
        return f"set {self.name(choice)}={ {'saved': 'auto', 'zero_ranks': 'null'}.get(choice, 'off') }"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Choices that exclude each other.

    broken_by: whether these choices break it.  message: the values that clash and the remedy.
    """

    name: str
    broken_by: Callable[[Choices], bool]
    message: Callable[[Choices], str]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _multiples(count: int, unit: int) -> str:
    """The nearest multiples of `unit`, from one on: `4 or 6`."""
    below = count // unit * unit
    return one_of(multiple for multiple in (below, below + unit) if multiple)


def _several_stages(c: Choices) -> bool:
    return c.stages is not None and c.stages > 1


def _interleaved(c: Choices) -> bool:
    return c.chunks is not None and c.chunks > 1


def _one_program_only(c: Choices) -> list[str]:
    """The choices that only one SPMD program offers."""
    made = {
        "sample_chunks": c.sample_chunks != (1,),
        "compression": c.compression,
        "gradient_compression": c.gradient_compression,
        "offload": c.offload is not None,
        "zero_ranks": c.zero_ranks is not None,
        "saved": c.saved,
        "other_blocks": c.other_blocks,
    }
    return [name for name, is_made in made.items() if is_made]


def _general_remedy(c: Choices) -> str:
    choices = _one_program_only(c)
    return (
        f"space={c.space} has a program for each stage, and these work within one SPMD program only: "
        f"{', '.join(map(c.name, choices))}; {' and '.join(map(c.off, choices))}, or use space=spmd"
    )


def _offload_partners(c: Choices) -> list[str]:
    """The choices made that exclude CPU offload.  Over one tensor rank compression changes nothing."""
    partners = {
        f"{c.stages} pipeline stages": _several_stages(c),
        f"tensor parallelism ({c.name('tensor')}={max(c.tensor, default=1)})": c.tensor not in ((), (1,)),
        f"sequence parallelism ({c.name('sequence')}=true)": c.sequence,
        f"ZeRO-2 ({c.name('zero')}=2)": c.zero == 2,
        f"{c.name('zero_ranks')}={c.zero_ranks}": c.zero_ranks is not None,
        c.name("compression"): c.compression and c.tensor != (1,),
        c.name("gradient_compression"): c.gradient_compression,
        f"saved activations in host memory ({', '.join(c.saved_in_host_memory)})": bool(c.saved_in_host_memory),
    }
    return [name for name, is_chosen in partners.items() if is_chosen]


def _uneven_sequence(c: Choices) -> int | None:
    """The first tensor degree that does not divide the sequence."""
    if not c.sequence or c.sequence_length is None:
        return None
    return next((degree for degree in c.tensor if c.sequence_length % degree), None)


def _crossing_degrees(c: Choices) -> tuple[int, int] | None:
    pairs = itertools.pairwise(c.tensor)
    return next(((low, high) for low, high in pairs if high % low), None)


def _crossing_message(c: Choices) -> str:
    low, high = _crossing_degrees(c) or (0, 0)
    return (
        f"tensor degrees {low} and {high} cannot share a device mesh: {low} does not divide {high}; use degrees that "
        "divide each other, such as powers of two"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="only one SPMD program",
        broken_by=lambda c: c.space == "general" and bool(_one_program_only(c)),
        message=_general_remedy,
    ),
    Rule(
        name="ZeRO-2 in one SPMD program",
        broken_by=lambda c: c.space == "general" and c.zero == 2,
        message=lambda c: (
            f"space=general has no ZeRO-2 ({c.name('zero')}=2); use {c.name('zero')}=1 or {c.name('zero')}=3, or "
            "space=spmd"
        ),
    ),
    Rule(
        name="hybrid sharding of something",
        broken_by=lambda c: c.zero_ranks is not None and (c.zero == 0 or c.gradient_compression),
        message=lambda c: (
            f"{c.name('zero_ranks')}={c.zero_ranks} shards over a part of the data ranks, which needs "
            f"{c.name('zero')}=1, 2 or 3 and excludes {c.name('gradient_compression')}; change these, or leave out "
            f"{c.name('zero_ranks')}"
        ),
    ),
    Rule(
        name="whole states and sequences in programs of stages",
        broken_by=lambda c: c.space == "general" and c.runs and (bool(c.zero) or c.sequence),
        message=lambda c: (
            f"the programs of space=general store whole states and sequences on every replica, and the plan has "
            f"{c.name('zero')}={c.zero or 0} and {c.name('sequence')}={str(c.sequence).lower()}; use "
            f"{c.name('zero')}=0 and no {c.name('sequence')}, or space=spmd"
        ),
    ),
    Rule(
        name="clipping by layer in programs of stages",
        broken_by=lambda c: c.space == "general" and c.runs and c.clip == "layer",
        message=lambda c: (
            "optimizer.clip=layer needs the norm of embedding and head together, and with space=general each has a "
            "program of its own; use optimizer.clip=global, or space=spmd"
        ),
    ),
    Rule(
        name="weight passes by hand",
        broken_by=lambda c: c.schedule == "zb-h1" and (c.space == "general" or c.chunks is None),
        message=lambda c: (
            "schedule=zb-h1 is neither searched nor in space=general; lay the step out by hand and set "
            "parallel.schedule=zb-h1, or use another schedule"
        ),
    ),
    Rule(
        name="weight passes and recomputation",
        broken_by=lambda c: c.schedule == "zb-h1" and bool(c.recompute),
        message=lambda c: (
            "schedule=zb-h1 stores what weight passes need in place of saved activations, and recomputation saves too "
            "few; use memory.recompute=none, or schedule=1f1b"
        ),
    ),
    Rule(
        name="no search of these schedules with stages of any size",
        broken_by=lambda c: c.space == "general" and c.schedule in ("1f1b", "interleaved") and c.chunks is None,
        message=lambda c: (
            f"the search of space=general has no schedule={c.schedule}; use eager-1f1b or gpipe, or space=spmd"
        ),
    ),
    Rule(
        name="one SPMD program on equal devices",
        broken_by=lambda c: c.space == "spmd" and c.mixed,
        message=lambda c: (
            f"space=spmd needs equal devices, and {c.place} has nodes of several kinds; plan it with --space general "
            "(in a configuration parallel.space=general), or give a cluster of one kind"
        ),
    ),
    Rule(
        name="devices",
        broken_by=lambda c: c.devices is not None and c.available is not None and c.devices > c.available,
        message=lambda c: (
            f"the plan needs {_number(c.devices or 0, 'device')}, {c.place} has {c.available}; use a plan for "
            f"{_number(c.available or 0, 'device')}, or a larger cluster"
        ),
    ),
    Rule(
        name="compression and sequence parallelism",
        broken_by=lambda c: c.compression and c.sequence,
        message=lambda c: (
            f"{c.name('compression')} needs whole sequences, and {c.name('sequence')}=true shards them; leave out "
            f"{c.name('sequence')} or {c.name('compression')}"
        ),
    ),
    Rule(
        name="compression of tokens",
        broken_by=lambda c: c.compression and c.sample is not None,
        message=lambda c: (
            f"{c.name('compression')} chooses among the tokens of a sequence, and a sample here is {c.sample}; "
            f"{c.off('compression')}"
        ),
    ),
    Rule(
        name="activations that are cut by token",
        broken_by=lambda c: c.sample is not None and (c.sequence or c.sample_chunks != (1,)),
        message=lambda c: (
            f"{c.name('sequence')} and {c.name('sample_chunks')} are for the all-reduces of attention and MLP, and a "
            f"sample here is {c.sample}; leave them out"
        ),
    ),
    Rule(
        name="compression and documents",
        broken_by=lambda c: c.compression and c.documents,
        message=lambda c: (
            f"{c.name('compression')} chooses the important tokens of a whole row, and data.packing=documents keeps "
            f"its documents apart; {c.off('compression')}, or use data.packing=stream"
        ),
    ),
    Rule(
        name="compressed gradients and ZeRO-2 or ZeRO-3",
        broken_by=lambda c: c.gradient_compression and c.zero in (2, 3),
        message=lambda c: (
            f"{c.name('gradient_compression')} reduces a gradient once a step, and {c.name('zero')}={c.zero} in every "
            f"micro-batch, layer by layer; use {c.name('zero')}=1 or leave out {c.name('gradient_compression')}"
        ),
    ),
    Rule(
        name="chunks need stages",
        broken_by=lambda c: _interleaved(c) and c.stages == 1,
        message=lambda c: (
            f"{c.name('chunks')}={c.chunks} needs several stages, and {c.name('stages')}=1; use more stages, or join "
            "them into one chunk"
        ),
    ),
    Rule(
        name="chunks are interleaved",
        broken_by=lambda c: (
            c.schedule is not None and c.chunks is not None and (c.schedule == "interleaved") != _interleaved(c)
        ),
        message=lambda c: (
            f"{c.name('schedule')}={c.schedule} with {_number(c.chunks or 0, 'chunk')} per stage: interleaved 1f1b "
            f"needs several, 1f1b, zb-h1, eager-1f1b and gpipe one; change {c.name('chunks')} or drop "
            f"{c.name('schedule')}={c.schedule}"
        ),
    ),
    Rule(
        name="interleaved micro-batches",
        broken_by=lambda c: _interleaved(c) and _several_stages(c) and bool((c.micro_batches or 0) % (c.stages or 1)),
        message=lambda c: (
            f"{c.name('chunks')}={c.chunks}: interleaved 1f1b needs {c.name('micro_batches')} divisible by "
            f"{c.name('stages')}={c.stages}, found {c.micro_batches}; "
            f"use {_multiples(c.micro_batches or 1, c.stages or 1)}, or one chunk"
        ),
    ),
    Rule(
        name="batch and micro-batches",
        broken_by=lambda c: c.batch is not None and bool(c.batch % ((c.micro_batches or 1) * (c.data or 1))),
        message=lambda c: (
            f"{c.name('batch')}={c.batch} is not divisible by {c.name('data')} x {c.name('micro_batches')} = "
            f"{(c.micro_batches or 1) * (c.data or 1)}; use a multiple of {(c.micro_batches or 1) * (c.data or 1)}"
            if c.data
            else f"{c.name('batch')}={c.batch} is not divisible by {c.name('micro_batches')}={c.micro_batches}; "
            f"use {one_of(divisors(c.batch or 1))}"
        ),
    ),
    Rule(
        name="blocks of one shape in an SPMD pipeline",
        broken_by=lambda c: c.space == "spmd" and not c.alike and _several_stages(c),
        message=lambda c: (
            f"{c.name('stages')}={c.stages} needs blocks of one shape, which the stages of an SPMD pipeline share, and "
            f"those of {c.place or 'this model'} differ; use one stage, or stages with a program each: jhpt plan "
            "--space general --out plan.json, and jhpt train --plan plan.json"
        ),
    ),
    Rule(
        name="CPU offload alone",
        broken_by=lambda c: c.offload is not None and bool(_offload_partners(c)),
        message=lambda c: (
            f"CPU offload ({c.name('offload')}={c.offload}) cannot be combined with "
            f"{' and '.join(_offload_partners(c))}; leave that out, or {c.off('offload')}"
        ),
    ),
    Rule(
        name="CPU offload of equal blocks",
        broken_by=lambda c: c.offload is not None and c.block_kinds is not None and len(c.block_kinds) != 1,
        message=lambda c: (
            f"CPU offload ({c.name('offload')}={c.offload}) needs layers that are all alike between embedding and "
            f"head, and {c.place} has {' and '.join(c.block_kinds or ()) or 'none'} there; {c.off('offload')}"
        ),
    ),
    Rule(
        name="CPU offload in float32",
        broken_by=lambda c: c.offload is not None and c.storage is not None,
        message=lambda c: (
            f"CPU offload ({c.name('offload')}={c.offload}) stores blocks in float32, not with optimizer.weights="
            f"{(c.storage or ('', ''))[0]} and optimizer.moments={(c.storage or ('', ''))[1]}; use float32 for both, "
            f"or {c.off('offload')}"
        ),
    ),
    Rule(
        name="CPU offload of an optimizer that can stream",
        broken_by=lambda c: c.offload is not None and c.optimizer_offloads is False,
        message=lambda c: (
            f"CPU offload ({c.name('offload')}={c.offload}) is not available with optimizer.name={c.optimizer}; use "
            f"another optimizer, or {c.off('offload')}"
        ),
    ),
    Rule(
        name="update in backward and clipping",
        broken_by=lambda c: (
            c.offload is not None
            and None not in (c.update_in_backward, c.clip_allows_update_in_backward)
            and c.update_in_backward != c.clip_allows_update_in_backward
        ),
        message=lambda c: (
            f"the plan has offload.update_in_backward={str(c.update_in_backward).lower()}, and optimizer.clip={c.clip} "
            f"{'allows the' if c.clip_allows_update_in_backward else 'does not allow an'} update in the backward pass; "
            "plan again with this configuration, or change offload.update_in_backward"
        ),
    ),
    Rule(
        name="saved activations need recomputation",
        broken_by=lambda c: c.saved and c.recompute is False,
        message=lambda c: (
            "saved lists tensors that recomputation (activation checkpointing) does not compute again, and recompute "
            "is false; set recompute to true, or leave saved out"
        ),
    ),
    Rule(
        name="blocks that save more need recomputation in the others",
        broken_by=lambda c: c.other_blocks and c.recompute is False,
        message=lambda c: (
            "other_blocks are those that save more than the blocks that recompute, and recompute is false; set "
            "recompute to true, or leave other_blocks out"
        ),
    ),
    Rule(
        name="equal blocks in a pipeline",
        broken_by=lambda c: c.other_blocks and _several_stages(c),
        message=lambda c: (
            f"{c.name('other_blocks')} needs one stage, and there are {c.stages}: in a pipeline all blocks save the "
            f"same; use one stage, or leave {c.name('other_blocks')} out"
        ),
    ),
    Rule(
        name="equal blocks where any are offloaded",
        broken_by=lambda c: c.other_blocks and (c.offload is not None or bool(c.saved_in_host_memory)),
        message=lambda c: (
            f"{c.name('other_blocks')} is not available where blocks or their activations are offloaded to the host; "
            f"leave out {c.name('other_blocks')} or the offload"
        ),
    ),
    Rule(
        name="one tensor degree in a pipeline",
        broken_by=lambda c: c.space == "spmd" and _several_stages(c) and len(c.tensor) > 1,
        message=lambda c: (
            f"a pipeline of space=spmd needs one tensor degree, found {list(c.tensor)}; use one, or price the plan "
            "with space=general"
        ),
    ),
    Rule(
        name="one number of sample chunks in a pipeline",
        broken_by=lambda c: c.space == "spmd" and _several_stages(c) and len(c.sample_chunks) > 1,
        message=lambda c: (
            f"a pipeline of space=spmd needs one number of sample chunks, found {list(c.sample_chunks)}; use one "
            "everywhere"
        ),
    ),
    Rule(
        name="tensor degrees share a mesh",
        broken_by=lambda c: c.space == "spmd" and _crossing_degrees(c) is not None,
        message=_crossing_message,
    ),
    Rule(
        name="tied layers",
        broken_by=lambda c: c.tied is not None and c.tied[0] != c.tied[1],
        message=lambda c: (
            "the first layer and the one that shares a parameter with it (embedding and head) have tensor degrees "
            f"{(c.tied or (0, 0))[0]} and {(c.tied or (0, 0))[1]}, and space=spmd stores the parameter once; use one "
            "degree for both"
        ),
    ),
    Rule(
        name="sequence parallelism in equal pieces",
        broken_by=lambda c: _uneven_sequence(c) is not None,
        message=lambda c: (
            f"{c.name('sequence')}=true cuts data.sequence_length={c.sequence_length} into {_uneven_sequence(c)} "
            f"pieces, which does not divide it; choose another length or tensor degree, or leave {c.name('sequence')} "
            "out"
        ),
    ),
)


def conflict(choices: Choices) -> str | None:
    """The message of the first rule that these choices break; None: they break no rule."""
    return next((rule.message(choices) for rule in RULES if rule.broken_by(choices)), None)


def check(choices: Choices) -> None:
    """Raises InputError where the choices break a rule."""
    if (message := conflict(choices)) is not None:
        raise InputError(message)
