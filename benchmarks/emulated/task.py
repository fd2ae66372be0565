"""What the hosts are asked to measure, as text on their command line, and where they leave what they found."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch; every benchmark adds what it measures.

    tag, cpu: of the lab.  folder: for files that all hosts see.
    """

    tag: str
    cpu: float
    folder: str

    def text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """`text` backwards."""
        return TypeAdapter(cls).validate_json(text)

    def leave(self, rows: list[dict[str, Any]]) -> None:
        """Writes what was found."""
        Path(self.folder, "rows.json").write_text(json.dumps(rows))

    def result(self) -> list[dict[str, Any]]:
        """What `leave` wrote."""
        return json.loads(Path(self.folder, "rows.json").read_text())
