"""Whether gradients survive their activations' way to the host and back, tried on the device that is to do it.

There are versions of XLA whose GPU programs silently compute wrong gradients where what a loop keeps is offloaded, as
that of jax 0.11.0.  So before a run relies on it a few layers are differentiated twice.
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
"""Of what the layers here keep."""

LAYERS, ROWS, WIDTH = 4, 256, 256
"""Of a program that compiles at once; a row of a stack is 256 KiB."""

TOLERANCE = 1e-4
"""Of the largest entry.  Two programs may round differently, by 1e-6; where layers are mixed up, all is wrong."""


def offload_is_right(gradients: Callable[[Sequence[str]], Any] | None = None) -> bool:
    """Whether gradients with everything on the host are those with everything on the device.

    Args:
      gradients: names of what is to be offloaded -> a tree of arrays; None: `layer_gradients`.
    """
    gradients = gradients or layer_gradients
    try:
        expected, found = (jax.tree.map(np.asarray, gradients(names)) for names in ((), NAMES))
    except jax.errors.JaxRuntimeError:  # a device without such memory
        return False
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True))
    return all(np.abs(one - other).max() <= TOLERANCE * np.abs(one).max() for one, other in pairs)


def layer_gradients(host: Sequence[str]) -> Any:
    """Gradients of x + tanh(x w) w, layer after layer, by the loop that training uses, on the first device of this
    process.  host: names of what waits there in between."""
    device = jax.local_devices()[0]
    loop = LayerLoop(
        stream=UnchunkedSamples(_layer),
        first=0,
        count=LAYERS,
        unroll=False,
        fetch=lambda params: params,
        finish=lambda gradient, total: gradient,
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
