"""The file of every benchmark: `{bench, date, commit, machine, versions, settings, rows, claims}`."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.files import check_writable as check_file_writable

PACKAGES = ("jhpt", "jax", "jaxlib", "flax", "optax", "numpy", "torch")


def last_lines(text: str, most: int = 15) -> str:
    """The end of what a process has printed, in which it says why it failed."""
    return "\n".join(text.strip().splitlines()[-most:]) or "no message"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a timing benchmark: one competitor at one set-up, seconds of every trial, and the work of one trial."""

    setup: str
    competitor: str
    samples_s: Sequence[float]
    tokens: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure that others may quote, with the set-up for which it holds."""

    value: float
    unit: str
    setup: str


@dataclass(kw_only=True)
class Report:
    """The results of a benchmark so far.  The file is rewritten after every part, so that a failure loses only one.

    device: whether it runs on the first jax device, which is then described.
    """

    path: str | None
    bench: str
    settings: Mapping[str, Any]
    device: bool = True
    rows: list[Any] = field(default_factory=list)
    claims: dict[str, Claim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path:
            check_writable(self.path)

    def add(self, rows: Iterable[Any], claims: Mapping[str, Claim] | None = None) -> None:
        """Adds a part; a claim replaces an earlier one of the same name."""
        self.rows += rows
        self.claims |= claims or {}
        if self.path:
            write_json(self.path, self.bench, self.settings, self.rows, self.claims, device=self.device)


def chosen(parts: Sequence[str], only: Sequence[str]) -> tuple[str, ...]:
    """The parts of a benchmark that `--only` names, in the order of `parts`; all if it names none.

    Raises:
      InputError: there is no such part.
    """
    if unknown := [name for name in only if name not in parts]:
        raise InputError(f"--only {','.join(unknown)}: no such part here; use {one_of(parts)}")
    return tuple(name for name in parts if not only or name in only)


def check_writable(path: str) -> None:
    """Refuses a file that could not be written at the end; leaves no trace."""
    check_file_writable("--json", path)
    commit()  # that of what is measured now, whatever is checked out meanwhile


def write_json(
    path: str,
    bench: str,
    settings: Mapping[str, Any],
    rows: Sequence[Any],
    claims: Mapping[str, Claim],
    *,
    device: bool = True,
) -> None:
    """Everything needed to check or redo a benchmark.

    Args:
      rows: dataclasses or mappings, raw samples included.
      device: whether the benchmark ran on the first jax device, which is then described.
    """
    report = {
        "bench": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(device=device),
        "versions": versions(),
        "settings": dict(settings),
        "rows": [dict(row) if isinstance(row, Mapping) else asdict(row) for row in rows],
        "claims": {name: asdict(claim) for name, claim in claims.items()},
    }
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


@cache
def commit() -> str | None:
    """The commit of the code, with `-dirty` if files differ from it; None if it was installed, not checked out."""
    here, said = Path(__file__), ""
    is_tracked = ["ls-files", "--error-unmatch", here.name]
    try:
        for arguments in (is_tracked, ["describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]):
            command = ["git", "-C", str(here.parent), *arguments]
            said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip()


def machine(*, device: bool = True) -> dict[str, Any]:
    """Processor, cores and device; without a device, both of its entries are None."""
    kind = platform_name = None
    if device:
        # Imported here, because jax takes a second to import, which benchmarks of plain arithmetic need not wait for.
        from jhpt.measure.device import device_info

        info = device_info()
        kind, platform_name = info.kind, info.platform
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "device": kind, "platform": platform_name}


def versions() -> dict[str, str]:
    """Installed versions of Python and of packages that matter."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Medians with quartiles, and ratios to the first competitor of each set-up."""
    from jhpt.measure.timer import spread  # imports jax, see `machine`

    first = {row.setup: spread(list(row.samples_s))[0] for row in reversed(rows)}
    lines = []
    for row in rows:
        median, lower, upper = spread(list(row.samples_s))
        lines.append(
            (
                row.setup,
                row.competitor,
                f"{median * 1e3:.1f}",
                f"{lower * 1e3:.1f} - {upper * 1e3:.1f}",
                f"{row.tokens / median:,.0f}",
                f"{median / first[row.setup]:.3f}",
            )
        )
    print_table(title, ("set-up", "competitor", "ms", "quartiles", "tokens/s", "time / jhpt"), lines, words=2)


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], *, words: int = 1) -> None:
    """A table whose first `words` columns are words and the others figures."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < words else "right")
    for line in lines:
        table.add_row(*line)
    _console().print(table)


def print_claims(claims: Mapping[str, Claim]) -> None:
    """One line for each claim."""
    for name, claim in claims.items():
        print(f"{name} = {claim.value:.4g} {claim.unit}  [{claim.setup}]")


def _console() -> Console:
    """A console as wide as the terminal; for a file or a pipe, wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=180)
