"""How long collectives take: plain ones, compressed ones, and where the groups that run them lie on the cluster.

A stage owns devices in the order of their ranks.  The tensor axis is innermost: tensor groups are neighbouring devices,
and data groups stride over them.  Devices without a stage stay idle.

Devices of one stage may be of different kinds.  Then the slowest of them sets the pace of every layer, in either pass,
the smallest one limits the memory, and all links inside nodes count as the slowest one.  If its data ranks have samples
by their speed, each kind of device computes its own number of them, and the kind that is done last sets the pace of
whole passes: data ranks wait for each other only once a step.  All have room for the most samples of any rank.

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

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.compression import by_attention, gathers, gathers_gradients, gradient_bytes, tokens_of, wire_bytes
from jhpt.core.config import Compression, GradientCompression
from jhpt.core.plan import Stage
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


@dataclass(frozen=True)
class Place:
    """The devices of one stage, as far as costs depend on them: equal places have equal costs.

    kinds: of its devices, as `Places.kinds` numbers them.  memory: usable bytes of the smallest device.  samples: of a
    micro-batch on each data rank; None: equally many on all, rounded up.
    """

    devices: int
    kinds: tuple[int, ...]
    memory: float
    crossing: tuple[int, ...]
    """Number of the stage's devices on each node that it touches."""
    inside: Link = field(hash=False)
    network: Link = field(hash=False)
    host: Link = field(hash=False)
    samples: int | None = None

    def __hash__(self) -> int:
        """Of what differs most; it is computed once, because `crossing` may be long."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.kinds, self.memory, self.crossing, self.samples))

    def local(self, micro_batch: int, tensor: int) -> int:
        """Samples of a micro-batch on a device."""
        return self.samples or -(-micro_batch * tensor // self.devices)

    def tensor_group(self, tensor: int) -> Group:
        """Among the groups of `tensor` neighbouring devices, the one on most nodes."""
        return self.group(tensor, 1)

    def data_group(self, tensor: int) -> Group:
        """Among the groups of every `tensor`-th device, the one on most nodes."""
        return self.group(self.devices // tensor, tensor)

    def group(self, size: int, stride: int) -> Group:
        """Among the groups of so many devices, each `stride` after the one before it, the one on most nodes."""
        nodes, groups, fewest = _spread(self.crossing, size, stride)
        return Group(size, nodes, groups, fewest, self.inside, self.network)


@lru_cache(maxsize=65536)
def _spread(crossing: tuple[int, ...], size: int, stride: int) -> tuple[int, int, int]:
    """(most nodes of a group, most groups that leave a node, fewest members of a group on one of its nodes).

    The groups consist of `size` devices each, every `stride`-th, and fill a stage with `crossing[i]` devices on its
    i-th node.
    """
    full = crossing[0]
    if size == 1 or len(crossing) == 1:
        return 1, 1, size
    if stride == 1 and full % size == 0 and all(count == full for count in crossing[:-1]):
        return 1, 1, size
    device = np.arange(sum(crossing) // (size * stride) * size * stride).reshape(-1, size, stride)
    node = np.searchsorted(np.cumsum(crossing), device.swapaxes(1, 2).reshape(-1, size), side="right")
    here = np.zeros((len(node), len(crossing)), np.int64)
    np.add.at(here, (np.arange(len(node))[:, None], node), 1)
    leaves = (here > 0).sum(axis=1) > 1
    if not leaves.any():
        return 1, 1, size
    here = here[leaves]
    return int((here > 0).sum(axis=1).max()), int((here > 0).sum(axis=0).max()), int(here[here > 0].min())


class Places:
    """The places of stages on a cluster.

    Attributes:
      kinds: the kinds of devices (`Device.rates`), those with the highest rate for `dtype` first.  Their order does not
        depend on that of the nodes.
    """

    def __init__(self, cluster: Cluster, dtype: str) -> None:
        self.cluster = cluster
        self.nodes: list[Node] = [node for node in cluster.nodes for _ in range(node.count)]
        self.first_device: list[int] = []
        self.node_of: list[int] = []
        for index, node in enumerate(self.nodes):
            self.first_device.append(len(self.node_of))
            self.node_of += [index] * node.devices
        devices = {node.device.rates: node.device for node in cluster.nodes}

        def slowest_last(rates: str) -> tuple[float, float, str]:
            return -devices[rates].peak_flops.get(dtype, 0.0), -devices[rates].memory_bandwidth, rates

        order = sorted(devices, key=slowest_last)
        self.kinds: list[Device] = [devices[rates] for rates in order]
        self._kind_of = [kind for node in cluster.nodes for kind in [order.index(node.device.rates)] * node.count]
        texts = [text for node in cluster.nodes for text in [node.kind] * node.count]
        self._row_of = [row for row, (_, equal) in enumerate(itertools.groupby(texts)) for _ in equal]
        self._at: dict[tuple[int, int], Place] = {}
        self._of: dict[tuple[int, ...], Place] = {}
        self._starts: dict[int, tuple[int, ...]] = {}
        self.uniform = not cluster.mixed
        self.per_node = self.nodes[0].devices

    def devices_of(self, place: Place) -> list[Device]:
        """One device of every kind at a place."""
        return [self.kinds[kind] for kind in place.kinds]

    def offset_class(self, offset: int) -> int:
        """The class of an offset: stages of equal size that start at offsets of one class have equal costs."""
        return offset % self.per_node if self.uniform else offset

    def starts(self, offset: int, before: int | None = None) -> tuple[int, ...]:
        """First devices of a stage if the one before it ends at `offset`.

        On a mixed cluster the rest of a node and whole nodes may stay idle.  Equal nodes are interchangeable: if the
        stage before lies on neighbours of the same kind, whole ones of them are idle before it, not behind it.

        Args:
          before: first device of the stage before; None: any.
        """
        if self.uniform or offset >= len(self.node_of):
            return (offset,)
        if offset not in self._starts:
            self._starts[offset] = (offset, *(first for first in self.first_device if first > offset))
        if before is None or self._row_of[self.node_of[before]] != self._row_of[self.node_of[offset]]:
            return self._starts[offset]
        node = self.node_of[offset]
        next_node = node + (offset > self.first_device[node])
        return tuple(
            start
            for start in self._starts[offset]
            if self.node_of[start] <= next_node or self._row_of[self.node_of[start]] != self._row_of[node]
        )

    def at(self, offset: int, devices: int) -> Place:
        """The place of a stage with so many neighbouring devices, the first of which is `offset`."""
        key = (self.offset_class(offset), devices)
        if key not in self._at:
            self._at[key] = self._place(self._counts(*key), devices)
        return self._at[key]

    def of(self, members: Sequence[int]) -> Place:
        """The place of a stage with these devices, in the order of their ranks."""
        if isinstance(members, range):
            return self.at(members.start, len(members))
        key = tuple(members)
        if key not in self._of:
            counts = [(node, len(list(same))) for node, same in itertools.groupby(key, self.node_of.__getitem__)]
            self._of[key] = self._place(counts, len(key))
        return self._of[key]

    def by_kind(self, stage: Stage) -> list[Place]:
        """The place of a stage; where its data ranks have samples by speed, one for each kind of its devices, with the
        most samples that a rank of this kind has."""
        place = self.of(stage.members)
        if stage.samples is None:
            return [place]
        most: dict[int, int] = {}
        for at, device in enumerate(stage.members):
            kind = self.kind_of(device)
            most[kind] = max(most.get(kind, 0), stage.samples[at // stage.degrees[0]])
        return [replace(place, kinds=(kind,), samples=samples) for kind, samples in most.items()]

    def kind_of(self, device: int) -> int:
        """The kind of a device, as `kinds` numbers it."""
        return self._kind_of[self.node_of[device]]

    def _counts(self, offset: int, devices: int) -> list[tuple[int, int]]:
        """(node, number of the stage's devices on it) of neighbouring devices."""
        counts: list[tuple[int, int]] = []
        at, stop = offset, offset + devices
        while at < stop:
            node = self.node_of[at]
            end = min(stop, self.first_device[node] + self.nodes[node].devices)
            counts.append((node, end - at))
            at = end
        return counts

    def _place(self, counts: list[tuple[int, int]], devices: int) -> Place:
        nodes = [self.nodes[index] for index, _ in counts]
        return Place(
            devices=devices,
            kinds=tuple(sorted({self._kind_of[index] for index, _ in counts})),
            memory=min(node.device.usable for node in nodes),
            crossing=tuple(count for _, count in counts),
            inside=slowest([node.inside for node in nodes]),
            network=self.cluster.network,
            host=slowest([node.host for node in nodes]),
        )

    def transfer(self, first: int, devices: int, to: int, others: int) -> tuple[Link, int]:
        """`between` for neighbouring devices: `devices` from `first` on, and `others` from `to` on."""
        return self.between(range(first, first + devices), range(to, to + others))

    def between(self, sender: Sequence[int], receiver: Sequence[int]) -> tuple[Link, int]:
        """(the link from one stage's devices to another's, how many transfers share the ports of a node)."""
        # A stage visits no node twice, so if its ends are on one node, all of it is.
        ends = {self.node_of[device] for stage in (sender, receiver) for device in (stage[0], stage[-1])}
        if len(ends) == 1:
            return self.nodes[ends.pop()].inside, 1
        # Transfers go either way, so they crowd on the larger node, whether it sends or receives.
        return self.cluster.network, min(len(sender), len(receiver), max(self.nodes[node].devices for node in ends))


def slowest(links: Sequence[Link]) -> Link:
    """The link at which collectives reach the lowest rate, and of several such links the one with the most latency."""
    return min(links, key=lambda link: (link.reached * link.bandwidth, -link.latency))


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
