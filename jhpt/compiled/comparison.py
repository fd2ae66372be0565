"""A compiled step compared with the planner's estimate: bytes in memory, bytes on the wire, hidden communication.

A plan's stages differ and the program is one, so memory is compared with the fullest stage.  Traffic is shown for the
stage that sends most.  Numbers of collectives differ if the compiler joins or splits them; bytes should not differ.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from jhpt.compiled.program import Reading, Tally, Traffic, Way
from jhpt.core.plan import Plan
from jhpt.core.profile import ModelProfile
from jhpt.planner.cost.estimate import Estimate, StageEstimate
from jhpt.planner.cost.traffic import Sent, StageTraffic, traffic

SHOWN = 1e-3
"""Share of a stage's bytes below which a kind of traffic has no row of its own."""

COPIES = 1e9
"""Bytes of plain copies in a step that are worth a line."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A reading and its predictions.  predicted: by stage."""

    reading: Reading
    estimate: Estimate
    predicted: tuple[StageTraffic, ...]

    @property
    def fullest(self) -> StageEstimate:
        """The stage that needs most memory by the planner's estimate."""
        return max(self.estimate.stages, key=lambda stage: stage.total_bytes)

    @property
    def busiest(self) -> int:
        """The stage that sends most, as compiled."""
        return max(range(len(self.reading.stages)), key=lambda stage: self.reading.stages[stage].bytes)

    @property
    def memory_ratio(self) -> float:
        """Estimated / compiled bytes of a device."""
        return self.fullest.total_bytes / self.reading.memory.device

    def ways(self, stage: int) -> list[tuple[Way, Traffic, Sent]]:
        """Compiled and predicted traffic of a stage, most bytes first."""
        compiled, predicted = self.reading.stages[stage].traffic, self.predicted[stage]
        ways = {*compiled, *(Way(*way) for way in predicted)}
        rows = [(way, compiled.get(way, Traffic()), predicted.get(way, Sent(0, 0))) for way in ways]
        return sorted(rows, key=lambda row: (-max(row[1].bytes, row[2].bytes), row[0]))

    def print(self, console: Console) -> None:
        """Both tables, and the hidden share of the communication along every axis."""
        console.print(memory_table(self))
        console.print(traffic_table(self))
        for line in hidden_lines(self.reading):
            console.print(line, markup=False)

    def to_json(self) -> dict[str, Any]:
        """The same figures; bytes, seconds, FLOP."""
        memory = self.reading.memory
        return {
            "memory": {
                "arguments": memory.arguments,
                "temporaries": memory.temporaries,
                "outputs": memory.outputs,
                "device": memory.device,
                "host": memory.host,
            },
            "planned_bytes": dict(self.fullest.bytes),
            "memory_ratio": self.memory_ratio,
            "hidden_shares": self.reading.hidden_shares(),
            "stages": [_stage_json(self, stage) for stage in range(len(self.reading.stages))],
        }


def compare(reading: Reading, plan: Plan, estimate: Estimate, profile: ModelProfile) -> Comparison:
    """The reading of a plan's step, compared with the plan's estimate and traffic."""
    return Comparison(reading=reading, estimate=estimate, predicted=traffic(plan, profile))


def memory_table(comparison: Comparison) -> Table:
    """Bytes of a device by cause, planned and compiled."""
    memory, stage = comparison.reading.memory, comparison.fullest
    planned = [*stage.bytes.items(), ("total", stage.total_bytes)]
    compiled = [
        ("arguments", memory.arguments),
        ("temporaries", memory.temporaries),
        ("outputs", memory.outputs),
        ("total", memory.device),
        ("in the host's memory", memory.host),
    ]
    table = _table("planned", "GiB", "compiled", "GiB", title="the compiled step: GiB on a device")
    for index in range(max(len(planned), len(compiled))):
        row: list[str] = []
        for name, size in (part[index] if index < len(part) else ("", None) for part in (planned, compiled)):
            row += [name, "" if size is None else f"{size / 2**30:,.2f}"]
        table.add_row(*row)
    table.caption = f"planned / compiled {comparison.memory_ratio:.2f}"
    table.caption_justify = "left"
    return table


def traffic_table(comparison: Comparison) -> Table:
    """The traffic of a device of the busiest stage."""
    stage = comparison.busiest
    tally: Tally = comparison.reading.stages[stage]
    place = f"stage {stage}, " if len(comparison.reading.stages) > 1 else ""
    columns = ("collective", "axis", "planned", "compiled", "MB planned", "MB compiled", "ratio", "seconds", "hidden")
    table = _table(*columns, title=f"{place}sent by a device in a step", words=(0, 1))
    for way, compiled, planned in comparison.ways(stage):
        if max(compiled.bytes, planned.bytes) < SHOWN * tally.bytes:
            continue
        table.add_row(
            way.kind,
            way.axis,
            f"{planned.count:,.0f}",
            f"{compiled.count:,.0f}",
            f"{planned.bytes / 1e6:,.1f}",
            f"{compiled.bytes / 1e6:,.1f}",
            _ratio(planned.bytes, compiled.bytes),
            f"{compiled.seconds:.3f}",
            f"{100 * compiled.hidden / compiled.seconds:.0f} %" if compiled.seconds else "",
        )
    total = sum(sent.bytes for sent in comparison.predicted[stage].values())
    sums = (f"{total / 1e6:,.1f}", f"{tally.bytes / 1e6:,.1f}", _ratio(total, tally.bytes))
    table.add_row("total", "", "", "", *sums, "", "")
    return table


def hidden_lines(reading: Reading) -> list[str]:
    """`hidden behind matrix products: data 65 %, pipe 99 %`."""
    shares = ", ".join(f"{axis} {100 * share:.0f} %" for axis, share in reading.hidden_shares().items())
    lines = [f"\nhidden behind matrix products, by modelled seconds: {shares or 'there is no communication'}"]
    if (copied := max(stage.copied for stage in reading.stages)) >= COPIES:
        lines.append(f"buffers that are copied as they are: {copied / 1e9:,.1f} GB in a step of a device")
    if again := sum(stage.again for stage in reading.stages):
        share = 100 * again / sum(stage.flops for stage in reading.stages)
        lines.append(f"the compiler computes {share:.1f} % of the matrix products' FLOP once more, to save memory")
    if guessed := sum(stage.guessed for stage in reading.stages):
        problems = "branches, loops, products or transfers could not be followed or priced"
        lines.append(f"{guessed} {problems}: counts and shares are a guess")
    return lines


def _stage_json(comparison: Comparison, stage: int) -> dict[str, Any]:
    tally = comparison.reading.stages[stage]
    return {
        "stage": stage,
        "product_flops": tally.flops,
        "product_seconds": tally.seconds,
        "repeated_flops": tally.again,
        "copied_bytes": tally.copied,
        "wire_bytes": tally.bytes,
        "planned_wire_bytes": sum(sent.bytes for sent in comparison.predicted[stage].values()),
        "guessed": tally.guessed,
        "collectives": [
            {
                "kind": way.kind,
                "axis": way.axis,
                "count": compiled.count,
                "bytes": compiled.bytes,
                "seconds": compiled.seconds,
                "hidden_seconds": compiled.hidden,
                "planned_count": planned.count,
                "planned_bytes": planned.bytes,
            }
            for way, compiled, planned in comparison.ways(stage)
        ],
    }


def _ratio(planned: float, compiled: float) -> str:
    return f"{planned / compiled:.2f}" if compiled else ""


def _table(*columns: str, title: str, words: tuple[int, ...] = (0, 2)) -> Table:
    """words: the columns that hold no figures."""
    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), title=f"\n{title}", title_justify="left"
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in words else "right")
    return table
