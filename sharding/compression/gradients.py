"""Compressed gradient reduction over the data axes, in low precision or sparse, with residuals for the next step.

Every rank r sends a part of its gradient g_r of a matrix or table, dW {U_dp}, and adds the rest to the gradient of the
next step (error feedback; Seide et al., Interspeech 2014; Stich et al. 2018, arXiv 1809.07599):

    e_r = g_r + residual_r        the numbers that this rank has to send
    s_r = Q(e_r)                  the numbers that it sends
    residual_r' = e_r - s_r

`quantize` sends all numbers in 8 or 4 bits (`kernels.segments`), `topk` the largest of every block as bfloat16
(`kernels.topk_sparsify`).  Every rank computes the sum from the same bytes, so the sum is the same on all of them, bit
for bit.

    two steps   all-to-all of codes, sum of a rank's share, quantized again, all-gather; the second rounding's error
                is added to the residual of the rank that owns the share
    gathered    all-gather, summed on every rank in the order of the ranks: top-k, and codes if t beta < 32
    shares      all-to-all alone, for ZeRO: the first of the two steps, which rounds only once

Nothing is lost in any case: sum over steps of applied gradients + sum over ranks of residuals = sum of all gradients.

With momentum m, top-k is Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887): u_r = m u_r + g_r takes the
place of g_r, and u_r is set to zero where its number was sent (factor masking).  Sums then grow to as much as
1 / (1 - m) times the gradients.  The optimizer of the paper is plain descent, because the momentum is in u.  Here AdamW
does not change, so it averages the sums once more, unless optimizer.b1 is 0.  Warm-up of the share and local clipping
are not implemented.

Gradients are sent in buckets (`core.compression.buckets`), in the order in which the backward pass produces them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.compression import COLUMNS, buckets, gathers_gradients, row_words, sent_of_block, share_of_bucket
from jhpt.core.config import GradientCompression
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.topk_sparsify import topk_sparsify
from jhpt.sharding.compression.codes import in_a_row, joined, pieces, split, sum_of_pieces
from jhpt.sharding.partition import path_name
from jhpt.sharding.types import Feedback, KeyPath, Tree


class GradientReduction(NamedTuple):
    """How a gradient is summed.

    axes: the mesh axes of the sum.  ranks: how many ranks these axes have.  dim: with ZeRO, the dim that is cut into
    shares; None: every rank needs the whole sum.
    """

    axes: tuple[str, ...]
    ranks: int
    dim: int | None = None


class Part(NamedTuple):
    """A gradient, of one layer where layers are stacked, with its residual and momentum (or None) of earlier steps.

    After the exchange: the reduced gradient, or this rank's shard of it, and the new residual and momentum.
    """

    gradient: jax.Array
    residual: jax.Array
    momentum: jax.Array | None = None


def backward_order(rows: Mapping[str, int | None]) -> list[tuple[str, int | None]]:
    """(path, layer) in the order in which the backward pass produces them: head, last layer ... first, embedding.

    Within a layer: the MLP before the attention.

    Args:
      rows: by path, how many layers are stacked in a leaf; None: the leaf is not a stack.
    """

    def when(one: tuple[str, int | None]) -> tuple[int, int, int]:
        path, row = one
        if row is not None:
            run = path.split("blocks/")[1].split("/")[0]  # where runs of layers have stacks of their own, its number
            return 1, -int(run) if run.isdigit() else 0, -row
        return (2 if path.startswith("embedding/") else 0), 0, 0

    each = [(path, row) for path, n in rows.items() for row in ([None] if n is None else range(n))]
    return sorted(sorted(each, key=lambda one: one[0], reverse=True), key=when)


def exchanged_tree(
    gradients: Tree,
    residuals: Feedback,
    reductions: Mapping[str, GradientReduction],
    compression: GradientCompression,
    kernels: Implementation = "reference",
) -> tuple[Any, dict[str, Any]]:
    """(gradients, of which those that have a residual are reduced, new residuals); inside `shard_map`.

    Args:
      gradients: leaves under `blocks` are stacked by layer, others are not.
      residuals: `residual` and, with momentum, `momentum`: trees like the gradients, None for leaves that are not
        compressed.
      reductions: by path; of one layer where leaves are stacked.
      kernels: which program rounds, sums and selects.
    """
    leaves = {"gradient": _by_path(gradients)} | {name: _by_path(tree) for name, tree in residuals.items()}
    rows = {path: len(leaf) if "blocks/" in path else None for path, leaf in leaves["residual"].items()}
    order = backward_order(rows)

    def part(path: str, row: int | None) -> Part:
        return Part(**{name: of[path] if row is None else of[path][row] for name, of in leaves.items()})

    done = exchanged([part(*at) for at in order], [reductions[path] for path, _ in order], compression, kernels)
    by_place = dict(zip(order, done, strict=True))

    def replaced(tree: Tree, name: str) -> Any:
        def one(key_path: KeyPath, leaf: jax.Array) -> jax.Array:
            path = path_name(key_path)
            if path not in rows:
                return leaf
            count = rows[path]
            if count is None:
                return getattr(by_place[path, None], name)
            return jnp.stack([getattr(by_place[path, row], name) for row in range(count)])

        return jax.tree_util.tree_map_with_path(one, tree)

    return replaced(gradients, "gradient"), {name: replaced(tree, name) for name, tree in residuals.items()}


def exchanged(
    parts: Sequence[Part],
    reductions: Sequence[GradientReduction],
    compression: GradientCompression,
    kernels: Implementation = "reference",
) -> list[Part]:
    """The reduced gradients and new residuals, bucket by bucket in the order of `parts`."""
    done: list[Part] = []
    for _, alike in itertools.groupby(
        zip(parts, reductions, strict=True), lambda one: (one[1].axes, one[1].dim is None)
    ):
        group = list(alike)
        for bucket in buckets([part.gradient.size for part, _ in group], compression.bucket):
            done += _bucket([group[at] for at in bucket], group[0][1], compression, kernels)
    return done


def _bucket(
    parts: Sequence[tuple[Part, GradientReduction]],
    reduction: GradientReduction,
    compression: GradientCompression,
    kernels: Implementation,
) -> list[Part]:
    if reduction.ranks == 1:  # all numbers arrive
        return [_arrived(part) for part, _ in parts]
    shapes, dims = [part.gradient.shape for part, _ in parts], [each.dim for _, each in parts]
    shape = _Shape(shapes, dims, reduction.ranks, compression)
    gradient = shape.packed([part.gradient.astype(jnp.float32) for part, _ in parts])
    residual = shape.packed([part.residual for part, _ in parts])
    if compression.kind == "quantize":
        total, residual = _quantized(gradient + residual, reduction, compression, kernels)
        momentum = None
    else:
        old = [part.momentum for part, _ in parts if part.momentum is not None]
        velocity = compression.momentum * shape.packed(old) + gradient if old else None
        sources = gradient if velocity is None else velocity
        total, residual, momentum = _sparse(sources, residual, reduction, compression, velocity, kernels)
    momenta = [None] * len(parts) if momentum is None else shape.unpacked(momentum)
    return list(map(Part, shape.sums(total), shape.unpacked(residual), momenta))


def _arrived(part: Part) -> Part:
    total = part.gradient.astype(jnp.float32) + part.residual
    nothing = None if part.momentum is None else jnp.zeros_like(part.momentum)
    return Part(total, jnp.zeros_like(part.residual), nothing)


class _Shape:
    """How a bucket's gradients lie in an array [parts, numbers].

    If every rank needs the whole sum, they lie one after the other.  With ZeRO part r holds share r of each gradient.
    Zeros fill up rows of codes, or blocks.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dims: Sequence[int | None],
        ranks: int,
        compression: GradientCompression,
    ) -> None:
        self.dims, self.ranks, self.shared = dims, ranks, dims[0] is not None
        self.shapes = [
            (shape[dim], *shape[:dim], *shape[dim + 1 :]) if dim is not None else shape
            for shape, dim in zip(shapes, dims, strict=True)
        ]
        self.sizes = [math.prod(shape) // (ranks if self.shared else 1) for shape in shapes]
        numbers = sum(map(math.prod, shapes))
        self.parts = 1 if not self.shared and gathers_gradients(ranks, compression) else ranks
        self.numbers = share_of_bucket(numbers, self.parts, compression)

    def packed(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """[parts, numbers]"""
        if not self.shared:
            flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
            return jnp.pad(flat, (0, self.parts * self.numbers - flat.size)).reshape(self.parts, -1)
        turned = [jnp.moveaxis(leaf, dim, 0) for leaf, dim in zip(leaves, self.dims, strict=True) if dim is not None]
        rows = jnp.concatenate([leaf.reshape(self.ranks, -1) for leaf in turned], 1)
        return jnp.pad(rows, ((0, 0), (0, self.numbers - rows.shape[1])))

    def unpacked(self, rows: jax.Array) -> list[jax.Array]:
        """The inverse of `packed`."""
        if not self.shared:
            return [one.reshape(shape) for one, shape in zip(self._split(rows.ravel()), self.shapes, strict=True)]
        whole = [one.reshape(shape) for one, shape in zip(self._split(rows), self.shapes, strict=True)]
        return [jnp.moveaxis(leaf, 0, dim) for leaf, dim in zip(whole, self.dims, strict=True) if dim is not None]

    def sums(self, total: jax.Array) -> list[jax.Array]:
        """The sum of all parts, or of this rank's part -> every gradient's sum, or this rank's share of it."""
        pieces = self._split(total.ravel())
        if not self.shared:
            return [one.reshape(shape) for one, shape in zip(pieces, self.shapes, strict=True)]
        shares = [(shape[0] // self.ranks, *shape[1:]) for shape in self.shapes]
        each = [one.reshape(shape) for one, shape in zip(pieces, shares, strict=True)]
        return [jnp.moveaxis(leaf, 0, dim) for leaf, dim in zip(each, self.dims, strict=True) if dim is not None]

    def _split(self, rows: jax.Array) -> list[jax.Array]:
        stops = list(itertools.accumulate(self.sizes))
        return jnp.split(rows[..., : stops[-1]], stops[:-1], -1)


def _quantized(
    wanted: jax.Array, reduction: GradientReduction, compression: GradientCompression, kernels: Implementation
) -> tuple[jax.Array, jax.Array]:
    """(sum over the ranks of wanted[parts, numbers], or with ZeRO of this rank's part; residual [parts, numbers])."""
    parts, rows = len(wanted), wanted.shape[1] // COLUMNS
    shapes = [(rows, words) for words in row_words(COLUMNS, compression.bits)]

    def decoded(parts: Sequence[jax.Array]) -> jax.Array:
        codes, ranges = parts
        return sum_of_pieces(codes, ranges, COLUMNS, compression.bits, kernels)

    sent = pieces(wanted.reshape(-1, COLUMNS), compression.bits, kernels)
    residual = wanted - decoded([piece[None] for piece in sent]).reshape(wanted.shape)
    payload = joined([piece.reshape(parts, rows, -1) for piece in sent])
    if parts == 1:
        return decoded(split(jax.lax.all_gather(payload[0], reduction.axes), shapes)), residual
    share = decoded(split(jax.lax.all_to_all(payload, reduction.axes, 0, 0, tiled=True), shapes))
    if reduction.dim is not None:
        return share, residual
    again = [piece[None] for piece in pieces(share, compression.bits, kernels)]
    residual = residual.at[jax.lax.axis_index(reduction.axes)].add((share - decoded(again)).ravel())
    of_all_ranks = split(jax.lax.all_gather(joined(again)[0], reduction.axes), shapes)
    return decoded([in_a_row(piece) for piece in of_all_ranks]), residual


def _sparse(
    gradient: jax.Array,
    residual: jax.Array,
    reduction: GradientReduction,
    compression: GradientCompression,
    velocity: jax.Array | None,
    kernels: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(the sum as in `_quantized`, residual, velocity without what was sent)."""
    parts, keep = len(gradient), sent_of_block(compression)
    sent = topk_sparsify(gradient.ravel(), residual.ravel(), keep=keep, block=compression.block, implementation=kernels)
    residual = sent.residual.reshape(residual.shape)
    if velocity is not None:
        blocks = velocity.reshape(-1, compression.block)
        rows, columns = _where(sent.positions)
        velocity = blocks.at[rows, columns].set(0, unique_indices=True).reshape(velocity.shape)
    values = jax.lax.bitcast_convert_type(sent.values, jnp.uint16)
    payload = jnp.stack([values, sent.positions], 1).reshape(parts, -1, 2, keep)
    if reduction.dim is None:
        received = jax.lax.all_gather(payload[0], reduction.axes)
    else:
        received = jax.lax.all_to_all(payload, reduction.axes, 0, 0, tiled=True)

    # Rank after rank: a sum whose order is not fixed would differ from rank to rank.
    def add(total: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
        values = jax.lax.bitcast_convert_type(one[:, 0], jnp.bfloat16).astype(jnp.float32)
        rows, columns = _where(one[:, 1])
        return total.at[rows, columns].add(values, unique_indices=True), None

    empty = jnp.zeros((received.shape[1], compression.block), jnp.float32)
    return jax.lax.scan(add, empty, received)[0], residual, velocity


def _where(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of blocks [B, block] for positions [B, keep]."""
    rows = jnp.arange(len(positions), dtype=jnp.int32)[:, None]
    return jnp.broadcast_to(rows, positions.shape), positions.astype(jnp.int32)


def _by_path(tree: Tree) -> dict[str, jax.Array]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
