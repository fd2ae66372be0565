"""Parts of the GPU kit that are not commands of jhpt: `python -m benchmarks.gpu.checks NAME --result FILE`.

Every check writes each result as soon as it has it, so that a check that is stopped leaves those that it had.
"""

import argparse
import json
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

DRY_MODEL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 2,
    "model.max_length": 32,
    "data.sequence_length": 32,
    "data.batch_size": 4,
}

QUIET: dict[str, Any] = {
    "log.every": 1,
    "log.tensorboard": False,
    "evaluation.sample_tokens": 0,
    "evaluation.batches": 1,
}
QUIET |= {"parallel.data": 1}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "schedules": {
        "micro-batches": {"parallel.micro_batches": 4},
        "ZeRO-3": {"parallel.zero": 3},
        "ZeRO-1, micro-batches": {"parallel.zero": 1, "parallel.micro_batches": 2},
        "recompute everything": {"memory.recompute": "full"},
        "sample chunks": {"parallel.sample_chunks": 2},
    },
    "offload": {
        "offload both": {"memory.offload": "both"},
        "offload parameters": {"memory.offload": "parameters"},
        "offload optimizer": {"memory.offload": "optimizer"},
    },
    "low-precision": {
        "int8 moments, Kahan weights": {"optimizer.moments": "int8", "optimizer.weights": "bfloat16_kahan"},
    },
}
"""Options that one device can run, in groups.  Schedules and offload train the same model, so their losses agree with
those of the plain run."""


class Result:
    """A file of the results so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, dict[str, Any]()

    def note(self, **values: Any) -> None:
        """Adds values and writes the file, whole at any moment."""
        self.values |= values
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1) + "\n")
        partial.replace(self.path)


def memory_gib(entry: str = "MemTotal") -> float:
    """An entry of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{entry}:")).split()[1]) / 2**20


def environment(result: Result, options: argparse.Namespace) -> None:
    """Versions, memory, and the device as jax sees it."""
    names = ("jax", "nvidia", "numpy", "flax", "optax", "orbax", "tensorstore", "scipy", "torch")
    versions = {d.name: d.version for d in distributions() if d.name.lower().startswith(names)}
    result.note(python=sys.version.split()[0], kernel=platform.release(), cores=os.cpu_count(), versions=versions)
    result.note(memory_gib=memory_gib(), available_gib=memory_gib("MemAvailable"), cuda=os.environ.get("CUDA_ROOT"))
    import jax

    device = jax.local_devices()[0]
    result.note(
        jax=jax.__version__,
        device=device.device_kind,
        platform=device.platform,
        memory_kinds=[memory.kind for memory in device.addressable_memories()],
    )
    if device.platform == "cpu" and not options.dry:
        raise SystemExit("jax finds no GPU here")


def grow_memory(result: Result, options: argparse.Namespace) -> None:
    """Touches memory until the machine reports no more: some virtual machines grow only as memory is used."""
    result.note(before_gib=memory_gib())
    most, held, before = (1 if options.dry else 112), list[mmap.mmap](), time.perf_counter()
    # Never the last 3 GiB that are free: if memory does not grow, the kernel would end this process.
    while len(held) < most and memory_gib("MemAvailable") > 3 and time.perf_counter() - before < 60:
        block = mmap.mmap(-1, 1 << 30)
        for page in range(0, 1 << 30, mmap.PAGESIZE * (1024 if options.dry else 1)):
            block[page] = 1
        held.append(block)
    result.note(touched_gib=len(held), most_gib=memory_gib())


def copies(result: Result, options: argparse.Namespace) -> None:
    """Bytes per second between pinned memory and the device: in either direction, and in both at the same time."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from jhpt.measure.timer import interleaved, spread

    device = jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    host = SingleDeviceSharding(device, memory_kind="pinned_host" if "pinned_host" in kinds else None)
    there = SingleDeviceSharding(device)
    for mib in (4, 16) if options.dry else (4, 64, 1024):
        x = jax.random.normal(jax.random.key(0), (mib << 18,))
        y = jax.block_until_ready(jax.device_put(x, host))

        def to_device(y: jax.Array = y) -> Any:
            return jax.device_put(y, there, may_alias=False)

        def to_host(x: jax.Array = x) -> Any:
            return jax.device_put(x, host, may_alias=False)

        calls: dict[str, Callable[[], Any]] = {"to device": to_device, "to host": to_host}
        calls["both"] = lambda pair=(to_device, to_host): [copy() for copy in pair]  # type: ignore[misc]
        seconds = {name: spread(samples)[0] for name, samples in interleaved(calls, 3 if options.dry else 7).items()}
        result.note(
            **{f"{mib} MiB": {name: x.nbytes * (1 + (name == "both")) / each for name, each in seconds.items()}}
        )


def losses(preset: str, overrides: dict[str, Any], *, steps: int) -> list[float]:
    """Training losses of a short run, step by step."""
    import jax

    import jhpt

    if overrides.get("model.dtype") == "float32":  # otherwise products are rounded to TF32, which has three digits
        jax.config.update("jax_default_matmul_precision", "highest")
    settings = QUIET | {"train.steps": steps, "optimizer.warmup_steps": 2} | overrides
    with tempfile.TemporaryDirectory() as folder:
        run = jhpt.train(preset, overrides=settings, out=f"{folder}/run")
        return [run.losses[step] for step in sorted(run.losses)]


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def parity(result: Result, options: argparse.Namespace) -> None:
    """Losses of the same runs on the device and on the CPU."""
    steps, small = (2, DRY_MODEL) if options.dry else (20, {})
    expected = None
    for name, dtype, variables in (
        ("cpu", "float32", {"JAX_PLATFORMS": "cpu"}),
        ("float32", "float32", {}),
        ("bfloat16", "bfloat16", {}),
    ):
        spec = {"preset": f"{options.family}-tiny", "overrides": small | {"model.dtype": dtype}, "steps": steps}
        code = "import json, sys; from benchmarks.gpu.checks import losses; s = json.loads(sys.argv[1]); "
        code += "print(json.dumps(losses(s['preset'], s['overrides'], steps=s['steps'])))"
        command = [sys.executable, "-c", code, json.dumps(spec)]
        child = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        if child.returncode:
            result.note(**{name: {"failed": child.returncode}})
            continue
        series = json.loads(child.stdout.splitlines()[-1])
        expected = expected or series
        result.note(**{name: {"losses": series, "largest_gap": largest_gap(series, expected)}})


def variants(result: Result, options: argparse.Namespace) -> None:
    """Losses under every option of a group, against those of the plain run."""
    small = DRY_MODEL | {"model.dtype": "float32"}
    if not options.dry:
        small |= {"model.num_layers": 4, "model.d_model": 256, "data.batch_size": 16}
    expected = None
    for name, changes in {"plain": {}, **VARIANTS[options.group]}.items():
        start = time.perf_counter()
        try:
            series = losses("gpt-tiny", small | changes, steps=3 if options.dry else 8)
        except Exception as error:  # the other variants are still measured
            result.note(**{name: {"failed": f"{type(error).__name__}: {error}"[:2000]}})
            continue
        expected = expected or series
        gap, seconds = largest_gap(series, expected), time.perf_counter() - start
        result.note(**{name: {"losses": series, "largest_gap": gap, "seconds": seconds}})


def steps(result: Result, options: argparse.Namespace) -> None:
    """Steps of a competitor at one set-up of `jhpt bench memory`, within its budget."""
    from jhpt.bench.memory.steps import SETUPS, device_memory, measured

    memory = device_memory() or (float(1 << 40) if options.dry else None)
    if memory is None:
        raise SystemExit("jax finds no GPU here")
    setup = ("gpt-tiny", 8, 1 << 30) if options.dry else SETUPS[options.setup]
    rows: list[dict[str, Any]] = []
    for row in measured(memory, rounds=1, setups=(setup,), names=(options.competitor,)):
        rows.append(row)
        result.note(rows=rows)


CHECKS: dict[str, Callable[[Result, argparse.Namespace], None]] = {
    "environment": environment,
    "grow-memory": grow_memory,
    "copies": copies,
    "parity": parity,
    "variants": variants,
    "steps": steps,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.checks")
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--setup", type=int, default=0)
    parser.add_argument("--competitor", choices=("planned", "synchronous", "optimizer", "resident"), default="planned")
    parser.add_argument("--family", choices=("gpt", "bert"), default="gpt")
    parser.add_argument("--group", choices=VARIANTS, default="schedules")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    result = Result(options.result)
    CHECKS[options.name](result, options)
    print(json.dumps(result.values, indent=1))
    found = [*result.values.values(), *result.values.get("rows", ())]
    return int(any(isinstance(value, dict) and value.get("failed") is not None for value in found))


if __name__ == "__main__":
    sys.exit(main())
