"""Arrays that a checkpoint writes layer by layer, so that they never have to be there as a whole.

A checkpoint holds leaves [L, ...].  What lives on the host as a row for every block would have to be copied into such
leaves, twice the memory of what is there because it is large.  Instead Orbax is given `Layered` leaves, and asks for
one layer after the other while it writes: the same layer of all leaves before the next one.
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


@dataclass(frozen=True, eq=False)
class Layered:
    """A leaf [L, ...].  layer: of its first dim -> that layer; all processes call it in the same order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layer: Callable[[int], np.ndarray]

    @property
    def size(self) -> int:
        """Numbers."""
        return math.prod(self.shape)

    @property
    def layer_bytes(self) -> int:
        """Of one layer."""
        return self.size // self.shape[0] * self.dtype.itemsize


SMALL = 1 << 20
"""Bytes of a layer; leaves of smaller ones are gathered and written at once, as chunks so small would be slow."""


def by_layer(leaf: Any) -> ocp.SaveArgs:
    """A chunk of the file for every layer, where leaves are written so."""
    if not isinstance(leaf, Layered) or leaf.layer_bytes < SMALL:
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=leaf.layer_bytes, shard_axes=(0,))


class LayeredHandler(ocp.type_handlers.NumpyHandler):
    """Writes them as numpy arrays are written; they are read as any other.

    Orbax writes in a thread of its own, and to read a layer may take all processes (a gather).  Nothing else may
    communicate meanwhile, or processes would do so in different orders: layers are read once `begin` is set, which says
    that the thread which saves only waits.
    """

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._files: dict[int, Any] = {}
        self.begin = threading.Event()

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: Any) -> None:
        """Opens the leaf's file; only on the process that writes."""
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
            except Exception as error:  # the other processes go on reading layers, so this one has to
                failure, files = error, [None] * len(files)
        if failure:
            raise failure
        whole = [file.write(small) for file, small in zip(files, gathered, strict=True) if file and small is not None]
        await asyncio.gather(*whole)


def item_handlers(layers: LayeredHandler) -> ocp.handlers.CheckpointHandlerRegistry:
    """Of what a checkpoint consists of: trees whose leaves are arrays, numpy arrays or `Layered`, and JSON."""
    leaves = ocp.type_handlers
    known = leaves.create_type_handler_registry(
        (Layered, layers), (jax.Array, leaves.ArrayHandler()), (np.ndarray, leaves.NumpyHandler())
    )
    tree, text = ocp.PyTreeCheckpointHandler(type_handler_registry=known), ocp.JsonCheckpointHandler()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for how, handler in (
        (ocp.args.PyTreeSave, tree),
        (ocp.args.PyTreeRestore, tree),
        (ocp.args.StandardSave, ocp.StandardCheckpointHandler()),
        (ocp.args.StandardRestore, ocp.StandardCheckpointHandler()),
        (ocp.args.JsonSave, text),
        (ocp.args.JsonRestore, text),
    ):
        registry.add(None, how, handler)
    return registry
