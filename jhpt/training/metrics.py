"""The records of a run: `metrics.jsonl`, TensorBoard events and a plain log file."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import tensorboardX

from jhpt.core.config import LogConfig
from jhpt.core.errors import InputError
from jhpt.core.text_files import bounded_lines
from jhpt.training.processes import is_main

METRICS_FILE = "metrics.jsonl"
"""The records of a run in its directory, a line each."""

LOG_FILE = "train.log"
"""What a run has printed, in its directory."""


class MetricsWriter:
    """Writes records of one run; on resume, records after the restored step are dropped, so that none appears twice.

    Once training runs, what cannot be written is lost and does not end it; that is said once.
    """

    def __init__(self, folder: Path, first_step: int, tensorboard: bool):
        self._folder, self._told, self._tensorboard = folder, False, tensorboard
        self._begin(first_step)

    def _begin(self, first_step: int) -> None:
        _drop_records_after(self._folder / METRICS_FILE, first_step)
        for name in (LOG_FILE, METRICS_FILE):
            (self._folder / name).open("a").close()
        events = str(self._folder / "tensorboard")
        self._events = tensorboardX.SummaryWriter(events, purge_step=first_step + 1) if self._tensorboard else None

    def go_back(self, step: int) -> None:
        """Drops the records after this step, which come anew."""
        self.close()
        with self._tolerantly():
            self._begin(step)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes one record, without values that are None or not finite, which JSON cannot hold."""
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._append(METRICS_FILE, json.dumps({"step": step, **known}))
        if self._events:
            with self._tolerantly():
                for name, value in known.items():
                    self._events.add_scalar(name, value, step)

    def log(self, line: str) -> None:
        """One line of the log file."""
        self._append(LOG_FILE, line)

    def _append(self, name: str, line: str) -> None:
        """Opens the file anew for each line: it may have been deleted, with its folder, while the run goes on."""
        with self._tolerantly(), (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def _tolerantly(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._told:
                print(f"warning: metrics cannot be written to {self._folder}: {error.strerror}", file=sys.stderr)
            self._told = True

    def close(self) -> None:
        """Closes what is open."""
        if self._events:
            with self._tolerantly():
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
    path = folder / METRICS_FILE
    return _whole_records(path) if path.is_file() else []


def _whole_records(path: Path) -> list[dict[str, float]]:
    """The records that are whole: a killed process may have left half a line, and a disk may have lost some."""
    records = []
    with path.open(encoding="utf-8", errors="replace") as stream, suppress(InputError):  # a line without an end
        for line in filter(str.strip, bounded_lines(stream)):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def _drop_records_after(path: Path, step: int) -> None:
    if not path.is_file():
        return
    remaining = [record for record in _whole_records(path) if record["step"] <= step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{json.dumps(record)}\n" for record in remaining))
    partial.rename(path)


class History(NamedTuple):
    """What a run has recorded, by step."""

    losses: dict[int, float]
    validation_losses: dict[int, float]
    validation_accuracy: dict[int, float]


def history(run_dir: Path) -> History:
    """All that a run has recorded."""
    records = read_metrics(run_dir)
    pick = lambda name: {int(record["step"]): record[name] for record in records if name in record}  # noqa: E731
    return History(pick("loss"), pick("validation_loss"), pick("validation_accuracy"))
