"""What every cost is computed from: a model's profile on a cluster, and the options that hold for the whole plan."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from jhpt.core.cluster import Cluster
from jhpt.core.config import PLAIN_GRADIENTS, GradientCompression
from jhpt.core.divisors import divisors
from jhpt.core.plan import SavedTensors, Space, Zero
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.planner.cost.activations import NOTHING, Activations
from jhpt.planner.cost.collectives import DataCollectives, TensorAllReduce
from jhpt.planner.cost.communication import residual_bytes
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.memory import FLOAT32, ParameterBytes, parameter_bytes
from jhpt.planner.cost.paces import Pace, paces
from jhpt.planner.cost.places import Place, Places
from jhpt.planner.cost.schedule import Array

NO_OTHERS: Mapping[str, ModelProfile] = MappingProxyType({})
"""No profiles of further kinds of devices."""


class CostBasis:
    """A model on a cluster.

    Args:
      profile: costs of the model's layers on a kind of device.
      gradient_compression: of the gradients' all-reduces over the data ranks.
      saved: what plans that recompute save where their strategy names nothing; None: the layers' inputs only.
      others: profiles of the same model on the other kinds of devices of a cluster, by `Device.rates`.

    Attributes:
      paces: of every kind of device, in the order of `Places.kinds`.
      kinds: the distinct kinds of layers.  index: [layers] the position of each layer's kind.
      boundary, inputs: [layers] bytes of a layer's output and of its input, per sample.
      tied_layer: the layer that shares a parameter with the first one, or None.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        gradient_compression: GradientCompression = PLAIN_GRADIENTS,
        saved: SavedTensors | None = None,
        others: Mapping[str, ModelProfile] = NO_OTHERS,
    ) -> None:
        self.profile, self.cluster, self.gradient_compression, self.saved, self.others = (
            profile,
            cluster,
            gradient_compression,
            saved,
            others,
        )
        self.places = Places(cluster, profile.dtype)
        self.paces = paces(profile, others, self.places.kinds)
        names = list(profile.kinds)
        self.kinds: list[LayerKind] = [profile.kinds[name] for name in names]
        self.index = np.array([names.index(layer) for layer in profile.layers])
        self.boundary = np.array([self.kinds[i].boundary_bytes for i in self.index])
        self.inputs = np.concatenate([[0.0], self.boundary[:-1]])
        tied = [layer for layer, kind in enumerate(self.index) if self.kinds[kind].tied_parameters]
        self.tied_layer: int | None = tied[0] if tied else None
        self.activations = Activations(self.kinds, self.index, self.inputs, profile.causal)
        self.tensor_all_reduce = TensorAllReduce(profile, self.places, self.kinds, self.compute_seconds)
        self.data_collectives = DataCollectives(
            self.places, self.kinds, profile.bytes_per_weight, gradient_compression, profile.framework
        )
        self._max_tensor = np.array([kind.max_tensor for kind in self.kinds])
        most = cluster.num_devices
        self._degrees = sorted(
            {t for kind in self.kinds for t in divisors(kind.max_tensor, min(kind.max_tensor, most))}
        )
        self._seconds: dict[tuple[tuple[int, ...], float, int, int], tuple[Array, Array]] = {}

    @property
    def num_layers(self) -> int:
        """Number of layers, embedding and head included."""
        return len(self.index)

    @property
    def stage_dispatch(self) -> float:
        """Seconds on top of every pass of a stage that has a program of its own."""
        return self.profile.framework.stage_dispatch

    def allowed(self, layer: int, tensor: int) -> bool:
        """Whether the layer can be cut into `tensor` shards."""
        return self.kinds[self.index[layer]].max_tensor % tensor == 0

    def kinds_allowed(self, tensor: int) -> Array:
        """[kinds] whether a layer of each kind can be cut into `tensor` shards."""
        return self._max_tensor % tensor == 0

    def common_degrees(self, devices: int) -> list[int]:
        """Tensor degrees up to `devices` that every layer allows."""
        common = math.gcd(*(kind.max_tensor for kind in self.kinds))
        return [t for t in range(1, min(common, devices) + 1) if common % t == 0]

    def degrees(self, devices: int) -> list[int]:
        """Tensor degrees that divide `devices` and that some layer allows."""
        return [t for t in self.degrees_up_to(devices) if devices % t == 0]

    def degrees_up_to(self, devices: int) -> list[int]:
        """Tensor degrees up to `devices` that some layer allows."""
        return [t for t in self._degrees if t <= devices]

    def levels(self, requested: tuple[Zero, ...], data: int, space: Space, micro_batches: int) -> tuple[Zero, ...]:
        """The requested ZeRO levels that differ from each other on so many data ranks, with so many micro-batches.

        With one micro-batch ZeRO-2 is the same as ZeRO-1, which reduces gradients once.
        A single rank shards nothing, so ZeRO-1 and ZeRO-2 are the same as ZeRO-0.  ZeRO-3 is the same too, except in
        one SPMD program whose weights are not stored in the compute dtype (`memory`).  Programs per stage have no
        ZeRO-2.  ZeRO-2 and ZeRO-3 exclude gradient compression.
        """
        if space == "general" or (micro_batches == 1 and 1 in requested):
            requested = tuple(level for level in requested if level != 2)
        if data > 1:
            return requested
        rounds = space == "spmd" and (self.profile.bytes_per_weight < FLOAT32 or not self.profile.used_as_stored)
        rounds = rounds and not self.gradient_compression.on
        first = [level for level in requested if level < 3 or not rounds][:1]
        return (*first, *(level for level in requested if level == 3 and rounds))

    @property
    def repeats(self) -> bool:
        """Whether tensor ranks are known to repeat computation that sequence parallelism would divide."""
        return any(timing.repeated for kind in self.kinds for timing in kind.timings)

    def cuts_sequences(self, tensor: int) -> bool:
        """Whether samples are sequences of tokens that sequence parallelism can cut into `tensor` equal parts."""
        return self.profile.sample_tokens is not None and self.profile.sample_tokens % tensor == 0

    def compute_seconds(
        self, kinds: tuple[int, ...], local: float, tensor: int, sequence: int = 1
    ) -> tuple[Array, Array]:
        """[kinds] seconds of the forward and of the backward pass of `local` samples.

        Args:
          kinds: of the devices that compute the same layers.  For each layer and pass the slowest one counts.
          sequence: number of parts into which sequence parallelism cuts what every tensor rank would do in full.
        """
        key = (kinds, local, tensor, sequence)
        if key not in self._seconds:
            pairs = np.max([self._pairs(self.paces[kind], local, tensor, sequence) for kind in kinds], axis=0)
            self._seconds[key] = pairs[:, 0], pairs[:, 1]
        return self._seconds[key]

    def least_seconds(self, local: float, tensor: int, *, sequence: bool) -> tuple[Array, Array]:
        """[kinds] as `compute_seconds`, on the fastest kind of device; sequence: with sequence parallelism."""
        cut = tensor if sequence else 1
        each = [self.compute_seconds((kind,), local, tensor, cut) for kind in range(len(self.paces))]
        forward, backward = np.min(np.array(each), axis=0)
        return forward, backward

    def _pairs(self, pace: Pace, local: float, tensor: int, sequence: int) -> Array:
        """[kinds, 2] seconds of both passes on one kind of device."""
        seconds = [
            kind.seconds(local, tensor, sequence) for kind in map(pace.profile.kinds.__getitem__, self.profile.kinds)
        ]
        return pace.compute * np.array(seconds)

    def update_seconds(self, zero: int, data: int, place: Place) -> float:
        """Seconds of the optimizer per parameter of the model; with ZeRO over `data` ranks a device updates 1 / data of
        them."""
        paces = map(self.paces.__getitem__, place.kinds)
        return max(pace.profile.update_seconds * pace.update for pace in paces) / (data if zero else 1)

    def parameter_bytes(self, strategy: LayerStrategy, data: int) -> ParameterBytes:
        """Bytes on a device per parameter, the residual of gradient compression included.

        data: the data ranks over which ZeRO shards.
        """
        profile = self.profile
        size = parameter_bytes(
            strategy,
            data,
            profile.bytes_per_weight,
            profile.state_bytes,
            as_stored=profile.used_as_stored,
            overlap=self.cluster.overlap,
        )
        return replace(size, optimizer=size.optimizer + residual_bytes(self.gradient_compression))

    def saved_tensors(self, strategy: LayerStrategy) -> SavedTensors:
        """What a strategy with recomputation saves."""
        return strategy.saved or self.saved or NOTHING
