"""Data parallelism whose gradients are sent in 16 bits: the runtime's own step with all-reduces of float16.

Everything is computed in float32 and micro-batches are added up in float32; the sum over the ranks is in float16, in a
ring of XLA's, which fills the wire (`benchmarks.comms`).  bfloat16 would be the usual choice, because its numbers have
the range of float32, but XLA's CPU backend widens it.  Both take as many bytes.  The result is rounded, so this is no
baseline of equal results.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jhpt.sharding.parameters import ParameterStorage
from jhpt.sharding.step import Execution
from jhpt.sharding.types import Specs, Tree
from jhpt.sharding.zero import Storage

SENT = jnp.dtype(jnp.float16)
"""What gradients are sent as."""


def with_short_sums(execution: Execution) -> Execution:
    """The same step, whose gradients are all-reduced as `SENT`."""
    return _ShortExecution(**{field.name: getattr(execution, field.name) for field in fields(execution)})


class _ShortExecution(Execution):
    @cached_property
    def _parameters(self) -> ParameterStorage:
        return _ShortParameterStorage(**vars(super()._parameters))


class _ShortParameterStorage(ParameterStorage):
    def storage(self, degree: int, blocks: bool = False) -> Storage:
        return _ShortSums(**vars(super().storage(degree, blocks)))


@dataclass(frozen=True)
class _ShortSums(Storage):
    def summed(self, gradients: Tree, specs: Specs, beside: Tree | None = None) -> Any:
        return Storage.summed(replace(self, dtype=SENT), gradients, specs, beside)
