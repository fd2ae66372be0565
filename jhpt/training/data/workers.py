"""Files -> shards, by several processes that each write one shard after the other."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jhpt.core.errors import InputError
from jhpt.training.data.documents import Part, cut
from jhpt.training.data.shards import write_shard
from jhpt.training.data.tokenizer import Tokenizer

SHARD_BYTES = 1 << 24
"""The least text, in bytes on disk, of a shard (the last one apart): what a process loses if it is killed."""

MOST_SHARDS = 512
"""Large corpora have larger shards, so that there are about this many at most."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all shards have in common.  tokenizer: the name that `load_tokenizer` knows."""

    tokenizer: str
    fingerprint: str
    text_key: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of tokens to be written: its name, what it is made of, and how many bytes these are."""

    name: str
    parts: tuple[Part, ...]
    size: int


class WorkerLost(InputError):
    """A process that tokenises was ended from outside."""


def shard_bytes(files: Sequence[Path]) -> int:
    """Bytes of a shard of a corpus of these files."""
    return max(SHARD_BYTES, sum(file.stat().st_size for file in files) // MOST_SHARDS)


def parts_of(files: Sequence[Path], size: int, text_key: str) -> Iterator[tuple[Part, int]]:
    """The parts of these files, each of about `size` bytes or less, and their bytes on disk."""
    return (each for file in files for each in cut(file, size, text_key))


def shards_of(name: str, pieces: Iterable[tuple[Part, int]], size: int) -> Iterator[Shard]:
    """The shards of these parts, in order: each has the next parts that together are `size` bytes or more.

    What lies in which shard depends on nothing but the parts, their order and `size`.
    """
    parts: list[Part] = []
    gathered = number = 0
    for part, count in pieces:
        parts.append(part)
        gathered += count
        if gathered >= size:
            yield Shard(name=f"{name}-{number:05}.bin", parts=tuple(parts), size=gathered)
            parts, gathered, number = [], 0, number + 1
    if parts:
        yield Shard(name=f"{name}-{number:05}.bin", parts=tuple(parts), size=gathered)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_workers(wanted: int | None, total: int, size: int) -> int:
    """Processes for `total` bytes in shards of `size`: as many as wanted, or cores that this process may use."""
    return max(1, min(wanted or cores(), total // size))


def write_shards(
    folder: Path, shards: Iterator[Shard], job: Job, tokenizer: Tokenizer, workers: int, done: Callable[[Shard], None]
) -> None:
    """Writes the shards that are not yet in the folder; `done` is told of each one that is there.

    One worker: this process, with the threads of the tokenizer.  More: processes that each load the tokenizer.

    Raises:
      InputError: text that cannot be read.  WorkerLost.  OSError: a folder that cannot be written.
    """
    missing = _missing(folder, shards, done)
    if workers == 1:
        for shard in missing:
            write_shard(folder / shard.name, shard.parts, job.text_key, tokenizer, np.dtype(job.dtype))
            done(shard)
        return
    queue, processes = _Queue(missing, done), [_start(job) for _ in range(workers)]
    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for served in as_completed([pool.submit(_serve, process, folder, queue) for process in processes]):
                    served.result()
            finally:  # also after the first failure, or Ctrl-C: the other threads then read the end of their answers
                for process in processes:
                    process.kill()
    finally:
        for process in processes:
            process.communicate()


def _missing(folder: Path, shards: Iterator[Shard], done: Callable[[Shard], None]) -> Iterator[Shard]:
    for shard in shards:
        if (folder / shard.name).is_file():
            done(shard)
        else:
            yield shard


class _Queue:
    """Shards to be written, which several threads take, and what is told of those that are."""

    def __init__(self, shards: Iterator[Shard], done: Callable[[Shard], None]):
        self._shards, self._done, self._lock = shards, done, threading.Lock()

    def take(self) -> Shard | None:
        with self._lock:
            return next(self._shards, None)

    def finish(self, shard: Shard) -> None:
        with self._lock:
            self._done(shard)


Process = subprocess.Popen[str]


def _start(job: Job) -> Process:
    """A new interpreter rather than a fork, which jax's threads would not survive, or multiprocessing's spawn, which
    would run the user's script again."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jhpt.training.data.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # The processes share the cores, so that the threads of the tokenizer would only stand in each other's way.
        env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
    )
    _send(process, asdict(job))
    return process


def _send(process: Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise _lost(process) from None


def _serve(process: Process, folder: Path, queue: _Queue) -> None:
    """Hands one shard after the other to a process."""
    assert process.stdout is not None
    while (shard := queue.take()) is not None:
        parts = [asdict(part) | {"file": str(part.file.absolute())} for part in shard.parts]
        _send(process, {"path": str((folder / shard.name).absolute()), "parts": parts})
        answer = process.stdout.readline()
        if not answer:
            raise _lost(process)
        match json.loads(answer):
            case {"refused": message}:
                raise InputError(message)
            case {"failed": message}:
                raise OSError(message)
            case {"crashed": trace}:
                raise RuntimeError(f"a process that tokenises crashed:\n{trace}")
        queue.finish(shard)


def _lost(process: Process) -> WorkerLost:
    status = process.wait()
    cause = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return WorkerLost(
        f"a process that tokenises was ended {cause}; if memory ran out, set data.workers to fewer; what is done is "
        "kept, so start again"
    )
