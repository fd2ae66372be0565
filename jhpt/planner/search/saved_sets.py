"""What blocks may save for their backward pass, and what each choice takes: seconds, and bytes on a device.

All blocks of a pipeline save activations of the same names, because one program runs them; on one stage there may be
two sets (`other_blocks`).  So the choices are few: every set of the named tensors that a backward pass reads, less
those that another set beats in everything, in the seconds and all-reduces that are computed again, in the bytes that
the tensor axis divides and in those that it does not.  Where
activations may be offloaded (`Request.host`), every tensor of a set is on the device or on the host, and so is the
block's input.  Of sets that take equally long the one with the fewest bytes on the host comes first, then the one with
the fewest on the device.

`SavedSets.costs` has the additional seconds and the bytes of every set, from the passes of a plan that computes nothing
again.  With them `grids` bounds plans with recomputation, whatever they save, and visits the sets one by one.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.plan import SavedTensors, Space
from jhpt.core.work import size_of
from jhpt.planner.cost.layers import LayerCosts, LayerStrategy
from jhpt.planner.cost.model import CostModel
from jhpt.planner.cost.schedule import Array
from jhpt.planner.search.request import Request

Saved = SavedTensors | None
"""What a block saves beside its input; None: nothing, or everything where nothing is computed again."""


@dataclass(frozen=True, kw_only=True)
class SetCosts:
    """The sets at one tensor degree, fastest first.

    seconds: [sets] that a micro-batch takes longer in all blocks than if everything were saved, at least.  bytes:
    [sets] that all blocks save on a device for a micro-batch, at least.  worse: [sets, ...] what a step grows with.
    """

    sets: tuple[Saved, ...]
    seconds: Array
    bytes: Array
    worse: Array

    def undominated(self, some: Sequence[int]) -> list[int]:
        """Those of some ascending positions whose set no other one of them beats, or equals and comes first."""
        worse = self.worse[list(some)]
        better = (worse[:, None] <= worse[None]).all(axis=2)
        first = np.triu(np.ones_like(better), 1)  # of equal ones the first counts
        beaten = (better & (~better.T | first)).any(axis=0)
        return [some[at] for at in np.flatnonzero(~beaten).tolist()]


class SavedSets:
    """The sets that plans with recomputation may save.

    Attributes:
      sets: empty where the request leaves nothing to choose: no names, or given ones that stay on the device.
      everything: all that a backward pass reads.
      smallest: the set that takes the fewest bytes, if no other one fits where it does not; else None.
      mixed: whether blocks of one stage may save different sets (`other_blocks`).
    """

    def __init__(self, request: Request, model: CostModel, space: Space) -> None:
        read = [tensor for kind in model.kinds for tensor in kind.tensors if tensor.read and tensor.name != BLOCK_INPUT]
        names = tuple(dict.fromkeys(tensor.name for tensor in read))
        self.model, self.everything = model, SavedTensors(device=names)
        self.sets: tuple[SavedTensors, ...] = ()
        if space == "spmd" and names:
            self._choose(names, request)
        is_open = request.saved is None and len(request.recompute) > 1 and not request.host
        alike = not names or len(set(model.index[1:-1].tolist())) == 1
        self.mixed = space == "spmd" and is_open and alike and model.num_layers > 3
        self.smallest = SavedTensors() if SavedTensors() in self.sets and not request.host else None
        self._measure()

    def _choose(self, names: tuple[str, ...], request: Request) -> None:
        if request.saved is None and len(request.recompute) > 1:
            every = _placed(names, optional=True, host=request.host)
            self.sets = tuple(saved for saved in every if saved != self.everything)
        elif request.saved is not None and request.host:
            unread = tuple(name for name in request.saved.device if name not in names)
            given = tuple(name for name in request.saved.device if name in names)
            every = _placed(given, optional=False, host=True)
            self.sets = tuple(saved.model_copy(update={"device": (*saved.device, *unread)}) for saved in every)

    def _measure(self) -> None:
        """[sets, kinds] shares of the forward pass that are repeated, and bytes of a sample; [sets] bytes left out."""
        kinds = self.model.kinds
        repeated = [self.model.activations.repeated(saved) for saved in self.sets]
        self._again = np.array([pair[0] for pair in repeated]).reshape(-1, len(kinds))
        self._sums = np.array([pair[1] for pair in repeated]).reshape(-1, len(kinds))
        on_device = [[size_of(kind.tensors, saved.device) for kind in kinds] for saved in self.sets]
        self._divided = np.array([[size.divided for size in row] for row in on_device]).reshape(-1, len(kinds))
        self._whole = np.array([[size.whole for size in row] for row in on_device]).reshape(-1, len(kinds))
        named = np.array([bool(kind.tensors) for kind in kinds])
        away = np.array([BLOCK_INPUT in saved.host for saved in self.sets], np.bool_)
        self._stays = ~(away[:, None] & named[None])

    def costs(self, tables: Sequence[LayerCosts], devices: int, tensor: int, strategy: LayerStrategy) -> SetCosts:
        """The costs of all sets.

        Args:
          tables: at each place of a stage: of layers that save everything, without ZeRO.
          devices: of a stage.
        """
        model, blocks = self.model, slice(1, -1)
        index, local = model.index[blocks], -(-strategy.micro_batch * tensor // devices)
        cut, several = tensor if strategy.sequence else 1, len(set(index.tolist())) > 1

        def by_kind(values: Array) -> Array:
            return np.bincount(index, weights=values, minlength=len(model.kinds)).astype(np.float64)

        forward, sums, backward = (  # [places, 1, kinds]
            np.array([by_kind(getattr(table, name)[blocks]) for table in tables])[:, None]
            for name in ("forward", "forward_tensor", "backward")
        )
        counts = by_kind(np.ones(len(index)))
        inputs = self._stays @ by_kind(model.inputs[blocks])
        sizes = (self._divided / tensor + self._whole / cut) @ counts + inputs / cut
        copied, on_host = self._copied(counts, tensor, cut, local)
        windows = (forward, backward) if model.cluster.overlap else (0.0, 0.0)
        there, back = (np.maximum(0.0, copied - window) for window in windows)
        # [places, sets, kinds] of the backward pass: computed again and copied back; summed over tensor ranks again.
        computed, summed = self._again * forward + back, self._sums * sums
        least = (computed + summed + there).min(axis=0).sum(axis=1)
        order = np.lexsort((sizes, on_host, least))
        # Where collectives of ZeRO take longer than a pass, it ends no later for all-reduces, but may for computation.
        again = (computed, summed) if strategy.zero > 1 else (computed + summed,)
        seconds = [row for each in (there, *again) for row in each.sum(axis=-1).reshape(-1, len(order))]
        worse = np.vstack([*seconds, sizes, on_host]).T
        if several:  # A stage may have more of one kind than of another.
            worse = np.eye(len(order))
        return SetCosts(
            sets=tuple(self.sets[at] for at in order),
            seconds=least[order],
            bytes=local * sizes[order],
            worse=worse[order],
        )

    def _copied(self, counts: Array, tensor: int, cut: int, local: int) -> tuple[Array, Array]:
        """[sets, kinds] seconds of a micro-batch's copies in one direction; [sets] bytes on the host, per sample."""
        copied, on_host = np.zeros_like(self._again), np.zeros(len(self.sets))
        link = self.model.cluster.nodes[0].host  # all nodes are equal
        for name in dict.fromkeys(itertools.chain.from_iterable(saved.host for saved in self.sets)):
            chosen = np.array([name in saved.host for saved in self.sets]).astype(np.float64)
            copied += chosen[:, None] * self.model.activations.copy_seconds(link, [name], tensor, cut, local) * counts
            sizes = np.array([size_of(kind.tensors, [name]).on(tensor, cut) for kind in self.model.kinds])
            on_host += chosen * (sizes @ counts)
        return copied, on_host


def _placed(names: Sequence[str], *, optional: bool, host: bool) -> Iterator[SavedTensors]:
    """Every way to save these names.

    Args:
      optional: whether a name may be left out.
      host: whether the names and the block's input may be on the host.
    """
    fates = (*((None,) if optional else ()), "device", *(("host",) if host else ()))
    for away, chosen in itertools.product(
        (False, True) if host else (False,), itertools.product(fates, repeat=len(names))
    ):
        device, on_host = (
            tuple(name for name, fate in zip(names, chosen, strict=True) if fate == own) for own in ("device", "host")
        )
        yield SavedTensors(device=device, host=(*on_host, BLOCK_INPUT) if away else on_host)
