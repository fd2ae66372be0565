"""Bytes that a plan sends: per device of each stage and per step, by kind of collective and axis of the mesh.

These are the collectives that `jhpt.sharding` issues, with their sizes.  A stage has k = d t devices; there are M
micro-batches of b samples and S stages of v chunks.  r: bytes of a micro-batch's activation on a device.  p: bytes of a
layer's parameters on a device in the compute dtype, in which they are sent.  With n ranks in a ring a device sends

    tensor    all-reduce of r           2 (n-1)/n r   block 2 M forward, 2 M backward (with recomputation 3 M);
                                                      embedding M forward, head M backward
    data      all-reduce of p           2 (n-1)/n p   ZeRO-0: once, gradients
              all-gather of p           (n-1)/n p     ZeRO-1: once, weights; ZeRO-3: 2 M for a block, once for embedding
                                                      and head
              reduce-scatter of p       (n-1)/n p     ZeRO-1: once, gradients; ZeRO-3: M for a block, once for embedding
                                                      and head
    replica   all-reduce of p / N       2 (n-1)/n p/N HSDP over N data ranks: once, shares of gradients; of the axis
                                                      data N ranks are left
    pipe      collective-permute of r   r             in S-1 + M v ticks forward to the next stage, in as many backward;
                                                      with one chunk the last (first) stage sends nothing on
              all-reduce                2 p           first and last stage, once: a tied table's gradient in float32
    between degrees   all-gather of r   (n-1)/n r     M wherever neighbouring layers differ

With sequence parallelism each all-reduce of a block is a reduce-scatter and an all-gather, (n-1)/n r each, and two more
all-gathers fetch the inputs of the products again for the backward pass; embedding and head gather r once each; r / t
goes to the next stage.  Where degrees differ, r is gathered forward by the layer before and backward by the one after.

With compression the all-reduces of a block, in the compressed directions, are an all-to-all and an all-gather of codes,
or an all-gather alone (`core.compression`).  If attention chooses the tokens, scores of 4 bytes per token are
all-reduced whenever the attention half runs forward.  With sample chunks every chunk has all-reduces of its own.  The
last all-reduce of the last chunk is postponed into the next block, so the first block of a run has one too many, of
zeros.  Its result is saved with the block's input, so recomputation does not repeat it.

If communication overlaps computation, loops prefetch `prefetch` layers and reduce gradients one layer late, and the
surplus is sent, too: a run of neighbouring blocks of one degree gathers `prefetch` more blocks (forward and backward
pass together) and reduces one more.  A chunk of a pipeline has room for as many blocks as the longest chunk.  With
ZeRO-0 and ZeRO-1 all of this room is sent; with ZeRO-3 and prefetching every pass gathers all of it and the surplus.

In a plan with offloaded blocks, blocks are gathered in float32 in both passes and their gradients are scattered in
float32: once per step, however many micro-batches there are.

Compressed gradients are an all-to-all and an all-gather of codes, or one of them (`core.compression.gradient_bytes`).

With several stages embedding and head have a slot on every stage: all stages gather it, the first and the last one
reduce it, in full.  Left out, below 1 % of the bytes: norms and biases are all-reduced at every ZeRO level, norms in
float32; three numbers per token for the softmax over a divided vocabulary; sums of the loss and of the gradient's norm;
token ids.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jhpt.core.axes import DATA, PIPE, REPLICA, TENSOR
from jhpt.core.compression import by_attention, gathers, gathers_gradients, gradient_bytes
from jhpt.core.errors import InputError
from jhpt.core.plan import Chunk, Plan
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.planner.cost.activations import NOTHING, repeated
from jhpt.planner.cost.collectives import chunk_sizes
from jhpt.planner.cost.communication import SCORE_BYTES, Stream, sent_bytes, stream_of
from jhpt.planner.cost.memory import FLOAT32


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind along one axis: number of tensors (a layer's parameters are one), and bytes sent."""

    count: float
    bytes: float

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.count + other.count, self.bytes + other.bytes)


StageTraffic = dict[tuple[str, str], Sent]
"""By (kind of collective, axes joined by +)."""

Collectives = tuple[tuple[str, str], Sent]
"""One entry of `StageTraffic`."""


def traffic(plan: Plan, profile: ModelProfile, *, overlap: bool = True) -> tuple[StageTraffic, ...]:
    """What a device of every stage sends in a step.

    Args:
      overlap: whether loops prefetch weights and reduce gradients late, as they do on GPUs.

    Raises:
      InputError: the plan is of space="general", which no single program runs.
    """
    if plan.space != "spmd":
        raise InputError(f"a plan of the space {plan.space} is not run by one program; plan with space=spmd")
    if plan.offload is not None:
        # Blocks are sharded anyway, and embedding and head are whole on every rank.
        plan = plan.model_copy(update={"zero": 0})
    step = _Step(plan, profile, overlap)
    return tuple(_added(step.stage(position)) for position in range(len(plan.stages)))


def _added(parts: Iterator[Collectives]) -> StageTraffic:
    total: StageTraffic = {}
    for way, sent in parts:
        if sent.bytes:
            total[way] = total.get(way, Sent(0, 0)) + sent
    return total


@dataclass(frozen=True)
class _Axes:
    """Axes of a plan's mesh: `data`, and `tensor` or, if layers differ in degree, one axis for every degree."""

    plan: Plan

    def between(self, low: int, high: int) -> str:
        """The axes of a group that spans the degrees above `low` up to `high`."""
        devices = self.plan.stages[0].devices
        degrees = {t for stage in self.plan.stages for chunk in stage.chunks for t in chunk.tensor}
        cut = [t for t in sorted(degrees) if t > 1]
        names = [TENSOR if len(cut) == 1 else f"{TENSOR}{t}" for t in cut if low < t <= high]
        whole = [DATA] if high == devices and devices > max(degrees) else []
        return "+".join([*whole, *reversed(names)])

    def tensor(self, t: int) -> str:
        """The axes of the tensor ranks of a layer of degree t."""
        degrees = [run.tensor for stage in self.plan.stages for chunk in stage.chunks for run in chunk.runs]
        return self.between(1, min(t, max(degrees)))

    def data(self, t: int) -> str:
        """The axes of the data ranks of a layer of tensor degree t."""
        return self.between(t, self.plan.stages[0].devices)


@dataclass(frozen=True)
class _Step:
    """A plan for a model.  Every method yields the collectives that it adds."""

    plan: Plan
    profile: ModelProfile
    overlap: bool

    def stage(self, position: int) -> Iterator[Collectives]:
        """All collectives of a stage."""
        for chunk in self.plan.stages[position].chunks:
            layers = range(chunk.first, chunk.stop)
            others, run = self.plan.other_blocks, (0, 0, False)
            for layer, t, cut in zip(layers, chunk.tensor, chunk.sample_chunks, strict=True):
                own = t, cut, others is not None and layer > others.after
                of_blocks = replace(self, plan=self.plan.of_other_blocks if own[2] else self.plan.of_first_blocks)
                yield from of_blocks._activations(layer, t, cut, begins=run != own)
                run = own if self._is_block(layer) else (0, 0, False)
                if self.stages == 1 and not self._is_block(layer):
                    yield from self._gathered(self._parameter_bytes(layer, t), t, 1 if self.plan.zero else 0)
                    yield from self._reduced(self._parameter_bytes(layer, t), t, 1)
            for layer, (before, after) in zip(layers, itertools.pairwise(chunk.tensor), strict=False):
                yield from self._resharded(layer, before, after)
            yield from self._blocks(chunk)
        if self.stages > 1:
            yield from self._slots(position)
            yield from self._transfers(position)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.plan.stages)

    @property
    def devices(self) -> int:
        """Devices of a stage."""
        return self.plan.stages[0].devices

    @property
    def _axes(self) -> _Axes:
        return _Axes(self.plan)

    @property
    def residual(self) -> float:
        """Bytes of one sample's activation between layers."""
        return self.profile.kinds[self.profile.layers[0]].boundary_bytes

    def _is_block(self, layer: int) -> bool:
        return 0 < layer < self.profile.num_layers - 1

    def _rows(self, t: int) -> float:
        """Samples of a micro-batch on a device, for a layer of tensor degree t."""
        return self.plan.batch / self.plan.micro_batches * t / self.devices

    def _activations(self, layer: int, t: int, cut: int, *, begins: bool) -> Iterator[Collectives]:
        """All-reduces over the tensor axis, in `cut` sample chunks.  begins: whether the layer begins a run."""
        if t == 1:
            return
        kind, axis = self.profile.kinds[self.profile.layers[layer]], self._axes.tensor(t)
        forward, backward = kind.tensor_forward_bytes, kind.tensor_backward_bytes
        again = self._repeated_share(kind) * forward if self._is_block(layer) else 0.0
        if self._is_block(layer) and (self.plan.compression.on or (cut > 1 and not self.plan.sequence)):
            yield from self._chunked(kind, t, cut, begins)
            return
        if self.plan.sequence and self._is_block(layer):
            yield ("reduce-scatter", axis), self._ring(t, forward + backward + again)
            yield ("all-gather", axis), self._ring(t, forward + backward + forward)
            return
        yield ("all-reduce", axis), self._ring(t, forward + backward + again, 2)
        if self.plan.sequence:
            yield ("all-gather", axis), self._ring(t, self.residual)

    def _repeated_share(self, kind: LayerKind) -> float:
        """Share of a block's all-reduces that its backward pass repeats; without named tensors the attention half's."""
        if not self.plan.recompute:
            return 0.0
        return repeated(kind.tensors, self.plan.saved or NOTHING).all_reduces if kind.tensors else 0.5

    def _chunked(self, kind: LayerKind, t: int, cut: int, begins: bool) -> Iterator[Collectives]:
        """All-reduces of a block, chunk by chunk.  begins: whether the block is the first one of its run."""
        compression = self.plan.compression
        samples = chunk_sizes(-(-self.plan.batch * t // (self.plan.micro_batches * self.devices)), cut)
        forward, backward = kind.tensor_forward_bytes, kind.tensor_backward_bytes
        yield from self._all_reduces(
            (1 + self._repeated_share(kind)) * forward, t, samples, compression.on and compression.forward
        )
        if len(samples) > 1:
            yield from self._all_reduces(
                self.residual * begins, t, samples[-1:], compression.on and compression.forward
            )
        yield from self._all_reduces(backward, t, samples, compression.on and compression.backward)
        if compression.on and by_attention(compression, self.profile.causal):
            # The choice of tokens is saved if anything else is, such as a chunked GPT's inputs (`layer_policy`).
            saved = self.plan.saved is not None or (self.profile.causal and self.plan.sample_chunks != (1,))
            times = self.plan.micro_batches * (2 if self.plan.recompute and not saved else 1)
            scores = SCORE_BYTES * self._stream.tokens * sum(samples)
            yield ("all-reduce", self._axes.tensor(t)), Sent(times * len(samples), 2 * (t - 1) / t * times * scores)

    def _all_reduces(self, size: float, t: int, samples: tuple[int, ...], compressed: bool) -> Iterator[Collectives]:
        """All-reduces over t ranks of `size` bytes per sample in all, for each chunk of samples and micro-batch."""
        sums, axis = self.plan.micro_batches * size / self.residual, self._axes.tensor(t)
        count = sums * len(samples)
        if not compressed:
            yield ("all-reduce", axis), Sent(count, 2 * (t - 1) / t * sums * self.residual * sum(samples))
            return
        sent = sums * sum(sent_bytes(t, self.plan.compression, self._stream, n) for n in samples)
        if gathers(t, self.plan.compression):
            yield ("all-gather", axis), Sent(count, sent)
            return
        yield ("all-to-all", axis), Sent(count, sent / 2)
        yield ("all-gather", axis), Sent(count, sent / 2)

    @property
    def _stream(self) -> Stream:
        """The residual stream, which compression needs."""
        if (stream := stream_of(self.profile)) is None:
            raise InputError(
                f"compression needs samples that are sequences of tokens, and a sample is {self.profile.sample}; "
                "turn compression off"
            )
        return stream

    def _ring(self, t: int, size: float, rounds: int = 1) -> Sent:
        """Collectives over t ranks of `size` bytes per sample in all, in every micro-batch."""
        count = self.plan.micro_batches
        return Sent(count * size / self.residual, rounds * (t - 1) / t * count * self._rows(t) * size)

    def _parameter_bytes(self, layer: int, t: int) -> float:
        """Bytes of a layer's parameters on one of t ranks; of embedding and head only the tables are cut."""
        kinds, layers = self.profile.kinds, self.profile.layers
        first, last, parameters = kinds[layers[0]], kinds[layers[-1]], kinds[layers[layer]].parameters
        table = last.tied_parameters or min(first.parameters, last.parameters)
        divided = parameters
        if layer == 0:
            divided = table
        elif layer == self.profile.num_layers - 1:
            divided = 0 if last.tied_parameters else table
        return (divided / t + parameters - divided) * self.profile.bytes_per_weight

    def _gathered(self, size: float, t: int, times: float) -> Iterator[Collectives]:
        ranks = self._shards(t)
        if times:
            yield ("all-gather", self._axes.data(t)), Sent(times, (ranks - 1) / ranks * times * size)

    def _reduced(self, size: float, t: int, times: float, between: float | None = None) -> Iterator[Collectives]:
        """Reductions of so many gradients.  between: of how many the shares are summed over replicas; None: of all."""
        ranks = self.devices // t
        if self.plan.gradient_compression.on and ranks > 1:
            yield from self._compressed(size, t, times)
            return
        if not self.plan.zero:
            yield ("all-reduce", self._axes.data(t)), Sent(times, 2 * (ranks - 1) / ranks * times * size)
            return
        shards = self._shards(t)
        yield ("reduce-scatter", self._axes.data(t)), Sent(times, (shards - 1) / shards * times * size)
        if replicas := ranks // shards - 1:
            count = times if between is None else between
            yield ("all-reduce", REPLICA), Sent(count, 2 * replicas / (replicas + 1) * count * size / shards)

    def _shards(self, t: int) -> int:
        """Over how many data ranks ZeRO shards."""
        return min(self.plan.zero_ranks or self.devices, self.devices // t)

    def _compressed(self, size: float, t: int, times: float) -> Iterator[Collectives]:
        """Compressed reduction of gradients that would have so many bytes in the compute dtype."""
        ranks, axis, compression = self.devices // t, self._axes.data(t), self.plan.gradient_compression
        shares = self.plan.zero > 0
        sent = times * gradient_bytes(ranks, compression, round(size / self.profile.bytes_per_weight), shares=shares)
        if shares:
            yield ("all-to-all", axis), Sent(times, sent)
        elif gathers_gradients(ranks, compression):
            yield ("all-gather", axis), Sent(times, sent)
        else:
            yield ("all-to-all", axis), Sent(times, sent / 2)
            yield ("all-gather", axis), Sent(times, sent / 2)

    def _blocks(self, chunk: Chunk) -> Iterator[Collectives]:
        """Parameters of a chunk's blocks and their gradients, run by run."""
        if self.plan.offload is not None:
            yield from self._offloaded()
            return
        others = self.plan.other_blocks
        layers = [
            (layer, t, others is not None and layer > others.after)
            for layer, t in enumerate(chunk.tensor, chunk.first)
            if self._is_block(layer)
        ]
        many, late = self.plan.micro_batches, 1 if self.overlap else 0
        for (t, _), run in itertools.groupby(layers, key=lambda one: one[1:]):
            size, count, one = self._parameter_bytes(layers[0][0], t), len(list(run)), self.stages == 1
            if self.plan.zero < 3:
                gathers = (count + self._ahead if one else self._depth) if self.plan.zero else 0
            else:
                passes = 2 * (self._depth + self._ahead if self._ahead else count)
                gathers = many * (2 * count + self._ahead if one else passes)
            if self._scatters_in_every_pass:
                sums, between = many * (count + late if one else count), count if one else self._depth
            else:
                sums = between = count + late if one else self._depth
            yield from self._gathered(size, t, gathers)
            yield from self._reduced(size, t, sums, between)
        if not layers and self.stages > 1:
            yield from self._padding(chunk.tensor[0])

    def _offloaded(self) -> Iterator[Collectives]:
        """Collectives of offloaded blocks, whose rows are sharded over the ranks."""
        size, ranks = self._parameter_bytes(1, 1) / self.profile.bytes_per_weight * FLOAT32, self.devices
        yield from self._gathered(size, 1, 2 * self._depth)
        yield ("reduce-scatter", self._axes.data(1)), Sent(self._depth, (ranks - 1) / ranks * self._depth * size)

    def _padding(self, t: int) -> Iterator[Collectives]:
        """Collectives of a chunk without blocks: its room for as many blocks as the longest chunk has is sent too."""
        size = self._parameter_bytes(1, t)
        if self.plan.zero == 3:
            ahead = self._depth + self._ahead if self._ahead else 0
            yield from self._gathered(size, t, 2 * self.plan.micro_batches * ahead)
            yield from self._reduced(size, t, 0, self._depth)
        else:
            yield from self._gathered(size, t, self._depth if self.plan.zero else 0)
            yield from self._reduced(size, t, 0 if self._scatters_in_every_pass else self._depth, self._depth)

    @property
    def _scatters_in_every_pass(self) -> bool:
        """Whether gradients of blocks are reduce-scattered in every micro-batch."""
        return self.plan.zero == 3 or (self.plan.zero == 2 and self.plan.micro_batches > 1)

    @property
    def _ahead(self) -> int:
        """How many blocks a loop prefetches."""
        return self.plan.prefetch if self.overlap else 0

    @property
    def _depth(self) -> int:
        """Blocks of the longest chunk."""
        chunks = (chunk for stage in self.plan.stages for chunk in stage.chunks)
        return max(sum(map(self._is_block, range(chunk.first, chunk.stop))) for chunk in chunks)

    def _resharded(self, layer: int, before: int, after: int) -> Iterator[Collectives]:
        """All-gathers between layers: in the forward pass towards a larger degree, else in the backward pass."""
        if before == after:
            return
        low, high = sorted((before, after))
        ranks, count = high // low, self.plan.micro_batches
        size = self.profile.kinds[self.profile.layers[layer]].boundary_bytes * self._rows(high)
        yield ("all-gather", self._axes.between(low, high)), Sent(count, (ranks - 1) / ranks * count * size)
        for t in (before, after):
            if self.plan.sequence and t > 1:
                yield ("all-gather", self._axes.tensor(t)), self._ring(t, self.residual)

    def _slots(self, position: int) -> Iterator[Collectives]:
        """Collectives of the slot for embedding and head."""
        last, t = self.profile.kinds[self.profile.layers[-1]], self.plan.stages[0].chunks[0].tensor[0]
        # The table of an untied head uses the slot of the embedding's table; beside the table the head has only a norm.
        size = self._parameter_bytes(0, t)
        size += self._parameter_bytes(self.profile.num_layers - 1, t) if last.tied_parameters else 0
        yield from self._gathered(size, t, 1 if self.plan.zero else 0)
        if position in (0, self.stages - 1):
            yield from self._reduced(size, t, 1)
            share = self._shards(t) if self.plan.zero else 1
            yield ("all-reduce", PIPE), Sent(1, last.tied_parameters * FLOAT32 / t / share)

    def _transfers(self, position: int) -> Iterator[Collectives]:
        """Transfers of activations and errors, in every tick in which any stage runs a pass of that direction."""
        around, t = self.plan.chunks > 1, self.plan.stages[0].chunks[0].tensor[0]
        ticks = self.stages - 1 + self.plan.micro_batches * self.plan.chunks
        size = self.residual * self._rows(t) / (t if self.plan.sequence else 1)
        directions = (around or position < self.stages - 1) + (around or position > 0)
        yield ("collective-permute", PIPE), Sent(directions * ticks, directions * ticks * size)
