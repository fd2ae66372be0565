"""The all-gather of one array of every process."""

from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PROCESS = "process"


def gathered(mine: np.ndarray | np.generic) -> np.ndarray:
    """[processes, *shape]: the array of every process, bit for bit; a call of all, each with this shape and dtype.

    It travels over one device of each process, and nothing of it still runs when it returns.
    `multihost_utils.process_allgather` travels over all devices and waits for the first of them: on CPU the rest may
    then run beside the collectives of the next program, and Gloo ends a process that receives the one for the other
    ("Received data size doesn't match expected size", seen once on four busy hosts of two devices).  Orbax's barriers
    still go that way.  On GPUs a stream keeps the order.
    """
    mine = np.asarray(mine)
    count, rank = jax.process_count(), jax.process_index()
    devices = [next(one for one in jax.devices() if one.process_index == process) for process in range(count)]
    mesh = Mesh(np.array(devices), (PROCESS,))
    # Bytes: of 64 bits jax would keep 32.
    shard = jax.device_put(np.frombuffer(mine.tobytes(), np.uint8)[None], devices[rank])
    shares = jax.make_array_from_single_device_arrays(
        (count, shard.size), NamedSharding(mesh, PartitionSpec(PROCESS)), [shard]
    )
    bytes_of_all = np.asarray(_to_all(NamedSharding(mesh, PartitionSpec()))(shares).addressable_data(0))
    return np.frombuffer(bytes_of_all.tobytes(), mine.dtype).reshape(count, *mine.shape)


@cache
def _to_all(everywhere: NamedSharding) -> "jax.stages.Wrapped":
    return jax.jit(lambda shares: shares, out_shardings=everywhere)
