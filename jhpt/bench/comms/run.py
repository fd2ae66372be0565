"""The benchmark: launches the hosts, prints the table and the claims.

Real processes of JAX with Gloo, one for each host of `jhpt.bench.netlab`, half a core each, tensor parallelism over all
four, at several link speeds.  A step is the value and the gradients of GPT blocks, in float32; there is no optimizer.
Variants (`jhpt.bench.comms.task`), in turn in one launch:

    serial, float32          XLA's all-reduce, computation and sums in line
    serial, 16 bits          the baseline: all_to_all of bfloat16, sum in float32, rounded, all_gather
    overlap                  the same on several lanes (`jhpt.bench.comms.blocks`)
    tokens                   16 bits for the important tokens, nothing for the others
    quantization             8 bits
    tokens + quantization    8 bits for the important tokens, 4 for the others
    all                      the same on several lanes

XLA's CPU backend widens bfloat16 in collectives, so payloads of 16 bits travel as integers.
"""

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

from jhpt.bench.comms.costs import relative
from jhpt.bench.comms.task import ALL, BASELINE, LANES, MIXED, OVERLAP, VARIANTS, Task
from jhpt.bench.emulated.launch import CPU, HOSTS, PLACE, launch
from jhpt.bench.netlab import HostError, LabError, why_not
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json

RATES = (200e6, 500e6, 1000e6)
"""Bits per second."""

COMPRESSION_RATE = 500e6
"""At which compression alone is claimed."""

SHAPE: dict[str, Any] = {"layers": 2, "width": 128, "heads": 4, "length": 64, "batch": 256}
"""Of the blocks: a head a host.  Two million numbers a sum: beside that, the 10 ms of a quota's period are little."""

QUICK_SHAPE = SHAPE | {"layers": 1, "batch": 64}

LIMIT_S = 900.0
"""Seconds for a launch."""

UNIT = f"time of {BASELINE} / the variant"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """All variants at one rate: seconds of their steps and predicted ones.  Ratios are medians of the ratios round by
    round, so that what slows the machine down cancels."""

    rate: float
    samples: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.rate / 1e6:.0f} Mbit/s"

    def ratio(self, name: str) -> float:
        """Time of the baseline / of a variant."""
        pairs = zip(self.samples[BASELINE], self.samples[name], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def median(self, name: str) -> float:
        """Typical seconds."""
        return statistics.median(self.samples[name])

    def error(self, name: str) -> float:
        """(predicted - measured) / measured."""
        return self.predicted[name] / self.median(name) - 1


def entries(rows: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """The entries of the table, from rows of steps."""
    found: dict[float, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["row"] == "step":
            found.setdefault(row["bits_per_s"], []).append(row)
    return [
        Entry(
            rate=rate,
            samples={row["variant"]: row["samples_s"] for row in own},
            predicted={row["variant"]: row["predicted_s"] for row in own},
        )
        for rate, own in found.items()
    ]


def claims(rows: Sequence[Mapping[str, Any]]) -> dict[str, Claim]:
    """What the rows say."""
    found, table = dict[str, Claim](), entries(rows)
    if not table:
        return found
    for name, variant in (("all_vs_serial_max", ALL), ("overlap_vs_serial_max", OVERLAP)):
        best = max(table, key=methodcaller("ratio", variant))
        found[name] = Claim(value=best.ratio(variant), unit=UNIT, setup=f"{best}, {LANES} lanes, {PLACE}")
    for entry in table:
        if entry.rate == COMPRESSION_RATE:
            found["compression_vs_serial_500mbit"] = Claim(
                value=entry.ratio(MIXED), unit=UNIT, setup=f"{MIXED}, {entry}, {PLACE}"
            )
    errors = [abs(entry.error(name)) for entry in table for name in entry.samples]
    found["prediction_error_median"] = Claim(
        value=statistics.median(errors),
        unit="|predicted - measured| / measured",
        setup=f"{len(errors)} steps, {PLACE}",
    )
    counted = [row for row in rows if row["row"] == "bytes"]
    if counted:
        worst = max(counted, key=lambda row: relative(row["counted"], row["formula"]))
        found["wire_bytes_error_max"] = Claim(
            value=relative(worst["counted"], worst["formula"]),
            unit="|counted - formula| / formula",
            setup=f"bytes at the interface, headers included, {worst['variant']}, the worst of {len(counted)}",
        )
    return found


def print_entries(table: Sequence[Entry], counted: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for every variant."""
    columns = ("Mbit/s", "variant", "MB sent", "ms", "quartiles", "predicted", "error", f"{BASELINE} / it")
    lines = []
    for entry in table:
        for name, samples in entry.samples.items():
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
            lines.append(
                (
                    f"{entry.rate / 1e6:.0f}",
                    name,
                    f"{counted[name]['counted'] / 1e6:.2f}" if name in counted else "",
                    f"{entry.median(name) * 1e3:.0f}",
                    f"{low * 1e3:.0f} - {high * 1e3:.0f}",
                    f"{entry.predicted[name] * 1e3:.0f}",
                    f"{100 * entry.error(name):+.0f} %",
                    f"{entry.ratio(name):.2f}",
                )
            )
    print_table(f"bench comms: {PLACE}, ms of a step", columns, lines, words=2)


def measure(*, quick: bool, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of the launch."""
    task = partial(
        Task,
        rates=tuple(rates),
        rounds=2 if quick else 5,
        parts_rounds=2 if quick else 3,
        **(QUICK_SHAPE if quick else SHAPE),
    )
    return launch("jhpt.bench.comms.worker", task, devices=LANES, limit_s=LIMIT_S)


def run(*, quick: bool, json_path: str | None) -> int:
    """Runs the benchmark; returns the exit status."""
    if json_path:
        check_writable(json_path)
    if reason := why_not():
        print(f"jhpt bench comms: {reason}", file=sys.stderr)
        return 3
    rates = RATES[1:2] if quick else RATES
    rows, failure = list[dict[str, Any]](), None
    try:
        rows = measure(quick=quick, rates=rates)
    except (HostError, LabError, OSError) as error:
        failure = f"{error}"
        print(f"jhpt bench comms: {error}", file=sys.stderr)
    print_entries(entries(rows), {row["variant"]: row for row in rows if row["row"] == "bytes"})
    found = claims(rows)
    print_claims(found)
    if json_path:
        settings = {
            "quick": quick,
            "hosts": HOSTS,
            "cpu": CPU,
            "bits_per_s": list(rates),
            "lanes": LANES,
            "blocks": QUICK_SHAPE if quick else SHAPE,
            "variants": [one.name for one in VARIANTS],
            "failure": failure,
        }
        write_json(json_path, "comms", settings, rows, found, device=False)
    return 1 if failure else 0
