"""Windows -> batches: a pure function of (seed, step), so that any number of processes can resume at any step."""

from collections.abc import Iterator

import grain
import numpy as np

from jhpt.training.data.left_out import LeftOut, position
from jhpt.training.data.mixture import Mixture, Sequences, Turns

PREFETCHED_BATCHES = 4


def shuffled(windows: Sequences, seed: int) -> grain.MapDataset:
    """An endless sequence of windows: epoch after epoch, each in another random order, which depends on `seed`.

    Of a mixture, each source has epochs of its own, and the sources take turns.
    """
    if not isinstance(windows, Mixture):
        return grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    sources = [shuffled(source, seed) for source in windows.sources]
    return grain.MapDataset.select_from_datasets(sources, Turns(windows.shares))


def training_batches(
    rows: grain.MapDataset, batch_size: int, local: slice, first_step: int, left_out: LeftOut = ()
) -> Iterator[np.ndarray]:
    """Batches from `first_step` on, read ahead by a thread.

    The batch that follows step t is rows `p * batch_size ... (p + 1) * batch_size - 1` of the endless sequence, with p
    its position (`left_out.position`), which is t where no data is left out.  A process reads only its `local` slice of
    each.  Yields int32 [local rows, window length].
    """

    def read(step: int) -> np.ndarray:
        first = position(step, left_out) * batch_size
        return np.stack([rows[row] for row in range(first + local.start, first + local.stop)])

    steps = grain.MapDataset.range(first_step, 2**62).map(read)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED_BATCHES)))


def evaluation_batches(
    windows: Sequences, batch_size: int, local: slice, batches: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The first `batches` held-out batches, in order, the same at every call.

    The last batch is filled up with repeated rows of weight 0.  Yields (int32 [local rows, length], float32 [local
    rows]).
    """
    total = min(len(windows), batches * batch_size)
    for first in range(0, total, batch_size):
        rows = range(first + local.start, first + local.stop)
        yield np.stack([windows[row % total] for row in rows]), np.asarray([row < total for row in rows], np.float32)
