"""Where everything lies if stages have devices, tensor degrees and numbers of replicas of their own.

Every chunk of a stage is laid out like a small model on the devices of the stage: a plan of one stage (`layout.Layout`)
for its blocks between two ends.  Only the first chunk really has the embedding and only the last the head; the other
ends are empty.  A table that embedding and head share lies on both.

A micro-batch of b samples does not have to divide by the r replicas of a stage: each has room for ceil(b / r) samples,
one replica after the other, and the room behind the last sample is padding, which counts in no loss and no gradient.
With samples by speed (`Stage.samples`) every replica has room for as many as the one that has most, and computes its
own only (`passes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan, Stage, runs_of
from jhpt.core.plan_check import check_plan, check_stages_run
from jhpt.sharding.layout import Layout
from jhpt.sharding.mesh import DeviceMesh, make_device_mesh
from jhpt.sharding.partition import Rules
from jhpt.sharding.types import StoredParams, Tree

BLOCKS, EMBEDDING = "blocks", "embedding"


@dataclass(frozen=True, kw_only=True)
class PlacedChunk:
    """A chunk of a stage as a model of its own.

    layout: on the devices of the stage.  first: its first block.  embeds, heads: whether it begins with the embedding,
    and ends with the head.  micro_batch: samples of all replicas together.  samples: of every replica, if they differ
    by speed.
    """

    layout: Layout
    stage: int
    chunk: int
    first: int
    embeds: bool
    heads: bool
    micro_batch: int
    samples: tuple[int, ...] | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The devices of the stage."""
        return self.layout.device_mesh

    @property
    def blocks(self) -> range:
        """Its blocks, by their numbers in the model."""
        return range(self.first, self.first + self.layout.num_layers)

    @property
    def here(self) -> bool:
        """Whether this process has devices of the stage."""
        return any(device.process_index == jax.process_index() for device in self.device_mesh.mesh.devices.flat)

    @property
    def room(self) -> int:
        """Samples of a micro-batch that all replicas together have room for."""
        return self.layout.plan.batch // self.layout.plan.micro_batches

    @property
    def entry(self) -> int:
        """The tensor degree in whose rows x comes in: that of the embedding, or else the least of the stage."""
        return self.layout.degrees[0] if self.embeds else self.device_mesh.degrees[0]

    @property
    def exit(self) -> int:
        """The tensor degree in whose rows x leaves."""
        return self.layout.degrees[-1]

    @cached_property
    def every_device(self) -> PartitionSpec:
        """Of arrays of which every device has one of its own, [devices, ...]."""
        return PartitionSpec(tuple(self.device_mesh.mesh.axis_names))

    def rows(self, degree: int) -> PartitionSpec:
        """Of activations [room, ...] as layers of this tensor degree have them."""
        return PartitionSpec(self.device_mesh.axes(degree).data)

    @property
    def batch(self) -> PartitionSpec:
        """Of a batch [micro-batches, room, ...]."""
        return PartitionSpec(None, self.device_mesh.axes(self.device_mesh.degrees[0]).data)

    def named(self, spec: PartitionSpec) -> NamedSharding:
        """A partition on the devices of the stage."""
        return NamedSharding(self.device_mesh.mesh, spec)


@dataclass(frozen=True, kw_only=True)
class StagesLayout:
    """A plan of space=general on its devices.  chunks: in the order in which a sample passes them.

    shared: paths of the embedding's parameters that the head reads, too.
    """

    plan: Plan
    num_layers: int
    alike: bool
    shared: tuple[str, ...]
    chunks: tuple[PlacedChunk, ...]

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the plan, stage after stage."""
        first_chunks = self.chunks[: len(self.plan.stages)]
        return tuple(device for chunk in first_chunks for device in chunk.device_mesh.mesh.devices.flat)

    @property
    def here(self) -> tuple[int, ...]:
        """The numbers of the chunks of which this process has devices."""
        return tuple(number for number, chunk in enumerate(self.chunks) if chunk.here)

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Names in the embedding of the parameters that the head reads, too."""
        return tuple(path.removeprefix(f"{EMBEDDING}/") for path in self.shared)

    @property
    def copies(self) -> bool:
        """Whether the last chunk has copies of parameters of the embedding."""
        return bool(self.shared) and len(self.chunks) > 1

    def own_rows(self, batch_size: int) -> slice:
        """The rows of a global batch that this process has to supply: all, because stages divide them differently."""
        return slice(0, batch_size)

    def part(self, number: int, tree: Mapping[str, Any]) -> Any:
        """What one chunk stores of the model's tree."""
        chunk, blocks = self.chunks[number], tree[BLOCKS]
        if self.alike:
            own = jax.tree.map(lambda leaf: leaf[chunk.blocks.start : chunk.blocks.stop], blocks)
        else:
            own = {str(at): blocks[str(block)] for at, block in enumerate(chunk.blocks)}
        part: dict[str, Any] = {EMBEDDING: tree[EMBEDDING]} if chunk.embeds else {}
        if chunk.heads:
            part |= {name: value for name, value in tree.items() if name not in (EMBEDDING, BLOCKS)}
            if not chunk.embeds and self.shared:
                part[EMBEDDING] = {name: tree[EMBEDDING][name] for name in self.shared_names}
        return chunk.layout.stored({**part, BLOCKS: own})

    def joined(self, parts: Sequence[StoredParams]) -> Any:
        """The model's tree, from what every chunk stores; leaves are numpy arrays, or scalars that all have."""
        blocks: list[Any] = []
        for chunk, part in zip(self.chunks, parts, strict=True):
            if chunk.layout.num_layers:
                blocks.append(_whole_blocks(chunk.layout, part[BLOCKS]))
        outside = {name: value for name, value in parts[-1].items() if name not in (EMBEDDING, BLOCKS)}
        if self.alike:
            whole: Tree = jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)
        else:
            every = (block for of_chunk in blocks for block in of_chunk.values())
            whole = {str(number): block for number, block in enumerate(every)}
        return {EMBEDDING: parts[0][EMBEDDING], BLOCKS: whole, **outside}


def _whole_blocks(layout: Layout, blocks: Any) -> Any:
    if layout.same:
        return blocks
    return jax.tree.map(lambda *runs: np.concatenate(runs), *(blocks[name] for name, _, _ in layout.runs))


def place_stages(
    plan: Plan,
    devices: Sequence[jax.Device],
    num_layers: int,
    *,
    alike: bool = True,
    shared: Sequence[str] = (),
    rules: Rules = (),
) -> StagesLayout:
    """The plan on these devices, for a model of `num_layers` blocks between an embedding and a head.

    shared: paths of parameters that the head reads.

    Raises:
      InputError: the plan cannot run, needs more devices than there are, or leaves out a process.
    """
    check_plan(plan, num_layers + 2)
    check_stages_run(plan)
    _check_devices(plan, devices)
    shared = tuple(path for path in shared if path.startswith(f"{EMBEDDING}/"))
    meshes = [
        make_device_mesh(_alone(plan, stage, stage.degrees), [devices[at] for at in stage.members])
        for stage in plan.stages
    ]

    def placed(at: int) -> PlacedChunk:
        chunk_number, number = divmod(at, len(plan.stages))
        stage = plan.stages[number]
        chunk, least = stage.chunks[chunk_number], stage.degrees[0]
        embeds, heads = chunk.first == 0, chunk.stop == num_layers + 2
        # The table of an empty end has the degree of the head, which reads it.
        before = () if embeds else (chunk.tensor[-1],) if heads and shared else (least,)
        alone = _alone(plan, stage, (*before, *chunk.tensor, *(() if heads else (least,))))
        blocks = len(chunk.tensor) - embeds - heads
        layout = Layout(plan=alone, device_mesh=meshes[number], num_layers=blocks, alike=alike, rules=rules)
        return PlacedChunk(
            layout=layout,
            stage=number,
            chunk=chunk_number,
            first=max(chunk.first - 1, 0),
            embeds=embeds,
            heads=heads,
            micro_batch=plan.batch // plan.micro_batches,
            samples=stage.samples,
        )

    return StagesLayout(
        plan=plan,
        num_layers=num_layers,
        alike=alike,
        shared=shared,
        chunks=tuple(placed(at) for at in range(len(plan.stages) * plan.chunks)),
    )


def _alone(plan: Plan, stage: Stage, degrees: Sequence[int]) -> Plan:
    """One stage of layers of these tensor degrees, with room for as many samples as each replica may have to take."""
    replicas = stage.devices // stage.degrees[0]
    each = max(stage.samples) if stage.samples else -(-plan.batch // plan.micro_batches // replicas)
    alone = Stage(device=0, devices=stage.devices, chunks=(Chunk(first=0, runs=runs_of(degrees)),))
    return plan.model_copy(
        update={
            "space": "spmd",
            "schedule": "1f1b",
            "prefetch": 1,
            "batch": plan.micro_batches * replicas * each,
            "stages": (alone,),
        }
    )


def _check_devices(plan: Plan, devices: Sequence[jax.Device]) -> None:
    used = {at for stage in plan.stages for at in stage.members}
    if max(used) >= len(devices):
        raise InputError(
            f"the plan uses device {max(used)}, and there are {len(devices)} here; make a plan for these, or on CPU "
            f"set JAX_NUM_CPU_DEVICES={max(used) + 1}"
        )
    idle = {device.process_index for device in devices} - {devices[at].process_index for at in used}
    if idle:
        raise InputError(
            f"the plan has no device of process {min(idle)}, and every process must take part; use devices of all, or "
            "start fewer processes"
        )
