"""What processes tell each other arrives bit for bit, over one device of each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jhpt.sharding.gather import gathered

VALUES = [
    np.float64(np.pi),
    np.int64(2**53 + 1),
    np.bool_(True),
    np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
    np.frombuffer(b"a text", np.uint8),
]

WORKER = """
import os, sys
rank, port = int(sys.argv[1]), sys.argv[2]
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jhpt.sharding import gather
from jhpt.sharding.gather import gathered
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
shardings = set()
to_all, gather._to_all = gather._to_all, lambda everywhere: shardings.add(everywhere) or to_all(everywhere)
mesh = jax.make_mesh((4,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
shares = jax.make_array_from_callback((4, 384), NamedSharding(mesh, PartitionSpec("all")), lambda at: np.ones((1, 384)))
total = jax.jit(lambda shares: shares.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
for turn in range(100):
    result = gathered(np.float64(rank + turn / 3))
    assert result.tolist() == [turn / 3, 1 + turn / 3], result
    assert np.all(np.asarray(total(shares).addressable_data(1)) == 4)
(sharding,) = shardings
assert [device.process_index for device in sharding.mesh.devices.flat] == [0, 1], "one device of each process"
assert gathered(np.array([[rank, 2**53 + rank]])).tolist() == [[[0, 2**53]], [[1, 2**53 + 1]]]
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}{list(value.shape)}")
def test_one_process_tells_itself(value):
    result = gathered(value)
    assert (result.shape, result.dtype) == ((1, *value.shape), value.dtype)
    assert np.array_equal(result[0], value)


def test_two_processes_of_two_devices():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(port)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            _, error = worker.communicate(timeout=200)
            assert worker.returncode == 0, error
    finally:
        for worker in workers:
            worker.kill()
