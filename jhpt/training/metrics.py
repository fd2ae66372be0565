"""The records of a run: `metrics.jsonl`, TensorBoard events and a plain log file."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tensorboardX

from jhpt.core.config import LogConfig
from jhpt.training.processes import is_main


class MetricsWriter:
    """Writes records of one run; on resume, records after the restored step are dropped, so that none appears twice."""

    def __init__(self, folder: Path, first_step: int, tensorboard: bool):
        self._log = (folder / "train.log").open("a", encoding="utf-8")
        self._path = folder / "metrics.jsonl"
        _drop_records_after(self._path, first_step)
        self._records = self._path.open("a", encoding="utf-8")
        self._events = (
            tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1) if tensorboard else None
        )

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes one record, without values that are None or not finite, which JSON cannot hold."""
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._records.write(json.dumps({"step": step, **known}) + "\n")
        self._records.flush()
        if self._events:
            for name, value in known.items():
                self._events.add_scalar(name, value, step)

    def log(self, line: str) -> None:
        """One line of the log file."""
        self._log.write(line + "\n")
        self._log.flush()

    def close(self) -> None:
        """Closes all files."""
        self._records.close()
        self._log.close()
        if self._events:
            self._events.close()


@contextmanager
def metrics_writer(folder: Path, first_step: int, log: LogConfig) -> Iterator[MetricsWriter | None]:
    """The writer on the main process, None on the others."""
    if not is_main():
        yield None
        return
    writer = MetricsWriter(folder, first_step, log.tensorboard)
    try:
        yield writer
    finally:
        writer.close()


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All records of a run, in order."""
    path = folder / "metrics.jsonl"
    return _whole_records(path) if path.is_file() else []


def _whole_records(path: Path) -> list[dict[str, float]]:
    """The records up to the first incomplete line, which a killed process was writing."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _drop_records_after(path: Path, step: int) -> None:
    if not path.is_file():
        return
    remaining = [record for record in _whole_records(path) if record["step"] <= step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{json.dumps(record)}\n" for record in remaining))
    partial.rename(path)
