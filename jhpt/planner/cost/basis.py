"""What every cost is computed from: a model's profile, a cluster, and the options that hold for the whole plan."""

import math
from dataclasses import replace

import numpy as np

from jhpt.core.cluster import Cluster
from jhpt.core.config import PLAIN_GRADIENTS, GradientCompression
from jhpt.core.plan import SavedTensors, Zero
from jhpt.core.profile import LayerKind, ModelProfile
from jhpt.planner.cost.communication import Place, Places
from jhpt.planner.cost.compression import residual_bytes
from jhpt.planner.cost.gradients import DataCollectives
from jhpt.planner.cost.layers import LayerStrategy, Space
from jhpt.planner.cost.memory import FLOAT32, ParameterBytes, parameter_bytes
from jhpt.planner.cost.recompute import NOTHING, Activations
from jhpt.planner.cost.schedule import Array
from jhpt.planner.cost.tensor_all_reduce import TensorAllReduce


class CostBasis:
    """A model on a cluster.

    Args:
      profile: costs of the model's layers on the first node's device.
      gradient_compression: of the gradients' all-reduces over the data ranks.
      saved: what plans that recompute save where their strategy names nothing; None: the layers' inputs only.

    Attributes:
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
    ) -> None:
        self.profile, self.cluster, self.gradient_compression, self.saved = (
            profile,
            cluster,
            gradient_compression,
            saved,
        )
        self.places = Places(cluster, profile.dtype)
        names = list(profile.kinds)
        self.kinds: list[LayerKind] = [profile.kinds[name] for name in names]
        self.index = np.array([names.index(layer) for layer in profile.layers])
        self.boundary = np.array([self.kinds[i].boundary_bytes for i in self.index])
        self.inputs = np.concatenate([[0.0], self.boundary[:-1]])
        tied = [layer for layer, kind in enumerate(self.index) if self.kinds[kind].tied_parameters]
        self.tied_layer: int | None = tied[0] if tied else None
        self.activations = Activations(self.kinds, self.index, self.inputs, profile.causal, cluster.nodes[0].host)
        self.tensor_all_reduce = TensorAllReduce(profile, cluster, self.kinds, self.compute_seconds)
        self.data_collectives = DataCollectives(
            cluster, self.places, self.kinds, profile.bytes_per_weight, gradient_compression
        )
        self._max_tensor = np.array([kind.max_tensor for kind in self.kinds])
        self._seconds: dict[tuple[float, int], tuple[Array, Array]] = {}

    @property
    def num_layers(self) -> int:
        """Number of layers, embedding and head included."""
        return len(self.index)

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
        largest = max(kind.max_tensor for kind in self.kinds)
        return [
            t
            for t in range(1, min(largest, devices) + 1)
            if devices % t == 0 and any(kind.max_tensor % t == 0 for kind in self.kinds)
        ]

    def levels(self, requested: tuple[Zero, ...], data: int, space: Space) -> tuple[Zero, ...]:
        """The requested ZeRO levels that differ from each other on this number of data ranks.

        A single rank shards nothing, so ZeRO-1 is the same as ZeRO-0.  ZeRO-3 is the same too, except in one SPMD
        program whose weights are not stored in the compute dtype (`memory`).  ZeRO-3 excludes gradient compression.
        """
        if data > 1:
            return requested
        rounds = space == "spmd" and (self.profile.bytes_per_weight < FLOAT32 or not self.profile.used_as_stored)
        rounds = rounds and not self.gradient_compression.on
        first = [level for level in requested if level < 3 or not rounds][:1]
        return (*first, *(level for level in requested if level == 3 and rounds))

    def compute_seconds(self, local: float, tensor: int) -> tuple[Array, Array]:
        """[kinds] seconds of the forward and of the backward pass of `local` samples on a device of the profile."""
        key = (local, tensor)
        if key not in self._seconds:
            pairs = np.array([kind.seconds(local, tensor) for kind in self.kinds])
            self._seconds[key] = pairs[:, 0], pairs[:, 1]
        return self._seconds[key]

    def update_seconds(self, zero: int, data: int, place: Place) -> float:
        """Seconds of the optimizer per parameter of the model; with ZeRO a device updates 1 / data of them."""
        return self.profile.update_seconds * place.slowdown / (data if zero else 1)

    def parameter_bytes(self, strategy: LayerStrategy, data: int) -> ParameterBytes:
        """Bytes on a device per parameter, the residual of gradient compression included."""
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
