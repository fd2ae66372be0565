"""A mesh and a ZeRO level -> the sharding of everything a training step touches."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.core.axes import DATA
from jhpt.sharding.rules import activation_spec, parameter_spec, path_name


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where parameters, optimizer state, gradients, batches and activations lie.

    zero: 0 replicates over the data axis; 1 shards the optimizer state (gradients are reduce-scattered, new
      parameters all-gathered); 3 shards the parameters too (gathered where they are used).
    """

    mesh: Mesh
    zero: int = 0

    @property
    def replicated(self) -> NamedSharding:
        """One whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Rows over the data axis."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def parameters(self, shapes: Any) -> Any:
        """Shardings for a tree of parameters."""
        return self._shardings(shapes, over_data=self.zero >= 3)

    def optimizer(self, shapes: Any) -> Any:
        """Shardings for a tree of optimizer state, or of gradients on their way into it."""
        return self._shardings(shapes, over_data=self.zero >= 1)

    def _shardings(self, shapes: Any, over_data: bool) -> Any:
        data_size = self.mesh.shape[DATA]

        def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            return NamedSharding(self.mesh, parameter_spec(path_name(path), leaf.shape, data_size, over_data))

        return jax.tree_util.tree_map_with_path(sharding, shapes)

    def constrain(self, x: jax.Array, dims: tuple[str | None, ...]) -> jax.Array:
        """States how an activation lies: the hook that models call."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, activation_spec(dims)))

    def own_rows(self, batch_size: int) -> slice:
        """The rows of a global batch that this process has to supply."""
        indices = self.batch.addressable_devices_indices_map((batch_size,)).values()
        spans = [index[0].indices(batch_size) for index in indices if index is not None]
        return slice(min(span[0] for span in spans), max(span[1] for span in spans))
