"""What every layer costs under one way of treating it: seconds, gradient traffic, bytes.

For a stage of k = d t devices, a layer at tensor degree t and a micro-batch of b samples:

    object           moment                         seconds
    compute          per micro-batch                profiled at ceil(b / d) samples and degree t
    tensor           per micro-batch, exposed       all_reduce of its activations (forward) and errors (backward) over t
    resharding       per micro-batch, exposed       all_gather of the activation where neighbouring degrees differ
    ZeRO-3           per micro-batch, prefetched    all_gather of weights in both passes, reduce_scatter of gradients:
                                                    a layer takes max(its work, its traffic)
    gradients        once, behind the last backward all_reduce over d (ZeRO-1: reduce_scatter); a layer's follows its
                                                    backward on a stream of their own
    ZeRO-1           once, in the first forward     all_gather of weights: what a layer's forward pass does not hide
    update           once, at the end               optimizer over its share of the state

Tensor seconds may be fewer.  With the samples in several chunks a layer takes the period of `overlap`, and the layer
that begins a run its filling; of that, what exceeds the plain work is tensor seconds.  Gradients of weights are not
counted on to hide anything: other chunks already do.  Compressed sums cost what the head of `compression` says.  In one
SPMD program both concern the layers between the ends only.  Left out: that several gathers and sums share a link, and
the memory of a chunk's sum.

Compressed gradients (`compression.gradient_seconds`) take the place of all_reduce and reduce_scatter; their kernels
count with the update, as does with the optimizer what every rank keeps of them.  There is no ZeRO-3 with them.

ZeRO-3 over one data rank has no traffic, but both passes turn weights into the dtype of computation: memory's time for
the two bytes of one and the four of the other, where other levels do it once a step, with the update.  Left out: that
the update then writes no copy.

Where a cluster does not overlap communication with computation, all of it is exposed: a ZeRO-3 layer takes its work
plus its traffic, ZeRO-1 all of its traffic, and gradients are summed when the last backward is over.  What is exposed
once a step is counted with the update.

With recomputation a layer keeps only its input, and what `SavedTensors` names; the backward pass repeats the forward pass and
its tensor communication, as far as it reads the result (`recompute.names`; all, of layers without named tensors).  What
is kept on the host is copied there beside the forward pass and back beside the backward pass, each tensor for itself;
what takes longer than that, and where nothing overlaps all of it, is added to them.  Left out: that communication slows
the computation beside it.

With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) what lies between products is cut
over the tensor ranks: of replicated activations, of a layer's input and of what goes to the next stage a device has
1 / t.  An all-reduce becomes a reduce-scatter and an all-gather of the same bytes, and the backward pass gathers the
products' inputs again: tensor communication x 1.5.  Left out: one all_gather at each end of the model.

These are the costs of programs that do as well as they can.  What the one program of space="spmd" makes of them is in
the head of `program`; its pipelines hide less of the parameters' traffic:

    ZeRO-3           the reduce_scatter follows each backward pass: max(backward, all_gather) + reduce_scatter
    gradients        exposed, when the last backward is over
    ZeRO-1           exposed, before the first forward
"""

import math
from dataclasses import replace

import numpy as np

from jhpt.core.cluster import Cluster
from jhpt.core.config import PLAIN_GRADIENTS, GradientCompression
from jhpt.core.plan import SavedTensors, Zero
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.planner.cost.collectives import all_gather
from jhpt.planner.cost.compression import (
    residual_bytes,
)
from jhpt.planner.cost.gradients import GradientSums
from jhpt.planner.cost.layers import LayerCosts, LayerStrategy, Space, picked
from jhpt.planner.cost.memory import FLOAT32, Held, Slot, held, in_one_stage, in_pipeline, with_embedding_and_head
from jhpt.planner.cost.overlap import partition
from jhpt.planner.cost.placement import Place, Places, transfer_seconds
from jhpt.planner.cost.recompute import NOTHING, Activations
from jhpt.planner.cost.schedule import Array
from jhpt.planner.cost.tensor_all_reduce import BACKWARD, DIRECTIONS, FORWARD, TensorSums

CAST = 6.0
"""Bytes that are read and written to turn a weight from float32 into 16 bits, or the other way."""


class CostModel:
    """Costs of a model on a cluster; everything is computed once per distinct place."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        gradient_compression: GradientCompression = PLAIN_GRADIENTS,
        saved: SavedTensors | None = None,
    ) -> None:
        self.profile, self.cluster, self.gradient_compression = profile, cluster, gradient_compression
        self.saved = saved  # where a treatment recomputes and names nothing
        self.places = Places(cluster, profile.dtype)
        names = list(profile.kinds)
        self.kinds: list[LayerKind] = [profile.kinds[name] for name in names]
        self.index = np.array([names.index(layer) for layer in profile.layers])
        self.boundary = np.array([self.kinds[i].boundary_bytes for i in self.index])
        ties = [layer for layer, kind in enumerate(self.index) if self.kinds[kind].tied_parameters]
        self.tied_layer: int | None = ties[0] if ties else None
        self.inputs = np.concatenate([[0.0], self.boundary[:-1]])
        self.activations = Activations(self.kinds, self.index, self.inputs, profile.causal, cluster.nodes[0].host)
        self.sums = TensorSums(profile, cluster, self.kinds, self.compute_seconds)
        self.gradients = GradientSums(cluster, self.places, self.kinds, profile.bytes_per_weight, gradient_compression)
        self._tops = np.array([kind.max_tensor for kind in self.kinds])
        self._costs: dict[tuple[Place, int, LayerStrategy], LayerCosts] = {}
        self._tables: dict[tuple[Place, int, LayerStrategy], LayerCosts] = {}
        self._chunks: dict[tuple[int, int, LayerStrategy], tuple[int, ...]] = {}
        self._layers: dict[tuple[Place, int, LayerStrategy], LayerCosts] = {}
        self._slots: dict[tuple[Place, int, LayerStrategy], Slot] = {}
        self._seconds: dict[tuple[float, int], tuple[Array, Array]] = {}

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.index)

    def allowed(self, layer: int, tensor: int) -> bool:
        """Whether the layer can be cut into `tensor` shards."""
        return self.kinds[self.index[layer]].max_tensor % tensor == 0

    def common_degrees(self, devices: int) -> list[int]:
        """Tensor degrees up to `devices` that every layer allows."""
        common = math.gcd(*(kind.max_tensor for kind in self.kinds))
        return [t for t in range(1, min(common, devices) + 1) if common % t == 0]

    def levels(self, asked: tuple[Zero, ...], data: int, space: Space) -> tuple[Zero, ...]:
        """Of these levels of ZeRO those that differ over so many data ranks.

        One has nothing to share out: ZeRO-1 is none, and ZeRO-3 too but where one program rounds weights (`program`).
        With compressed gradients there is no ZeRO-3.
        """
        if data > 1:
            return asked
        rounds = space == "spmd" and (self.profile.bytes_per_weight < FLOAT32 or not self.profile.used_as_stored)
        rounds = rounds and not self.gradient_compression.on
        none = [level for level in asked if level < 3 or not rounds][:1]
        return (*none, *(level for level in asked if level == 3 and rounds))

    def degrees(self, devices: int) -> list[int]:
        """Tensor degrees that some layer allows and that divide `devices`."""
        top = max(kind.max_tensor for kind in self.kinds)
        return [
            t
            for t in range(1, min(top, devices) + 1)
            if devices % t == 0 and any(kind.max_tensor % t == 0 for kind in self.kinds)
        ]

    def layer_costs(self, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """Costs of every layer at degree `tensor`, each with its best number of chunks, as a row of all of them.

        Infinite where a layer does not allow the degree.
        """
        if strategy.sample_chunks == (1,):
            return self.table(place, tensor, strategy)
        key = (place, tensor, strategy)
        if key not in self._costs:
            chosen = self.sample_chunks(place.devices, tensor, strategy)
            tables = {c: self.table(place, tensor, replace(strategy, sample_chunks=(c,))) for c in {1, *chosen}}
            self._costs[key] = tables[1] if set(chosen) == {1} else picked(tables, (1, *chosen[1:-1], 1))
        return self._costs[key]

    def table(self, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """Costs of every layer where all have the one number of chunks that the treatment has; fillings apart."""
        key = (place, tensor, strategy)
        if key not in self._tables:
            costs = self._by_layer(place, tensor, strategy)
            if strategy.program != "own":
                costs = with_embedding_and_head(costs, self._by_layer(place, tensor, strategy.of_embedding_and_head))
                costs = self._in_one_program(costs, place, tensor, strategy)
            self._tables[key] = costs
        return self._tables[key]

    def _in_one_program(self, costs: LayerCosts, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """Layers of a stage, of which the ends are as `with_embedding_and_head` has them."""
        data, wire = place.devices // tensor, self.profile.bytes_per_weight
        kind, local = self.kinds[self.index[-1]], -(-strategy.micro_batch // data)
        # Its gradient begins the backward pass, in the compute dtype.
        logits = local * kind.activation_bytes / tensor
        last = logits * (1 + wire / FLOAT32) + local * kind.replicated_bytes
        if strategy.program == "piped":
            return in_pipeline(costs, last)
        own = self.gradients.parameters[self.index] / tensor
        inner, embedding_and_head = (self._held(how, data).coming for how in (strategy, strategy.of_embedding_and_head))
        coming = inner * own[1:-1].sum() + embedding_and_head * own[list({0, len(own) - 1})].sum()
        return in_one_stage(costs, last, float(coming))

    def sample_chunks(self, devices: int, tensor: int, strategy: LayerStrategy) -> tuple[int, ...]:
        """Into how many chunks every layer cuts its samples, on so many devices: `overlap.partition`.

        A pipeline has one number.  None makes a layer by itself slower than one chunk does, in either direction.  So
        plans with these chunks are never slower than without; with ZeRO-1 by one filling at most, for weights are not
        counted on to be gathered beside it.
        """
        local = -(-strategy.micro_batch * tensor // devices)
        candidates = tuple(c for c in strategy.sample_chunks if c <= local)
        if strategy.sample_chunks == (1,) or tensor == 1 or local == 1 or self.num_layers < 3:
            return (1,) * self.num_layers
        if len(candidates) == 1 or not self.cluster.overlap:
            return (candidates[0] if candidates else 1,) * self.num_layers
        key = (devices, tensor, replace(strategy, zero=0, several=False, pair=False, late=False))
        if key not in self._chunks:
            self._chunks[key] = self._best_chunks(devices, tensor, strategy, candidates)
        return self._chunks[key]

    def _best_chunks(
        self, devices: int, tensor: int, strategy: LayerStrategy, candidates: tuple[int, ...]
    ) -> tuple[int, ...]:
        places = self._places_of(devices) if strategy.program == "piped" else [self.places.at(0, devices)]
        local = -(-strategy.micro_batch * tensor // devices)
        blocks = self.index[1:-1]
        # [places, candidates, direction, exposed or filling, kinds]
        found = np.array(
            [
                [
                    [
                        self.sums.exposed(place, tensor, replace(strategy, sample_chunks=(c,)), local, direction)
                        for direction in DIRECTIONS
                    ]
                    for c in candidates
                ]
                for place in places
            ]
        )
        exposed, fillings = found[:, :, :, 0], found[:, :, :, 1]
        slower = (exposed + fillings > exposed[:, :1] * (1 + 1e-12)).any(axis=(0, 2))
        periods = exposed.sum(axis=(0, 2)) + (exposed[:, :, FORWARD].sum(axis=0) if strategy.recompute else 0.0)
        periods = np.where(slower, np.inf, periods)[:, blocks].T
        first, last = (fillings[:, :, direction].sum(axis=0)[:, blocks].T for direction in DIRECTIONS)
        if strategy.program == "piped":
            totals = periods.sum(axis=0) + first[0] + last[-1]
            return (candidates[int(totals.argmin())],) * self.num_layers
        inner = [candidates[at] for at in partition(periods, first, last)[1]]
        return (inner[0], *inner, inner[-1])

    def _places_of(self, devices: int) -> list[Place]:
        """Where stages of so many devices, all alike, may lie."""
        last = self.cluster.num_devices - devices
        starts = range(0, min(math.lcm(self.places.per_node, devices), last + 1), devices)
        return list(dict.fromkeys(self.places.at(start, devices) for start in starts))

    def _by_layer(self, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """Every layer for itself."""
        key = (place, tensor, strategy)
        if key not in self._layers:
            arrays = {name: values[self.index] for name, values in self.kind_costs(place, tensor, strategy).items()}
            local, cut = -(-strategy.micro_batch * tensor // place.devices), tensor if strategy.sequence else 1
            chunks = min(strategy.sample_chunks[0], local) if tensor > 1 else 1
            if strategy.recompute:  # a layer keeps its input, which is the boundary of the layer before it
                saved = strategy.saved or self.saved or NOTHING
                arrays["activations"] = self.activations.saved(saved, tensor, cut, local, chunks)
            else:
                arrays["activations"] = arrays["activations"] + self.activations.second_inputs(cut, local, chunks)
            self._layers[key] = LayerCosts(**arrays)
        return self._layers[key]

    def kind_costs(self, place: Place, tensor: int, strategy: LayerStrategy) -> dict[str, Array]:
        """[kinds] arrays of `LayerCosts`, each layer for itself; the equations are in the head of this file."""
        data = place.devices // tensor
        local = -(-strategy.micro_batch // data)
        zero = strategy.zero if data > 1 else 0
        wire = self.profile.bytes_per_weight
        piped = strategy.program == "piped"
        forward, backward = self.compute_seconds(local, tensor)
        forward, backward = forward * place.slowdown, backward * place.slowdown
        forward_tensor, forward_filling = self.sums.exposed(place, tensor, strategy, local, FORWARD)
        backward_tensor, backward_filling = self.sums.exposed(place, tensor, strategy, local, BACKWARD)
        scattered = self.gradients.gathered(place, tensor)
        own, tied = self.gradients.parameters / tensor, self.gradients.tied / tensor
        cut = tensor if strategy.sequence else 1
        nothing = np.zeros_like(own)
        gathered = scattered if zero == 1 else nothing  # all_gather costs what reduce_scatter does
        if self.cluster.overlap and not piped:
            gathered = np.maximum(0.0, gathered - forward - forward_tensor)
        if strategy.recompute:
            saved, plain = strategy.saved or self.saved or NOTHING, backward
            again, sums = self.activations.repeated(saved)
            backward, backward_tensor = backward + again * forward, backward_tensor + sums * forward_tensor
            if saved.host:
                copied = self.activations.copy_seconds(saved.host, tensor, cut, local)
                forward = forward + (np.maximum(0.0, copied - forward) if self.cluster.overlap else copied)
                backward = backward + (np.maximum(0.0, copied - plain) if self.cluster.overlap else copied)
        if zero == 3 and self.cluster.overlap:
            beside, after = (scattered, scattered) if piped else (2 * scattered, nothing)
            forward, forward_filling = _beside(forward, forward_filling, scattered - forward_tensor)
            backward, backward_filling = _beside(backward, backward_filling, beside - backward_tensor)
            backward = backward + after
        elif zero == 3:
            forward, backward = forward + scattered, backward + 2 * scattered
        if strategy.zero == 3 and data == 1 and strategy.program != "own" and not self.profile.used_as_stored:
            rounding = own * CAST / self.cluster.nodes[0].device.memory_bandwidth * place.slowdown
            forward, backward = forward + rounding, backward + rounding
        own_bytes, one_program = self._held(strategy, data), strategy.program != "own"
        working = self.activations.working(tensor, cut, local, recompute=strategy.recompute, one_program=one_program)
        transfer = self.gradients.of_pairs(place, tied * wire)
        gradients, reduced = (nothing, nothing) if zero == 3 else self.gradients.summed(place, tensor, shares=zero == 1)
        in_line = nothing if self.cluster.overlap and not piped else gradients
        coding = nothing if zero == 3 else self.gradients.kernels(place, tensor, own, shares=zero == 1)
        tied_coding = nothing if zero == 3 else self.gradients.kernels(place, tensor, tied, shares=zero == 1)
        return {
            "forward": np.where(self._divisible(tensor), forward, np.inf),
            "backward": backward,
            "forward_tensor": forward_tensor,
            "backward_tensor": backward_tensor,
            "gradients": gradients - in_line,
            "update": own * self._update_seconds(zero, data, place) + gathered + in_line + coding,
            "in_line": in_line,
            "gathered": gathered,
            "weights": own * own_bytes.weights,
            "optimizer": own * own_bytes.optimizer,
            "activations": self.activations.all(tensor, cut, local),
            "working": working + own * own_bytes.working,
            "forward_filling": forward_filling,
            "backward_filling": backward_filling,
            "tied": np.where(tied > 0, transfer + reduced + tied_coding, 0.0),
            "tied_bytes": tied * (own_bytes.weights + own_bytes.optimizer),
        }

    def slot(self, place: Place, tensor: int, strategy: LayerStrategy) -> Slot:
        """What a stage has for the ends of the model; nothing where these are layers like others."""
        if strategy.program != "piped":
            return Slot()
        key = (place, tensor, replace(strategy.of_embedding_and_head, sequence=strategy.sequence))
        if key not in self._slots:
            self._slots[key] = self._slot(*key)
        return self._slots[key]

    def _slot(self, place: Place, tensor: int, strategy: LayerStrategy) -> Slot:
        data = place.devices // tensor
        zero = strategy.zero if data > 1 else 0
        first, last = self.index[[0, -1]]
        shared = self.gradients.tied[last] / tensor
        own = max(self.gradients.parameters[first] / tensor, self.gradients.parameters[last] / tensor + shared)
        wire, group = self.profile.bytes_per_weight, place.data_group(tensor)
        gathered = all_gather(group, own * wire) if zero else 0.0
        own_bytes = self._held(strategy, data)
        cut = tensor if strategy.sequence else 1
        return Slot(
            weights=own * own_bytes.weights,
            optimizer=own * own_bytes.optimizer,
            update=own * self._update_seconds(zero, data, place) + gathered,
            gathered=gathered,
            reduced=self.gradients.of(group, own, shares=zero > 0)
            + float(self.gradients.kernels(place, tensor, np.array([own]), shares=zero > 0)[0]),
            exchanged=self.gradients.of_pairs(place, np.array([shared * wire]))[0] if shared else 0.0,
            output=-(-strategy.micro_batch // data) * float(self.boundary[:-1].max()) / cut,
        )

    def _held(self, strategy: LayerStrategy, data: int) -> Held:
        """Bytes of a parameter."""
        wire, state = self.profile.bytes_per_weight, self.profile.state_bytes
        as_stored, overlap = self.profile.used_as_stored, self.cluster.overlap
        own = held(strategy, data, wire, state, as_stored=as_stored, overlap=overlap)
        return replace(own, optimizer=own.optimizer + residual_bytes(self.gradient_compression))

    def _update_seconds(self, zero: int, data: int, place: Place) -> float:
        """The optimizer, per parameter of which a device updates its share."""
        return self.profile.update_seconds * place.slowdown / (data if zero else 1)

    def compute_seconds(self, local: float, tensor: int) -> tuple[Array, Array]:
        """[kinds] forward and backward seconds of `local` samples on a device of the profile."""
        key = (local, tensor)
        if key not in self._seconds:
            pairs = np.array([kind.seconds(local, tensor) for kind in self.kinds])
            self._seconds[key] = pairs[:, 0], pairs[:, 1]
        return self._seconds[key]

    def _divisible(self, tensor: int) -> Array:
        return self._tops % tensor == 0

    def reshard_seconds(self, place: Place, layer: int, before: int, after: int, micro_batch: int) -> float:
        """Seconds to give `layer`'s output, at degree `before`, the sharding of degree `after`, forward plus backward.

        Towards a larger degree the forward pass gathers samples and the backward pass slices for free; towards a
        smaller one it is the other way round.
        """
        if before == after:
            return 0.0
        low, high = sorted((before, after))
        local = -(-micro_batch * high // place.devices)
        group = place.tensor_group(math.lcm(low, high) if place.devices % math.lcm(low, high) == 0 else place.devices)
        group = replace(group, size=max(2, group.size // low))
        return all_gather(group, self.boundary[layer] * local)

    def cut_seconds(
        self, layer: int, sender: tuple[int, int, int], receiver: tuple[int, int, int], batch: int, cut: int = 1
    ) -> float:
        """Seconds to move one micro-batch of `layer`'s output to the next stage.

        Args:
          sender, receiver: (first device, devices, data degree) of the stages; the smaller degree limits.
          cut: parts of a sequence, of which every device moves its own.
        """
        (first, devices, data), (to, others, their_data) = sender, receiver
        local = max(-(-batch // data), -(-batch // their_data))
        return transfer_seconds(self.places.transfer(first, devices, to, others), self.boundary[layer] * local / cut)


def _beside(work: Array, first: Array, gathered: Array) -> tuple[Array, Array]:
    """Work and filling, beside which weights are gathered."""
    whole = np.maximum(work, gathered)
    return whole, np.maximum(work + first, gathered) - whole
