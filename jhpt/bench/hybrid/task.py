"""What the hosts are asked to measure, as text on their command line."""

import json
from dataclasses import asdict, dataclass

MODELS = ("vgg", "mlp", "gpt", "bert")
"""In the order of the table (`jhpt.bench.hybrid.models`)."""


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

    @staticmethod
    def parse(text: str) -> "Task":
        """`text` backwards."""
        given = json.loads(text)
        return Task(**{**given, "models": tuple(given["models"]), "rates": tuple(given["rates"])})
