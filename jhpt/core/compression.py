"""What compressed sums send: rows, bits, blocks and bytes.

Over the tensor axis `sharding.compressed` sends them, over the data axes, of gradients, `sharding.gradients`.
"""

import math
from collections.abc import Sequence
from typing import Literal

from jhpt.core.config import Compression, GradientCompression

Bits = Literal[4, 8]
"""Of a code."""

WireBits = Literal[4, 8, 16]
"""Of a number on the wire: a code's, or a bfloat16's."""

BLOCK = 128
"""Neighbours that share a range by default: of {tensor, row, 128} the lowest error at equal total bits
(docs/reports/compression.md)."""

RANGE_BYTES = 2
"""Of a bfloat16."""


LINE = 64
"""Bytes of a line, in which payloads are laid: the codes of a block in 4 bits, so that none is torn."""


def wire_bits(how: Compression) -> tuple[WireBits, Bits | None]:
    """Of an important token's numbers, and of any other's; None: they do not travel."""
    return how.bits, how.rest_bits or None


def tokens_of(how: Compression, length: int) -> int:
    """How many of so many tokens are important: at least one."""
    return max(1, math.ceil(how.tokens * length - 1e-9))


def by_attention(how: Compression, causal: bool) -> bool:
    """Whether tokens are chosen by the attention they receive, which ranks have to add up; else by their own rows."""
    return how.tokens < 1 and (how.importance == "attention" or (how.importance == "auto" and not causal))


def gathers(ranks: int, how: Compression) -> bool:
    """Whether codes are gathered, instead of summed in two steps.

    Left to itself where t beta < 32, beta the bits of a number on average: it rounds once and moves no more than a sum
    in 16 bits does, though t / 2 times as much as two steps.
    """
    if how.steps != "auto":
        return how.steps == 1
    return ranks * (how.tokens * how.bits + (1 - how.tokens) * how.rest_bits) < 32


def codes_in_row(columns: int, bits: Bits, group: int | str = BLOCK) -> int:
    """Codes of so many numbers: whole groups, whole bytes."""
    unit = group if isinstance(group, int) else 8 // bits
    return -(-columns // unit) * unit


def payload_bytes(kinds: Sequence[tuple[int, WireBits]], columns: int) -> int:
    """What rows of so many numbers take on the wire: codes and a range for every block, or 16 bits each.

    What is more than one piece lies in whole lines.

    Args:
      kinds: how many rows, and the bits of their numbers.
    """
    pieces = [size for rows, bits in kinds for size in _pieces(rows, columns, bits)]
    return pieces[0] if len(pieces) == 1 else sum(map(_whole_lines, pieces))


def _pieces(rows: int, columns: int, bits: WireBits) -> list[int]:
    if bits == 16:
        return [2 * rows * columns]
    return [rows * words for words in row_words(columns, bits)]


def row_words(columns: int, bits: Bits) -> tuple[int, int]:
    """Bytes of a row's codes, and of its ranges."""
    codes = codes_in_row(columns, bits)
    return codes * bits // 8, codes // BLOCK * RANGE_BYTES


def _whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE


def wire_bytes(ranks: int, how: Compression, batch: int, length: int, columns: int) -> int:
    """Bytes that a rank sends, and receives, for one sum of [batch, length, columns].

    For n numbers at beta bits (t-1) n beta / 8 where codes are gathered, 2 (t-1)/t n beta / 8 in two steps; besides
    ranges, rows that fill up a rank's share, and what fills up lines.
    """
    count, (bits, rest_bits) = tokens_of(how, length), wire_bits(how)
    kinds: list[tuple[int, WireBits]] = [(batch * count, bits)]
    if count < length and rest_bits:
        kinds.append((batch * (length - count), rest_bits))
    if gathers(ranks, how):
        return (ranks - 1) * payload_bytes(kinds, columns)
    return 2 * (ranks - 1) * payload_bytes([(-(-rows // ranks), bits) for rows, bits in kinds], columns)


# Gradients, over the data axes.

COLUMNS = 1024
"""Numbers of a gradient that are a row of codes."""

SPARSE_BYTES = 4
"""Of an entry that top-k sends: a bfloat16 and its position in the block, in 16 bits."""


def buckets(sizes: Sequence[int], capacity: int) -> list[range]:
    """Neighbours that travel together: whole gradients, joined until they are `capacity` numbers or more.

    Every gradient is in exactly one bucket, in the given order.
    """
    found, start, numbers = [], 0, 0
    for at, size in enumerate(sizes):
        numbers += size
        if numbers >= capacity or at == len(sizes) - 1:
            found.append(range(start, at + 1))
            start, numbers = at + 1, 0
    return found


def sent_of_block(how: GradientCompression) -> int:
    """How many entries of a block top-k sends: at least one."""
    return max(1, math.ceil(how.share * how.block - 1e-9))


def gathers_gradients(ranks: int, how: GradientCompression) -> bool:
    """Whether every rank gets what all send and adds it up itself: top-k, and codes where t beta < 32."""
    return how.kind == "topk" or ranks * how.bits < 32


def share_of_bucket(numbers: int, parts: int, how: GradientCompression) -> int:
    """Numbers in one of so many equal parts of a bucket: whole rows of codes, or whole blocks."""
    unit = COLUMNS if how.kind == "quantize" else how.block
    return -(-numbers // (parts * unit)) * unit


def gradient_bytes(ranks: int, how: GradientCompression, numbers: int, *, shares: bool = False) -> int:
    """Bytes that a rank sends, and receives, for the sum over the ranks of a bucket of so many numbers.

    For n numbers, ranges and what fills up rows, blocks and lines besides:

        quantize    2 (t-1)/t n bits / 8, or (t-1) n bits / 8 where codes are gathered (`gathers_gradients`)
        topk        (t-1) n share 4

    and with ZeRO, where a rank needs only its share of the sum, (t-1)/t of n bits / 8 or of n share 4.

    Args:
      shares: with ZeRO.
    """
    gathered = gathers_gradients(ranks, how) and not shares
    part = share_of_bucket(numbers, 1 if gathered else ranks, how)
    if how.kind == "topk":
        return (ranks - 1) * part // how.block * sent_of_block(how) * SPARSE_BYTES
    once = (ranks - 1) * payload_bytes([(part // COLUMNS, how.bits)], COLUMNS)
    return once if gathered or shares else 2 * once
