"""Rows from the devices of one stage to those of another: one small program on the devices of both.

The stages may have different numbers of replicas, so a device may need rows that several others have, and others may
need its rows.  A program of `ppermute`s moves them in rounds, in each of which a device sends at most one piece and
receives at most one.  Rows that several devices have are sent by the one that has least to send.

Every process that has a device of either stage calls the transfer, in the same order as all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jhpt.sharding.stages.settled import settled

DEVICE = "device"


class Piece(NamedTuple):
    """`rows` that one device sends to another, by their places.  begin, end: the first in what each of them holds."""

    source: int
    target: int
    begin: int
    end: int
    rows: int


@dataclass(frozen=True, eq=False)
class Transfer:
    """From arrays [rows of all source devices, ...] to arrays [rows of all target devices, ...].

    source, target: where the two lie.  shapes: of both.  rows: how many there are really; what follows is padding,
    which arrives as zeros.
    """

    source: NamedSharding
    target: NamedSharding
    from_shape: tuple[int, ...]
    to_shape: tuple[int, ...]
    rows: int
    dtype: Any

    def __call__(self, x: jax.Array | None) -> jax.Array | None:
        """What arrives.  x, and the result: None on processes without devices of that stage."""
        if not self._here:
            return None
        shards = {} if x is None else {shard.device: shard.data for shard in x.addressable_shards}
        mine = [device for device in self._devices if device.process_index == jax.process_index()]
        blocks = [shards[device] if device in shards else self._nothing[device] for device in mine]
        whole = (len(self._devices) * self._held, *self.from_shape[1:])
        sent = jax.make_array_from_single_device_arrays(whole, self._together, blocks)
        arrived = {shard.device: shard.data for shard in settled(self._program(sent)).addressable_shards}
        here = [arrived[device] for device in self.target.addressable_devices if device in arrived]
        if not here:
            return None
        return jax.make_array_from_single_device_arrays(self.to_shape, self.target, here)

    @cached_property
    def rounds(self) -> list[list[Piece]]:
        """All pieces, in rounds."""
        rounds: list[list[Piece]] = []
        for piece in sorted(self._pieces, key=lambda piece: -piece.rows):
            free = (
                one
                for one in rounds
                if all(piece.source != other.source and piece.target != other.target for other in one)
            )
            place = next(free, None)
            if place is None:
                rounds.append(place := [])
            place.append(piece)
        return rounds

    @cached_property
    def _devices(self) -> list[jax.Device]:
        both = [*self.source.mesh.devices.flat, *self.target.mesh.devices.flat]
        return list(dict.fromkeys(both))

    @cached_property
    def _here(self) -> bool:
        return any(device.process_index == jax.process_index() for device in self._devices)

    @property
    def _held(self) -> int:
        return self.source.shard_shape(self.from_shape)[0]

    @property
    def _taken(self) -> int:
        return self.target.shard_shape(self.to_shape)[0]

    @property
    def _pieces(self) -> list[Piece]:
        place = {device: at for at, device in enumerate(self._devices)}
        held, taken = (_first_rows(*one) for one in ((self.source, self.from_shape), (self.target, self.to_shape)))
        sent = dict.fromkeys(held, 0)
        pieces = []
        for device, first in taken.items():
            at, stop = first, min(first + self._taken, self.rows)
            while at < stop:
                holders = [one for one, begin in held.items() if begin <= at < begin + self._held]
                # A device keeps the rows that it has; if it has none of these, the least busy one sends them.
                holder = min(holders, key=lambda one: (one is not device, sent[one]))
                count = min(stop, held[holder] + self._held) - at
                pieces.append(Piece(place[holder], place[device], at - held[holder], at - first, count))
                sent[holder] += count
                at += count
        return pieces

    @cached_property
    def _together(self) -> NamedSharding:
        mesh = Mesh(np.array(self._devices), (DEVICE,), axis_types=(AxisType.Auto,))
        return NamedSharding(mesh, PartitionSpec(DEVICE))

    @cached_property
    def _nothing(self) -> dict[jax.Device, jax.Array]:
        """What devices of the target alone give to the program."""
        source = set(self.source.mesh.devices.flat)
        zeros = np.zeros((self._held, *self.from_shape[1:]), self.dtype)
        return {
            device: jax.device_put(zeros, device)
            for device in self._devices
            if device not in source and device.process_index == jax.process_index()
        }

    @cached_property
    def _program(self) -> "jax.stages.Wrapped":
        spec = PartitionSpec(DEVICE)
        mapped = jax.shard_map(self._moved, mesh=self._together.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped)

    def _moved(self, x: jax.Array) -> jax.Array:
        """x[held, ...] -> [taken, ...], on every device."""
        if self._in_one:
            pairs = [(piece.source, piece.target) for piece in self.rounds[0]]
            return jax.lax.ppermute(x, DEVICE, pairs)
        me, room = jax.lax.axis_index(DEVICE), max(piece.rows for piece in self._pieces)
        x = _padded(x, room)
        y = jnp.zeros((self._taken + room, *x.shape[1:]), x.dtype)
        for pieces in self.rounds:
            width = max(piece.rows for piece in pieces)
            begin, end, count = self._places(pieces)
            block = jax.lax.dynamic_slice_in_dim(x, begin[me], width)
            block = jax.lax.ppermute(block, DEVICE, [(piece.source, piece.target) for piece in pieces])
            before = jax.lax.dynamic_slice_in_dim(y, end[me], width)
            is_new = (jnp.arange(width) < count[me]).reshape(-1, *(1,) * (x.ndim - 1))
            y = jax.lax.dynamic_update_slice_in_dim(y, jnp.where(is_new, block, before), end[me], 0)
        return y[: self._taken]

    @property
    def _in_one(self) -> bool:
        """Whether every device of the target receives just what one of the source has."""
        return len(self.rounds) == 1 and all(
            piece.rows == self._held == self._taken and piece.begin == piece.end == 0 for piece in self.rounds[0]
        )

    def _places(self, pieces: Sequence[Piece]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(first row sent, first row written, number of rows written), [devices]."""
        table = np.zeros((3, len(self._devices)), np.int32)
        for piece in pieces:
            table[0, piece.source] = piece.begin
            table[1:, piece.target] = piece.end, piece.rows
        begin, end, count = map(jnp.asarray, table)
        return begin, end, count


def _first_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, int]:
    """The first row of what every device holds; no other dimension is cut."""
    return {device: index[0].indices(shape[0])[0] for device, index in sharding.devices_indices_map(shape).items()}


def _padded(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, [(0, rows), *((0, 0),) * (x.ndim - 1)])
