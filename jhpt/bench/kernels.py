"""Kernels compared with their references, compiled by XLA, and with a copy of the same bytes; on an NVIDIA GPU.

    mosaic       the Pallas kernel
    reference    the definition, fused by XLA
    top_k, approx_max_k    jax's functions, for scores only
    copy         a gigabyte from device memory to device memory: the highest rate

A sample is the time of many calls, queued on the device one after the other, divided by their number: the launch would
dominate that of a single call.  Without a GPU the kernels are compiled for an H100, and their memory is printed.
"""

import inspect
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhpt.bench.ratios import ratio_unit, speed_claim, times_as_fast
from jhpt.bench.results import Claim, Report, chosen, print_claims, print_table
from jhpt.compiled.deviceless import compile_only_devices, compiled_for
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import NotHere
from jhpt.kernels.operations import OPERATIONS, Operation
from jhpt.kernels.token_topk.specs import Spec as Scores
from jhpt.measure.device import device_info
from jhpt.measure.timer import interleaved

CALLS = 20
"""Calls in a sample."""

COPIED = 1 << 30
"""Bytes of the copy."""

BANDWIDTH_BOUND = ("segment_quantize", "dequantize_sum")
"""Operations whose claim is the share of the copy's bandwidth; that of others is the speed against the best
baseline."""

ANY_ORDER: dict[str, Any] = {"is_stable": False} if "is_stable" in inspect.signature(jax.lax.top_k).parameters else {}
"""Lets equal scores come in any order, which the fast implementation needs from jax 0.11 on."""

Call = Callable[[], Any]


def run(*, quick: bool, json_path: str | None, only: Sequence[str] = ()) -> int:
    """Runs the benchmark; returns the exit status.  only: operations."""
    operations = chosen(list(OPERATIONS), only)
    report = Report(path=json_path, bench="kernels", settings={"quick": quick, "calls": CALLS})
    info = device_info()
    if not info.is_gpu or (info.capability or 0) < 9:
        return _compiled_only(info.kind)
    for row in _measured(operations, rounds=5 if quick else 15, most=1 if quick else None):
        report.add([row])
    rows = report.rows
    report.add([], claims(rows))
    print_table(
        "bench kernels",
        ("operation", "arguments", "competitor", "us", "GB/s"),
        [
            (row["operation"], row["spec"], row["competitor"], f"{_median(row) * 1e6:.1f}", f"{_rate(row) / 1e9:.0f}")
            for row in rows
        ],
        words=3,
    )
    print_claims(report.claims)
    return 0


def _measured(operations: Sequence[str], rounds: int, most: int | None) -> Iterator[dict[str, Any]]:
    source = jax.random.bits(jax.random.key(0), (COPIED // 4,))  # constant numbers would be copied faster
    yield from _rows("copy", "1 GiB", {"copy": _repeated(jax.jit(lambda x: x ^ 1), (source,))}, 2 * COPIED, rounds)
    del source
    for name in operations:
        operation = OPERATIONS[name]
        for spec in operation.specs.TIMED[:most]:
            arguments = jax.block_until_ready(operation.specs.arguments(spec, jax.random.key(0)))
            calls = {kind: _repeated(run, arguments) for kind, run in competitors(operation, spec).items()}
            yield from _rows(name, _words(spec), calls, moved(operation, spec), rounds)


def competitors(operation: Operation, spec: Any) -> dict[str, Callable[..., Any]]:
    """Programs by name, for the same arguments."""
    programs: dict[str, Callable[..., Any]] = {
        "mosaic": jax.jit(operation.call(spec, "mosaic")),
        "reference": jax.jit(operation.call(spec, "reference")),
    }
    if isinstance(spec, Scores):
        k = spec.k
        programs["top_k"] = jax.jit(lambda scores, _: jax.lax.top_k(scores, k, **ANY_ORDER))
        programs["approx_max_k"] = jax.jit(lambda scores, _: jax.lax.approx_max_k(scores, k))
    return programs


def moved(operation: Operation, spec: Any) -> int:
    """Bytes that have to be read and written: arguments (only the rows that are gathered) and results."""
    arguments = operation.shapes(spec)
    results = jax.eval_shape(operation.call(spec, "reference"), *arguments)
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size"))  # noqa: E731
    chosen = getattr(spec, "chosen", 0)
    unread = (spec.rows - chosen) / spec.rows * size(arguments[0]) if chosen else 0
    return int(size(arguments) - unread + size(results))


def claims(rows: list[dict[str, Any]]) -> dict[str, Claim]:
    """A claim for every operation and size."""
    copy = _rate(rows[0])
    made = {}
    for row in rows:
        if row["competitor"] != "mosaic":
            continue
        others = [o for o in rows if (o["operation"], o["spec"]) == (row["operation"], row["spec"]) and o is not row]
        if row["operation"] in BANDWIDTH_BOUND:
            made[f"{row['operation']}[{row['spec']}]"] = Claim(
                value=_rate(row) / copy, unit="of the copy's bandwidth", setup=row["spec"]
            )
        else:
            best = min(others, key=_median)
            ratio = times_as_fast(best["samples_s"], row["samples_s"])
            unit = ratio_unit(best["competitor"], "the kernel")
            made[f"{row['operation']}_vs_best[{row['spec']}]"] = speed_claim(ratio, unit=unit, setup=row["spec"])
    return made


def _rows(operation: str, spec: str, calls: dict[str, Call], size: int, rounds: int) -> Iterator[dict[str, Any]]:
    for name, samples in interleaved(calls, rounds).items():
        each = [seconds / CALLS for seconds in samples]
        yield {"operation": operation, "spec": spec, "competitor": name, "bytes": size, "samples_s": each}


def _repeated(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    def calls() -> Any:
        for _ in range(CALLS):
            result = run(*arguments)
        return result

    return calls


def _median(row: dict[str, Any]) -> float:
    return statistics.median(row["samples_s"])


def _rate(row: dict[str, Any]) -> float:
    return row["bytes"] / _median(row)


def _words(spec: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in spec._asdict().items())


def _compiled_only(kind: str) -> int:
    """Prints the memory of the kernels, compiled for an H100."""
    try:
        mesh = Mesh(np.array(compile_only_devices(find_cluster("h100x8x1"))[:1]), "data")
        there = NamedSharding(mesh, PartitionSpec())
        lines = []
        for name, operation in OPERATIONS.items():
            for spec in operation.specs.TIMED:
                shapes = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), operation.shapes(spec)
                )
                memory: Any = compiled_for(jax.jit(operation.call(spec, "mosaic")).lower(*shapes)).memory_analysis()
                sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
                lines.append((name, _words(spec), *(f"{size / 2**20:.2f}" for size in sizes)))
    except NotHere as missing:
        print(f"jhpt bench kernels: {missing}", file=sys.stderr)
    else:
        columns = ("operation", "arguments", "MiB of arguments", "results", "temporaries")
        print_table("Mosaic kernels compiled for an H100", columns, lines, words=2)
    print(
        f"jhpt bench kernels: nothing was timed: it needs an NVIDIA GPU of capability 9.0 or newer, and this is {kind}",
        file=sys.stderr,
    )
    return 3
