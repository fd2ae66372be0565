"""The task of the hosts, as text on their command line, and the file of their results."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch; every benchmark adds fields of its own.

    tag, cpu, shares: those of the lab.  folder: for files that all hosts see.
    """

    tag: str
    cpu: float
    folder: str
    shares: tuple[float, ...] | None = None

    def text(self) -> str:
        """The task as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `text`."""
        return TypeAdapter(cls).validate_json(text)

    def leave(self, rows: list[dict[str, Any]]) -> None:
        """Writes the rows to the folder."""
        Path(self.folder, "rows.json").write_text(json.dumps(rows))

    def result(self) -> list[dict[str, Any]]:
        """The rows that `leave` has written."""
        return json.loads(Path(self.folder, "rows.json").read_text())
