"""A plan of space=general, ready to run: gradients and sums of global batches, of which every stage has its part.

All communication is written down: within a stage as in one SPMD program of one stage (`parameters`, `tensor`,
`single_stage`), between stages `transfer`, and over all stages `everywhere`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhpt.core.schedule import timetable
from jhpt.sharding.stages.batches import chunk_batch, placed_batch
from jhpt.sharding.stages.everywhere import Everywhere
from jhpt.sharding.stages.layout import EMBEDDING, StagesLayout
from jhpt.sharding.stages.passes import ChunkPrograms
from jhpt.sharding.stages.settled import settled
from jhpt.sharding.stages.transfer import Transfer
from jhpt.sharding.stages.walk import Route, Walk
from jhpt.sharding.step import Execution
from jhpt.sharding.types import PyTree

Parts = tuple[Any, ...]
"""Something of every chunk; None of those that have no device here."""


class Found(NamedTuple):
    """gradients: of the sum of losses x scale, stored like the parameters.  report: on every stage, [1 + sums] float32:
    the square of the norm of all gradients, and the sums over the batch."""

    gradients: Parts
    report: Parts


@dataclass(frozen=True, eq=False, kw_only=True)
class StagesExecution:
    """executions: of every chunk's layout.  params: shapes of the model's tree.  rows: a batch, for its shapes.
    options: the compiler's."""

    layout: StagesLayout
    executions: tuple[Execution, ...]
    params: PyTree
    rows: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def gradients(self, params: Parts, batches: Parts, keys: Parts) -> Found:
        """Of the batch, by every chunk's stored parameters.  keys: of the step."""
        plan = self.layout.plan
        zeros = self._each(lambda at: self.route.programs[at].zeros(params[at]))
        walk = Walk(route=self.route, params=self._read(params), batches=batches, keys=keys, totals=list(zeros))
        walk.step(timetable(plan.schedule, len(plan.stages), plan.chunks, plan.micro_batches))
        gradients = self._each(lambda at: self.route.programs[at].finish(walk.totals[at]))
        gradients = self._with_shared(gradients)
        reports = self._each(lambda at: self.route.programs[at].report(gradients[at], self._sums_of(walk, at)))
        return Found(gradients, self._report_everywhere(reports))

    def sums(self, params: Parts, batches: Parts, keys: Parts) -> Parts:
        """The sums over the batch, on every stage, [sums]; forward only."""
        walk = Walk(route=self.route, params=self._read(params), batches=batches, keys=keys)
        walk.evaluation(self.layout.plan.micro_batches)
        last = len(self.layout.chunks) - 1
        sums = self._each(lambda at: self.route.programs[at].sums(walk.sums) if at == last else None)
        return self._sums_everywhere(sums)

    def batches(self, rows: Any) -> Parts:
        """A global batch, a tree of numpy arrays [B, ...], on the stages."""
        return placed_batch(self.layout, self._any_parts, rows)

    @cached_property
    def scale(self) -> float:
        """What losses are multiplied by before they are differentiated, which keeps sums near 1."""
        return 1.0 / max(leaf.size for leaf in jax.tree.leaves(self.rows))

    @cached_property
    def stored(self) -> Parts:
        """Shapes of every chunk's stored parameters."""
        count = range(len(self.layout.chunks))
        return tuple(jax.eval_shape(lambda tree, at=at: self.layout.part(at, tree), self.params) for at in count)

    @property
    def num_sums(self) -> int:
        """How many numbers a loss has (`types.LossSums`)."""
        return len(jax.tree.leaves(self._traced[1]))

    @property
    def route(self) -> Route:
        """The programs of all chunks, and the transfers between them."""
        return self._traced[0]

    @property
    def sums_tree(self) -> Any:
        """The structure of sums, whose leaves are in the order of reports."""
        return jax.tree.structure(self._traced[1])

    @cached_property
    def _traced(self) -> tuple[Route, Any]:
        """(the route, shapes of sums): every program's shapes follow from those of the chunk before."""
        key, at = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
        programs, up, down = list[ChunkPrograms](), list[Transfer](), list[Transfer]()
        x = sums = None
        for chunk, execution, params in zip(self.layout.chunks, self.executions, self.stored, strict=True):
            one = ChunkPrograms(
                placed=chunk, execution=execution, stored=params, entering=x, scale=self.scale, options=self.options
            )
            batch = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
                chunk_batch(chunk, self._any_parts, self.rows),
            )
            y = jax.eval_shape(one.evaluate, jax.eval_shape(one.read, params), x, batch, key, at)
            programs.append(one)
            if chunk.heads:
                sums = y
                break
            following = self.layout.chunks[len(programs)]
            x = jax.ShapeDtypeStruct((following.room, *y.shape[1:]), y.dtype)
            source, target = chunk.named(chunk.rows(chunk.exit)), following.named(following.rows(following.entry))
            up.append(Transfer(source, target, y.shape, x.shape, chunk.micro_batch, y.dtype))
            down.append(Transfer(target, source, x.shape, y.shape, chunk.micro_batch, y.dtype))
        return Route(chunks=self.layout.chunks, programs=programs, up=up, down=down), sums

    @property
    def _any_parts(self) -> Any:
        return next(iter(self.executions[0].parts.values()))

    def _each(self, function: Callable[[int], Any]) -> Parts:
        """function(number) of every chunk that has devices here."""
        return tuple(settled(function(at)) if chunk.here else None for at, chunk in enumerate(self.layout.chunks))

    def _read(self, params: Parts) -> Parts:
        """Every chunk's parameters as its passes read them."""
        return self._each(lambda at: self.route.programs[at].read(params[at]))

    def _sums_of(self, walk: Walk, at: int) -> list[Any] | None:
        return walk.sums if self.layout.chunks[at].heads else None

    def _with_shared(self, gradients: Parts) -> Parts:
        """Gradients of parameters that embedding and head share: on the first and the last chunk the sum of both."""
        if not self.layout.copies:
            return gradients
        *between, last = (dict(one) if one is not None else None for one in gradients)
        first = between[0]
        for name in self.layout.shared_names:
            there, back = self._shared_transfers[name]
            one, other = (None if part is None else part[EMBEDDING][name] for part in (first, last))
            from_other, from_one = back(other), there(one)
            for part, mine, more in ((first, one, from_other), (last, other, from_one)):
                if part is not None:
                    part[EMBEDDING] = {**part[EMBEDDING], name: _added(mine, more)}
        return (*between, last)

    @cached_property
    def _shared_transfers(self) -> dict[str, tuple[Transfer, Transfer]]:
        """By name: from the first chunk to the last, and back."""
        ends = [(self.layout.chunks[at].layout, self.stored[at]) for at in (0, -1)]
        one, other = (layout.shardings(params)[EMBEDDING] for layout, params in ends)
        made = {}
        for name in self.layout.shared_names:
            shape, dtype = self.stored[0][EMBEDDING][name].shape, jnp.float32
            there = Transfer(one[name], other[name], shape, shape, shape[0], dtype)
            made[name] = there, Transfer(other[name], one[name], shape, shape, shape[0], dtype)
        return made

    @cached_property
    def _report_everywhere(self) -> Everywhere:
        return Everywhere(self.layout, 1 + self.num_sums)

    @cached_property
    def _sums_everywhere(self) -> Everywhere:
        return Everywhere(self.layout, self.num_sums)


_added = jax.jit(jnp.add, donate_argnums=0)
