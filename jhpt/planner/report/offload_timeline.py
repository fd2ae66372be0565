"""A step with blocks on the host, group by group: what computes, what comes and what goes, for `planner.timeline`."""

from jhpt.core.plan import Plan
from jhpt.planner.cost.offload import OffloadedStep
from jhpt.planner.report.simulation import Kind, Span, Stream, Timeline


def offload_timeline(plan: Plan, step: OffloadedStep) -> Timeline:
    """The step that `offloaded` prices; the data ranks do the same at the same time, so one is shown."""
    played, copies, size = _Played(), step.copies, step.size
    groups = [at * size + 1 for at in range(step.groups)]
    heads = [f"block {first}" for first in groups]

    played.together(compute=("embedding", step.entry[0], "forward"))
    played.together(fetch=(heads[0], copies.forward_in))
    for first, head, coming in zip(groups, heads, [*heads[1:], None], strict=True):
        (one, seconds), (others, longer) = _cut(first, size, step.block.forward)
        played.together(compute=(one, seconds, "forward"), write=(head, copies.forward_out))
        played.together(compute=(others, longer, "forward"), fetch=(coming, copies.forward_in))
    played.together(compute=("head", step.exit[0], "forward"))
    played.together(compute=("head", step.exit[1], "backward"))
    played.together(fetch=(heads[-1], copies.first))
    before = f"{heads[-1]}, as it was" if step.update_in_backward else None
    for first, head, coming in zip(reversed(groups), reversed(heads), [*heads[-2::-1], None], strict=True):
        write = (before, copies.backward_out)
        if step.update_in_backward:
            (one, seconds), (others, longer) = _cut(first, size, step.block.backward)
            came = f"the state of {head}" + (f", weights of {coming}" if coming else "")
            played.together(compute=(others, longer, "backward"), write=write)
            played.together(compute=(one, seconds, "backward"), fetch=(came, copies.backward_in))
        else:
            blocks, seconds = _blocks(first, size), size * step.block.backward
            played.together(compute=(blocks, seconds, "backward"), fetch=(coming, copies.backward_in), write=write)
        before = head
    played.together(write=(before, copies.backward_out))
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
        embedding_and_head = [self.now]
        if compute:
            embedding_and_head.append(self._add("compute", compute[2], f"{compute[2]} of {compute[0]}", compute[1]))
        copies: tuple[tuple[Stream, Kind, str, tuple[str | None, float]], ...] = (
            ("fetch", "forward", "fetch of", fetch),
            ("write", "backward", "write of", write),
            ("update", "update", "update of", update),
        )
        for stream, kind, what, (name, seconds) in copies:
            if name and seconds > 0:
                embedding_and_head.append(self._add(stream, kind, f"{what} {name}", seconds))
        self.now = max(embedding_and_head)

    def _add(self, stream: Stream, kind: Kind, name: str, seconds: float) -> float:
        end = self.now + seconds
        self.spans.append(Span(device=0, stream=stream, kind=kind, name=name, start=self.now, end=end))
        return end


def _cut(first: int, size: int, seconds: float) -> tuple[tuple[str, float], tuple[str, float]]:
    """(the block that comes, those that stay behind it), by name and seconds; a half of it each, where none do."""
    if size == 1:
        return (f"block {first}", seconds / 2), (f"block {first}", seconds / 2)
    return (f"block {first}", seconds), (_blocks(first + 1, size - 1), (size - 1) * seconds)


def _blocks(first: int, count: int) -> str:
    return f"block {first}" if count == 1 else f"blocks {first}-{first + count - 1}"
