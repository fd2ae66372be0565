"""Rows arrive wherever a stage needs them, and no device sends or receives more than the price says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.sharding.stages.transfer import Transfer

WIDTH = 6
"""Numbers of a row: not all groups can divide them equally."""

ENDS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 3), (3, 1)]
"""(replicas, tensor ranks of each) of a stage."""

PAIRS = list(itertools.product(ENDS, ENDS))


def place(first: int, data: int, tensor: int) -> NamedSharding:
    devices = np.array(jax.devices()[first : first + data * tensor]).reshape(data, tensor)
    return NamedSharding(Mesh(devices, ("data", "tensor")), PartitionSpec("data"))


def made(sender: tuple[int, int], receiver: tuple[int, int], rows: int) -> Transfer:
    """Between neighbouring stages, each of which has as many rows as its replicas can divide."""
    room = [-(-rows // data) * data for data, _ in (sender, receiver)]
    source, target = place(0, *sender), place(sender[0] * sender[1], *receiver)
    return Transfer(source, target, (room[0], WIDTH), (room[1], WIDTH), rows, jnp.float32)


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_rows_arrive_and_padding_is_zero(sender, receiver, rows):
    transfer = made(sender, receiver, rows)
    x = np.zeros(transfer.from_shape, np.float32)
    x[:rows] = np.arange(1, rows * WIDTH + 1).reshape(rows, WIDTH)
    sent = jax.make_array_from_callback(x.shape, transfer.source, lambda index: x[index])
    expected = np.zeros(transfer.to_shape, np.float32)
    expected[:rows] = x[:rows]
    arrived = transfer(sent)
    assert len(arrived.addressable_shards) == receiver[0] * receiver[1]
    for shard in arrived.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


@pytest.mark.parametrize(("sender", "receiver"), [pair for pair in PAIRS if 3 not in itertools.chain(*pair)])
def test_a_round_has_every_device_once_and_nobody_moves_more_than_is_priced(sender, receiver):
    """4 rows, cut equally.  Priced: rows / (the smaller number of replicas), and (g - 1) / g of a replica's rows where
    g tensor ranks gather."""
    transfer = made(sender, receiver, 4)
    rounds = [*transfer.rounds, *transfer.gathering]
    for pieces in rounds:
        assert len({piece.source for piece in pieces}) == len({piece.target for piece in pieces}) == len(pieces)
    sent = sum(max(piece.units for piece in pieces) for pieces in transfer.rounds) / transfer.cut
    assert sent <= 4 / min(sender[0], receiver[0])
    gathered = sum(max(piece.units for piece in pieces) for pieces in transfer.gathering) / transfer.cut
    (data, tensor), more = receiver, receiver[0] * receiver[1] > sender[0] * sender[1]
    assert gathered == pytest.approx((tensor - 1) / tensor * 4 / data if more else 0)
