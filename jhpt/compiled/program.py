"""A compiled program's bytes in memory, its collectives, and how much of them matrix products hide.

The optimized program is followed as one device of every pipeline stage executes it: loops as often as they run, and the
branch of every conditional that this device takes (`jhpt.compiled.evaluate`).  Bytes on the wire are those that a
device sends if rings are used (n devices, each of which contributes s bytes):

    all-reduce           2 (n-1)/n s             all-gather         (n-1) s
    reduce-scatter, all-to-all   (n-1)/n s       collective-permute s, if it is a sender

A collective that is started and awaited in two places is hidden as far as matrix products are scheduled between them:

    hidden share = sum of min(modelled seconds of those products, its own modelled seconds) / sum of its own seconds

Products hide the collectives of one axis one after the other, in the order in which these were started; products in a
loop first hide collectives of the loop, then those in progress around it.  Everything except matrix products (norms,
copies) is left out, and so is the slowdown of products by communication beside them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jhpt.compiled.evaluate import KNOWN_BY_NOBODY, Frame, Unclear, branches_of, rounds, trip_count
from jhpt.compiled.hlo import Computation, Instruction, Module, read, text_of
from jhpt.compiled.modelled import Clock, products
from jhpt.compiled.replicas import permuted_pairs, replica_groups, spanned_axes
from jhpt.core.axes import PIPE

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")

UNPRICED = ("send", "recv", "collective-broadcast", "ragged-all-to-all")
"""Other opcodes that communicate: they are noticed, but neither their bytes nor their seconds are counted."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a device, and in the host's memory.  Donated buffers count once, among the arguments."""

    arguments: int
    temporaries: int
    outputs: int
    host: int

    @property
    def device(self) -> int:
        """All of the device."""
        return self.arguments + self.temporaries + self.outputs


class Way(NamedTuple):
    """A kind of traffic: the collective, and the axes of the mesh, joined by +."""

    kind: str
    axis: str


@dataclass
class Traffic:
    """Collectives of one kind in a step of one device: their count, bytes on the wire, modelled seconds, and how many
    of these are hidden."""

    count: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    hidden: float = 0.0

    def add(self, other: "Traffic", times: float = 1.0) -> None:
        """Adds `times` as much as `other` has."""
        self.count += times * other.count
        self.bytes += times * other.bytes
        self.seconds += times * other.seconds
        self.hidden += times * other.hidden


@dataclass
class Tally:
    """The work and traffic of a device in a step, or in a part of it.

    seconds, flops: modelled seconds of matrix products, and their FLOP.  again: FLOP among them of products that the
    compiler computes once more to save memory.  copied: bytes of plain copies, such as those of buffers that the
    compiler cannot update in place; each byte is read and written.  moved: bytes that kernels without products read and
    write, where they are counted (`jhpt.compiled.element_wise`).  guessed: conditionals and loops that could not be
    followed (the branch with most FLOP was taken, the loop once), products in an element type for which the device has
    no rate, and communication that is `UNPRICED`.
    """

    traffic: dict[Way, Traffic] = field(default_factory=dict)
    seconds: float = 0.0
    flops: float = 0.0
    again: float = 0.0
    copied: float = 0.0
    moved: float = 0.0
    guessed: int = 0

    def add(self, other: "Tally", times: float = 1.0) -> None:
        """Adds `times` as much as `other` has."""
        for way, traffic in other.traffic.items():
            self.traffic.setdefault(way, Traffic()).add(traffic, times)
        self.seconds += times * other.seconds
        self.flops += times * other.flops
        self.again += times * other.again
        self.copied += times * other.copied
        self.moved += times * other.moved
        self.guessed += other.guessed

    def free(self, axis: str) -> float:
        """Seconds of products that do not hide communication along an axis yet."""
        return self.seconds - sum(traffic.hidden for way, traffic in self.traffic.items() if way.axis == axis)

    @property
    def bytes(self) -> float:
        """Bytes on the wire."""
        return sum(traffic.bytes for traffic in self.traffic.values())


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A compiled step.  stages: the tally of the first device of every pipeline stage."""

    memory: Memory
    stages: tuple[Tally, ...]

    def hidden_shares(self) -> dict[str, float]:
        """Hidden shares of the modelled seconds of communication by axis, over all stages; axes without communication
        are left out."""
        totals: dict[str, Traffic] = {}
        for stage in self.stages:
            for way, traffic in stage.traffic.items():
                totals.setdefault(way.axis, Traffic()).add(traffic)
        return {axis: total.hidden / total.seconds for axis, total in totals.items() if total.seconds}


def read_compiled(compiled: Any, sizes: Mapping[str, int], clock: Clock) -> Reading:
    """Reads a `jax.stages.Compiled`; sizes: of the mesh's axes, outermost first."""
    analysis = compiled.memory_analysis()
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        host=analysis.host_argument_size_in_bytes
        + analysis.host_temp_size_in_bytes
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes,
    )
    return Reading(memory=memory, stages=read_stages(read(text_of(compiled)), sizes, clock))


def read_stages(module: Module, sizes: Mapping[str, int], clock: Clock) -> tuple[Tally, ...]:
    """The tally of the first device of every stage."""
    devices, stages = math.prod(sizes.values()), sizes.get(PIPE, 1)
    return tuple(Walk(module, sizes, clock, stage * devices // stages).whole() for stage in range(stages))


@dataclass
class _Flight:
    """A collective that is in progress: its seconds, and how many of them are hidden so far."""

    way: Way
    seconds: float
    hidden: float = 0.0


class Walk:
    """One device's execution of a program."""

    def __init__(self, module: Module, sizes: Mapping[str, int], clock: Clock, device: int) -> None:
        self.module, self.sizes, self.clock, self.device = module, sizes, clock, device
        self.devices = math.prod(sizes.values())
        self._fixed: dict[str, bool] = {}
        self._tallies: dict[str, Tally] = {}
        self._steps: dict[str, tuple[Instruction, ...]] = {}
        self._products: dict[tuple[str, str], Tally] = {}

    def whole(self) -> Tally:
        """A whole step."""
        entry = self.module[self.module.entry]
        return self._run(Frame(self.module, entry, [KNOWN_BY_NOBODY] * len(entry.parameters), self.device))

    def _run(self, frame: Frame) -> Tally:
        """One execution of a computation; one whose executions are all alike is followed only once."""
        name = frame.computation.name
        if not self._is_fixed(name):
            return self._walked(frame)
        if name not in self._tallies:
            self._tallies[name] = self._walked(frame)
        return self._tallies[name]

    def _walked(self, frame: Frame) -> Tally:
        tally, flights = Tally(), dict[str, list[_Flight]]()
        for instruction in self._worth_a_look(frame.computation):
            opcode = instruction.opcode
            if opcode.endswith("-done"):
                _land(tally, flights.pop(instruction.operands[0], []))
            elif opcode.endswith("-start") and (sent := self._collectives(frame.computation, instruction)):
                flights[instruction.name] = [_send(tally, *one) for one in sent]
            elif opcode in KINDS:
                for one in self._collectives(frame.computation, instruction):
                    _send(tally, *one)
            else:
                inner = self._called(frame, instruction)
                tally.add(inner)
                _hide(flights, inner)
        for unfinished in flights.values():
            _land(tally, unfinished)
        return tally

    def _called(self, frame: Frame, instruction: Instruction) -> Tally:
        """The tally of an instruction that calls others, multiplies, copies, or communicates without a price."""
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in UNPRICED:
            return Tally(guessed=1)
        if opcode == "while":
            return self._looped(frame, instruction)
        if opcode == "conditional":
            return self._branched(frame, instruction)
        if opcode in ("call", "async-start"):
            called = instruction.called("to_apply") or instruction.called("calls")
            return self._run(frame.inner(called, [frame.reference(name) for name in instruction.operands]))
        key = (frame.computation.name, instruction.name)
        if key not in self._products:
            tally = Tally(copied=_copied(instruction))
            for product in products(self.module, frame.computation, instruction):
                tally.flops += product.flops
                tally.seconds += self.clock.product_seconds(product)
                tally.guessed += 0 if self.clock.has_rate(product) else 1
            tally.again = tally.flops if _is_repeated(frame.computation, instruction) else 0.0
            self._products[key] = tally
        return self._products[key]

    def _looped(self, frame: Frame, loop: Instruction) -> Tally:
        trips, tally = trip_count(loop), Tally()
        any_round = frame.inner(loop.called("body"), [KNOWN_BY_NOBODY])
        if trips is not None and self._is_fixed(any_round.computation.name):
            tally.add(self._run(any_round), trips)
            return tally
        try:
            for each in rounds(frame, loop):
                tally.add(self._run(each))
        except Unclear:  # perhaps after some iterations
            tally = Tally(guessed=1)
            tally.add(self._run(any_round))
        return tally

    def _branched(self, frame: Frame, conditional: Instruction) -> Tally:
        if (chosen := frame.branch(conditional)) is not None:
            return self._run(frame.inner(chosen[0], [chosen[1]]))
        arguments = [frame.reference(name) for name in conditional.operands[1:]]
        options = zip(branches_of(conditional), arguments, strict=True)
        tallies = [self._run(frame.inner(name, [argument])) for name, argument in options]
        guess = Tally(guessed=1)
        guess.add(max(tallies, key=lambda tally: (tally.flops, tally.bytes)))
        return guess

    def _collectives(self, computation: Computation, instruction: Instruction) -> list[tuple[Way, float, float]]:
        """(way, bytes on the wire, modelled seconds) of each collective in which this device sends."""
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:  # perhaps it calls a computation with collectives
            inner = self.module.computations.get(instruction.called("calls") or instruction.called("to_apply"))
            return [] if inner is None else [sent for one in inner for sent in self._collectives(inner, one)]
        size = sum(array.bytes for name in instruction.operands for array in computation[name].arrays)
        permuted = kind == "collective-permute"
        groups = permuted_pairs(instruction.tail) if permuted else replica_groups(instruction.tail, self.devices)
        groups = tuple(group for group in groups if len(group) > 1)  # a device alone sends nothing
        if self.device not in {device for group in groups for device in (group[:1] if permuted else group)}:
            return []
        way = Way(kind, "+".join(spanned_axes(groups, self.sizes)))
        return [(way, wire_bytes(kind, len(groups[0]), size), self.clock.collective_seconds(kind, groups, size))]

    def _is_fixed(self, name: str) -> bool:
        """Whether all executions of a computation are alike."""
        if name not in self._fixed:
            self._fixed[name] = all(self._step_is_fixed(one) for one in self.module[name])
        return self._fixed[name]

    def _step_is_fixed(self, one: Instruction) -> bool:
        if one.opcode == "conditional":
            return False
        if one.opcode == "while":
            return trip_count(one) is not None and self._is_fixed(one.called("body"))
        if one.opcode in ("call", "async-start"):
            return self._is_fixed(one.called("to_apply") or one.called("calls"))
        return True

    def _worth_a_look(self, computation: Computation) -> tuple[Instruction, ...]:
        if computation.name not in self._steps:
            self._steps[computation.name] = tuple(one for one in computation if self._counts(computation, one))
        return self._steps[computation.name]

    def _counts(self, computation: Computation, one: Instruction) -> bool:
        opcode = one.opcode
        looked_at = (*KINDS, *UNPRICED, "while", "conditional", "call", "copy")
        if opcode in looked_at or opcode.endswith(("-start", "-done")):
            return True
        return bool(products(self.module, computation, one))


def _copied(one: Instruction) -> float:
    """Bytes of an instruction that only copies."""
    return one.arrays[0].bytes if one.opcode in ("copy", "copy-start") else 0.0


def _is_repeated(computation: Computation, one: Instruction) -> bool:
    """Whether XLA made this instruction from another one to save memory (by `HloRematerialization`'s names).

    The first remaining instruction of a family counts as the original, which may be gone.
    """
    original = one.name.split(".remat")[0]
    family = [name for name in computation.instructions if name.split(".remat")[0] == original]
    return family[0] != one.name


def wire_bytes(kind: str, members: int, size: float) -> float:
    """Bytes that a member of a ring sends if every member contributes `size` bytes."""
    if kind == "collective-permute":
        return size
    if kind == "all-gather":
        return (members - 1) * size
    return (2 if kind == "all-reduce" else 1) * (members - 1) / members * size


def _send(tally: Tally, way: Way, size: float, seconds: float) -> _Flight:
    tally.traffic.setdefault(way, Traffic()).add(Traffic(1, size, seconds))
    return _Flight(way, seconds)


def _hide(flights: Mapping[str, list[_Flight]], inner: Tally) -> None:
    """Hides the collectives that are in progress behind the products of `inner`."""
    remaining: dict[str, float] = {}
    for flight in (flight for each in flights.values() for flight in each):
        free = remaining.setdefault(flight.way.axis, inner.free(flight.way.axis))
        used = min(free, flight.seconds - flight.hidden)
        flight.hidden += used
        remaining[flight.way.axis] = free - used


def _land(tally: Tally, flights: Iterable[_Flight]) -> None:
    for flight in flights:
        tally.traffic[flight.way].hidden += flight.hidden
