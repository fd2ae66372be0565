"""Runs one stage of the GPU kit: `python3 -m benchmarks.gpu.run STAGE`, in the checkout's root on the GPU machine.

It needs nothing but Python and pip.  First it installs the wheels that `benchmarks.gpu.prepare` has downloaded, into a
folder of the checkout.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import LIMIT_S, STAGES, Part

ROOT = Path(__file__).resolve().parent.parent.parent
WHEELS, SITE, RESULTS = ROOT / "build/gpu-wheels", ROOT / "build/gpu-site", ROOT / "build/gpu-results"

TAIL = 4000
"""Characters of a log in its line of results."""

LEAST_S = 15.0
"""A part is not begun with fewer seconds left."""

NOT_BEGUN, TIMED_OUT = 125, 124
"""Exit statuses of parts that were not begun, and of parts that took too long, as for timeout(1)."""

UNSET = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_ENABLE_COMPILATION_CACHE")
"""Variables of the caller that would change what is measured."""


def run_stage(
    name: str,
    parts: Sequence[Part],
    out: Path,
    *,
    dry: bool = False,
    limit: float = LIMIT_S,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs parts one after the other, and writes a line of `out`/NAME.jsonl as soon as each one ends.

    Returns:
      The lines of the file: part, command, status (0: done), seconds, result (None: it wrote none), end of the log.
    """
    out.mkdir(parents=True, exist_ok=True)
    lines, start = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, (out / f"{name}.jsonl").open("w") as results:
        for part in parts:
            seconds = min(part.seconds, limit - (time.monotonic() - start))
            line = _run_part(part, out / f"{name}-{part.name}.log", Path(folder), seconds, dry, environment)
            lines.append(line)
            results.write(json.dumps(line) + "\n")
            results.flush()
            print(f"{part.name:<24} status {line['status']:>3}  {line['seconds']:6.1f} s", flush=True)
    return lines


def _run_part(
    part: Part, log: Path, folder: Path, seconds: float, dry: bool, environment: Mapping[str, str] | None
) -> dict[str, Any]:
    result = folder / f"{part.name}.json"
    arguments = part.dry if dry and part.dry else part.arguments
    command = [text.replace("{result}", str(result)).replace("{folder}", str(folder)) for text in arguments]
    line: dict[str, Any] = {"part": part.name, "command": command, "status": NOT_BEGUN, "seconds": 0.0}
    if seconds < LEAST_S:
        return line | {"result": None, "log": "no time was left in this stage"}
    variables = {**(os.environ if environment is None else environment), **part.variables}
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            line["status"] = process.wait(seconds)
        except subprocess.TimeoutExpired:
            line["status"] = TIMED_OUT
        _end(process)
    text = log.read_bytes().decode("utf-8", "replace")
    return line | {"seconds": time.monotonic() - start, "result": _read(result), "log": text[-TAIL:]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part with all processes that it started, because one that survives would hold the GPU."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    text = file.read_text()
    try:
        return json.loads(text)
    except ValueError:  # the part was ended while it was writing
        return {"unreadable": text[:TAIL]}


def environment(*, dry: bool) -> dict[str, str]:
    """Variables of the parts: the checkout and the wheels can be imported, and jax finds the CUDA toolkit."""
    variables = {name: value for name, value in os.environ.items() if name not in UNSET}
    paths = [str(ROOT), *([str(SITE)] if SITE.is_dir() else []), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if dry:
        variables["JAX_PLATFORMS"] = "cpu"
    elif "CUDA_ROOT" not in variables and (toolkit := cuda_toolkit()):
        variables["CUDA_ROOT"] = str(toolkit)
    return variables


def cuda_toolkit() -> Path | None:
    """The folder of the CUDA toolkit on the path, if it has the files that XLA's compiler needs.

    Without the wheel nvidia-cuda-nvcc, jax 0.11 takes the text "None" for this folder.
    """
    if not (nvcc := shutil.which("nvcc")):
        return None
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    here = re.search(r"^#\$ _HERE_=(.+)$", plan, re.MULTILINE)
    folder = Path(here[1] if here else Path(nvcc).resolve().parent).parent
    complete = (folder / "bin/ptxas").is_file() and (folder / "nvvm/libdevice/libdevice.10.bc").is_file()
    return folder if complete else None


def install_wheels() -> None:
    """Installs the wheels into `SITE`, once for each set of them."""
    wheels = sorted(WHEELS.glob("*.whl"))
    if not wheels:
        print(f"no wheels in {WHEELS}; continuing with the installed packages", file=sys.stderr)
        return
    marker, names = SITE / "wheels.txt", "\n".join(wheel.name for wheel in wheels)
    if marker.is_file() and marker.read_text() == names:
        return
    shutil.rmtree(SITE, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(SITE)]
    subprocess.run([*pip, *map(str, wheels)], check=True)
    marker.write_text(names)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1: a part failed."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results and logs")
    parser.add_argument("--only", default="", help="these parts alone, separated by commas")
    parser.add_argument("--skip", default="", help="parts that are left out, separated by commas")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of the whole stage")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny models")
    options = parser.parse_args(arguments)
    parts = STAGES[options.stage]
    only, skip = (set(filter(None, text.split(","))) for text in (options.only, options.skip))
    if unknown := (only | skip) - {part.name for part in parts}:
        parser.error(f"no part {', '.join(sorted(unknown))} in {options.stage}: {', '.join(p.name for p in parts)}")
    wanted = [part for part in parts if (not only or part.name in only) and part.name not in skip]
    if not options.dry:
        install_wheels()
    lines = run_stage(
        options.stage,
        wanted,
        options.out,
        dry=options.dry,
        limit=options.limit,
        environment=environment(dry=options.dry),
    )
    return int(any(line["status"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
