"""Simulates one pipelined step event by event: what every device and every link does, and when.

Every device runs a fixed program, in the order of the tick table (`jhpt.core.schedule`).  Only the order counts, not
the ticks: an operation starts when its device is free and what it waits for is over.  With S devices, v chunks per
device (virtual stage s = chunk * S + device) and M micro-batches:

    S = 2, M = 4, "1f1b"        device 0   F0 F1 B0 F2 B1 F3 B2 B3
                                device 1   F0 B0 F1 B1 F2 B2 F3 B3
    S = 2, M = 4, "eager-1f1b"  device 0   F0 F1 F2 B0 F3 B1 B2 B3
                                device 1   F0 B0 F1 B1 F2 B2 F3 B3
    S = 2, M = 4, "gpipe"       device 0   F0 F1 F2 F3 B0 B1 B2 B3
                                device 1   F0 F1 F2 F3 B0 B1 B2 B3

Exchanges between neighbours are part of the programs: of errors, from the tick of the first backward pass on, and of
activations, until the tick of the last forward pass.  All devices take part in all of them.  An exchange begins when
both neighbours have reached it.  `e` and `a` begin one, and neither device goes on past `(e)` or `(a)` before it has
ended; a backward pass lies between `a` and `(a)` where there is one, and a forward pass between `e` and `(e)`.  Without
overlap an exchange is waited for where it begins.

    S = 2, M = 2, "eager-1f1b"  device 0   F0 a (a) e F1 a (e) (a) e a (e) B0 (a) e (e) B1
                                device 1   a (a) e F0 a (e) B0 (a) e F1 a (e) B1 (a) e (e)
      without overlap           device 0   F0 a e F1 a e a B0 e B1
                                device 1   a e F0 a B0 e F1 a B1 e

With 1f1b only two neighbours exchange at the end of a tick, and both wait for both directions:

    S = 2, M = 2, "1f1b"        device 0   F0 x F1 x B0 x B1
                                device 1   x F0 B0 x F1 B1 x

Tests check the cost model's closed formulas against this simulation, which is far too slow to search with.
"""

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.plan import Schedule
from jhpt.core.rules import Choices, check
from jhpt.core.schedule import Table, Timetable, timetable

Stream = Literal["compute", "forward link", "backward link", "gradients", "update", "fetch", "write"]
Kind = Literal["forward", "backward", "gradients", "update"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One piece of work and when it ran, in seconds from the start of the step.

    A transfer belongs to the sending device, and has the kind, micro-batch and chunk of the operation whose result it
    carries.  Gradients, updates and empty exchanges have neither micro-batch nor chunk.  With CPU offload all spans,
    fetches and writes included, have a name instead.
    """

    device: int
    stream: Stream
    kind: Kind
    micro_batch: int | None = None
    chunk: int | None = None
    name: str = ""
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long the work took."""
        return self.end - self.start

    @property
    def label(self) -> str:
        """`F3`, `B3`; `F3.1` in chunk 1; without a micro-batch the name or the kind."""
        if self.micro_batch is None:
            return self.name or self.kind
        return f"{self.kind[0].upper()}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step.  `spans` are sorted by start; those of one stream of a device do not overlap."""

    schedule: Schedule
    devices: int
    chunks: int
    micro_batches: int
    seconds: float
    spans: tuple[Span, ...]

    @cached_property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of every device."""
        rows: list[list[Span]] = [[] for _ in range(self.devices)]
        for span in self.spans:
            rows[span.device].append(span)
        return tuple(map(tuple, rows))

    def busy(self, device: int) -> float:
        """Share of the step in which `device` computes: forward, backward or update."""
        working = sum(span.seconds for span in self.rows[device] if span.stream in ("compute", "update"))
        return working / self.seconds if self.seconds else 1.0

    @property
    def bubble(self) -> float:
        """Share of all device-seconds without computation: ramps, and waiting for transfers and gradients."""
        return 1 - sum(map(self.busy, range(self.devices))) / self.devices


def simulate(
    schedule: str,
    micro_batches: int,
    forward: ArrayLike,
    backward: ArrayLike,
    cut: ArrayLike,
    sync: ArrayLike,
    update: ArrayLike,
    *,
    overlap: bool = True,
) -> Timeline:
    """Simulates one step.

    Args:
        schedule: "1f1b", "eager-1f1b", "gpipe" or "interleaved".
        micro_batches: M; a multiple of S if there are several chunks.
        forward, backward: `[S, v]` seconds of one micro-batch in chunk c of device d.
        cut: `[S * v - 1]` seconds of the transfer between virtual stages i and i + 1, the same in both directions.
        sync: `[S]` seconds from the *start* of the last backward pass until the gradients are reduced.
        update: `[S]` seconds of the optimizer.
        overlap: whether exchanges overlap computation.

    Neighbours in the ring of devices have a link for each direction of training (activations forward, errors backward),
    which does not slow down computation.  An exchange takes as long as the dearest transfer that ever crosses between
    the two devices.  A device is done at max(end of its last backward, start of its last backward + sync) + update, and
    the step when all devices are.
    Collectives inside a stage are part of `forward` and `backward`.  Left out: what communication takes from
    computation on the same chip, and jitter.  O(S v M log S) time.

    Raises InputError for a schedule that does not exist or does not fit the counts, ValueError for wrong arrays.
    """
    times = {"forward": _times("forward", forward, 2), "backward": _times("backward", backward, 2)}
    times |= {"cut": _times("cut", cut, 1), "sync": _times("sync", sync, 1), "update": _times("update", update, 1)}
    devices, chunks = times["forward"].shape
    known = _checked(schedule, micro_batches, devices, chunks)
    _check_shapes(times, devices, chunks)
    table = timetable(known, devices, chunks, micro_batches)
    passes = [_passes(table, device) for device in range(devices)]
    programs, followers = _in_turn(passes) if table.in_turn else _programs(passes, chunks, overlap)
    spans, free = [], [0.0] * devices
    for op, start, end in _play(programs, followers, lambda op: _seconds(op, times)):
        if isinstance(op, _Op):
            spans.append(op.span(start, end))
        if op.stream == "compute":
            free[op.device] = end
    last = {span.device: span for span in spans if span.stream == "compute"}
    for device, span in last.items():
        spans += _closing(span, free[device], times["sync"].item(device), times["update"].item(device))
    return Timeline(
        schedule=known,
        devices=devices,
        chunks=chunks,
        micro_batches=micro_batches,
        seconds=max(span.end for span in spans if span.stream == "update"),
        spans=tuple(sorted(spans, key=lambda span: span.start)),
    )


def _check_shapes(times: dict[str, Floats], devices: int, chunks: int) -> None:
    shapes = {"backward": (devices, chunks), "cut": (devices * chunks - 1,), "sync": (devices,), "update": (devices,)}
    for name, shape in shapes.items():
        if times[name].shape != shape:
            raise ValueError(
                f"{name} has shape {times[name].shape}; {devices} devices of {chunks} chunks (the shape of forward) "
                f"need {shape}"
            )


class _Op(NamedTuple):
    """A pass of one micro-batch through one chunk, the transfer of its result, or the exchange of a tick."""

    stream: Stream
    device: int
    kind: Kind
    micro_batch: int | None
    chunk: int | None
    tick: int | None = None

    def span(self, start: float, end: float) -> Span:
        """The operation with the time at which it ran."""
        return Span(
            device=self.device,
            stream=self.stream,
            kind=self.kind,
            micro_batch=self.micro_batch,
            chunk=self.chunk,
            start=start,
            end=end,
        )


class _Stop(NamedTuple):
    """A point in a device's program: the device has reached the exchanges of this kind and tick, or its end."""

    stream: Stream
    device: int
    kind: Kind | None
    tick: int | None


Followers = dict[_Op | _Stop, list[_Op | _Stop]]
"""The operations that wait for the end of each operation."""


def _seconds(op: _Op | _Stop, times: dict[str, Floats]) -> float:
    """How long an operation takes."""
    if isinstance(op, _Stop):
        return 0.0
    if op.stream == "compute":
        return times[op.kind].item(op.device, op.chunk or 0)
    devices = len(times["forward"])
    edge = op.device if op.stream == "forward link" else (op.device - 1) % devices
    return float(times["cut"][edge::devices].max())


def _passes(table: Timetable, device: int) -> dict[tuple[int, Kind], _Op]:
    """The passes of one device by tick and kind, in order."""
    kinds: tuple[tuple[Kind, Table], ...] = (("forward", table.forward), ("backward", table.backward))
    passes = {}
    for tick, (kind, rows) in itertools.product(range(table.ticks), kinds):
        micro_batch, chunk, _ = map(int, rows[tick, device])
        if micro_batch >= 0:
            passes[tick, kind] = _Op("compute", device, kind, micro_batch, chunk)
    return passes


def _programs(
    passes: list[dict[tuple[int, Kind], _Op]], chunks: int, overlap: bool
) -> tuple[list[list[_Op | _Stop]], Followers]:
    """Programs that contain the exchanges, and their followers.  With several chunks the ring of devices is closed."""
    devices = len(passes)
    ticks: dict[Kind, list[int]] = {
        kind: [tick for program in passes for tick, other in program if other == kind]
        for kind in ("forward", "backward")
    }
    first_backward, last_forward, last = min(ticks["backward"]), max(ticks["forward"]), max(ticks["backward"])
    programs: list[list[_Op | _Stop]] = [[] for _ in passes]
    followers: Followers = defaultdict(list)
    begun: list[dict[str, list[_Op]]] = [{"forward": [], "backward": []} for _ in passes]
    held: list[list[_Op]] = [[] for _ in passes]  # the exchanges that have to end before a device goes on

    def run(op: _Op | _Stop | None) -> None:
        if op is not None:
            programs[op.device].append(op)
            for exchange in held[op.device]:
                followers[exchange].append(op)
            held[op.device] = []

    def wait(kind: Literal["forward", "backward"]) -> None:
        for device in range(devices):
            held[device] += begun[device][kind]
            begun[device][kind] = []

    def exchange(kind: Literal["forward", "backward"], tick: int) -> None:
        stops = [_Stop("compute", device, kind, tick) for device in range(devices)]
        for stop in stops:
            run(stop)
        for one in range(devices if chunks > 1 else devices - 1):
            other = (one + 1) % devices
            sender, done = (one, tick) if kind == "forward" else (other, tick - 1)
            cargo = _cargo(passes[sender].get((done, kind)), devices, chunks)
            link: Stream = "forward link" if kind == "forward" else "backward link"
            transfer = _Op(link, sender, kind, *cargo, tick)
            for device in (one, other):
                followers[stops[device]].append(transfer)
                begun[device][kind].append(transfer)
        if not overlap:
            wait(kind)

    for tick in range(last + 1):
        if tick >= first_backward:
            exchange("backward", tick)
        if tick <= last_forward:
            for program in passes:
                run(program.get((tick, "forward")))
            exchange("forward", tick)
        wait("backward")
        for program in passes:
            run(program.get((tick, "backward")))
        wait("forward")
    for device in range(devices):
        run(_Stop("compute", device, None, None))
    return programs, followers


def _in_turn(passes: list[dict[tuple[int, Kind], _Op]]) -> tuple[list[list[_Op | _Stop]], Followers]:
    """Programs whose neighbours exchange in turn, and their followers: a pass a tick, then the exchange of pairs."""
    devices, kinds = len(passes), cast(tuple[Kind, ...], ("forward", "backward"))
    programs: list[list[_Op | _Stop]] = [[] for _ in passes]
    followers: Followers = defaultdict(list)
    held: list[list[_Op]] = [[] for _ in passes]

    def run(op: _Op | _Stop) -> None:
        programs[op.device].append(op)
        for transfer in held[op.device]:
            followers[transfer].append(op)
        held[op.device] = []

    for tick in range(1 + max(tick for program in passes for tick, _ in program)):
        for program, kind in itertools.product(passes, kinds):
            if (tick, kind) in program:
                run(program[tick, kind])
        for one in range(tick % 2, devices - 1, 2):
            pair = (one, one + 1)
            stops = [_Stop("compute", device, "forward", tick) for device in pair]
            for stop in stops:
                run(stop)
            for kind, sender in zip(kinds, pair, strict=True):
                cargo = _cargo(passes[sender].get((tick, kind)), devices, 1)
                transfer = _Op("forward link" if kind == "forward" else "backward link", sender, kind, *cargo, tick)
                for stop in stops:
                    followers[stop].append(transfer)
                    held[stop.device].append(transfer)
    for device in range(devices):
        run(_Stop("compute", device, None, None))
    return programs, followers


def _cargo(sent: _Op | None, devices: int, chunks: int) -> tuple[int | None, int | None]:
    """(micro-batch, chunk) of an exchange after this pass of the sender; the ends of the model send nothing."""
    end = (devices - 1, chunks - 1) if sent and sent.kind == "forward" else (0, 0)
    return (None, None) if sent is None or (sent.device, sent.chunk) == end else (sent.micro_batch, sent.chunk)


def _play(
    programs: list[list[_Op | _Stop]], followers: Followers, seconds: Callable[[_Op | _Stop], float]
) -> Iterator[tuple[_Op | _Stop, float, float]]:
    """Every operation with its start and end, in the order of their starts.

    A stream runs one operation at a time, from the head of its queue.  A device's queue holds its whole program from
    the beginning; a link's queue holds what is ready to be sent.  Everything on a link comes from one device, one
    result after another, so the order of simultaneous events does not change the times.
    """
    missing = Counter(follower for waiting in followers.values() for follower in waiting)
    queues: dict[tuple[Stream, int], deque[_Op | _Stop]] = defaultdict(deque)
    for device, program in enumerate(programs):
        queues["compute", device].extend(program)
    working: set[tuple[Stream, int]] = set()
    events: list[tuple[float, int, _Op | _Stop]] = []
    numbers = itertools.count()
    now, idle = 0.0, list(queues)
    while idle or events:
        for stream in idle:
            if stream not in working and queues[stream] and not missing[queues[stream][0]]:
                op = queues[stream].popleft()
                working.add(stream)
                end = now + seconds(op)
                heapq.heappush(events, (end, next(numbers), op))
                yield op, now, end
        if not events:
            break
        now, _, ended = heapq.heappop(events)
        working.remove((ended.stream, ended.device))
        idle = [(ended.stream, ended.device)]
        for follower in followers[ended]:
            missing[follower] -= 1
            if follower.stream != "compute" and not missing[follower]:
                queues[follower.stream, follower.device].append(follower)
            idle.append((follower.stream, follower.device))
    assert not any(queues.values()), "the programs wait for each other"


def _closing(last: Span, free: float, sync: float, update: float) -> tuple[Span, Span]:
    """The reduction of gradients, which begins with the last backward pass, and the update, which follows all else."""
    reduced = last.start + sync
    ready = max(free, reduced)
    return (
        Span(device=last.device, stream="gradients", kind="gradients", start=last.start, end=reduced),
        Span(device=last.device, stream="update", kind="update", start=ready, end=ready + update),
    )


def _times(name: str, values: ArrayLike, ndim: int) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; it needs {ndim} dimension{'s' if ndim > 1 else ''}")
    wrong = array[~(np.isfinite(array) & (array >= 0))]
    if wrong.size:
        raise ValueError(f"{name} holds {wrong[0]}; seconds are finite and not negative")
    return array


def _checked(schedule: str, micro_batches: int, devices: int, chunks: int) -> Schedule:
    """The schedule, which has to exist and to fit the counts."""
    names = get_args(Schedule)
    if schedule not in names:
        raise InputError(f"there is no schedule {schedule!r}; use {', '.join(names)}{did_you_mean(schedule, names)}")
    if micro_batches < 1:
        raise InputError(f"micro_batches={micro_batches}; use 1 or more")
    if not devices or not chunks:
        raise ValueError(f"forward has shape {(devices, chunks)}; it needs a device and a chunk")
    if chunks > 1:
        check(Choices(stages=devices, chunks=chunks, schedule=schedule, micro_batches=micro_batches))
    return cast(Schedule, schedule)
