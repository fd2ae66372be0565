"""Seconds of compressed sums, on the wire and in kernels: over the tensor axis (`jhpt.sharding.compression.all_reduce`), and of
gradients over the data axes (`jhpt.sharding.compression.gradients`).

For the sum of N numbers of w bytes over t ranks, n of which travel, as S bytes of codes and ranges:

    wire, two steps     all_to_all of S, all_gather of S
    wire, gathered      all_gather of t S
    kernels, two steps  quantize n w + S; sum S + 4 n / t; quantize again 4 n / t + S / t; dequantize S + N w
    kernels, gathered   quantize n w + S; sum t S + N w

Kernels move their bytes at the memory's bandwidth, each tensor once: they compute little.  Where tokens are chosen by
attention (`core.compression.by_attention`), every rank multiplies its queries and keys twice more in the forward pass,
for the denominators of the softmax and for what each token receives, and the ranks sum 4 bytes a token.  By their own
norm, every rank reads the stream once, and nothing is sent.  All this is work: what could run beside it is not counted
on.

Gradients of N numbers, float32, which a rank packs into S bytes of codes or of positions and values:

    wire, quantized     as above; with ZeRO the all_to_all alone
    wire, top-k         all_gather of t S; with ZeRO all_to_all of S
    kernels, quantized  32 N + 2 S: gradient and residual added (12 N), quantized (4 N + S), decoded (S + 4 N) and
                        taken away (12 N)
        two steps       4 N + 2 S + 28 N / t besides: codes received are added up, the sum is quantized, decoded and
                        its error added to the residual, and what comes back is decoded
        gathered        4 N + t S: codes received are added up
        with ZeRO       4 N / t + S
    kernels, top-k      12 N + S, with momentum 12 N more; what is received, t S or with ZeRO S, is written and read,
                        and the sum, 4 N or with ZeRO 4 N / t, written

Kernels of gradients are work as well: they run beside nothing.  Left out: how long it takes to order the scores, and
that gradients travel in buckets of several layers.
"""

from dataclasses import dataclass

from jhpt.core.cluster import Device
from jhpt.core.compression import by_attention, gathers, gathers_gradients, gradient_bytes, tokens_of, wire_bytes
from jhpt.core.config import Compression, GradientCompression
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.communication import Group, all_gather, all_reduce, all_to_all

SCORE_BYTES = 4
"""Of a token's importance, float32."""


@dataclass(frozen=True)
class Stream:
    """One sample of the residual stream: tokens, numbers of a token, bytes of a number."""

    tokens: int
    width: int
    element: int

    @property
    def bytes(self) -> float:
        """Of a sample."""
        return float(self.tokens * self.width * self.element)


def stream_of(profile: ModelProfile) -> Stream | None:
    """The residual stream of a model of sequences; None: samples are no sequences of a known length."""
    tokens, element = profile.sample_tokens, int(profile.bytes_per_weight)
    if not tokens:
        return None
    width = profile.kinds[profile.layers[0]].boundary_bytes / tokens / element
    return Stream(tokens, round(width), element) if width >= 1 else None


def sent_bytes(ranks: int, how: Compression, stream: Stream, samples: int) -> float:
    """Bytes that a rank sends for one sum of so many samples."""
    return wire_bytes(ranks, how, samples, stream.tokens, stream.width)


def sum_seconds(group: Group, how: Compression, stream: Stream, samples: int, sums: float) -> float:
    """Seconds on the wire of so many sums, as one."""
    whole = sums * sent_bytes(group.size, how, stream, samples) * group.size / (group.size - 1)
    if gathers(group.size, how):
        return all_gather(group, whole)
    return all_to_all(group, whole / 2) + all_gather(group, whole / 2)


def kernel_seconds(ranks: int, how: Compression, stream: Stream, samples: int, device: Device) -> float:
    """Seconds in which one sum is quantized, summed and dequantized."""
    share = 1.0 if how.rest_bits else tokens_of(how, stream.tokens) / stream.tokens
    numbers = samples * stream.tokens * stream.width
    travels, result = share * numbers, numbers * stream.element
    sent = sent_bytes(ranks, how, stream, samples) / (ranks - 1)
    if gathers(ranks, how):
        moved = travels * stream.element + (1 + ranks) * sent + result
    else:
        codes = sent * ranks / 2
        moved = travels * (stream.element + 8 / ranks) + (3 + 1 / ranks) * codes + result
    return moved / device.memory_bandwidth


def choice_seconds(
    group: Group, how: Compression, causal: bool, stream: Stream, samples: int, device: Device, dtype: str
) -> float:
    """Seconds of a forward pass in which ranks find, and agree on, the important tokens of a block."""
    if how.tokens == 1:
        return 0.0
    numbers = samples * stream.tokens * stream.width
    if not by_attention(how, causal):
        return numbers * stream.element / device.memory_bandwidth
    scores = all_reduce(group, float(SCORE_BYTES * samples * stream.tokens))
    products = 2 * 2.0 * numbers * stream.tokens / group.size
    read = 2 * 2.0 * numbers * stream.element / group.size
    kind = dtype if dtype in device.peak_flops else next(iter(device.peak_flops))
    return scores + device.seconds(products, read, kind)


def gradient_seconds(group: Group, how: GradientCompression, numbers: float, *, shares: bool = False) -> float:
    """Seconds on the wire in which a gradient of so many numbers is summed over the data ranks.

    Args:
      shares: with ZeRO every rank keeps its share of the sum.
    """
    ranks, count = group.size, round(numbers)
    if ranks == 1 or not count:
        return 0.0
    whole = gradient_bytes(ranks, how, count, shares=shares) * ranks / (ranks - 1)
    if shares:
        return all_to_all(group, whole)
    if gathers_gradients(ranks, how):
        return all_gather(group, whole)
    return all_to_all(group, whole / 2) + all_gather(group, whole / 2)


def gradient_kernel_seconds(
    ranks: int, how: GradientCompression, numbers: float, device: Device, *, shares: bool = False
) -> float:
    """Seconds in which that gradient is packed and added up."""
    count = round(numbers)
    if ranks == 1 or not count:
        return 0.0
    whole = gradient_bytes(ranks, how, count, shares=shares) * ranks / (ranks - 1)
    if how.kind == "topk":
        packed = whole if shares else whole / ranks
        moved = (24 if how.momentum else 12) * count + packed + 2 * whole + 4 * count / (ranks if shares else 1)
    elif shares:
        moved = 32 * count + 3 * whole + 4 * count / ranks
    elif gathers_gradients(ranks, how):
        moved = 36 * count + 2 * whole / ranks + whole
    else:
        moved = 36 * count + 4 * whole / 2 + 28 * count / ranks
    return moved / device.memory_bandwidth


def residual_bytes(how: GradientCompression) -> int:
    """Of a parameter, that a rank keeps for later steps: float32, twice with momentum; 0: nothing is compressed."""
    return how.on * (8 if how.momentum else 4)
