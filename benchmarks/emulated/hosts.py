"""One host of the lab: it waits for the others, exchanges results with them, and sets links and quotas."""

import json
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.experimental import serialize_executable

from benchmarks.emulated.launch import COMPILING
from benchmarks.emulated.task import Launch
from benchmarks.netlab import Lab
from benchmarks.netlab.quotas import QUOTA_PERIOD
from jhpt.sharding.gather import gathered

AnyTask = TypeVar("AnyTask", bound=Launch)


class Hosts(Generic[AnyTask]):
    """This process among those of all hosts.  All of them have to call every method except `say`."""

    def __init__(self, task: AnyTask) -> None:
        self.task, self.rank, self.count = task, jax.process_index(), jax.process_count()
        self.lab = Lab(hosts=self.count, cpu=task.cpu, shares=task.shares, tag=task.tag)
        self.programs = 0

    def wait(self) -> None:
        """Waits until all hosts have called it."""
        gathered(np.int32(self.rank))

    def free(self) -> None:
        """Lifts quotas and rates, to compile."""
        self._set(COMPILING, None)

    def limit(self, rate: float | None, period: int = QUOTA_PERIOD) -> None:
        """Sets quotas, which hold over so many microseconds, and links to this rate."""
        self._set(None, rate, period)

    def _set(self, cores: float | None, rate: float | None, period: int = QUOTA_PERIOD) -> None:
        self.wait()
        if self.rank == 0:
            self.lab.quota(cores, period)
            self.lab.limit(rate)
        self.wait()

    def everyone(self, mine: Any) -> list[Any]:
        """The values `mine` of all hosts, by rank; JSON has to be able to hold them."""
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        sizes = gathered(np.int64(len(text)))
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: len(text)] = text
        rows = gathered(padded)
        return [json.loads(bytes(row[:size]).decode()) for row, size in zip(rows, sizes, strict=True)]

    def compiled(
        self, programs: Mapping[str, Callable[[], jax.stages.Lowered]], devices: Sequence[jax.Device] | None = None
    ) -> dict[str, Any]:
        """Programs over these devices, by default all; every host compiles the next one that no other has begun.

        Every host loads all programs from files, also those that it compiled: a compiled and a loaded program may run
        independent operations in different orders, and two hosts that wait for each other in different collectives wait
        forever.
        """
        files = [Path(self.task.folder, f"{self.programs + index}.program") for index in range(len(programs))]
        self.programs += len(programs)
        for file, lower in zip(files, programs.values(), strict=True):
            if _is_first(file.with_suffix(".begun")):
                file.write_bytes(pickle.dumps(serialize_executable.serialize(lower().compile())))
        self.wait()
        load = partial(serialize_executable.deserialize_and_load, execution_devices=devices)
        return {name: load(*pickle.loads(file.read_bytes())) for name, file in zip(programs, files, strict=True)}

    def say(self, line: str) -> None:
        """Prints progress to stderr, whose end is part of error messages."""
        if self.rank == 0:
            print(f"{time.process_time():6.1f} s of processor  {line}", file=sys.stderr, flush=True)


def _is_first(file: Path) -> bool:
    """Whether no other host has made this file, which is made."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
