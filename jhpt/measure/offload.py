"""A test on the device: whether gradients are right when saved activations are offloaded to the host.

Some versions of XLA, such as that of jax 0.11.0, build GPU programs that silently compute wrong gradients when a loop's
saved activations are offloaded.  Therefore a few layers are differentiated with and without offload before a run relies
on it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jhpt.sharding.layer_loop import LayerLoop
from jhpt.sharding.recompute import save_named
from jhpt.sharding.sample_chunks import UnchunkedSamples

NAMES = ("entered", "product")
"""Names of the tensors that the test layers save."""

LAYERS, ROWS, WIDTH = 4, 256, 256
"""Small enough to compile quickly; one row of the stacked activations is 256 KiB."""

TOLERANCE = 1e-4
"""Relative to the largest entry.  Two programs may round differently, by 1e-6; wrong gradients differ everywhere."""


def offload_is_right(gradients: Callable[[Sequence[str]], Any] | None = None) -> bool:
    """Whether gradients with all saved activations on the host equal those with all of them on the device.

    Args:
      gradients: names of tensors to offload -> a tree of arrays; None: `layer_gradients`.
    """
    gradients = gradients or layer_gradients
    try:
        expected, offloaded = (jax.tree.map(np.asarray, gradients(names)) for names in ((), NAMES))
    except jax.errors.JaxRuntimeError:  # a device without such memory
        return False
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(offloaded), strict=True))
    return all(np.abs(one - other).max() <= TOLERANCE * np.abs(one).max() for one, other in pairs)


def layer_gradients(host: Sequence[str]) -> Any:
    """Gradients of layers x + tanh(x w) w, by the loop that training uses, on the first device of this process.

    host: names of saved tensors that are offloaded to the host.
    """
    device = jax.local_devices()[0]
    loop = LayerLoop(
        stream=UnchunkedSamples(_layer),
        first=0,
        count=LAYERS,
        unroll=False,
        fetch=lambda params: params,
        finish=lambda gradient, total, beside: gradient,
        recompute=save_named([name for name in NAMES if name not in host], host),
    )

    def both(params: jax.Array, x: jax.Array, keys: jax.Array) -> Any:
        y, passed = loop.forward(params, x, keys)
        return loop.backward(params, passed, jnp.cos(y))

    rng = np.random.default_rng(0)
    params = rng.normal(0, WIDTH**-0.5, (LAYERS, WIDTH, WIDTH)).astype(np.float32)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    arguments = jax.device_put((params, x, jax.random.split(jax.random.key(0), ROWS)), device)
    return jax.jit(both)(*arguments)


def _layer(params: jax.Array, x: jax.Array, at: Any) -> jax.Array:
    x = checkpoint_name(x, NAMES[0])
    return x + jnp.tanh(checkpoint_name(x @ params, NAMES[1])) @ params
