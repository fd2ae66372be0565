"""Devices -> mesh.

The tensor axis varies fastest, so a tensor-parallel group is made of neighbouring devices: its all-reduces, which are
the most frequent communication, stay inside a node where a node has at least `tensor` devices.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jhpt.core.axes import DATA, TENSOR
from jhpt.core.config import ParallelConfig, divisors, one_of
from jhpt.core.errors import InputError


def make_mesh(parallel: ParallelConfig, batch_size: int, devices: Sequence[jax.Device]) -> Mesh:
    """The `data x tensor` mesh of the configuration; devices beyond it stay idle (in a single process only).

    Raises:
      InputError: more devices asked for than there are, a batch that does not divide, or idle devices among several
        processes.
    """
    count, tensor = len(devices), parallel.tensor
    data = parallel.data or max(count // tensor, 1)
    if data * tensor > count:
        raise InputError(
            f"parallel.data={data} x parallel.tensor={tensor} needs {data * tensor} devices, and there "
            f"{'is' if count == 1 else 'are'} {count}; lower them, or on CPU set JAX_NUM_CPU_DEVICES={data * tensor}"
        )
    if data * tensor < count and jax.process_count() > 1:
        raise InputError(
            f"parallel.data={data} x parallel.tensor={tensor} leaves {count - data * tensor} of {count} devices idle, "
            "and every process must take part; use them all or start fewer processes"
        )
    if batch_size % (data * parallel.micro_batches):
        fitting = [d for d in divisors(count // tensor) if batch_size % (d * parallel.micro_batches) == 0]
        remedy = f"set parallel.data to {one_of(fitting)}" if fitting else "lower parallel.micro_batches"
        raise InputError(
            f"data.batch_size={batch_size} is not divisible by {data} data-parallel devices x "
            f"{parallel.micro_batches} micro-batches; {remedy}, or change the batch"
        )
    used = np.asarray(devices[: data * tensor]).reshape(data, tensor)
    return Mesh(used, (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)
