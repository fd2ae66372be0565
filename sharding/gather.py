"""The all-gather of one array of every process."""

from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PROCESS = "process"


def gathered(mine: np.ndarray | np.generic) -> np.ndarray:
    """[processes, *shape]: the array of every process, bit for bit.  All processes call it, with one shape and dtype.

    It uses one device of each process, and it is complete when it returns.  `multihost_utils.process_allgather` uses
    all devices and waits for the first of them only.  On CPU the others may then run beside the collectives of the next
    program, and Gloo ends a process that takes the data of one for that of the other ("Received data size doesn't match
    expected size", seen once on four busy hosts of two devices).  Orbax's barriers still use that function.  On GPUs a
    stream keeps the order.
    """
    mine = np.asarray(mine)
    count, rank = jax.process_count(), jax.process_index()
    devices = [next(one for one in jax.devices() if one.process_index == process) for process in range(count)]
    mesh = Mesh(np.array(devices), (PROCESS,))
    # As bytes, because jax would cut numbers of 64 bits to 32.
    shard = jax.device_put(np.frombuffer(mine.tobytes(), np.uint8)[None], devices[rank])
    shares = jax.make_array_from_single_device_arrays(
        (count, shard.size), NamedSharding(mesh, PartitionSpec(PROCESS)), [shard]
    )
    bytes_of_all = np.asarray(_to_all(NamedSharding(mesh, PartitionSpec()))(shares).addressable_data(0))
    return np.frombuffer(bytes_of_all.tobytes(), mine.dtype).reshape(count, *mine.shape)


@cache
def _to_all(everywhere: NamedSharding) -> "jax.stages.Wrapped":
    return jax.jit(lambda shares: shares, out_shardings=everywhere)
