"""The sizes of compressed all-reduces: rows, bits, blocks and bytes.

`jhpt.sharding.compression.all_reduce` sends activations over the tensor axis, `jhpt.sharding.compression.gradients`
sends gradients over the data axes.
"""

import math
from collections.abc import Sequence
from typing import Literal

from jhpt.core.config import Compression, GradientCompression

Bits = Literal[4, 8]
"""Bits of a code."""

WireBits = Literal[4, 8, 16]
"""Bits of a number on the wire: of a code, or of a bfloat16."""

BLOCK = 128
"""Neighbouring numbers that share a range by default: of {tensor, row, 128} the choice with the lowest error at equal
total bits (docs/reports/compression.md)."""

RANGE_BYTES = 2
"""Bytes of a range, a bfloat16."""

LINE = 64
"""Bytes of a line.  Pieces of a payload begin at a line; the codes of a block in 4 bits fill one."""


def wire_bits(compression: Compression) -> tuple[WireBits, Bits | None]:
    """Bits of a number of an important token and of any other; None: others are not sent."""
    return compression.bits, compression.rest_bits or None


def tokens_of(compression: Compression, length: int) -> int:
    """Number of important tokens among `length`: at least one."""
    return max(1, math.ceil(compression.tokens * length - 1e-9))


def by_attention(compression: Compression, causal: bool) -> bool:
    """Whether tokens are chosen by the attention they receive, which needs an all-reduce; else by their own rows."""
    if compression.tokens == 1:
        return False
    return compression.importance == "attention" or (compression.importance == "auto" and not causal)


def gathers(ranks: int, compression: Compression) -> bool:
    """Whether codes are all-gathered, instead of reduced in two steps.

    With steps=auto they are if t beta < 32, where beta is the mean number of bits: this rounds once and moves no more
    than an all-reduce in 16 bits does, though t / 2 times as much as two steps.
    """
    if compression.steps != "auto":
        return compression.steps == 1
    return ranks * (compression.tokens * compression.bits + (1 - compression.tokens) * compression.rest_bits) < 32


def codes_in_row(columns: int, group: int = BLOCK) -> int:
    """Number of codes for a row of `columns` numbers: whole groups."""
    return -(-columns // group) * group


def payload_bytes(kinds: Sequence[tuple[int, WireBits]], columns: int) -> int:
    """Bytes of rows of `columns` numbers on the wire: codes and a range for every block, or 16 bits a number.

    Where there is more than one piece, each takes whole lines.

    Args:
      kinds: (number of rows, bits of their numbers).
    """
    pieces = [size for rows, bits in kinds for size in _pieces(rows, columns, bits)]
    return pieces[0] if len(pieces) == 1 else sum(map(_whole_lines, pieces))


def _pieces(rows: int, columns: int, bits: WireBits) -> list[int]:
    if bits == 16:
        return [2 * rows * columns]
    return [rows * words for words in row_words(columns, bits)]


def row_words(columns: int, bits: Bits) -> tuple[int, int]:
    """Bytes of the codes of a row, and of its ranges."""
    codes = codes_in_row(columns)
    return codes * bits // 8, codes // BLOCK * RANGE_BYTES


def _whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE


def wire_bytes(ranks: int, compression: Compression, batch: int, length: int, columns: int) -> int:
    """Bytes that a rank sends, and receives, for one all-reduce of [batch, length, columns].

    For n numbers of beta bits: (t-1) n beta / 8 if codes are all-gathered, 2 (t-1)/t n beta / 8 in two steps.  Ranges,
    padding rows of a rank's share and padding of lines are added.
    """
    count, (bits, rest_bits) = tokens_of(compression, length), wire_bits(compression)
    kinds: list[tuple[int, WireBits]] = [(batch * count, bits)]
    if count < length and rest_bits:
        kinds.append((batch * (length - count), rest_bits))
    if gathers(ranks, compression):
        return (ranks - 1) * payload_bytes(kinds, columns)
    return 2 * (ranks - 1) * payload_bytes([(-(-rows // ranks), bits) for rows, bits in kinds], columns)


# Gradients, over the data axes.

COLUMNS = 1024
"""Numbers of a gradient in a row of codes."""

SPARSE_BYTES = 4
"""Bytes of an entry that top-k sends: a bfloat16 and its position in the block, in 16 bits."""


def buckets(sizes: Sequence[int], capacity: int) -> list[range]:
    """Gradients that one collective sends: neighbours, joined until they have `capacity` numbers or more.

    Every gradient is in exactly one bucket, and their order does not change.
    """
    joined, start, numbers = [], 0, 0
    for at, size in enumerate(sizes):
        numbers += size
        if numbers >= capacity or at == len(sizes) - 1:
            joined.append(range(start, at + 1))
            start, numbers = at + 1, 0
    return joined


def sent_of_block(compression: GradientCompression) -> int:
    """Number of entries that top-k sends of a block: at least one."""
    return max(1, math.ceil(compression.share * compression.block - 1e-9))


def gathers_gradients(ranks: int, compression: GradientCompression) -> bool:
    """Whether gradients are all-gathered and added up by every rank: top-k, and codes if t beta < 32."""
    return compression.kind == "topk" or ranks * compression.bits < 32


def share_of_bucket(numbers: int, parts: int, compression: GradientCompression) -> int:
    """Numbers in one of `parts` equal parts of a bucket: whole rows of codes, or whole blocks."""
    unit = COLUMNS if compression.kind == "quantize" else compression.block
    return -(-numbers // (parts * unit)) * unit


def gradient_bytes(ranks: int, compression: GradientCompression, numbers: int, *, shares: bool = False) -> int:
    """Bytes that a rank sends, and receives, for the all-reduce of a bucket of n numbers.

        quantize    2 (t-1)/t n bits / 8, or (t-1) n bits / 8 if codes are all-gathered (`gathers_gradients`)
        topk        (t-1) n share 4

    Ranges and the padding of rows, blocks and lines are added.  With ZeRO a reduce-scatter is enough: (t-1)/t of
    n bits / 8, or of n share 4.

    Args:
      shares: whether a rank needs only its share of the sum, as with ZeRO.
    """
    gathered = gathers_gradients(ranks, compression) and not shares
    part = share_of_bucket(numbers, 1 if gathered else ranks, compression)
    if compression.kind == "topk":
        return (ranks - 1) * part // compression.block * sent_of_block(compression) * SPARSE_BYTES
    once = (ranks - 1) * payload_bytes([(part // COLUMNS, compression.bits)], COLUMNS)
    return once if gathered or shares else 2 * once
