"""A global batch on the stages: micro-batch after micro-batch, with padding behind each if its replicas need it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jhpt.sharding.model_parts import ModelParts
from jhpt.sharding.stages.layout import PlacedChunk, StagesLayout
from jhpt.sharding.stages.passes import ChunkBatch


def placed_batch(layout: StagesLayout, parts: ModelParts, rows: Any) -> tuple[ChunkBatch | None, ...]:
    """The batch of every chunk; None of those that have no device here.

    rows: the whole batch, a tree of numpy arrays [B, ...], on every process.
    """
    by_stage: dict[int, ChunkBatch] = {}
    for chunk in layout.chunks[: len(layout.plan.stages)]:
        if chunk.here:
            sharding, cut = chunk.named(chunk.batch), chunk_batch(chunk, parts, rows)
            by_stage[chunk.stage] = jax.tree.map(lambda leaf, place=sharding: _placed(leaf, place), cut)
    return tuple(by_stage.get(chunk.stage) for chunk in layout.chunks)


def chunk_batch(chunk: PlacedChunk, parts: ModelParts, rows: Any) -> ChunkBatch:
    """The batch with room for `chunk.room` rows in a micro-batch, in numpy.

    Padding repeats rows, with weight zero; with samples by speed replicas leave it out.
    """
    size, room = chunk.micro_batch, chunk.room
    count = chunk.layout.plan.micro_batches
    ids = np.arange(count * size, dtype=np.int32).reshape(count, size)
    if chunk.samples:
        first, each = np.cumsum((0, *chunk.samples[:-1])), room // len(chunk.samples)
        taken = ids[:, (first[:, None] + np.arange(each)).ravel() % size]
        return ChunkBatch(jax.tree.map(lambda leaf: leaf[taken], rows), taken)
    taken = np.concatenate([ids, ids[:, np.arange(room - size) % size]], axis=1)
    cut = jax.tree.map(lambda leaf: leaf[taken], rows)
    if room > size:
        cut = parts.weighted(cut, np.broadcast_to(np.arange(room) < size, taken.shape).astype(np.float32))
    return ChunkBatch(cut, taken)


def _placed(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
