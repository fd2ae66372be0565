"""All-reduces over the tensor axis in low precision: token-level top-k and segmented quantization (AccTFM).

Of x[B, S, D] {U_tp} the rows of important tokens are sent in `bits`, the others in `rest_bits`; with 0 bits the others
are not sent, and their sum is zero on every rank.  Numbers of 16 bits are bfloat16; numbers of 8 and 4 bits are codes.
All ranks compute the sum from the same codes, so the residual stream is the same on all of them, bit for bit.  There
are two algorithms; for n numbers of beta bits over t ranks a rank receives

    two steps   2 (t-1)/t n beta / 8 bytes   all-to-all of codes, sum of a rank's rows, quantized again, all-gather
    gathered    (t-1) n beta / 8 bytes       all-gather of codes, summed on every rank

The second rounds once instead of twice.  Unless `steps` says otherwise, it is chosen if t beta < 32, because it then
sends no more than an all-reduce in 16 bits.

    g  reduce_over_tensor_axis   forward the compressed sum    backward the gradient, zero where a row was not sent
    f  copy_to_tensor_axis       forward x                     backward the compressed sum of the ranks' gradients

Rounding passes gradients on unchanged.  Both directions send the rows of one set of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp

from jhpt.core.compression import WireBits, gathers, row_words, wire_bits
from jhpt.core.config import Compression
from jhpt.kernels.implementation import Implementation
from jhpt.sharding.compression.codes import in_a_row, joined, pieces, split, sum_of_pieces
from jhpt.sharding.compression.token_choice import positions_where


@dataclass(frozen=True)
class Rows:
    """Rows of x[R, D] whose numbers are sent in the same number of bits.

    count: how many rows.  numbers: their indices, int32 [count]; None: all rows, in order.  bits: of each number.
    """

    count: int
    numbers: jax.Array | None
    bits: WireBits


@dataclass(frozen=True, kw_only=True)
class CompressedAllReduce:
    """All-reduces over these mesh axes, compressed.

    axes: empty on one rank alone, which is timed without communication: it computes as if the other ranks sent the
      same numbers as it has.
    implementation: of the kernels.
    """

    axes: tuple[str, ...]
    ranks: int
    compression: Compression
    implementation: Implementation = "reference"

    def reduce_over_tensor_axis(self, parts: jax.Array, tokens: jax.Array | None) -> jax.Array:
        """g: the sum over the ranks of parts[B, S, D].  tokens: int32 [B, k]; None: all are important."""
        return _reduce_over_tensor_axis(self, parts, tokens)

    def copy_to_tensor_axis(self, x: jax.Array, tokens: jax.Array | None) -> jax.Array:
        """f: x[B, S, D] itself."""
        return _enter(self, x, tokens)

    def copy_before_choice(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """f before `count` tokens are chosen, since the choice depends on x: (x, placeholder of the choice, for
        `settle`)."""
        return _copy_before_choice(self, x, jnp.zeros((x.shape[0], count), jnp.float32))

    @property
    def gathered(self) -> bool:
        """Whether codes are gathered, instead of summed in two steps."""
        return gathers(self.ranks, self.compression)

    @property
    def word(self) -> jnp.dtype:
        """The dtype of a payload: bytes, or words of 16 bits if all numbers are bfloat16, because XLA's CPU backend
        splits these into bytes at a fifth of the speed."""
        bits, rest_bits = wire_bits(self.compression)
        return jnp.dtype(jnp.uint16 if bits == 16 and (self.compression.tokens == 1 or not rest_bits) else jnp.uint8)

    def sum(self, parts: jax.Array, tokens: jax.Array | None) -> jax.Array:
        """The compressed sum, in the dtype of the parts."""
        rows = parts.reshape(-1, parts.shape[-1])
        groups = self.groups(parts.shape[0], parts.shape[1], tokens)
        add = self._gathered_sums if self.gathered else self._two_step_sums
        total = _in_place(add(rows, groups), groups, len(rows))
        return total.astype(parts.dtype).reshape(parts.shape)

    def groups(self, batch: int, length: int, tokens: jax.Array | None) -> list[Rows]:
        """The rows, of batch x length, that are sent, by the bits of their numbers."""
        bits, rest_bits = wire_bits(self.compression)
        if tokens is None:
            return [Rows(batch * length, None, bits)]
        groups = [Rows(tokens.size, _flat(tokens, length), bits)]
        if rest_bits and tokens.shape[1] < length:
            rest = others(tokens, length)
            groups.append(Rows(rest.size, _flat(rest, length), rest_bits))
        return groups

    def _two_step_sums(self, x: jax.Array, groups: Sequence[Rows]) -> list[jax.Array]:
        """Rank r sums the r-th share of every group's rows."""
        columns, shares = x.shape[1], [-(-group.count // self.ranks) for group in groups]
        sent = [
            piece.reshape(self.ranks, share, -1)
            for group, share in zip(groups, shares, strict=True)
            for piece in self._packed(*_filled(x, group, share * self.ranks), group.bits)
        ]
        received = self._all_to_all(joined(sent))
        sums_of_rank = self._sums(received, groups, shares, columns)
        again = [
            piece[None]
            for sums, group in zip(sums_of_rank, groups, strict=True)
            for piece in self._packed(sums, None, group.bits)
        ]
        of_all_ranks = self._split(self._all_gathered(joined(again)[0]), groups, shares, columns)
        return [
            self._added([in_a_row(piece) for piece in parts], group.bits, columns)[: group.count]
            for parts, group in zip(of_all_ranks, groups, strict=True)
        ]

    def _gathered_sums(self, x: jax.Array, groups: Sequence[Rows]) -> list[jax.Array]:
        sent = [piece[None] for group in groups for piece in self._packed(x, group.numbers, group.bits)]
        of_all_ranks = self._all_gathered(joined(sent)[0])
        return self._sums(of_all_ranks, groups, [group.count for group in groups], x.shape[1])

    def _all_to_all(self, payload: jax.Array) -> jax.Array:
        """payload[t, ...]: entry r of every rank is sent to rank r."""
        return jax.lax.all_to_all(payload, self.axes, 0, 0, tiled=True) if self.axes else _opaque(payload)

    def _all_gathered(self, payload: jax.Array) -> jax.Array:
        """payload[...] of every rank, [t, ...]."""
        if self.axes:
            return jax.lax.all_gather(payload, self.axes)
        return _opaque(jnp.stack([payload] * self.ranks))

    def _sums(self, payload: jax.Array, groups: Sequence[Rows], counts: Sequence[int], columns: int) -> list[jax.Array]:
        """Sums over the first dimension of lines [t, ...], which hold `counts` rows of the groups."""
        parts = self._split(payload, groups, counts, columns)
        return [self._added(one, group.bits, columns) for one, group in zip(parts, groups, strict=True)]

    def _split(
        self, payload: jax.Array, groups: Sequence[Rows], counts: Sequence[int], columns: int
    ) -> list[list[jax.Array]]:
        """Lines -> the pieces [t, rows, words of a row] of every group."""
        shapes = [
            [(count, words) for words in self._words(columns, group.bits)]
            for group, count in zip(groups, counts, strict=True)
        ]
        each = iter(split(payload, [shape for of_group in shapes for shape in of_group]))
        return [[next(each) for _ in of_group] for of_group in shapes]

    def _words(self, columns: int, bits: WireBits) -> tuple[int, ...]:
        """Words that a row takes in each of its pieces: codes and ranges, or bfloat16 alone."""
        return (2 * columns // self.word.itemsize,) if bits == 16 else row_words(columns, bits)

    def _packed(self, x: jax.Array, numbers: jax.Array | None, bits: WireBits) -> list[jax.Array]:
        """Rows of x[R, D], all or those with these indices, as they are sent: pieces [n, words of a row]."""
        if bits == 16:
            short = (x if numbers is None else x[numbers]).astype(jnp.bfloat16)
            return [jax.lax.bitcast_convert_type(short, self.word).reshape(len(short), -1)]
        return list(pieces(x, bits, self.implementation, numbers))

    def _added(self, parts: Sequence[jax.Array], bits: WireBits, columns: int) -> jax.Array:
        """Pieces [t, n, words of a row] -> the sum over t, float32 [n, D]."""
        if bits == 16:
            (words,) = parts
            words = words.reshape(*words.shape[:2], columns, -1) if words.dtype == jnp.uint8 else words
            each = jax.lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)
            return reduce(jnp.add, each)
        codes, ranges = parts
        return sum_of_pieces(codes, ranges, columns, bits, self.implementation)


def _filled(x: jax.Array, group: Rows, count: int) -> tuple[jax.Array, jax.Array | None]:
    """The group's rows, filled up to `count` rows: (x, numbers)."""
    if group.numbers is None:
        return jnp.pad(x, ((0, count - group.count), (0, 0))), None
    return x, jnp.pad(group.numbers, (0, count - group.count))


def _in_place(sums: Sequence[jax.Array], groups: Sequence[Rows], count: int) -> jax.Array:
    """[count, D] with the groups' sums in the places of their rows, and zero in the rows that were not sent.

    It is computed by a gather, because that takes XLA's CPU backend half the time of a scatter.
    """
    numbers = [group.numbers for group in groups if group.numbers is not None]
    if not numbers:
        return sums[0]
    sent = jnp.concatenate(numbers)
    places = jnp.full(count, len(sent), jnp.int32)  # behind the last one: zeros
    places = places.at[sent].set(jnp.arange(len(sent), dtype=jnp.int32), unique_indices=True)
    return jnp.concatenate([*sums, jnp.zeros((1, sums[0].shape[1]), jnp.float32)])[places]


def _opaque(payload: jax.Array) -> jax.Array:
    """payload[t, ...] in this order or reversed; the compiler cannot know which.  As with data from a network, it has
    to compute the whole payload first, and what depends on it afterwards."""
    odd = payload[0, 0, 0] % 2 == 1
    return jax.lax.cond(odd, lambda rows: rows[::-1], lambda rows: rows, payload)


def others(tokens: jax.Array, length: int) -> jax.Array:
    """The positions [B, length - k] that are not among tokens[B, k], ascending."""
    rest = jnp.ones((len(tokens), length), bool).at[jnp.arange(len(tokens))[:, None], tokens].set(False)
    return positions_where(rest, length - tokens.shape[1])


def _flat(tokens: jax.Array, length: int) -> jax.Array:
    """Positions [B, k] in their samples -> rows of [B length, D]."""
    return (tokens + length * jnp.arange(len(tokens), dtype=jnp.int32)[:, None]).ravel()


def travelled(x: jax.Array, tokens: jax.Array) -> jax.Array:
    """x[B, S, D], zero in the rows that are not among tokens[B, k]."""
    chosen = jnp.zeros(x.shape[:2], bool).at[jnp.arange(len(tokens))[:, None], tokens].set(True)
    return jnp.where(chosen[..., None], x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce_over_tensor_axis(compressed: CompressedAllReduce, parts: jax.Array, tokens: jax.Array | None) -> jax.Array:
    return compressed.sum(parts, tokens) if compressed.compression.forward else jax.lax.psum(parts, compressed.axes)


def _sum_parts_backward(
    compressed: CompressedAllReduce, tokens: jax.Array | None, gradient: jax.Array
) -> tuple[jax.Array, None]:
    drops = compressed.compression.forward and tokens is not None and not compressed.compression.rest_bits
    return (travelled(gradient, tokens) if drops and tokens is not None else gradient), None


_reduce_over_tensor_axis.defvjp(
    lambda compressed, parts, tokens: (_reduce_over_tensor_axis(compressed, parts, tokens), tokens), _sum_parts_backward
)


def _summed_error(compressed: CompressedAllReduce, gradient: jax.Array, tokens: jax.Array | None) -> jax.Array:
    if compressed.compression.backward:
        return compressed.sum(gradient, tokens)
    return jax.lax.psum(gradient, compressed.axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(compressed: CompressedAllReduce, x: jax.Array, tokens: jax.Array | None) -> jax.Array:
    return x


_enter.defvjp(
    lambda compressed, x, tokens: (x, tokens),
    lambda compressed, tokens, gradient: (_summed_error(compressed, gradient, tokens), None),
)


# The attention half applies f before its tokens are chosen, because the choice depends on its queries and keys.  The
# backward pass of f runs after the choice: it receives the choice as the gradient of a placeholder.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy_before_choice(
    compressed: CompressedAllReduce, x: jax.Array, choice: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return x, choice


_copy_before_choice.defvjp(
    lambda compressed, x, choice: ((x, choice), None),
    lambda compressed, _, gradients: (
        _summed_error(compressed, gradients[0], gradients[1].astype(jnp.int32)),
        jnp.zeros_like(gradients[1]),
    ),
)


@jax.custom_vjp
def settle(y: jax.Array, choice: jax.Array, tokens: jax.Array) -> jax.Array:
    """y itself; in the backward pass the placeholder's gradient is the choice, tokens[B, k]."""
    return y


settle.defvjp(
    lambda y, choice, tokens: (y, tokens),
    lambda tokens, gradient: (gradient, tokens.astype(jnp.float32), None),
)
