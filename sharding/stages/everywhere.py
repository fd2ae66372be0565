"""Sums over all stages, known to all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jhpt.sharding.stages.layout import StagesLayout
from jhpt.sharding.stages.settled import settled
from jhpt.sharding.stages.transfer import DEVICE


@dataclass(frozen=True, eq=False)
class Everywhere:
    """One all-reduce of `count` numbers over all devices of a plan, of which the first device of each stage gives what
    its chunks report."""

    layout: StagesLayout
    count: int

    def __call__(self, reports: Sequence[jax.Array | None]) -> tuple[jax.Array | None, ...]:
        """The sum over all chunks, on every stage, [count].

        reports: of every chunk, [up to count] on all devices of its stage; None: of those elsewhere, or nothing.
        """
        found: dict[jax.Device, list[jax.Array]] = {}
        for chunk, report in zip(self.layout.chunks, reports, strict=True):
            first = chunk.device_mesh.mesh.devices.flat[0]
            if report is not None and first in self._nothing:
                one = next(shard.data for shard in report.addressable_shards if shard.device == first)
                found.setdefault(first, []).append(one)
        blocks = self._nothing | {device: settled(self._joined(ones)) for device, ones in found.items()}
        shape = (len(self.layout.devices), self.count)
        given_by_all = jax.make_array_from_single_device_arrays(shape, self._each, list(blocks.values()))
        summed = {shard.device: shard.data for shard in settled(self._sum(given_by_all)).addressable_shards}

        def on(number: int) -> jax.Array | None:
            mesh = self.layout.chunks[number].device_mesh.mesh
            here = [summed[device] for device in mesh.devices.flat if device in summed]
            place = NamedSharding(mesh, PartitionSpec())
            return jax.make_array_from_single_device_arrays((self.count,), place, here) if here else None

        return tuple(map(on, range(len(self.layout.chunks))))

    @cached_property
    def _nothing(self) -> dict[jax.Device, jax.Array]:
        """What devices here give that have no report."""
        mine = [device for device in self.layout.devices if device.process_index == jax.process_index()]
        zeros = np.zeros((1, self.count), np.float32)
        return {device: jax.device_put(zeros, device) for device in mine}

    @cached_property
    def _joined(self) -> "jax.stages.Wrapped":
        """Reports of the chunks of a device -> [1, count], in one program: one operation after the other takes Python
        longer than the sum."""

        def joined(ones: Sequence[jax.Array]) -> jax.Array:
            padded = [jnp.pad(one, (0, self.count - one.size)) for one in ones]
            return jnp.sum(jnp.stack(padded), axis=0)[None]

        return jax.jit(joined)

    @cached_property
    def _each(self) -> NamedSharding:
        mesh = Mesh(np.array(self.layout.devices), (DEVICE,), axis_types=(AxisType.Auto,))
        return NamedSharding(mesh, PartitionSpec(DEVICE))

    @cached_property
    def _sum(self) -> "jax.stages.Wrapped":
        mesh, spec = self._each.mesh, PartitionSpec(DEVICE)
        return jax.jit(
            jax.shard_map(
                lambda one: jax.lax.psum(one[0], DEVICE),
                mesh=mesh,
                in_specs=spec,
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )
