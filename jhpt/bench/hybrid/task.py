"""What the hosts are asked to measure, as text on their command line, and where they leave what they found."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jhpt.core.plan import Plan

MODELS = ("vgg", "mlp", "gpt", "bert")
"""In the order of the table (`jhpt.bench.hybrid.models`)."""

COMPILING = 2.0
"""Cores that a host may use while nothing is measured."""

CHUNKS = 2
"""Of a stage, where the bubble of interleaved 1F1B is measured."""


def run_key(plan: Plan) -> str:
    """Equal where plans run equally."""
    return plan.model_dump_json(exclude={"seconds", "lower_bound", "device", "origin"})


@dataclass(frozen=True, kw_only=True)
class Task:
    """One launch.

    tag, cpu: of the lab.  folder: for files that all hosts see.  rates: bits per second.
    rounds: samples of a step.  layer_rounds, link_rounds: of a layer, of a message.
    bubble: whether to measure that of a pipeline too.
    """

    tag: str
    cpu: float
    folder: str
    models: tuple[str, ...]
    rates: tuple[float, ...]
    rounds: int
    layer_rounds: int
    link_rounds: int
    bubble: bool

    def text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    def leave(self, rows: list[dict[str, Any]]) -> None:
        """Writes what was found."""
        Path(self.folder, "rows.json").write_text(json.dumps(rows))

    def result(self) -> list[dict[str, Any]]:
        """What `leave` wrote."""
        return json.loads(Path(self.folder, "rows.json").read_text())

    @staticmethod
    def parse(text: str) -> "Task":
        """`text` backwards."""
        given = json.loads(text)
        return Task(**{**given, "models": tuple(given["models"]), "rates": tuple(given["rates"])})
