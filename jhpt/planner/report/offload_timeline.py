"""The timeline of a step with CPU offload: computation, fetches and writes, group by group."""

from jhpt.core.plan import Plan
from jhpt.planner.cost.offload import OffloadedStep
from jhpt.planner.report.simulation import Kind, Span, Stream, Timeline


def offload_timeline(plan: Plan, step: OffloadedStep) -> Timeline:
    """The step that `offloaded_step` prices.  All data ranks do the same at the same time, so one is shown."""
    recorder, copies, size = _Recorder(), step.copies, step.size
    groups = [at * size + 1 for at in range(step.groups)]
    heads = [f"block {first}" for first in groups]

    recorder.run(compute=("embedding", step.entry[0], "forward"))
    recorder.run(fetch=(_gradient_of(heads[0]), copies.gradient))
    recorder.run(fetch=(heads[0], copies.forward_in))
    for first, head, coming in zip(groups, heads, [*heads[1:], None], strict=True):
        (one, seconds), (others, longer) = _cut(first, size, step.block.forward)
        recorder.run(
            compute=(one, seconds, "forward"),
            fetch=(_gradient_of(coming), copies.gradient),
            write=(head, copies.forward_out),
        )
        recorder.run(compute=(others, longer, "forward"), fetch=(coming, copies.forward_in))
    recorder.run(compute=("head", step.exit[0], "forward"))
    recorder.run(compute=("head", step.exit[1], "backward"))
    recorder.run(fetch=(heads[-1], copies.first))
    before = f"{heads[-1]}, as it was" if step.update_in_backward else None
    for first, head, coming in zip(reversed(groups), reversed(heads), [*heads[-2::-1], None], strict=True):
        write = (before, copies.backward_out)
        if step.update_in_backward:
            (one, seconds), (others, longer) = _cut(first, size, step.block.backward)
            fetched = f"the state of {head}" + (f", weights of {coming}" if coming else "")
            recorder.run(compute=(others, longer, "backward"), write=write)
            recorder.run(compute=(one, seconds, "backward"), fetch=(fetched, copies.backward_in))
        else:
            blocks, seconds = _blocks(first, size), size * step.block.backward
            recorder.run(compute=(blocks, seconds, "backward"), fetch=(coming, copies.backward_in), write=write)
        before = head
    recorder.run(write=(before, copies.backward_out))
    recorder.run(compute=("embedding", step.entry[1], "backward"))
    recorder.run(update=("embedding and head", step.finish))
    spans = sorted(recorder.spans, key=lambda span: span.start)
    return Timeline(
        schedule=plan.schedule,
        devices=1,
        chunks=1,
        micro_batches=plan.micro_batches,
        seconds=recorder.now,
        spans=tuple(spans),
    )


def _gradient_of(head: str | None) -> str | None:
    return head and f"the gradient of {head}"


class _Recorder:
    """The spans so far, and the time when the last of them ends."""

    def __init__(self) -> None:
        self.now, self.spans = 0.0, list[Span]()

    def run(
        self,
        *,
        compute: tuple[str, float, Kind] | None = None,
        fetch: tuple[str | None, float] = (None, 0.0),
        write: tuple[str | None, float] = (None, 0.0),
        update: tuple[str | None, float] = (None, 0.0),
    ) -> None:
        """Starts all of these now.  The next call starts when the last of them has ended."""
        ends = [self.now]
        if compute:
            ends.append(self._add("compute", compute[2], f"{compute[2]} of {compute[0]}", compute[1]))
        copies: tuple[tuple[Stream, Kind, str, tuple[str | None, float]], ...] = (
            ("fetch", "forward", "fetch of", fetch),
            ("write", "backward", "write of", write),
            ("update", "update", "update of", update),
        )
        for stream, kind, verb, (name, seconds) in copies:
            if name and seconds > 0:
                ends.append(self._add(stream, kind, f"{verb} {name}", seconds))
        self.now = max(ends)

    def _add(self, stream: Stream, kind: Kind, name: str, seconds: float) -> float:
        end = self.now + seconds
        self.spans.append(Span(device=0, stream=stream, kind=kind, name=name, start=self.now, end=end))
        return end


def _cut(first: int, size: int, seconds: float) -> tuple[tuple[str, float], tuple[str, float]]:
    """(the streamed block, the resident blocks of its group), by name and seconds.

    A group without resident blocks is split into two halves of its one block.
    """
    if size == 1:
        return (f"block {first}", seconds / 2), (f"block {first}", seconds / 2)
    return (f"block {first}", seconds), (_blocks(first + 1, size - 1), (size - 1) * seconds)


def _blocks(first: int, count: int) -> str:
    return f"block {first}" if count == 1 else f"blocks {first}-{first + count - 1}"
