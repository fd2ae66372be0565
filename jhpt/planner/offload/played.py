"""A step with blocks on the host, group by group: what computes, what comes and what goes, for `planner.timeline`."""

from jhpt.core.plan import Plan
from jhpt.planner.offload.hosted import HostedStep
from jhpt.planner.simulation import Kind, Span, Stream, Timeline


def hosted_timeline(plan: Plan, step: HostedStep) -> Timeline:
    """The step that `hosted` prices; the data ranks do the same at the same time, so one is shown."""
    played = _Played()
    fetched, written, again = step.copies
    groups = [_blocks(at * step.size + 1, step.size) for at in range(step.groups)]
    heads = [f"block {at * step.size + 1}" for at in range(step.groups)]
    ends = [*heads[1:], None]
    forward, backward = (step.size * seconds for seconds in (step.block.forward, step.block.backward))

    played.together(compute=("embedding", step.entry[0], "forward"))
    played.together(fetch=(heads[0], fetched))
    for blocks, head, coming in zip(groups, heads, ends, strict=True):
        played.together(fetch=(coming, fetched))
        played.together(compute=(blocks, forward, "forward"), write=(head, written))
    played.together(compute=("head", step.exit[0], "forward"))
    played.together(compute=("head", step.exit[1], "backward"))
    played.together(fetch=(heads[-1], again))
    before = None
    for blocks, head, coming in zip(reversed(groups), reversed(heads), [*heads[-2::-1], None], strict=True):
        played.together(compute=(blocks, backward, "backward"), fetch=(coming, again), write=(before, again))
        before = head
    played.together(write=(before, again))
    played.together(compute=("embedding", step.entry[1], "backward"))
    played.together(update=("ends", step.finish))
    spans = sorted(played.spans, key=lambda span: span.start)
    return Timeline(
        schedule=plan.schedule,
        devices=1,
        chunks=1,
        micro_batches=plan.micro_batches,
        seconds=played.now,
        spans=tuple(spans),
    )


class _Played:
    """Spans so far, and when the last of them has ended."""

    def __init__(self) -> None:
        self.now, self.spans = 0.0, list[Span]()

    def together(
        self,
        *,
        compute: tuple[str, float, Kind] | None = None,
        fetch: tuple[str | None, float] = (None, 0.0),
        write: tuple[str | None, float] = (None, 0.0),
        update: tuple[str | None, float] = (None, 0.0),
    ) -> None:
        """All begin now, and the next ones when the last has ended."""
        ends = [self.now]
        if compute:
            ends.append(self._add("compute", compute[2], f"{compute[2]} of {compute[0]}", compute[1]))
        copies: tuple[tuple[Stream, Kind, str, tuple[str | None, float]], ...] = (
            ("fetch", "forward", "fetch of", fetch),
            ("write", "backward", "write of", write),
            ("update", "update", "update of", update),
        )
        for stream, kind, what, (name, seconds) in copies:
            if name and seconds > 0:
                ends.append(self._add(stream, kind, f"{what} {name}", seconds))
        self.now = max(ends)

    def _add(self, stream: Stream, kind: Kind, name: str, seconds: float) -> float:
        end = self.now + seconds
        self.spans.append(Span(device=0, stream=stream, kind=kind, name=name, start=self.now, end=end))
        return end


def _blocks(first: int, count: int) -> str:
    return f"block {first}" if count == 1 else f"blocks {first}-{first + count - 1}"
