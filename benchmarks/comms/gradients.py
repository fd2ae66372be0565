"""Data-parallel GPT blocks: the loss, the gradients of every host's samples, and their all-reduce over the hosts.

Only gradients of matrices are computed and reduced.  Those of biases and norms, a thousandth of the numbers, are never
compressed and are left out.  Device 0 of every host takes part.  Ways to reduce:

    float32              XLA's all-reduce of all gradients as one array
    16 bits              the baseline: the same in float16
    16 bits in two steps bfloat16, `CompressedAllReduce`, rows of `COLUMNS` numbers
    quantize, 8 bits     `jhpt.sharding.compression.gradients`, two steps; rounding errors become residuals
    quantize, 4 bits     the same; four ranks gather codes of 4 bits, which are as many bytes as two steps of 8 bits
    top-k                a share of every block, gathered; the rest becomes residuals

Computation and communication are in line, so the predicted seconds of a step are the sum of

    work      the program over as many devices of one host, less its collectives there, divided by their number:
              gradients, quantizing or choosing, and adding up
    travel    collectives of the same bytes on the hosts, while nothing is computed
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.comms.blocks import Blocks, placed
from benchmarks.comms.costs import REPEATS, bare_sum, gathering, two_steps
from benchmarks.comms.task import Shape
from jhpt.core.axes import DATA
from jhpt.core.compression import COLUMNS, buckets, gathers_gradients, gradient_bytes, wire_bytes
from jhpt.core.config import Compression, GradientCompression
from jhpt.models.hooks import Hooks
from jhpt.sharding.compression.all_reduce import CompressedAllReduce
from jhpt.sharding.compression.gradients import GradientReduction, Part, exchanged
from jhpt.sharding.partition import MATRICES, path_name

SHARE = 0.1
"""Share of a block's numbers that top-k sends."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A way to reduce gradients.

    compression: None: XLA's all-reduce of numbers of this dtype; `Compression`: without residuals.
    """

    name: str
    compression: Compression | GradientCompression | None = None
    dtype: Literal["float32", "float16"] = "float32"


FLOAT32, SHORT, SHORT_STEPS, BYTES = "float32", "16 bits", "16 bits in two steps", "quantize, 8 bits"
BASELINE = SHORT

EXCHANGES: tuple[Exchange, ...] = (
    Exchange(name=FLOAT32),
    Exchange(name=SHORT, dtype="float16"),
    Exchange(name=SHORT_STEPS, compression=Compression(bits=16)),
    Exchange(name=BYTES, compression=GradientCompression(kind="quantize", bits=8)),
    Exchange(name="quantize, 4 bits", compression=GradientCompression(kind="quantize", bits=4)),
    Exchange(name="top-k", compression=GradientCompression(kind="topk", share=SHARE)),
)
"""All ways, in the order of the table."""

QUICK = (SHORT, BYTES)
"""Names of the ways that `--quick` measures."""


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Data-parallel blocks over several hosts.  shape: its batch is that of one host."""

    shape: Shape
    hosts: int

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks, whole on every host."""
        return Blocks(shape=self.shape, hosts=1)

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of every matrix."""
        return [leaf.size for leaf in self._split(self.blocks.shapes(self.shape.layers))[0]]

    def _split(self, params: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """(matrices, all parameters of such matrices)."""
        named, tree = jax.tree_util.tree_flatten_with_path(params)
        places = [at for at, (path, _) in enumerate(named) if MATRICES.search(path_name(path))]

        def whole(matrices: Sequence[Any]) -> Any:
            changed = dict(zip(places, matrices, strict=True))
            return jax.tree.unflatten(tree, [changed.get(at, leaf) for at, (_, leaf) in enumerate(named)])

        return [named[at][1] for at in places], whole

    def step(self, exchange: Exchange, mesh: Mesh) -> tuple[Callable[[], jax.stages.Lowered], Callable[[], Any]]:
        """The program (residuals, parameters, x, error) -> (residuals, (values, sums)), and its arguments.

        values: of every rank, [ranks].
        """
        shape, ranks = self.shape, self.hosts
        run = self.blocks.layers(Hooks(), shape.layers)

        def local(saved: list[jax.Array], params: Any, x: jax.Array, error: jax.Array) -> Any:
            matrices, whole = self._split(params)
            value, gradients = jax.value_and_grad(lambda each: jnp.vdot(run(whole(each), x), error))(matrices)
            sums, saved = summed(exchange, gradients, saved, ranks)
            return saved, (value[None], sums)

        shapes = self.blocks.shapes(shape.layers)
        matrices = self._split(shapes)[0] if isinstance(exchange.compression, GradientCompression) else []
        rows = jax.ShapeDtypeStruct((ranks * shape.batch, shape.length, shape.width), jnp.float32)
        saved = [jax.ShapeDtypeStruct((ranks * leaf.shape[0], *leaf.shape[1:]), jnp.float32) for leaf in matrices]
        cut, replicated = PartitionSpec(DATA), PartitionSpec()
        program = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(cut, replicated, cut, cut),
                out_specs=(cut, (cut, replicated)),
                check_vma=False,
            )
        )

        def lowered() -> jax.stages.Lowered:
            def described(tree: Any, spec: PartitionSpec) -> Any:
                place = NamedSharding(mesh, spec)
                return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

            return program.lower(described(saved, cut), described(shapes, replicated), *described((rows, rows), cut))

        def arguments() -> Any:
            place = NamedSharding(mesh, cut)
            zeros = [np.zeros(leaf.shape, np.float32) for leaf in saved]
            nothing = [jax.make_array_from_callback(leaf.shape, place, leaf.__getitem__) for leaf in zeros]
            params = jax.tree.map(lambda leaf: placed(leaf, mesh, replicated), shapes)
            return nothing, params, *(placed(rows, mesh, cut, seed) for seed in (1, 2))

        return lowered, arguments

    def sent(self, exchange: Exchange) -> float:
        """Bytes that a host sends in a step."""
        numbers, compression = sum(self.sizes), exchange.compression
        if compression is None:
            return 2 * (self.hosts - 1) / self.hosts * jnp.dtype(exchange.dtype).itemsize * numbers
        if isinstance(compression, Compression):
            return wire_bytes(self.hosts, compression, 1, math.ceil(numbers / COLUMNS), COLUMNS)
        sizes = [sum(self.sizes[at] for at in bucket) for bucket in buckets(self.sizes, compression.bucket)]
        return sum(gradient_bytes(self.hosts, compression, one) for one in sizes)

    def travel(self, exchange: Exchange, mesh: Mesh) -> tuple[Any, Any]:
        """The program of `REPEATS` exchanges of the same bytes, which computes nothing else, and its arguments."""
        compression = exchange.compression
        if compression is None:
            return bare_sum(sum(self.sizes), mesh, jnp.dtype(exchange.dtype))
        if isinstance(compression, GradientCompression) and gathers_gradients(self.hosts, compression):
            return gathering(self.sent(exchange), mesh)
        return two_steps(self.sent(exchange), mesh)

    def predicted(self, on_one: dict[str, float], travel: float) -> float:
        """Seconds of a step.

        Args:
          on_one: seconds of `step` and `travel` over as many devices of one host.  travel: seconds of an exchange
            between the hosts.
        """
        return (on_one["step"] - on_one["travel"] / REPEATS) / self.hosts + travel


def summed(
    exchange: Exchange, gradients: list[jax.Array], saved: list[jax.Array], ranks: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """(sums over the ranks, residuals), on a rank, inside `shard_map`."""
    compression = exchange.compression
    if isinstance(compression, GradientCompression):
        done = exchanged(
            list(map(Part, gradients, saved)), [GradientReduction((DATA,), ranks)] * len(gradients), compression
        )
        return [part.gradient for part in done], [part.residual for part in done]
    flat = jnp.concatenate([gradient.ravel() for gradient in gradients])
    if compression is None:
        total = jax.lax.psum(flat.astype(exchange.dtype), DATA).astype(flat.dtype)
    else:
        rows = jnp.pad(flat, (0, -flat.size % COLUMNS)).reshape(1, -1, COLUMNS)
        total = CompressedAllReduce(axes=(DATA,), ranks=ranks, compression=compression).sum(rows, None).ravel()
    offsets = np.cumsum([gradient.size for gradient in gradients])
    pieces = jnp.split(total[: offsets[-1]], offsets[:-1])
    return [piece.reshape(one.shape) for piece, one in zip(pieces, gradients, strict=True)], []


def stepping(program: Callable[..., Any], saved: Any, *arguments: Any) -> Callable[[], Any]:
    """Calls of a step, each with the residuals of the one before."""

    def run() -> Any:
        nonlocal saved
        saved, result = program(saved, *arguments)
        return saved, result

    return run


def data_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """The data axis over these devices."""
    return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))
