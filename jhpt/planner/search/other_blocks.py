"""Blocks of one stage that save different activations: how many first blocks save one set, and the others another.

On one stage seconds and bytes of blocks add up, and with equal blocks only their number matters.  Two sets are then
enough, up to rounding to whole blocks: one that takes more bytes than there are, and one that takes fewer.  So the
choices are pairs of sets.  With every block that saves the larger one a step takes more bytes and fewer seconds, so the
best number for a pair is the largest that fits; no other one is visited.

In a pipeline all blocks save the same: one program runs every stage, and its ring of saved activations has a row of the
same shape for every block.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jhpt.core.plan import OtherBlocks, SavedTensors
from jhpt.planner.cost.schedule import Array


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What blocks cost with each choice.

    saved: what is saved beside the input; None: everything.  seconds: [choices, blocks] that a micro-batch's backward
    pass computes again, at least.  bytes: [choices, blocks] that a micro-batch saves on a device, at least.
    """

    saved: tuple[SavedTensors | None, ...]
    seconds: Array
    bytes: Array

    def pairs(self, room: Array | float) -> "Pairs":
        """The pairs of sets that fit with some number of blocks.  At least one block saves each set.

        Args:
          room: bytes for what blocks save; [blocks - 1] with 1, 2, ... first blocks, where that matters.
        """
        count = self.bytes.shape[1]
        numbers = np.arange(1, count)
        seconds, sizes = (_by_number(values, numbers) for values in (self.seconds, self.bytes))
        fits = sizes <= room
        total = self.bytes.sum(axis=1)
        possible = (total[:, None] < total[None]) & fits.any(axis=2)
        first, others = np.nonzero(possible)
        least = np.where(fits, seconds, np.inf).min(axis=2, initial=np.inf)
        return Pairs(
            costs=self, first=first, others=others, after=1 + fits.argmax(axis=2)[possible], seconds=least[possible]
        )


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of sets, by their positions in `costs`.

    after: the fewest first blocks with which a pair fits.  seconds: that a micro-batch computes again, at least.
    """

    costs: BlockCosts
    first: npt.NDArray[np.intp]
    others: npt.NDArray[np.intp]
    after: npt.NDArray[np.intp]
    seconds: Array

    def choice(self, at: int) -> tuple[SavedTensors, OtherBlocks]:
        """What the first blocks save, and the others."""
        saved = self.costs.saved[self.first[at]]
        assert saved is not None, "everything takes the most bytes"
        return saved, OtherBlocks(after=int(self.after[at]), saved=self.costs.saved[self.others[at]])


def _by_number(values: Array, numbers: npt.NDArray[np.intp]) -> Array:
    """[first, others, numbers] sums over all blocks, of which so many have the first choice."""
    begun = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    left = begun[:, -1:] - begun
    sums: Array = begun[:, None, numbers] + left[None, :, numbers]
    return sums
