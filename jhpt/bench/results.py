"""What every benchmark writes: `{bench, machine, versions, settings, rows, claims}`."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jhpt.core.errors import InputError
from jhpt.measure.device import device_info
from jhpt.measure.timer import spread

PACKAGES = ("jhpt", "jax", "jaxlib", "flax", "optax", "numpy", "torch")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One competitor at one set-up: seconds of every trial, and what one trial does."""

    setup: str
    competitor: str
    samples_s: Sequence[float]
    tokens: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure that others may quote, with the set-up it holds for."""

    value: float
    unit: str
    setup: str


def check_writable(path: str) -> None:
    """Refuses a file that could not be written after all the measuring."""
    try:
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise InputError(f"--json {path} cannot be written: {error}") from None


def write_json(
    path: str, bench: str, settings: Mapping[str, Any], rows: Sequence[Row], claims: Mapping[str, Claim]
) -> None:
    """Everything needed to check or redo a benchmark."""
    report = {
        "bench": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "rows": [asdict(row) for row in rows],
        "claims": {name: asdict(claim) for name, claim in claims.items()},
    }
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Processor, cores and device."""
    info = device_info()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "device": info.kind, "platform": info.platform}


def versions() -> dict[str, str]:
    """Installed versions of what takes part."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Medians with quartiles, and ratios to the first competitor of each set-up."""
    table = Table(title=title, title_justify="left")
    for column in ("set-up", "competitor", "ms", "quartiles", "tokens/s", "time / jhpt"):
        table.add_column(column, justify="left" if column in ("set-up", "competitor") else "right")
    first = {row.setup: spread(list(row.samples_s))[0] for row in reversed(rows)}
    for row in rows:
        median, lower, upper = spread(list(row.samples_s))
        table.add_row(
            row.setup,
            row.competitor,
            f"{median * 1e3:.1f}",
            f"{lower * 1e3:.1f} - {upper * 1e3:.1f}",
            f"{row.tokens / median:,.0f}",
            f"{median / first[row.setup]:.3f}",
        )
    Console().print(table)
