"""How long collectives take, plain ones and compressed ones.  Where the groups that run them lie: `places`.

Collectives run over a group of n members on q nodes, m of them on the node that has the fewest.  `bytes` is the size of
the whole tensor: the one that is reduced, the gathered one, or all that a member sends in an all-to-all, its own part
included.  Inside a node every device has its own link (rate B, latency a).  The network ports of a node are shared by
all groups that use them at the same time; what a group reaches through them (rate B', latency a') falls with congestion
(`jhpt.core.cluster.Link`).  Many rings run side by side and use all ports of a node, so R = min(B, B') for q > 1.

    ring          all_reduce 2 ((n-1)/n bytes / R + (n-q) a + (q-1) a');   reduce_scatter and all_gather: half of it
    double tree   all_reduce 2 ((n-1)/n bytes / R + m a + ceil(log2 q) a'),   on one node ceil(log2 n) a
    all_to_all    (n-1) (bytes / n / B + a) inside a node; in a group on several nodes the ports carry what leaves the
                  node, m (n-m)/n bytes / B', while the rest moves inside it

The fastest algorithm counts, as NCCL chooses: ring and double tree (Jeaugey 2019, "Massively scale your deep learning
training with NCCL 2.4") are what it has for these collectives.  Left out: the compute cores that a collective takes
from the computation beside it (`Framework.exposed_gathers` holds what published runs lose by that).

Compressed all-reduce over t tensor ranks (`jhpt.sharding.compression.all_reduce`) of N numbers of w bytes, of which n
numbers travel, as S bytes of codes and ranges:

    links, two steps    all_to_all of S, all_gather of S
    links, gathered     all_gather of t S
    kernels, two steps  quantize n w + S; sum S + 4 n / t; quantize again 4 n / t + S / t; dequantize S + N w
    kernels, gathered   quantize n w + S; sum t S + N w

Kernels move their bytes at the rate of streams, each tensor once; they compute little.  If attention chooses the
tokens (`core.compression.by_attention`), every rank multiplies its queries and keys twice more in the forward pass, for
the denominators of the softmax and for the attention that each token receives, and the ranks all-reduce 4 bytes per
token.  If the tokens' own norms choose, every rank reads the residual stream once and sends nothing.  All of this
counts as compute; nothing is assumed to run beside it.

Compressed reduction over the data axes (`jhpt.sharding.compression.gradients`) of a gradient of N float32 numbers,
which a rank packs into S bytes of codes, or of positions and values:

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

import math
from dataclasses import dataclass, field

from jhpt.core.cluster import Device, Link
from jhpt.core.compression import by_attention, gathers, gathers_gradients, gradient_bytes, tokens_of, wire_bytes
from jhpt.core.config import Compression, GradientCompression
from jhpt.core.profile import ModelProfile

SCORE_BYTES = 4
"""Bytes of a token's importance, float32."""


@dataclass(frozen=True)
class Group:
    """Devices that communicate.

    size: number of members.  nodes: number of nodes that they are on.  groups: number of such groups that share the
    ports of a node.  fewest: members on the node that has the fewest of them.
    """

    size: int
    nodes: int
    groups: int
    fewest: int
    inside: Link = field(hash=False)  # links are few objects: comparing them is cheap, hashing them is not
    network: Link = field(hash=False)

    def port_rate(self, size: float) -> float:
        """Bytes/s of this group through the ports of one node, for messages of `size` bytes."""
        ports = min(self.fewest, self.network.ports / self.groups)
        return self.network.rate(size) * ports * self.network.congested(self.nodes, self.groups)

    @property
    def ring_latency(self) -> float:
        """Seconds in which the first byte passes a ring through all members."""
        return (self.size - self.nodes) * self.inside.latency + (self.nodes - 1) * self.network.latency

    def ring_rate(self, size: float) -> float:
        """Bytes/s of rings through all members, for messages of `size` bytes."""
        inside = self.inside.rate(size)
        return inside if self.nodes == 1 else min(inside, self.port_rate(size))


def all_reduce(group: Group, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes over the group and leave the sum on every member."""
    if group.size == 1 or size == 0:
        return 0.0
    return min(_ring(group, size, 2.0), _tree(group, size))


def reduce_scatter(group: Group, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes over the group and leave every member its share of the sum."""
    if group.size == 1 or size == 0:
        return 0.0
    return _ring(group, size, 1.0)


all_gather = reduce_scatter
"""Seconds until every member has the whole tensor of `size` bytes: a reduce_scatter in reverse."""


def all_to_all(group: Group, size: float) -> float:
    """Seconds until every member has sent each member its share of `size` bytes."""
    if group.size == 1 or size == 0:
        return 0.0
    n, m, message = group.size, group.fewest, size / group.size
    inside = (m - 1) * (message / group.inside.rate(message) + group.inside.latency)
    if group.nodes == 1:
        return inside
    across = m * (n - m) * message / group.port_rate(message) + (n - m) * group.network.latency
    return max(inside, across)


def _ring(group: Group, size: float, rounds: float) -> float:
    n, message = group.size, size / group.size
    return rounds * ((n - 1) * message / group.ring_rate(message) + group.ring_latency)


def _tree(group: Group, size: float) -> float:
    n, q, message = group.size, group.nodes, size / group.size
    if q == 1:
        latency = math.ceil(math.log2(n)) * group.inside.latency
    else:
        latency = group.fewest * group.inside.latency + math.ceil(math.log2(q)) * group.network.latency
    return 2.0 * ((n - 1) * message / group.ring_rate(message) + latency)


def transfer_seconds(transfer: tuple[Link, int], size: float) -> float:
    """Seconds to move `size` bytes per device from one stage to the next.  transfer: as `Places.transfer` states it."""
    link, senders = transfer
    if size == 0:
        return 0.0
    return size / (link.rate(size) * min(1.0, link.ports / senders)) + link.latency


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


def compressed_all_reduce_seconds(
    group: Group, compression: Compression, stream: Stream, samples: int, count: float
) -> float:
    """Seconds on the links of `count` compressed all-reduces, priced as one."""
    whole = count * sent_bytes(group.size, compression, stream, samples) * group.size / (group.size - 1)
    if gathers(group.size, compression):
        return all_gather(group, whole)
    return all_to_all(group, whole / 2) + all_gather(group, whole / 2)


def compression_kernel_seconds(
    ranks: int, compression: Compression, stream: Stream, samples: int, device: Device
) -> float:
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
    return moved / device.stream_rate


def token_choice_seconds(
    group: Group, compression: Compression, causal: bool, stream: Stream, samples: int, device: Device, dtype: str
) -> float:
    """Seconds in which the ranks choose the important tokens of a block, in the forward pass."""
    if compression.tokens == 1:
        return 0.0
    numbers = samples * stream.tokens * stream.width
    if not by_attention(compression, causal):
        return numbers * stream.element / device.stream_rate
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
    """Seconds of the kernels that compress such a gradient and sum what is received."""
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
    return moved / device.stream_rate


def residual_bytes(compression: GradientCompression) -> int:
    """Bytes per parameter of the residual that a rank keeps for later steps: one float32 number, two with momentum; 0
    without compression."""
    return compression.on * (8 if compression.momentum else 4)
