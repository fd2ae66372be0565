"""A step whose layers come from the host, as `jhpt.sharding.offload.stream` runs it: its seconds, and what the device holds.

A layer's rows are a bucket: weights, a gradient as large as they are, and the optimizer's state.  It is

    resident     on the device for good
    optimizer    its state on the host
    both         all of it on the host
    parameters   weights and gradient on the host

and a step makes two passes over the layers:

    forward      fetches what is on the host of a layer, takes the step that its gradient asks for, writes back what has
                 changed, computes
    backward     fetches weights, computes, writes the gradient

or, where a layer takes its step at once,

    forward      fetches weights, computes
    backward     fetches what is on the host of a layer, computes, takes the step, writes back what has changed

and no gradient lives anywhere.

A layer that is fetched and those that stay behind it are a group; those that stay before all others are one too.  A
pass goes from group to group, and no copy outlasts the group in which it began.  Where a pass reads and writes the same
rows, it writes beside the first half of a group's computation and fetches beside the second: A(g) is the layer that has
come, and B(g) those that stay; where none do, both are half of the layer.  In a backward pass those that stay come
first.  With F and W the seconds in which a group is fetched and written, a group of a pass takes

    forward             max(A(g), W(g)) + max(B(g), F(g + 1))
    backward            max(A(g) + B(g), F(g - 1), W(g + 1))
    backward, at once   max(B(g), W(g + 1)) + max(A(g), F)        F: weights of g - 1, and state of g

as programs for an H100 are scheduled (jax 0.10.2).  Behind the group that begins a backward pass there is none; at once
it writes its own rows as they came.  First of all F of the group that begins a pass, beside the layers that stay before
all others; last of all W of the one that ends the backward pass.  `offloaded` prices plans with this; the runtime's groups
are equal, here they need not be.

Left out: what copies take of the memory's bandwidth, and the last fetch of a pass, which nobody needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

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
    PARAMETERS = 3


# Of weights and of state, by home.
ON_HOST = np.array([(0, 0), (0, 1), (2, 1), (2, 0)], float)
"""Also what a forward pass fetches."""

CHANGED = np.array([(0, 0), (0, 1), (1, 1), (1, 0)], float)
"""What it writes."""

AGAIN = np.array([(0, 0), (0, 0), (1, 0), (1, 0)], float)
"""What a backward pass fetches, and as many bytes of gradient that it writes."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A layer.  Seconds of its operations, without copies; bytes.

    weights: also of a gradient.  kept: of what the forward operation leaves for the backward one.  working: of what an
    operation needs beside.
    """

    forward: float
    backward: float
    weights: float
    state: float
    saved: float = 0.0
    working: float = 0.0


@dataclass(frozen=True)
class Streamed:
    """Steps that differ in their homes: seconds, the most bytes that the device holds, bytes on the host, each [C]."""

    seconds: Array
    peak: Array
    host: Array


def stream(buckets: Sequence[Bucket], link: Link, homes: Any) -> Streamed:
    """Many steps of the same buckets at a time.

    Args:
      link: between host and device, either direction.
      homes: [C, L], or [L] of one.
    """
    homes = np.atleast_2d(np.asarray(homes, np.int64))
    return Streamed(
        seconds=forward_seconds(buckets, link, homes) + backward_seconds(buckets, link, homes),
        peak=held(buckets, homes).max(1, initial=0.0),
        host=bytes_of(buckets, homes, ON_HOST).sum(1),
    )


def bytes_of(buckets: Sequence[Bucket], homes: Homes, parts: Array) -> Array:
    """[C, L] of these parts of every layer's weights and state, by home."""
    return parts[homes, 0] * [bucket.weights for bucket in buckets] + parts[homes, 1] * [b.state for b in buckets]


def copy_seconds(link: Link, size: Array) -> Array:
    """Of copies of so many bytes; nothing takes no time."""
    rates = np.vectorize(link.rate, otypes=[float])
    return np.where(size > 0, link.latency + size / rates(size), 0.0)


def forward_seconds(buckets: Sequence[Bucket], link: Link, homes: Homes) -> Array:
    """[C]: of every group its write beside the layer that has come, the next fetch beside those that stay."""
    fetched, written = _copies(buckets, link, homes, ON_HOST), _copies(buckets, link, homes, CHANGED)
    total, came, stay, writing = (np.zeros(len(homes)) for _ in range(4))
    for layer, bucket in enumerate(buckets):
        begins = homes[:, layer] != Home.RESIDENT
        total += np.where(begins, _halves(came, stay, writing, fetched[:, layer]), 0.0)
        came, stay = np.where(begins, bucket.forward, came), np.where(begins, 0.0, stay + bucket.forward)
        writing = np.where(begins, written[:, layer], writing)
    return total + _halves(came, stay, writing, 0.0)


def _halves(early: Any, late: Any, first: Any, second: Any) -> Any:
    """Two copies beside two computations; where one of these is nothing, the other is cut in half."""
    whole = early + late
    half = np.where((early == 0) | (late == 0), whole / 2, early)
    return np.maximum(half, first) + np.maximum(whole - half, second)


def backward_seconds(buckets: Sequence[Bucket], link: Link, homes: Homes) -> Array:
    """[C]: every group beside the fetch of the next one and the write of the one before."""
    copies = _copies(buckets, link, homes, AGAIN)
    # Of the layers since the last group that is complete; of that one, of what is written beside it and afterwards.
    total, computed, complete, beside, afterwards = (np.zeros(len(homes)) for _ in range(5))
    for layer in reversed(range(len(buckets))):
        embedding_and_head, copy = AGAIN[homes[:, layer], 0] > 0, copies[:, layer]
        total += np.where(embedding_and_head, np.maximum(np.maximum(complete, beside), copy), 0.0)
        computed = computed + buckets[layer].backward
        complete, computed = (
            np.where(embedding_and_head, computed, complete),
            np.where(embedding_and_head, 0.0, computed),
        )
        beside, afterwards = (
            np.where(embedding_and_head, afterwards, beside),
            np.where(embedding_and_head, copy, afterwards),
        )
    return total + np.maximum(complete, beside) + np.maximum(computed, afterwards)


class Copies(NamedTuple):
    """Seconds of a layer's copies in either pass.  first: of the first fetch of the backward pass."""

    forward_in: float
    forward_out: float
    backward_in: float
    backward_out: float
    first: float


def group_copies(block: Bucket, link: Link, home: Home, update_in_backward: bool = False) -> Copies:
    """Of a layer with this home."""

    def seconds(parts: Array) -> float:
        return float(copy_seconds(link, parts[home] @ np.array((block.weights, block.state))))

    weights, changed = seconds(AGAIN), seconds(CHANGED)
    if update_in_backward:
        return Copies(weights, 0.0, changed, changed, weights)
    return Copies(seconds(ON_HOST), changed, weights, weights, weights)


def periodic(
    block: Bucket, copies: Copies, groups: int, size: int, update_in_backward: bool = False
) -> tuple[float, float]:
    """(forward, backward) seconds over equal groups, of one block with these copies and size - 1 resident ones."""
    others, came = size - 1, copies.forward_in

    def forward_of(coming: float) -> float:
        return float(_halves(block.forward, others * block.forward, copies.forward_out, coming))

    forward = came + (groups - 1) * forward_of(came) + forward_of(0.0)
    if update_in_backward:
        own = float(_halves(others * block.backward, block.backward, copies.backward_out, copies.backward_in))
        return forward, copies.first + groups * own + copies.backward_out
    backward, again = size * block.backward, copies.backward_in
    last = max(backward, again) if groups > 1 else backward
    return forward, 2 * again + (groups - 1) * max(backward, again) + last


def in_line(block: Bucket, copies: Copies, groups: int, size: int) -> tuple[float, float]:
    """`periodic` where nothing runs beside anything else."""
    forward = copies.forward_in + size * block.forward + copies.forward_out
    return groups * forward, groups * (copies.backward_in + size * block.backward + copies.backward_out)


def held(buckets: Sequence[Bucket], homes: Homes) -> Array:
    """Bytes on the device during every operation, [C, 2 L]: forward of the layers 1 ... L, backward of L ... 1.

    A group holds its rows and those that are fetched for the next one, and backward its gradient and the one before
    on its way; what is written goes from where it has come to.
    """
    rows, again = bytes_of(buckets, homes, ON_HOST), bytes_of(buckets, homes, AGAIN)
    stays = sum(2 * bucket.weights + bucket.state for bucket in buckets) - rows.sum(1)
    _, own, following = _around(rows)
    forward = own + following
    preceding, own, following = _around(again)
    backward = preceding + 2 * own + following
    return stays[:, None] + activations(buckets) + np.concatenate([forward, backward[:, ::-1]], 1)


def activations(buckets: Sequence[Bucket]) -> Array:
    """Bytes that operations leave for each other and need beside, [2 L]: the same wherever buckets live."""
    saved, working = (np.array([getattr(bucket, name) for bucket in buckets]) for name in ("saved", "working"))
    so_far = np.cumsum(saved)
    return np.concatenate([so_far + working, (so_far + working)[::-1]])


def _around(sizes: Array) -> tuple[Array, Array, Array]:
    """[C, L] of what comes and goes -> (of the group before, of a layer's own, of the group behind), each [C, L]."""
    before, own, behind = (np.zeros_like(sizes) for _ in range(3))
    last, now, coming = (np.zeros(len(sizes)) for _ in range(3))
    for layer in range(sizes.shape[1]):
        begins = sizes[:, layer] > 0
        last, now = np.where(begins, now, last), np.where(begins, sizes[:, layer], now)
        before[:, layer], own[:, layer] = last, now
    for layer in reversed(range(sizes.shape[1])):
        behind[:, layer] = coming
        coming = np.where(sizes[:, layer] > 0, sizes[:, layer], coming)
    return before, own, behind


def _copies(buckets: Sequence[Bucket], link: Link, homes: Homes, parts: Array) -> Array:
    """[C, L] seconds to copy these parts of every layer."""
    each = np.repeat(np.array(list(Home))[:, None], len(buckets), 1)
    by_home = copy_seconds(link, bytes_of(buckets, each, parts))
    return by_home[homes, np.arange(len(buckets))]
