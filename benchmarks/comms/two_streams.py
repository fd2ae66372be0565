"""Seconds of operations on two streams, simulated chunk by chunk.

The benchmark predicts its variants with them, and the additive costs of `jhpt.planner.cost.collectives` approximate
them.
"""

from collections.abc import Sequence

from jhpt.planner.cost.collectives import Operation, chunk_sizes


def makespan(operations: Sequence[Operation], chunks: Sequence[int], samples: int, *, overlap: bool = True) -> float:
    """Seconds until the compute and the all-reduces of the last operation are done.

    Args:
      chunks: of every operation.
      overlap: whether there are two streams; with one stream the computation waits for each all-reduce.
    """
    computed = reduced = 0.0
    done = [(samples, 0.0)]  # of every chunk of the operation before: one past its last sample, and when it is reduced
    for operation, count in zip(operations, chunks, strict=True):
        finished: list[tuple[int, float]] = []
        stop, at = 0, 0
        for size in chunk_sizes(samples, count):
            stop += size
            ready = done[at][1]
            while done[at][0] < stop:
                at += 1
                ready = done[at][1]
            computed = max(computed, ready) + operation.work(size)
            end = computed
            if (travel := operation.travel(size)) > 0:
                end = reduced = max(reduced, computed) + travel
            computed = computed if overlap else end
            finished.append((stop, end))
        done = finished
    return max(computed, reduced)


def layers_seconds(
    *, layers: int, forward: float, backward: float, travel: float, chunks: int = 1, overlap: bool = True
) -> float:
    """Seconds of a step of equal layers: the forward pass, followed by the backward pass.

    Args:
      forward, backward: seconds to compute one chunk in one layer; half of them before each of its two all-reduces.
      travel: seconds to all-reduce one chunk.
      chunks: of a device's samples.
      overlap: whether there are two streams.
    """
    counts = [chunks] * (2 * layers)

    def operation(seconds: float) -> Operation:
        return Operation(work=lambda _: seconds / 2, travel=lambda _: travel)

    passes = (operation(seconds) for seconds in (forward, backward))
    return sum(makespan([one] * len(counts), counts, chunks, overlap=overlap) for one in passes)
