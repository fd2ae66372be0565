"""Rows from the devices of one stage to those of another: one small program on the devices of both.

The stages may have different numbers of replicas, so a device may need rows that several others have, and others may
need its rows.  A program of `ppermute`s moves them in rounds, in each of which a device sends at most one piece and
receives at most one.  Rows that several devices have are sent by the one that has least to send.

Where more devices receive than send and g of them, the tensor ranks of a replica, need the same rows, each is sent
1/g of these and gathers the others' shares (the scatter-gather of Megatron-LM, Narayanan et al. 2021, section 4.1).  A
sender then sends its rows once instead of once for every rank.

Every process that has a device of either stage calls the transfer, in the same order as all others.
"""

import math
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
    """What one device sends to another, by their places.

    Counted in units, into which a row is cut (`Transfer.cut`).  begin, end: the first unit in what each of them holds.
    """

    source: int
    target: int
    begin: int
    end: int
    units: int


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
        """All pieces that the source sends, in rounds."""
        rounds: list[list[Piece]] = []
        for piece in sorted(self._pieces, key=lambda piece: -piece.units):
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
    def gathering(self) -> list[list[Piece]]:
        """What devices of the target then send each other, in rounds: in round n everyone its share to the n-th device
        behind it."""
        if not self._gathers:
            return []
        shares = [self._shares(devices) for devices in self._groups.values()]
        return [
            [
                Piece(self._place[device], self._place[its[(at + ahead) % len(its)][0]], begin, begin, stop - begin)
                for its in shares
                for at, (device, begin, stop) in enumerate(its)
                if stop > begin
            ]
            for ahead in range(1, self._alike)
        ]

    @cached_property
    def cut(self) -> int:
        """Units of a row: as many as devices that share it, if its numbers can be divided by so many."""
        return math.gcd(self._alike, math.prod(self.from_shape[1:])) if self._gathers else 1

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

    @cached_property
    def _place(self) -> dict[jax.Device, int]:
        return {device: at for at, device in enumerate(self._devices)}

    @cached_property
    def _groups(self) -> dict[int, list[jax.Device]]:
        """By their first row, the devices of the target that need the same rows."""
        groups: dict[int, list[jax.Device]] = {}
        for device, first in _first_rows(self.target, self.to_shape).items():
            groups.setdefault(first, []).append(device)
        return groups

    @property
    def _alike(self) -> int:
        """How many devices of the target need the same rows."""
        return max(map(len, self._groups.values()))

    @cached_property
    def _gathers(self) -> bool:
        """Whether devices of the target are sent shares, which they gather: where there are more of them than senders,
        and none of them sends."""
        senders, receivers = self.source.mesh.devices, self.target.mesh.devices
        return self._alike > 1 and receivers.size > senders.size and not set(senders.flat) & set(receivers.flat)

    def _shares(self, devices: list[jax.Device]) -> list[tuple[jax.Device, int, int]]:
        """(device, first unit, unit after the last) of what each device of a group is sent, in what it holds."""
        first = _first_rows(self.target, self.to_shape)[devices[0]]
        units = max(0, min(self._taken, self.rows - first)) * self.cut
        if not self._gathers:
            return [(device, 0, units) for device in devices]
        edges = [at * units // len(devices) for at in range(len(devices) + 1)]
        return list(zip(devices, edges, edges[1:], strict=False))

    @cached_property
    def _pieces(self) -> list[Piece]:
        held = {device: first * self.cut for device, first in _first_rows(self.source, self.from_shape).items()}
        sent, size = dict.fromkeys(held, 0), self._held * self.cut
        pieces = []
        for first, devices in self._groups.items():
            begin = first * self.cut
            for device, at, stop in self._shares(devices):
                while at < stop:
                    holders = [one for one, has in held.items() if has <= begin + at < has + size]
                    # A device keeps the rows that it has; if it has none of these, the least busy one sends them.
                    holder = min(holders, key=lambda one: (one is not device, sent[one]))
                    offset = begin + at - held[holder]
                    count = min(stop - at, size - offset)
                    pieces.append(Piece(self._place[holder], self._place[device], offset, at, count))
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
        rest = x.shape[1:]
        if self.cut > 1:
            x = x.reshape(x.shape[0] * self.cut, -1)
        room = max(piece.units for piece in self._pieces)
        x = _padded(x, room)
        y = jnp.zeros((self._taken * self.cut + room, *x.shape[1:]), x.dtype)
        for pieces in self.rounds:
            y = self._received(pieces, x, y)
        for pieces in self.gathering:
            y = self._received(pieces, y, y)
        return y[: self._taken * self.cut].reshape(self._taken, *rest)

    def _received(self, pieces: Sequence[Piece], x: jax.Array, y: jax.Array) -> jax.Array:
        """y after a round of pieces of x."""
        width, me = max(piece.units for piece in pieces), jax.lax.axis_index(DEVICE)
        begin, end, count = self._offsets(pieces)
        block = jax.lax.dynamic_slice_in_dim(x, begin[me], width)
        block = jax.lax.ppermute(block, DEVICE, [(piece.source, piece.target) for piece in pieces])
        before = jax.lax.dynamic_slice_in_dim(y, end[me], width)
        is_new = (jnp.arange(width) < count[me]).reshape(-1, *(1,) * (x.ndim - 1))
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(is_new, block, before), end[me], 0)

    @property
    def _in_one(self) -> bool:
        """Whether every device of the target receives just what one of the source has."""
        return (
            len(self.rounds) == 1
            and not self.gathering
            and all(
                piece.units == self._held == self._taken and piece.begin == piece.end == 0 for piece in self.rounds[0]
            )
        )

    def _offsets(self, pieces: Sequence[Piece]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(first unit sent, first unit written, number of units written), [devices]."""
        table = np.zeros((3, len(self._devices)), np.int32)
        for piece in pieces:
            table[0, piece.source] = piece.begin
            table[1:, piece.target] = piece.end, piece.units
        begin, end, count = map(jnp.asarray, table)
        return begin, end, count


def _first_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, int]:
    """The first row of what every device holds; no other dimension is cut."""
    return {device: index[0].indices(shape[0])[0] for device, index in sharding.devices_indices_map(shape).items()}


def _padded(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, [(0, rows), *((0, 0),) * (x.ndim - 1)])
