"""The cost model: costs of every layer of a model, of the cuts between stages and of changes of the tensor degree.

`CostBasis` holds what costs are computed from, `layer_costs` computes those of one kind of layer; here they become rows
of layers, and every table is computed once per distinct place, degree and strategy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jhpt.core.cluster import Cluster, Link
from jhpt.core.config import PLAIN_GRADIENTS, GradientCompression
from jhpt.core.plan import SavedTensors, Schedule, Space
from jhpt.core.profile import ModelProfile
from jhpt.core.schedule import IN_TURN
from jhpt.planner.cost.basis import NO_OTHERS, CostBasis
from jhpt.planner.cost.collectives import DIRECTIONS, FORWARD, partition
from jhpt.planner.cost.communication import all_gather, transfer_seconds
from jhpt.planner.cost.layer_costs import KindCosts, slot
from jhpt.planner.cost.layers import ChunkCosts, LayerCosts, LayerStrategy, select_layers
from jhpt.planner.cost.memory import Slot, in_one_stage, in_pipeline, with_embedding_and_head
from jhpt.planner.cost.places import Place
from jhpt.planner.cost.schedule import Array

_Key = tuple[Place, int, LayerStrategy]
_ChunkKey = tuple[tuple[tuple[int, int, int], ...], tuple[int, ...], Place, LayerStrategy]


class End(NamedTuple):
    """A stage at one end of a transfer, and the data degree of its first or last layer."""

    place: Place
    data: int


class CostModel(CostBasis):
    """Costs of a model on a cluster.  Its arguments and attributes are those of `CostBasis`, and

    Attributes:
      alike: [layers] numbers that are equal for layers with equal costs.
      chunks: costs of the chunks that were priced so far, by their layers, place and strategy (`estimate.chunk_costs`).
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        gradient_compression: GradientCompression = PLAIN_GRADIENTS,
        saved: SavedTensors | None = None,
        others: Mapping[str, ModelProfile] = NO_OTHERS,
    ) -> None:
        super().__init__(profile, cluster, gradient_compression, saved, others)
        self._costs: dict[_Key, LayerCosts] = {}
        self._tables: dict[_Key, LayerCosts] = {}
        self._layers: dict[_Key, LayerCosts] = {}
        self._slots: dict[_Key, Slot] = {}
        self._sample_chunks: dict[tuple[int, int, LayerStrategy], tuple[int, ...]] = {}
        kinds = [int(kind) for kind in self.index]
        # A layer saves its input, which is the output of the layer before it.  The first and the last are alone.
        pairs = list(zip([-1, *kinds[:-1]], kinds, [*([False] * (len(kinds) - 1)), True], strict=True))
        self.alike: tuple[int, ...] = tuple(pairs.index(pair) for pair in pairs)
        self.chunks: dict[_ChunkKey, ChunkCosts] = {}
        self._cuts: dict[tuple[int, tuple[int, int, int], tuple[int, int, int], int, int], float] = {}

    def on(self, cluster: Cluster) -> "CostModel":
        """The same model on another cluster, whose devices are of the same kinds."""
        return CostModel(self.profile, cluster, self.gradient_compression, self.saved, self.others)

    def layer_costs(self, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """Costs of every layer at degree `tensor`, each with its best number of chunks, as one row of layers.

        Infinite where a layer does not allow the degree.
        """
        if strategy.sample_chunks == (1,):
            return self.table(place, tensor, strategy)
        key = (place, tensor, strategy)
        if key not in self._costs:
            chosen = self.sample_chunks(place.devices, tensor, strategy)
            tables = {c: self.table(place, tensor, replace(strategy, sample_chunks=(c,))) for c in {1, *chosen}}
            self._costs[key] = tables[1] if set(chosen) == {1} else select_layers(tables, (1, *chosen[1:-1], 1))
        return self._costs[key]

    def table(self, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """Costs of every layer where all have the strategy's only number of chunks.  Fillings stay separate."""
        key = (place, tensor, strategy)
        if key not in self._tables:
            costs = self._by_layer(place, tensor, strategy)
            if strategy.program != "per_stage":
                costs = with_embedding_and_head(costs, self._by_layer(place, tensor, strategy.of_embedding_and_head))
                costs = self._in_one_program(costs, place, tensor, strategy)
            self._tables[key] = costs
        return self._tables[key]

    def _in_one_program(self, costs: LayerCosts, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """What one SPMD program makes of `costs`, in which embedding and head have a strategy of their own."""
        data, width = place.devices // tensor, self.profile.bytes_per_weight
        head, local = self.kinds[self.index[-1]], -(-strategy.micro_batch // data)
        # The gradient of the logits starts the backward pass, in the compute dtype.
        logits = local * head.activation_bytes / tensor
        head_bytes = logits * (1 + width / self.profile.bytes_per_logit) + local * head.replicated_bytes
        if strategy.program == "pipeline":
            return in_pipeline(costs, head_bytes)
        numbers = self.data_collectives.parameters[self.index] / tensor
        inner, embedding_and_head = (
            self.parameter_bytes(each, each.shards(data)).absent_at_head
            for each in (strategy, strategy.of_embedding_and_head)
        )
        absent = inner * numbers[1:-1].sum() + embedding_and_head * numbers[list({0, len(numbers) - 1})].sum()
        return in_one_stage(costs, head_bytes, float(absent))

    def _by_layer(self, place: Place, tensor: int, strategy: LayerStrategy) -> LayerCosts:
        """Costs of every layer by itself."""
        key = (place, tensor, strategy)
        if key not in self._layers:
            arrays = {name: values[self.index] for name, values in self.kind_costs(place, tensor, strategy).items()}
            local, sequence = place.local(strategy.micro_batch, tensor), tensor if strategy.sequence else 1
            chunks = min(strategy.sample_chunks[0], local) if tensor > 1 else 1
            if strategy.recompute:  # a layer saves its input, which is the output of the layer before it
                saved = self.saved_tensors(strategy)
                arrays["activations"] = self.activations.saved(saved, tensor, sequence, local, chunks)
            else:
                second = self.activations.second_inputs(sequence, local, chunks)
                arrays["activations"] = arrays["activations"] + second
            self._layers[key] = LayerCosts(**arrays)
        return self._layers[key]

    def kind_costs(self, place: Place, tensor: int, strategy: LayerStrategy) -> dict[str, Array]:
        """[kinds] arrays of `LayerCosts`, for each layer by itself (`jhpt.planner.cost.layer_costs`)."""
        return KindCosts(self, place, tensor, strategy).arrays()

    def slot(self, place: Place, tensor: int, strategy: LayerStrategy) -> Slot:
        """What a stage reserves for embedding and head; nothing where these are layers like the others."""
        if strategy.program != "pipeline":
            return Slot()
        key = (place, tensor, strategy)
        if key not in self._slots:
            of_both = replace(strategy.of_embedding_and_head, sequence=strategy.sequence)
            self._slots[key] = slot(self, place, tensor, of_both)
        return self._slots[key]

    def sample_chunks(self, devices: int, tensor: int, strategy: LayerStrategy) -> tuple[int, ...]:
        """The number of chunks into which every layer cuts its samples, on so many devices (`collectives.partition`).

        In a pipeline all layers have the same number.  No number is chosen that makes a layer by itself slower than one
        chunk does, in either direction, its collectives of ZeRO-2 and ZeRO-3 included.  So plans with these chunks are
        never slower than plans without; with ZeRO-1 by at most one filling, because the all-gather of weights is not
        assumed to run beside it.
        """
        local = -(-strategy.micro_batch * tensor // devices)
        candidates = tuple(c for c in strategy.sample_chunks if c <= local)
        if strategy.sample_chunks == (1,) or tensor == 1 or local == 1 or self.num_layers < 3:
            return (1,) * self.num_layers
        if len(candidates) == 1 or not self.cluster.overlap:
            return (candidates[0] if candidates else 1,) * self.num_layers
        # These fields do not change the choice.
        shared = replace(
            strategy,
            zero=strategy.zero if strategy.zero > 1 else 0,
            zero_ranks=strategy.zero_ranks if strategy.zero > 1 else None,
            several_micro_batches=False,
            accumulates=False,
            two_micro_batches=False,
            reduces_late=False,
        )
        key = (devices, tensor, shared)
        if key not in self._sample_chunks:
            self._sample_chunks[key] = self._best_chunks(devices, tensor, strategy, candidates)
        return self._sample_chunks[key]

    def _best_chunks(
        self, devices: int, tensor: int, strategy: LayerStrategy, candidates: tuple[int, ...]
    ) -> tuple[int, ...]:
        pipeline = strategy.program == "pipeline"
        places = self._stage_places(devices) if pipeline else [self.places.at(0, devices)]
        local = -(-strategy.micro_batch * tensor // devices)
        blocks = self.index[1:-1]
        strategies = [replace(strategy, sample_chunks=(c,)) for c in candidates]
        # [places, candidates, direction, exposed or filling, kinds]
        seconds = np.array(
            [
                [
                    [self.tensor_all_reduce.exposed(place, tensor, each, local, direction) for direction in DIRECTIONS]
                    for each in strategies
                ]
                for place in places
            ]
        )
        exposed, fillings = seconds[:, :, :, 0], seconds[:, :, :, 1]
        slower = (exposed + fillings > exposed[:, :1] * (1 + 1e-12)).any(axis=(0, 2))[:, blocks]
        periods = exposed.sum(axis=(0, 2)) + (exposed[:, :, FORWARD].sum(axis=0) if strategy.recompute else 0.0)
        first, last = (fillings[:, :, direction].sum(axis=0)[:, blocks].T for direction in DIRECTIONS)

        def best() -> tuple[int, ...]:
            """Of each block the position of its number among the candidates."""
            allowed = np.where(slower, np.inf, periods[:, blocks]).T
            if pipeline:
                totals = allowed.sum(axis=0) + first[0] + last[-1]
                return (int(totals.argmin()),) * len(blocks)
            return partition(allowed, first, last)[1]

        chosen = best()
        while strategy.zero > 1 and len(used := sorted({0, *chosen})) > 1:
            also = self._slower_layers(places, tensor, [strategies[at] for at in used])[:, 1:-1]
            if (also <= slower[used]).all():
                break
            slower[used] |= also
            chosen = best()
        inner = [candidates[at] for at in chosen]
        return (inner[0], *inner, inner[-1])

    def _slower_layers(
        self, places: Sequence[Place], tensor: int, strategies: Sequence[LayerStrategy]
    ) -> npt.NDArray[np.bool_]:
        """[strategies, layers] whether a pass of the layer takes longer than with the first strategy, anywhere.

        Collectives of ZeRO-2 and ZeRO-3 hide behind computation only while the tensor axis does not use the links, so
        hiding the all-reduces of that axis may expose as many seconds of them.
        """
        tables = [[self._by_layer(place, tensor, strategy) for strategy in strategies] for place in places]
        # [places, strategies, directions, layers]
        passes = np.array(
            [[(t.forward + t.forward_tensor, t.backward + t.backward_tensor) for t in row] for row in tables]
        )
        fillings = np.array([[(t.forward_filling, t.backward_filling) for t in row] for row in tables])
        slower: npt.NDArray[np.bool_] = (passes + fillings > passes[:, :1] * (1 + 1e-12)).any(axis=(0, 2))
        return slower

    def _stage_places(self, devices: int) -> list[Place]:
        """The distinct places of equal stages with so many devices."""
        last = self.cluster.num_devices - devices
        starts = range(0, min(math.lcm(self.places.per_node, devices), last + 1), devices)
        return list(dict.fromkeys(self.places.at(start, devices) for start in starts))

    def reshard_seconds(
        self, place: Place, layer: int, before: int, after: int, micro_batch: int, *, sequence: bool = False
    ) -> float:
        """Seconds, forward plus backward, to change `layer`'s output from tensor degree `before` to `after`.

        Towards a larger degree the forward pass gathers samples and the backward pass slices at no cost; towards a
        smaller degree it is the other way round.

        Args:
          sequence: with sequence parallelism the output, or its error, is gathered first where it comes from.
        """
        if before == after:
            return 0.0
        low, high = sorted((before, after))
        local = -(-micro_batch * high // place.devices)
        group = place.tensor_group(math.lcm(low, high) if place.devices % math.lcm(low, high) == 0 else place.devices)
        group = replace(group, size=max(2, group.size // low))
        seconds = all_gather(group, self.boundary[layer] * local)
        for degree in (before, after) if sequence else ():
            whole = self.boundary[layer] * -(-micro_batch * degree // place.devices)
            seconds += all_gather(place.tensor_group(degree), whole)
        return seconds

    def cut_seconds(
        self, layer: int, sender: tuple[int, int, int], receiver: tuple[int, int, int], batch: int, sequence: int = 1
    ) -> float:
        """`moved_seconds` between stages of neighbouring devices.

        Args:
          sender, receiver: (first device, devices, data degree) of the stages.
        """
        key = (layer, sender, receiver, batch, sequence)
        if key not in self._cuts:
            (first, devices, data), (to, others, their_data) = sender, receiver
            ends = End(self.places.at(first, devices), data), End(self.places.at(to, others), their_data)
            transfer = self.places.transfer(first, devices, to, others)
            self._cuts[key] = self.moved_seconds(layer, transfer, ends, batch, sequence)
        return self._cuts[key]

    def ways(self, schedule: Schedule, space: Space) -> int:
        """How many times as long as one transfer neighbours take for one: where they exchange in turn, in one program,
        two transfers cross."""
        return self.cluster.both_ways if space == "spmd" and schedule in IN_TURN else 1

    def moved_seconds(
        self, layer: int, transfer: tuple[Link, int], ends: tuple[End, End], batch: int, sequence: int = 1
    ) -> float:
        """Seconds to move one micro-batch of `layer`'s output to the next stage, or its error back: the mean of both.

            size / R + a,   size = bytes of ceil(b / d) samples, d the smaller data degree;   rate R, latency a

        If the stages have different numbers of devices, every tensor rank of the larger one receives a share of the
        rows and gathers the others (`jhpt.sharding.stages.transfer`).  It receives one way only: half of that counts.

        Args:
          transfer: the link and its senders (`Places.between`).
          ends: both stages.
          sequence: parts into which sequence parallelism cuts the output; every device moves its own.
        """
        size = float(self.boundary[layer])
        seconds = transfer_seconds(transfer, size * -(-batch // min(end.data for end in ends)) / sequence)
        fewer, more = sorted(ends, key=lambda end: end.place.devices)
        if more.place.devices > fewer.place.devices:
            ranks = more.place.devices // more.data
            seconds += all_gather(more.place.tensor_group(ranks), size * -(-batch // more.data)) / 2
        return seconds
