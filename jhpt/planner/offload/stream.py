"""A step that streams what its layers need from the host: how long it takes, and what the device holds meanwhile.

A layer's weights and optimizer state are a bucket.  A step is 2 L operations: forward of the layers 1 ... L, backward
of L ... 1, of which each also updates its layer.  A bucket is

    resident     on the device for good
    optimizer    its state on the host: fetched for the backward operation, written back after it
    both         all of it on the host: weights are fetched for both operations, state for the second, and all is
                 written back

Weights that would be fetched again before the forward operation has let go of them stay until the backward one.

Copies have a stream for either direction, beside that of the computation.  On each of the three one thing follows the
other, in the order of the operations; with c, f and w the ends of operation o, of its fetch and of its write,

    fetch     starts at  max(f(o - 1), c(o - 1 - ahead))
    compute   starts at  max(c(o - 1), f(o), w(o - 2))
    write     starts at  max(w(o - 1), c(o))

and the step ends with the last of them.  So a fetch has room from the beginning of operation o - ahead on, and a write
until the end of operation o + 1: what the device holds is known from the order alone, whatever the seconds are.

Without the bound on writes, w(o - 2), a slow link would fill the device with what waits to be written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jhpt.core.cluster import Link

Array = NDArray[np.float64]
Homes = NDArray[np.int64]


class Home(IntEnum):
    """Where a bucket lives."""

    RESIDENT = 0
    OPTIMIZER = 1
    BOTH = 2


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A layer.  Seconds of its operations, without copies; bytes.

    kept: of what the forward operation leaves for the backward one.  working: of what an operation needs beside.
    """

    forward: float
    backward: float
    weights: float
    state: float
    kept: float = 0.0
    working: float = 0.0


@dataclass(frozen=True)
class Streamed:
    """Steps that differ in their homes: seconds, the most bytes that the device holds, bytes on the host, each [C]."""

    seconds: Array
    peak: Array
    host: Array


def stream(buckets: Sequence[Bucket], link: Link, homes: Any, ahead: int) -> Streamed:
    """Many steps of the same buckets at a time.

    Args:
      link: between host and device, either direction.
      homes: [C, L], or [L] of one.
      ahead: how many operations before its own a fetch may begin.
    """
    homes = np.atleast_2d(np.asarray(homes, np.int64))
    each = np.repeat(np.array(list(Home))[:, None], len(buckets), 1)
    fetches, writes = (_chosen(copy_seconds(link, size), homes) for size in copies(buckets, each, ahead))
    seconds = np.array([bucket.forward for bucket in buckets] + [bucket.backward for bucket in reversed(buckets)])
    return Streamed(
        seconds=_ends(seconds, fetches, writes, ahead),
        peak=held(buckets, homes, ahead).max(1, initial=0.0),
        host=_host_bytes(buckets, homes),
    )


def copies(buckets: Sequence[Bucket], homes: Homes, ahead: int) -> tuple[Array, Array]:
    """Bytes that every operation has fetched and has written, [C, 2 L]."""
    weights, state = _sizes(buckets)
    moves, streams = (homes == Home.BOTH) * weights, (homes != Home.RESIDENT) * state
    again = np.where(stays(len(buckets), ahead), 0.0, moves)
    fetched = np.concatenate([moves, (again + streams)[:, ::-1]], 1)
    return fetched, np.concatenate([np.zeros_like(moves), (moves + streams)[:, ::-1]], 1)


def _chosen(by_home: Array, homes: Homes) -> Array:
    """[3, 2 L] of every home -> [C, 2 L] of these: what an operation copies depends on its own layer only."""
    return by_home[np.concatenate([homes, homes[:, ::-1]], 1), np.arange(by_home.shape[1])]


def stays(layers: int, ahead: int) -> NDArray[np.bool_]:
    """Whether the fetch of a layer's weights for its backward operation could begin before its forward one is over."""
    return 2 * (layers - np.arange(layers)) - 1 <= ahead


def copy_seconds(link: Link, size: Array) -> Array:
    """Of copies of so many bytes; nothing takes no time."""
    rates = np.vectorize(link.rate, otypes=[float])
    return np.where(size > 0, link.latency + size / rates(size), 0.0)


def held(buckets: Sequence[Bucket], homes: Homes, ahead: int) -> Array:
    """Bytes on the device during every operation, [C, 2 L]."""
    fetched, written = copies(buckets, homes, ahead)
    count = fetched.shape[1]
    total = np.repeat(_resident_bytes(buckets, homes)[:, None], count, 1) + activations(buckets)
    for operation in range(count):
        total[:, max(operation - ahead, 0) : operation + 1] += fetched[:, operation, None]
        total[:, operation + 1 : operation + 2] += written[:, operation, None]
    for layer in np.flatnonzero(stays(len(buckets), ahead)):
        total[:, layer + 1 : count - layer] += fetched[:, layer, None]
    return total


def activations(buckets: Sequence[Bucket]) -> Array:
    """Bytes that operations leave for each other and need beside, [2 L]: the same wherever buckets live."""
    kept, working = (np.array([getattr(bucket, name) for bucket in buckets]) for name in ("kept", "working"))
    so_far = np.cumsum(kept)
    return np.concatenate([so_far + working, (so_far + working)[::-1]])


def _sizes(buckets: Sequence[Bucket]) -> tuple[Array, Array]:
    return np.array([bucket.weights for bucket in buckets]), np.array([bucket.state for bucket in buckets])


def _resident_bytes(buckets: Sequence[Bucket], homes: Homes) -> Array:
    weights, state = _sizes(buckets)
    return (homes != Home.BOTH) @ weights + (homes == Home.RESIDENT) @ state


def _host_bytes(buckets: Sequence[Bucket], homes: Homes) -> Array:
    return sum(bucket.weights + bucket.state for bucket in buckets) - _resident_bytes(buckets, homes)


def _ends(seconds: Array, fetch: Array, write: Array, ahead: int) -> Array:
    """When steps end, [C]; seconds: [2 L] of the operations, fetch and write: [C, 2 L] of their copies."""
    candidates, count = fetch.shape
    computed, written = np.zeros((candidates, count + 2)), np.zeros((candidates, count + 2))  # two nothings before
    fetched = np.zeros(candidates)
    for at in range(count):
        issued = computed[:, max(at + 1 - ahead, 0)]
        fetched = np.where(fetch[:, at] > 0, np.maximum(fetched, issued) + fetch[:, at], fetched)
        ready = np.where(fetch[:, at] > 0, fetched, 0.0)
        start = np.maximum(np.maximum(computed[:, at + 1], ready), written[:, at])
        computed[:, at + 2] = start + seconds[at]
        own = np.maximum(written[:, at + 1], computed[:, at + 2]) + write[:, at]
        written[:, at + 2] = np.where(write[:, at] > 0, own, written[:, at + 1])
    return np.maximum(computed[:, -1], written[:, -1])
