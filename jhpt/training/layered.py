"""Leaves that are written to a checkpoint layer by layer.

Leaves of a checkpoint are [L, ...].  Offloaded blocks have a row for each block instead.  Copying rows into such leaves
would take twice the memory, and they are offloaded because they are large.  So Orbax is given `Layered` leaves and asks
for one layer after the other while it writes: the same layer of all leaves before the next one.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jhpt.sharding.types import PyTree


@dataclass(frozen=True, eq=False)
class Layered:
    """A leaf [L, ...] that is written layer by layer.

    layer: index -> that layer.  All processes call it in the same order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layer: Callable[[int], np.ndarray]

    @property
    def size(self) -> int:
        """The number of its entries."""
        return math.prod(self.shape)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return self.size // self.shape[0] * self.dtype.itemsize


SMALL = 1 << 20
"""Bytes; leaves with smaller layers are collected and written whole, because such small chunks would be slow."""


def by_layer(leaf: PyTree) -> ocp.SaveArgs:
    """How a leaf is saved: a `Layered` leaf with a chunk of the file for each layer, unless layers are small."""
    if not isinstance(leaf, Layered) or leaf.layer_bytes < SMALL:
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=leaf.layer_bytes, shard_axes=(0,))


class LayeredHandler(ocp.type_handlers.NumpyHandler):
    """Writes `Layered` leaves like numpy arrays; they are restored like any others.

    Orbax writes in its own thread, and reading a layer may involve all processes (an all-gather).  Nothing else may
    communicate meanwhile, or the processes would communicate in different orders.  So layers are read only once
    `begin` is set, when the thread that saves does nothing but wait.
    """

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._files: dict[int, Any] = {}
        self.begin = threading.Event()

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: Any) -> None:
        """Opens the file of the leaf; called only on the process that writes."""
        spec = tensorstore.Spec(tspec)
        self._files[id(value)] = await tensorstore.open(spec, create=True, open=True, context=ts_context)

    async def _background_serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> None:
        await super()._background_serialize(values, infos, args)
        files = [self._files.pop(id(value), None) for value in values]
        gathered = [np.empty(value.shape, value.dtype) if value.layer_bytes < SMALL else None for value in values]
        await asyncio.to_thread(self.begin.wait)
        failure: Exception | None = None
        for layer in range(max(value.shape[0] for value in values)):
            pieces, writing = [value.layer(layer) for value in values], []
            for file, small, piece in zip(files, gathered, pieces, strict=True):
                if small is not None:
                    small[layer] = piece
                elif file is not None:
                    writing.append(file[layer].write(piece))
            try:
                await asyncio.gather(*writing)
            except Exception as error:  # other processes continue to read layers, so this one must, too
                failure, files = error, [None] * len(files)
        if failure:
            raise failure
        rest = [file.write(small) for file, small in zip(files, gathered, strict=True) if file and small is not None]
        await asyncio.gather(*rest)


def item_handlers(layers: LayeredHandler) -> ocp.handlers.CheckpointHandlerRegistry:
    """Handlers for the items of a checkpoint: JSON, and trees of jax arrays, numpy arrays or `Layered` leaves."""
    leaves = ocp.type_handlers
    known = leaves.create_type_handler_registry(
        (Layered, layers),
        (jax.Array, leaves.ArrayHandler()),
        (np.ndarray, leaves.NumpyHandler(deepcopy_host_arrays=False)),
    )
    tree, text = ocp.PyTreeCheckpointHandler(type_handler_registry=known), ocp.JsonCheckpointHandler()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for arguments, handler in (
        (ocp.args.PyTreeSave, tree),
        (ocp.args.PyTreeRestore, tree),
        (ocp.args.StandardSave, ocp.StandardCheckpointHandler()),
        (ocp.args.StandardRestore, ocp.StandardCheckpointHandler()),
        (ocp.args.JsonSave, text),
        (ocp.args.JsonRestore, text),
    ):
        registry.add(None, arguments, handler)
    return registry
