"""A step played event by event from raw profile numbers: a second derivation of what the planner prices.

It shares nothing with `jhpt.planner.cost`: neither formulas of collectives, of layers and of schedules nor the order of
passes.  It reads seconds of layers, bytes, bandwidths and latencies, lists the tasks that the devices of every stage
run, and plays them.  All devices of a stage do the same, so one of them stands for all.

**Tasks.**  A task takes seconds on one or several streams and begins when what it waits for is over and the tasks that
were listed before it on its streams are.  Every stage has a stream that computes and one that reduces and gathers over
the data ranks; every pair of neighbours has one in each direction.  Where communication cannot run beside computation
it also occupies the stream that computes.

    layer, forward      seconds of its samples, then the all-reduce of its activations over the tensor ranks, in line
    layer, backward     the same of its errors
    gradients           of a layer, over the data ranks, after its last backward pass, in line after all passes;
                        ZeRO-2, ZeRO-3: after every backward pass
    weights             ZeRO-1, ZeRO-2: of a layer, before its first forward pass; ZeRO-3: before every pass, beside the
                        layer before it at the earliest, and ahead of that layer's gradients
    tied parameter      summed over the data ranks, then exchanged between its two stages, when both are that far
    update              after the gradients

**Pipelines.**  Devices walk through ticks; d is the stage, n the micro-batch, S and M their numbers:

    gpipe, eager-1f1b   forward n in tick d + n, backward n in tick D + S - 1 - d + n; D is S + M - 2, or S - 1.  In a
                        tick: errors of neighbours leave, forward pass, activations leave, errors are awaited, backward
                        pass, activations are awaited.  Errors travel from tick D on, activations until the last forward
                        pass, whether or not there are any.
    1f1b                forward n in tick d + 2 n, backward n in tick 2 S - 1 - d + 2 n.  At the end of tick t devices d
                        and d + 1 with even t - d exchange, and both wait.

**Collectives.**  A ring of n members passes n - 1 pieces of 1 / n of the tensor; the first byte goes from the first
member to the last.  All-reduces pass twice, or up and down a tree, whichever takes less.  Members on several nodes
share the ports of a node with the other groups that leave it, and each has one port at most.

Left out: clusters of several kinds of devices, different tensor degrees within a stage, several chunks of a stage,
recomputation, sequence parallelism, compression, offload, gathers and reductions of a parameter's copy with ZeRO-3, and
pipelines of one SPMD program, whose embedding and head are on every stage.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jhpt.core.cluster import Cluster, Link
from jhpt.core.plan import Plan, Stage
from jhpt.core.profile import LayerKind, ModelProfile, Timing


@dataclass
class Clock:
    """Plays tasks in the order in which they are listed.  free: when each stream is."""

    free: dict[str, float] = field(default_factory=dict)

    def run(self, seconds: float, *streams: str, after: float = 0.0) -> float:
        """The end of a task that begins when `after` is over and its streams are free."""
        end = seconds + max([after, *(self.free.get(stream, 0.0) for stream in streams)])
        for stream in streams:
            self.free[stream] = end
        return end


def ring(members: Sequence[int], all_groups: Sequence[Sequence[int]], cluster: Cluster, size: float) -> float:
    """Seconds in which a ring passes n - 1 pieces of a tensor of `size` bytes.

    Args:
      members: node of every member.  all_groups: of all groups that do so at the same time.
    """
    if len(members) < 2 or not size:
        return 0.0
    pairs = itertools.pairwise(members)
    latency = sum(_links(cluster)[one != other].latency for one, other in pairs)
    return (len(members) - 1) / len(members) * size / _rate(members, all_groups, cluster) + latency


def all_reduce(members: Sequence[int], all_groups: Sequence[Sequence[int]], cluster: Cluster, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes over a group; arguments as of `ring`."""
    if len(members) < 2 or not size:
        return 0.0
    inside, across = _links(cluster)
    nodes = sorted(set(members))
    if len(nodes) == 1:
        depth = math.ceil(math.log2(len(members))) * inside.latency
    else:
        depth = min(map(members.count, nodes)) * inside.latency + math.ceil(math.log2(len(nodes))) * across.latency
    tree = 2 * (depth + (len(members) - 1) / len(members) * size / _rate(members, all_groups, cluster))
    return min(2 * ring(members, all_groups, cluster, size), tree)


def _links(cluster: Cluster) -> tuple[Link, Link]:
    return cluster.nodes[0].inside, cluster.network


def _rate(members: Sequence[int], all_groups: Sequence[Sequence[int]], cluster: Cluster) -> float:
    """Bytes/s that a group passes on."""
    inside, across = _links(cluster)
    if len(set(members)) == 1:
        return inside.bandwidth
    leaving = [set(group) for group in all_groups if len(set(group)) > 1]
    crowd = max(sum(node in group for group in leaving) for node in set(members))
    ports = min(min(map(members.count, set(members))), across.ports / crowd)
    return min(inside.bandwidth, ports * across.bandwidth)


def layer_seconds(kind: LayerKind, samples: int, tensor: int) -> tuple[float, float]:
    """Forward and backward seconds: linear between measured batches, a straight line through the origin above."""
    timing: Timing = max((each for each in kind.timings if each.tensor <= tensor), key=lambda each: each.tensor)
    share = timing.tensor / tensor
    batches = timing.batches
    if samples >= batches[-1]:
        share *= samples / batches[-1]
        return share * timing.forward[-1], share * timing.backward[-1]
    if samples <= batches[0]:
        return share * timing.forward[0], share * timing.backward[0]
    above = next(at for at, batch in enumerate(batches) if batch >= samples)
    part = (samples - batches[above - 1]) / (batches[above] - batches[above - 1])
    forward, backward = (
        share * ((1 - part) * each[above - 1] + part * each[above]) for each in (timing.forward, timing.backward)
    )
    return forward, backward


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer on a device.  forward, backward: seconds with all-reduces.  gather: of its weights, or to scatter its
    gradients.  reduce: of its gradients, to all ranks.  numbers: of its parameters on a device.  zero: its level."""

    forward: float
    backward: float
    gather: float
    reduce: float
    numbers: float
    zero: int


class Played:
    """A plan's step; `seconds` plays it.

    waits: whether the two stages of a shared parameter wait for each other; without, each takes the seconds of the
      exchange when it is that far itself.
    """

    def __init__(self, plan: Plan, profile: ModelProfile, cluster: Cluster, *, waits: bool = True) -> None:
        self.plan, self.profile, self.cluster, self.waits = plan, profile, cluster, waits
        self.nodes = [at for at in range(cluster.num_nodes) for _ in range(cluster.nodes[0].devices)]
        self.clock = Clock()
        self.layers = [self._layers(stage) for stage in plan.stages]
        self.ready: list[list[float]] = [[0.0] * len(row) for row in self.layers]
        """When the weights of a layer are there; ZeRO-1 and ZeRO-2 gather them once."""
        self.began = [0.0] * len(plan.stages)
        """When a stage began the layer that it computes."""
        self.behind: list[list[tuple[float, float]]] = [[] for _ in plan.stages]
        """Reductions that wait for the link, or for the end of all passes, and when their gradients were there."""

    def seconds(self) -> float:
        """When the last device has updated its parameters."""
        self._gather_once()
        stages, count = len(self.plan.stages), self.plan.micro_batches
        if stages == 1:
            for n in range(count):
                self._forward(0)
                self._backward(0, last=n == count - 1)
        elif self.plan.schedule == "1f1b":
            self._in_turn()
        else:
            self._all_at_once()
        for s in range(stages):
            self._flush(s)
        done = [max(self.clock.free.get(f"{s} {stream}", 0.0) for stream in ("compute", "data")) for s in range(stages)]
        done = self._tied(done)
        updates = (
            sum(layer.numbers / self._shares(s, layer.zero) for layer in row) + self._copied(s)
            for s, row in self._numbered()
        )
        return max(end + numbers * self.profile.update_seconds for end, numbers in zip(done, updates, strict=True))

    def _numbered(self) -> list[tuple[int, list[Layer]]]:
        return list(enumerate(self.layers))

    def _shares(self, stage: int, zero: int) -> int:
        """Over how many ranks the update of a layer is divided."""
        return self._degrees(self.plan.stages[stage])[1] if zero else 1

    @staticmethod
    def _degrees(stage: Stage) -> tuple[int, int]:
        """(tensor degree, data degree); the same in all layers."""
        tensor = stage.chunks[0].tensor[0]
        return tensor, stage.devices // tensor

    def _layers(self, stage: Stage) -> list[Layer]:
        tensor, data = self._degrees(stage)
        nodes = [self.nodes[device] for device in range(stage.device, stage.device + stage.devices)]
        tensor_groups = [nodes[at : at + tensor] for at in range(0, len(nodes), tensor)]
        data_groups = [nodes[at::tensor] for at in range(tensor)]
        samples = math.ceil(self.plan.batch / self.plan.micro_batches / data)
        (chunk,), last = stage.chunks, self.profile.num_layers - 1
        rows = []
        for at in range(chunk.first, chunk.stop):
            kind = self.profile.kinds[self.profile.layers[at]]
            forward, backward = layer_seconds(kind, samples, tensor)
            forward += self._slowest(all_reduce, tensor_groups, samples * kind.tensor_forward_bytes)
            backward += self._slowest(all_reduce, tensor_groups, samples * kind.tensor_backward_bytes)
            size = kind.parameters / tensor * self.profile.bytes_per_weight
            # In one SPMD program embedding and head are gathered once.
            once = self.plan.space == "spmd" and at in (0, last)
            zero = 0 if data == 1 else min(1, self.plan.zero) if once else self.plan.zero
            rows.append(
                Layer(
                    forward=forward,
                    backward=backward,
                    gather=self._slowest(ring, data_groups, size),
                    reduce=self._slowest(all_reduce, data_groups, size),
                    numbers=kind.parameters / tensor,
                    zero=1 if zero == 2 and self.plan.micro_batches == 1 else zero,
                )
            )
        return rows

    def _slowest(self, collective: Callable[..., float], groups: list[list[int]], size: float) -> float:
        return max(collective(group, groups, self.cluster, size) for group in groups)

    def _compute(self, stage: int, seconds: float, after: float = 0.0) -> float:
        return self.clock.run(seconds, f"{stage} compute", after=after)

    def _collective(self, stage: int, seconds: float, after: float = 0.0) -> float:
        streams = [f"{stage} data"] if self.cluster.overlap else [f"{stage} data", f"{stage} compute"]
        return self.clock.run(seconds, *streams, after=after)

    def _gather_once(self) -> None:
        for stage, row in self._numbered():
            self.ready[stage] = [
                self._collective(stage, layer.gather) if layer.zero in (1, 2) else 0.0 for layer in row
            ]

    def _forward(self, stage: int, after: float = 0.0) -> None:
        for at, layer in enumerate(self.layers[stage]):
            self._run(stage, layer, layer.forward, max(after, self.ready[stage][at]))

    def _backward(self, stage: int, *, last: bool, after: float = 0.0) -> None:
        for layer in reversed(self.layers[stage]):
            end = self._run(stage, layer, layer.backward, after)
            if layer.zero >= 2:
                self.behind[stage].append((layer.gather, end))
                if layer.zero == 2 or not self.cluster.overlap:
                    self._flush(stage)
            elif last:
                self.behind[stage].append((layer.gather if layer.zero else layer.reduce, end))
                if self.cluster.overlap:
                    self._flush(stage)

    def _run(self, stage: int, layer: Layer, seconds: float, after: float) -> float:
        """The end of a layer's pass; with ZeRO-3 its weights are gathered before, ahead of gradients that wait."""
        if layer.zero == 3:
            after = max(after, self._collective(stage, layer.gather, after=self.began[stage]))
            self._flush(stage)
        end = self._compute(stage, seconds, after=after)
        self.began[stage] = end - seconds
        return end

    def _flush(self, stage: int) -> None:
        """Reduces the gradients that wait."""
        for seconds, end in self.behind[stage]:
            self._collective(stage, seconds, after=end)
        self.behind[stage].clear()

    def _cut(self, stage: int) -> float:
        """Seconds of a micro-batch's activations on their way to the next stage, and of errors on their way back: the
        mean of both."""
        sender, receiver = self.plan.stages[stage : stage + 2]
        kind = self.profile.kinds[self.profile.layers[sender.chunks[0].stop - 1]]
        data = min(self._degrees(each)[1] for each in (sender, receiver))
        size = kind.boundary_bytes * math.ceil(self.plan.batch / self.plan.micro_batches / data)
        rows = [
            [self.nodes[at] for at in range(each.device, each.device + each.devices)] for each in (sender, receiver)
        ]
        if not size:
            return 0.0
        if len({node for row in rows for node in row}) == 1:
            link, crowd = self.cluster.nodes[0].inside, 1
        else:
            link, crowd = self.cluster.network, min(*map(len, rows), self.cluster.nodes[0].devices)
        return size / (link.bandwidth * min(1.0, link.ports / crowd)) + link.latency + self._gathered(stage, kind) / 2

    def _gathered(self, stage: int, kind: LayerKind) -> float:
        """Seconds in which the tensor ranks of the stage with more devices gather rows, of which each got a share."""
        fewer, more = sorted(self.plan.stages[stage : stage + 2], key=lambda each: each.devices)
        if more.devices == fewer.devices:
            return 0.0
        tensor, data = self._degrees(more)
        nodes = [self.nodes[at] for at in range(more.device, more.device + more.devices)]
        groups = [nodes[at : at + tensor] for at in range(0, more.devices, tensor)]
        size = kind.boundary_bytes * math.ceil(self.plan.batch / self.plan.micro_batches / data)
        return max(ring(group, groups, self.cluster, size) for group in groups)

    def _all_at_once(self) -> None:
        stages, count = len(self.plan.stages), self.plan.micro_batches
        first_back = stages - 1 + (count - 1 if self.plan.schedule == "gpipe" else 0)
        cuts = [self._cut(s) for s in range(stages - 1)]
        for tick in range(first_back + stages - 1 + count):
            errors = self._exchange("errors", cuts) if tick >= first_back else [0.0] * stages
            activations = [0.0] * stages
            if tick <= stages - 1 + count - 1:
                for d in range(stages):
                    if 0 <= tick - d < count:
                        self._forward(d)
                activations = self._exchange("activations", cuts)
            for d in range(stages):
                self._compute(d, 0.0, after=errors[d])
                n = tick - first_back - (stages - 1 - d)
                if 0 <= n < count:
                    self._backward(d, last=n == count - 1)
            for d in range(stages):
                self._compute(d, 0.0, after=activations[d])

    def _exchange(self, what: str, cuts: list[float]) -> list[float]:
        """When the exchanges of every stage with its neighbours are over that begin where the stages are now."""
        at = [self.clock.free.get(f"{s} compute", 0.0) for s in range(len(cuts) + 1)]
        ends = [self.clock.run(cut, f"{what} {s}", after=max(at[s : s + 2])) for s, cut in enumerate(cuts)]
        over = [max(ends[max(0, s - 1) : s + 1]) for s in range(len(at))]
        if not self.cluster.overlap:
            for s, end in enumerate(over):
                self._compute(s, 0.0, after=end)
        return over

    def _in_turn(self) -> None:
        stages, count = len(self.plan.stages), self.plan.micro_batches
        ways = (
            1 if self.cluster.overlap or self.plan.space == "general" else 2
        )  # in line, one direction after the other
        cuts = [ways * self._cut(s) for s in range(stages - 1)]
        for tick in range(2 * (count + stages - 1)):
            for d in range(stages):
                for first, forward in ((d, True), (2 * stages - 1 - d, False)):
                    n, odd = divmod(tick - first, 2)
                    if not odd and 0 <= n < count:
                        self._forward(d) if forward else self._backward(d, last=n == count - 1)
            for d in range(tick % 2, stages - 1, 2):
                self.clock.run(cuts[d], f"{d} compute", f"{d + 1} compute")

    def _tied_stages(self) -> tuple[int, int, int]:
        """(parameters shared by two stages, the stage that has them, the one that has the copy); zeros: none are."""
        names = self.profile.layers
        for at, name in enumerate(names):
            if numbers := self.profile.kinds[name].tied_parameters:
                chunks = [stage.chunks[0] for stage in self.plan.stages]
                holder = next(s for s, chunk in enumerate(chunks) if chunk.first <= at < chunk.stop)
                return (numbers, 0, holder) if holder else (0, 0, 0)
        return 0, 0, 0

    def _copied(self, stage: int) -> float:
        """Numbers that a device updates of the copy of a shared parameter."""
        numbers, _, holder = self._tied_stages()
        tensor, _ = self._degrees(self.plan.stages[stage])
        return numbers / tensor / self._shares(stage, self.plan.zero) if numbers and stage == holder else 0.0

    def _tied(self, done: list[float]) -> list[float]:
        """When every stage can update: a shared parameter's gradient is summed over its two stages before."""
        numbers, *pair = self._tied_stages()
        if not numbers:
            return done
        ready, exchanges = {}, []
        for s in pair:
            stage = self.plan.stages[s]
            tensor, data = self._degrees(stage)
            nodes = [self.nodes[device] for device in range(stage.device, stage.device + stage.devices)]
            groups, size = [nodes[at::tensor] for at in range(tensor)], numbers / tensor * self.profile.bytes_per_weight
            if self.plan.zero < 2 or data == 1:
                reduced = self._slowest(ring if self.plan.zero else all_reduce, groups, size)
            else:
                reduced = 0.0
            several = self.cluster.num_nodes > 1
            link = self.cluster.network if several else self.cluster.nodes[0].inside
            crowd = max(map(nodes.count, nodes)) if several else 1
            one_way = size / (link.bandwidth * min(1.0, link.ports / crowd)) + link.latency
            exchanges.append((1 if self.cluster.overlap else 2) * one_way + link.latency)
            ready[s] = done[s] + reduced
        if self.waits:
            ready = dict.fromkeys(pair, max(ready.values()))
        ends = {s: ready[s] + seconds for s, seconds in zip(pair, exchanges, strict=True)}
        return [ends.get(s, end) for s, end in enumerate(done)]
