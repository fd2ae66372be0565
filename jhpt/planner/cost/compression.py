"""Seconds of compressed all-reduces, on the links and in kernels: over the tensor axis
(`jhpt.sharding.compression.all_reduce`), and of gradients over the data axes (`jhpt.sharding.compression.gradients`).

All-reduce of N numbers of w bytes over t ranks, of which n numbers travel, as S bytes of codes and ranges:

    links, two steps    all_to_all of S, all_gather of S
    links, gathered     all_gather of t S
    kernels, two steps  quantize n w + S; sum S + 4 n / t; quantize again 4 n / t + S / t; dequantize S + N w
    kernels, gathered   quantize n w + S; sum t S + N w

Kernels move their bytes at the memory bandwidth, each tensor once; they compute little.  Where attention chooses the
tokens (`core.compression.by_attention`), every rank multiplies its queries and keys twice more in the forward pass, for
the denominators of the softmax and for the attention that each token receives, and the ranks all-reduce 4 bytes per
token.  Where the tokens' own norms choose, every rank reads the residual stream once and sends nothing.  All of this
counts as compute; nothing is assumed to run beside it.

Gradients of N float32 numbers, which a rank packs into S bytes of codes, or of positions and values:

    links, quantized    as above; with ZeRO only the all_to_all
    links, top-k        all_gather of t S; with ZeRO all_to_all of S
    kernels, quantized  32 N + 2 S: the residual is added to the gradient (12 N), the sum quantized (4 N + S), decoded
                        (S + 4 N) and subtracted (12 N)
        two steps       4 N + 2 S + 28 N / t more: the received codes are summed, the sum is quantized and decoded, its
                        error is added to the residual, and the gathered result is decoded
        gathered        4 N + t S more: the received codes are summed
        with ZeRO       4 N / t + S more
    kernels, top-k      12 N + S, with momentum 12 N more; the received bytes, t S or with ZeRO S, are written and read,
                        and the sum, 4 N or with ZeRO 4 N / t, is written

Kernels of gradients count as compute as well: they run beside nothing.  Left out: the seconds to sort the scores, and
that gradients travel in buckets of several layers.
"""

from dataclasses import dataclass

from jhpt.core.cluster import Device
from jhpt.core.compression import by_attention, gathers, gathers_gradients, gradient_bytes, tokens_of, wire_bytes
from jhpt.core.config import Compression, GradientCompression
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.communication import Group, all_gather, all_reduce, all_to_all

SCORE_BYTES = 4
"""Bytes of a token's importance, float32."""


@dataclass(frozen=True)
class Stream:
    """One sample of the residual stream: tokens, numbers per token, bytes of a number."""

    tokens: int
    width: int
    element: int

    @property
    def bytes(self) -> float:
        """Bytes of a sample."""
        return float(self.tokens * self.width * self.element)


def stream_of(profile: ModelProfile) -> Stream | None:
    """The residual stream of a model; None if its samples are not sequences of a known length."""
    tokens, element = profile.sample_tokens, int(profile.bytes_per_weight)
    if not tokens:
        return None
    width = profile.kinds[profile.layers[0]].boundary_bytes / tokens / element
    return Stream(tokens, round(width), element) if width >= 1 else None


def sent_bytes(ranks: int, compression: Compression, stream: Stream, samples: int) -> float:
    """Bytes that a rank sends for one compressed all-reduce of so many samples."""
    return wire_bytes(ranks, compression, samples, stream.tokens, stream.width)


def all_reduce_seconds(group: Group, compression: Compression, stream: Stream, samples: int, count: float) -> float:
    """Seconds on the links of `count` compressed all-reduces, priced as one."""
    whole = count * sent_bytes(group.size, compression, stream, samples) * group.size / (group.size - 1)
    if gathers(group.size, compression):
        return all_gather(group, whole)
    return all_to_all(group, whole / 2) + all_gather(group, whole / 2)


def kernel_seconds(ranks: int, compression: Compression, stream: Stream, samples: int, device: Device) -> float:
    """Seconds of the kernels that quantize, sum and dequantize for one all-reduce."""
    share = 1.0 if compression.rest_bits else tokens_of(compression, stream.tokens) / stream.tokens
    numbers = samples * stream.tokens * stream.width
    travels, result = share * numbers, numbers * stream.element
    sent = sent_bytes(ranks, compression, stream, samples) / (ranks - 1)
    if gathers(ranks, compression):
        moved = travels * stream.element + (1 + ranks) * sent + result
    else:
        codes = sent * ranks / 2
        moved = travels * (stream.element + 8 / ranks) + (3 + 1 / ranks) * codes + result
    return moved / device.memory_bandwidth


def choice_seconds(
    group: Group, compression: Compression, causal: bool, stream: Stream, samples: int, device: Device, dtype: str
) -> float:
    """Seconds in which the ranks choose the important tokens of a block, in the forward pass."""
    if compression.tokens == 1:
        return 0.0
    numbers = samples * stream.tokens * stream.width
    if not by_attention(compression, causal):
        return numbers * stream.element / device.memory_bandwidth
    scores = all_reduce(group, float(SCORE_BYTES * samples * stream.tokens))
    products = 2 * 2.0 * numbers * stream.tokens / group.size
    read = 2 * 2.0 * numbers * stream.element / group.size
    kind = dtype if dtype in device.peak_flops else next(iter(device.peak_flops))
    return scores + device.seconds(products, read, kind)


def gradient_seconds(group: Group, compression: GradientCompression, numbers: float, *, shares: bool = False) -> float:
    """Seconds on the links to reduce a compressed gradient of so many numbers over the data ranks.

    Args:
      shares: whether every rank keeps only its share of the sum (ZeRO).
    """
    ranks, count = group.size, round(numbers)
    if ranks == 1 or not count:
        return 0.0
    whole = gradient_bytes(ranks, compression, count, shares=shares) * ranks / (ranks - 1)
    if shares:
        return all_to_all(group, whole)
    if gathers_gradients(ranks, compression):
        return all_gather(group, whole)
    return all_to_all(group, whole / 2) + all_gather(group, whole / 2)


def gradient_kernel_seconds(
    ranks: int, compression: GradientCompression, numbers: float, device: Device, *, shares: bool = False
) -> float:
    """Seconds of the kernels that compress this gradient and sum what is received."""
    count = round(numbers)
    if ranks == 1 or not count:
        return 0.0
    whole = gradient_bytes(ranks, compression, count, shares=shares) * ranks / (ranks - 1)
    if compression.kind == "topk":
        packed = whole if shares else whole / ranks
        moved = (24 if compression.momentum else 12) * count + packed + 2 * whole + 4 * count / (ranks if shares else 1)
    elif shares:
        moved = 32 * count + 3 * whole + 4 * count / ranks
    elif gathers_gradients(ranks, compression):
        moved = 36 * count + 2 * whole / ranks + whole
    else:
        moved = 36 * count + 4 * whole / 2 + 28 * count / ranks
    return moved / device.memory_bandwidth


def residual_bytes(compression: GradientCompression) -> int:
    """Bytes per parameter of the residual that a rank keeps for later steps: one float32 number, two with momentum; 0
    without compression."""
    return compression.on * (8 if compression.momentum else 4)
