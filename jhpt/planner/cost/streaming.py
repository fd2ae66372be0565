"""A step whose blocks are streamed from the host, as `jhpt.sharding.offload.stream` runs it: its seconds, and the
bytes that the device holds.

A layer's rows form a bucket: weights, a gradient of the same size, and the optimizer's state.  A bucket is

    resident     on the device all the time
    optimizer    with its optimizer state on the host
    both         entirely on the host
    parameters   with weights and gradient on the host

A step makes two passes over the layers:

    forward      fetches what a layer has on the host, updates it with its gradient, writes back what has changed,
                 computes
    backward     fetches weights, computes, writes the gradient

or, with updates in the backward pass,

    forward      fetches weights, computes
    backward     fetches what a layer has on the host, computes, updates, writes back what has changed

In the second case no gradient is stored anywhere.

A layer that is fetched forms a group with the resident layers behind it; resident layers before all others form a
group, too.  A pass goes from group to group, and no copy outlasts the group in which it began.  Where a pass reads and
writes the same rows, it writes beside the first half of a group's computation and fetches them beside the second half:
A(g) is the fetched layer, B(g) the resident ones; without resident layers each is half of the fetched layer.  The
gradient that a forward pass only reads is fetched beside the first half, in the other direction than the rows that are
written.  In a backward pass the resident layers come first.  With F and W the seconds to fetch and to write a group and
G to fetch its gradient, a group takes

    forward                           max(A(g), W(g), G(g + 1)) + max(B(g), F(g + 1))
    backward                          max(A(g) + B(g), F(g - 1), W(g + 1))
    backward, with updates in it      max(B(g), W(g + 1)) + max(A(g), F)        F: weights of g - 1, and state of g

as programs for an H100 are scheduled (jax 0.11.2).  The group that begins a backward pass has no group behind it; with
updates in the backward pass it writes its own rows unchanged.  A pass begins with G + F of its first group, beside
which the resident layers before all others are computed; the backward pass ends with W of its last group.  `offload`
prices plans with this.  The runtime's groups are equal; here they need not be.

Left out: the memory bandwidth that copies take, and the last fetch of a pass, which nothing needs.
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
    """Which part of a bucket is on the host."""

    RESIDENT = 0
    OPTIMIZER = 1
    BOTH = 2
    PARAMETERS = 3


# Multiples of the bytes of weights and of state, by home.
ON_HOST = np.array([(0, 0), (0, 1), (2, 1), (2, 0)], float)
"""Bytes on the host, and bytes that a forward pass fetches."""

CHANGED = np.array([(0, 0), (0, 1), (1, 1), (1, 0)], float)
"""Bytes that a forward pass fetches and writes."""

AGAIN = np.array([(0, 0), (0, 0), (1, 0), (1, 0)], float)
"""Bytes of gradient that a forward pass only fetches; of weights that a backward pass fetches, and of gradient that it
writes."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A layer.

    forward, backward: seconds of its computation, without copies.  weights: bytes of its weights, and as many of its
    gradient.  state: bytes of its optimizer state.  saved: bytes that the forward pass saves for the backward pass.
    working: bytes that either pass needs temporarily.
    """

    forward: float
    backward: float
    weights: float
    state: float
    saved: float = 0.0
    working: float = 0.0


@dataclass(frozen=True)
class Streamed:
    """[C] steps that differ in their homes: seconds, peak bytes on the device, bytes on the host."""

    seconds: Array
    peak: Array
    host: Array


def stream(buckets: Sequence[Bucket], link: Link, homes: Any) -> Streamed:
    """The costs of several steps with the same buckets.

    Args:
      link: between host and device, in either direction.
      homes: [C, L], or [L] for a single step.
    """
    homes = np.atleast_2d(np.asarray(homes, np.int64))
    return Streamed(
        seconds=forward_seconds(buckets, link, homes) + backward_seconds(buckets, link, homes),
        peak=held(buckets, homes).max(1, initial=0.0),
        host=bytes_of(buckets, homes, ON_HOST).sum(1),
    )


def bytes_of(buckets: Sequence[Bucket], homes: Homes, parts: Array) -> Array:
    """[C, L] bytes of each layer: its weights and state times the multiples that `parts` has for its home."""
    return parts[homes, 0] * [bucket.weights for bucket in buckets] + parts[homes, 1] * [b.state for b in buckets]


def copy_seconds(link: Link, size: Array) -> Array:
    """Seconds of copies of these bytes; 0 for copies of nothing."""
    rates = np.vectorize(link.rate, otypes=[float])
    return np.where(size > 0, link.latency + size / rates(size), 0.0)


def forward_seconds(buckets: Sequence[Bucket], link: Link, homes: Homes) -> Array:
    """[C] seconds: each group writes beside its fetched layer, as the next gradient comes; what the next group changes
    is fetched beside its resident layers."""
    gradients, changed = _copies(buckets, link, homes, AGAIN), _copies(buckets, link, homes, CHANGED)
    total, first, resident, writing = (np.zeros(len(homes)) for _ in range(4))
    for layer, bucket in enumerate(buckets):
        begins = homes[:, layer] != Home.RESIDENT
        beside = np.maximum(writing, gradients[:, layer])
        total += np.where(begins, _halves(first, resident, beside, changed[:, layer]), 0.0)
        first, resident = (
            np.where(begins, bucket.forward, first),
            np.where(begins, 0.0, resident + bucket.forward),
        )
        writing = np.where(begins, changed[:, layer], writing)
    return total + _halves(first, resident, writing, 0.0)


def _halves(early: Any, late: Any, first: Any, second: Any) -> Any:
    """Seconds of two copies beside two computations; if one of these is empty, the other is cut in half."""
    whole = early + late
    half = np.where((early == 0) | (late == 0), whole / 2, early)
    return np.maximum(half, first) + np.maximum(whole - half, second)


def backward_seconds(buckets: Sequence[Bucket], link: Link, homes: Homes) -> Array:
    """[C] seconds: each group runs beside the fetch of the next one and the write of the one before."""
    copies = _copies(buckets, link, homes, AGAIN)
    # computed: layers since the last complete group.  complete: that group.  beside, afterwards: writes during it and
    # after it.
    total, computed, complete, beside, afterwards = (np.zeros(len(homes)) for _ in range(5))
    for layer in reversed(range(len(buckets))):
        ends_group, copy = AGAIN[homes[:, layer], 0] > 0, copies[:, layer]
        total += np.where(ends_group, np.maximum(np.maximum(complete, beside), copy), 0.0)
        computed = computed + buckets[layer].backward
        complete, computed = (
            np.where(ends_group, computed, complete),
            np.where(ends_group, 0.0, computed),
        )
        beside, afterwards = (
            np.where(ends_group, afterwards, beside),
            np.where(ends_group, copy, afterwards),
        )
    return total + np.maximum(complete, beside) + np.maximum(computed, afterwards)


class Copies(NamedTuple):
    """Seconds of a group's copies: fetches and writes of both passes.  gradient: what a forward pass fetches beside
    them, and only reads.  first: the first fetch of the backward pass."""

    gradient: float
    forward_in: float
    forward_out: float
    backward_in: float
    backward_out: float
    first: float


def group_copies(block: Bucket, link: Link, home: Home, update_in_backward: bool = False) -> Copies:
    """The copies of a layer with this home."""

    def seconds(parts: Array) -> float:
        return float(copy_seconds(link, parts[home] @ np.array((block.weights, block.state))))

    weights, changed = seconds(AGAIN), seconds(CHANGED)
    if update_in_backward:
        return Copies(0.0, weights, 0.0, changed, changed, weights)
    return Copies(weights, changed, changed, weights, weights, weights)


def periodic(
    block: Bucket, copies: Copies, groups: int, size: int, update_in_backward: bool = False
) -> tuple[float, float]:
    """(forward, backward) seconds of passes over equal groups, each of one copied block and size - 1 resident ones."""
    residents, gradient, fetch, write = size - 1, copies.gradient, copies.forward_in, copies.forward_out

    def forward_of(first: float, second: float) -> float:
        return float(_halves(block.forward, residents * block.forward, first, second))

    forward = gradient + fetch + (groups - 1) * forward_of(max(write, gradient), fetch) + forward_of(write, 0.0)
    if update_in_backward:
        group = float(_halves(residents * block.backward, block.backward, copies.backward_out, copies.backward_in))
        return forward, copies.first + groups * group + copies.backward_out
    backward, copy = size * block.backward, copies.backward_in
    last = max(backward, copy) if groups > 1 else backward
    return forward, 2 * copy + (groups - 1) * max(backward, copy) + last


def in_line(block: Bucket, copies: Copies, groups: int, size: int) -> tuple[float, float]:
    """`periodic` without overlap of copies and computation."""
    forward = copies.gradient + copies.forward_in + size * block.forward + copies.forward_out
    return groups * forward, groups * (copies.backward_in + size * block.backward + copies.backward_out)


def held(buckets: Sequence[Bucket], homes: Homes) -> Array:
    """[C, 2 L] bytes on the device during each pass of a layer: forward 1 ... L, backward L ... 1.

    A group holds its own rows and those that are fetched for the next group; in the backward pass also its gradient and
    the one being written.  Rows are written from the buffer that they were fetched into.
    """
    rows, weights = bytes_of(buckets, homes, ON_HOST), bytes_of(buckets, homes, AGAIN)
    resident = sum(2 * bucket.weights + bucket.state for bucket in buckets) - rows.sum(1)
    _, current, following = _around(rows)
    forward = current + following
    preceding, current, following = _around(weights)
    backward = preceding + 2 * current + following
    return resident[:, None] + activations(buckets) + np.concatenate([forward, backward[:, ::-1]], 1)


def activations(buckets: Sequence[Bucket]) -> Array:
    """[2 L] bytes of saved and temporary tensors during each pass of a layer; they do not depend on homes."""
    saved, working = (np.array([getattr(bucket, name) for bucket in buckets]) for name in ("saved", "working"))
    so_far = np.cumsum(saved)
    return np.concatenate([so_far + working, (so_far + working)[::-1]])


def _around(sizes: Array) -> tuple[Array, Array, Array]:
    """[C, L] copied bytes -> those of the group before each layer's group, of its group and of the next one, [C, L]."""
    preceding, current, following = (np.zeros_like(sizes) for _ in range(3))
    last, now, coming = (np.zeros(len(sizes)) for _ in range(3))
    for layer in range(sizes.shape[1]):
        begins = sizes[:, layer] > 0
        last, now = np.where(begins, now, last), np.where(begins, sizes[:, layer], now)
        preceding[:, layer], current[:, layer] = last, now
    for layer in reversed(range(sizes.shape[1])):
        following[:, layer] = coming
        coming = np.where(sizes[:, layer] > 0, sizes[:, layer], coming)
    return preceding, current, following


def _copies(buckets: Sequence[Bucket], link: Link, homes: Homes, parts: Array) -> Array:
    """[C, L] seconds to copy these multiples of each layer's weights and state."""
    each = np.repeat(np.array(list(Home))[:, None], len(buckets), 1)
    by_home = copy_seconds(link, bytes_of(buckets, each, parts))
    return by_home[homes, np.arange(len(buckets))]
