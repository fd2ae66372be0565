"""Costs of each kind of layer under one strategy: seconds of compute and communication, and bytes.

`CostBasis` holds what every cost is computed from, `KindCosts` computes the costs.  A stage has k = d t devices; a
layer has tensor degree t, and a micro-batch b samples.

    cost           when                            seconds
    compute        per micro-batch                 profiled at ceil(b / d) samples and degree t, on the slowest device
    tensor         per micro-batch, exposed        all-reduce over t of activations (forward) and errors (backward)
    resharding     per micro-batch, exposed        all-gather of the activation where neighbouring degrees differ
    ZeRO-3         per micro-batch, prefetched     all-gather of weights in both passes, reduce-scatter of gradients;
                                                   a layer takes max(compute, communication) and a share of the
                                                   shorter one (`Framework.exposed_gathers`)
    ZeRO-2         per micro-batch                 reduce-scatter of gradients beside the backward pass, as with ZeRO-3
    gradients      once per step                   all-reduce over d (ZeRO-1: reduce-scatter); it follows the layer's
                                                   last backward pass on a separate stream; a share counts as
                                                   update (`Framework.exposed_gradients`)
    HSDP           once per step                   N data ranks shard, and the d / N that hold the same shares
                                                   all-reduce them: with ZeRO-1 as part of the gradients, else after all
                                                   passes
    accumulation   per micro-batch, if several     gradients added up, in the backward pass
    ZeRO-1, ZeRO-2 once, in the first forward      all-gather of weights; the part that the forward pass does not hide
    update         once, at the end                optimizer, on a device's share of the state

Sample chunks reduce the tensor seconds.  A layer then takes the period of `collectives`, and the first layer of a run
its filling as well; whatever exceeds the plain compute counts as tensor seconds.  Weight gradients are not assumed to
hide anything, since other chunks already do.  Compressed all-reduces cost what `communication` states.  In one SPMD
program both apply to the blocks only, not to embedding and head.  Left out: contention of all-gathers and all-reduces
on a shared link, and the memory of a chunk's all-reduce.

Compressed gradients (`communication.gradient_seconds`) replace all-reduce and reduce-scatter.  Their kernels count as
update seconds, and the residual that each rank keeps counts as optimizer state.  ZeRO-2 and ZeRO-3 exclude them.

ZeRO-3 on a single data rank communicates nothing, but both passes convert weights to the compute dtype.  That takes the
memory bandwidth's time for reading 4 and writing 2 bytes.  The other levels convert once per step, in the update.  Left
out: the update of ZeRO-3 then writes no copy.

On a cluster that does not overlap communication with computation everything is exposed: a layer of ZeRO-2 or ZeRO-3
takes compute plus communication, ZeRO-1 its whole all-gather, and gradients are reduced after the last backward pass.
What is exposed once per step counts as update seconds.

With recomputation a layer saves only its input and the tensors that `SavedTensors` names.  The backward pass repeats
the part of the forward pass, and of its all-reduces, that it needs (`activations.repeated`; all of it for layers
without named tensors).  Offloaded tensors are copied to the host beside the forward pass and back beside the backward
pass, one by one; the copy seconds that exceed the pass are added to it, and all of them without overlap.

Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) cuts what lies between the products over
the tensor ranks: a device holds 1 / t of replicated activations, of a layer's input and of what it sends to the next
stage.  An all-reduce becomes a reduce-scatter and an all-gather of the same bytes, and the backward pass gathers the
inputs of the products again, of which a share counts (`Framework.exposed_regathers`: of jhpt's program all, so its
tensor seconds are 1.5 times as many).  Norms and sums of the stream are divided, too (`Timing.repeated`).  Left out:
one all-gather each at embedding and head.

These are the costs of a program per stage.  `memory` describes what the single SPMD program of space="spmd" does
instead.  Its pipelines hide less of the parameters' communication:

    ZeRO-3         the reduce-scatter follows each backward pass: max(backward, all-gather) + reduce-scatter
    ZeRO-2         backward + reduce-scatter
    gradients      exposed, after the last backward pass
    ZeRO-1, ZeRO-2 weights exposed, before the first forward pass
"""

from dataclasses import dataclass, replace

import numpy as np

from jhpt.core.framework import Framework
from jhpt.planner.cost.basis import CostBasis
from jhpt.planner.cost.collectives import BACKWARD, FORWARD
from jhpt.planner.cost.communication import all_gather
from jhpt.planner.cost.layers import LayerStrategy
from jhpt.planner.cost.memory import Slot
from jhpt.planner.cost.places import Place
from jhpt.planner.cost.schedule import Array

CAST = 6.0
"""Bytes read and written to convert a weight between float32 and a 16-bit type: 4 + 2."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """[kinds] seconds of one micro-batch: passes, exposed all-reduces over tensor ranks, filling of a run of chunks."""

    forward: Array
    backward: Array
    forward_tensor: Array
    backward_tensor: Array
    forward_filling: Array
    backward_filling: Array


@dataclass(frozen=True)
class KindCosts:
    """Costs of every kind of layer at one place, tensor degree and strategy."""

    basis: CostBasis
    place: Place
    tensor: int
    strategy: LayerStrategy

    @property
    def data(self) -> int:
        """Number of data ranks."""
        return self.place.devices // self.tensor

    @property
    def local(self) -> int:
        """Samples of a micro-batch on the device that has most."""
        return self.place.local(self.strategy.micro_batch, self.tensor)

    @property
    def zero(self) -> int:
        """The effective ZeRO level: a single data rank has nothing to shard."""
        return self.strategy.zero if self.data > 1 else 0

    @property
    def shards(self) -> int:
        """Number of data ranks over which ZeRO shards."""
        return self.strategy.shards(self.data) if self.zero else self.data

    @property
    def sequence(self) -> int:
        """Parts into which sequence parallelism cuts replicated tensors."""
        return self.tensor if self.strategy.sequence else 1

    @property
    def framework(self) -> Framework:
        """The program that trains."""
        return self.basis.profile.framework

    @property
    def in_pipeline(self) -> bool:
        """Whether one SPMD program runs several stages."""
        return self.strategy.program == "pipeline"

    def arrays(self) -> dict[str, Array]:
        """[kinds] the fields of `LayerCosts`."""
        plain = self._with_accumulation(self._plain_passes())
        passes = self._with_sharding(self._with_recomputation(plain))
        return {
            "forward": np.where(self.basis.kinds_allowed(self.tensor), passes.forward, np.inf),
            "backward": passes.backward,
            "forward_tensor": passes.forward_tensor,
            "backward_tensor": passes.backward_tensor,
            "forward_filling": passes.forward_filling,
            "backward_filling": passes.backward_filling,
            **self._once_per_step(plain),
            **self._bytes(),
        }

    def _plain_passes(self) -> Passes:
        """Compute and exposed all-reduces, without recomputation, offloading and ZeRO."""
        basis = self.basis
        forward, backward = basis.compute_seconds(self.place.kinds, self.local, self.tensor, self.sequence)
        tensor = [
            basis.tensor_all_reduce.exposed(self.place, self.tensor, self.strategy, self.local, direction)
            for direction in (FORWARD, BACKWARD)
        ]
        return Passes(
            forward=forward,
            backward=backward,
            forward_tensor=tensor[FORWARD][0],
            backward_tensor=tensor[BACKWARD][0],
            forward_filling=tensor[FORWARD][1],
            backward_filling=tensor[BACKWARD][1],
        )

    def _with_recomputation(self, passes: Passes) -> Passes:
        """Adds what the backward pass repeats, and the exposed copies of offloaded tensors."""
        if not self.strategy.recompute:
            return passes
        saved = self.basis.saved_tensors(self.strategy)
        shares, all_reduce_shares = self.basis.activations.repeated(saved)
        forward, backward = passes.forward, passes.backward + shares * passes.forward
        if saved.host:
            sizes = self.tensor, self.sequence, self.local
            copied = self.basis.activations.copy_seconds(self.place.host, saved.host, *sizes)
            overlap = self.basis.cluster.overlap
            forward = forward + (np.maximum(0.0, copied - forward) if overlap else copied)
            backward = backward + (np.maximum(0.0, copied - passes.backward) if overlap else copied)
        return replace(
            passes,
            forward=forward,
            backward=backward,
            backward_tensor=passes.backward_tensor + all_reduce_shares * passes.forward_tensor,
        )

    def _with_sharding(self, passes: Passes) -> Passes:
        """Adds ZeRO-2's reduce-scatter of gradients, or ZeRO-3's with its all-gathers of weights, or on one rank the
        conversion."""
        gather = self.basis.data_collectives.gathered(self.place, self.tensor, self.shards)
        exposed = self.framework.exposed_gathers
        if self.zero == 3 and self.basis.cluster.overlap:
            backward_gather, after = (gather, gather) if self.in_pipeline else (2 * gather, np.zeros_like(gather))
            forward, forward_filling = _beside(
                passes.forward, passes.forward_filling, gather - passes.forward_tensor, exposed
            )
            backward, backward_filling = _beside(
                passes.backward, passes.backward_filling, backward_gather - passes.backward_tensor, exposed
            )
            passes = replace(
                passes,
                forward=forward,
                backward=backward + after,
                forward_filling=forward_filling,
                backward_filling=backward_filling,
            )
        elif self.zero == 3:
            passes = replace(passes, forward=passes.forward + gather, backward=passes.backward + 2 * gather)
        elif self.zero == 2 and self.basis.cluster.overlap and not self.in_pipeline:
            backward, filling = _beside(
                passes.backward, passes.backward_filling, gather - passes.backward_tensor, exposed
            )
            passes = replace(passes, backward=backward, backward_filling=filling)
        elif self.zero == 2:
            passes = replace(passes, backward=passes.backward + gather)
        profile, strategy = self.basis.profile, self.strategy
        if strategy.zero == 3 and self.data == 1 and strategy.program != "per_stage" and not profile.used_as_stored:
            rate = min(device.stream_rate for device in self.basis.places.devices_of(self.place))
            rounding = self.basis.data_collectives.parameters / self.tensor * CAST / rate
            passes = replace(passes, forward=passes.forward + rounding, backward=passes.backward + rounding)
        return passes

    def _with_accumulation(self, passes: Passes) -> Passes:
        """Adds the seconds in which the gradients of a micro-batch are added to those of the others."""
        moved = self.framework.accumulation * self.strategy.accumulates
        if not moved:
            return passes
        rate = min(device.stream_rate for device in self.basis.places.devices_of(self.place))
        parameters, shares = self.basis.data_collectives.parameters / self.tensor, self.shards if self.zero > 1 else 1
        added = parameters * moved / shares / rate
        return replace(passes, backward=passes.backward + added)

    def _once_per_step(self, plain: Passes) -> dict[str, Array]:
        """[kinds] seconds of gradients, weights and update.  plain: the first forward pass may hide the weights."""
        basis, place, tensor, zero = self.basis, self.place, self.tensor, self.zero
        collectives = basis.data_collectives
        # A backward pass with a branch for every number of samples cannot hold what all ranks do together.
        hides = basis.cluster.overlap and not self.in_pipeline and place.samples is None
        parameters, tied = collectives.parameters / tensor, collectives.tied / tensor
        nothing = np.zeros_like(parameters)
        # The all-gather of the weights takes as long as the reduce-scatter of the gradients.
        gathered = collectives.gathered(place, tensor, self.shards) if zero in (1, 2) else nothing
        if zero in (1, 2) and self.framework.broadcasts_shares:
            group = place.data_group(tensor)
            gathered = gathered + group.size * group.ring_latency / basis.num_layers
        # What runs beside a pass still adds a share of its seconds to it.
        exposed = min(1.0, self.framework.exposed_gradients) if hides else 1.0
        if hides:
            gathered = np.maximum(exposed * gathered, gathered - plain.forward - plain.forward_tensor)
        exchange = collectives.between_first_and_last(place, tied * basis.profile.bytes_per_weight, one_program=False)
        gradients, tied_reduction, coding, tied_coding = nothing, nothing, nothing, nothing
        if zero < 2:
            shares = zero == 1
            summed = self.strategy.accumulates
            gradients, tied_reduction = collectives.reduced(place, tensor, self.shards, shares=shares, summed=summed)
            coding = collectives.kernels(place, tensor, parameters, shares=shares)
            tied_coding = collectives.kernels(place, tensor, tied, shares=shares)
        in_update = exposed * gradients
        if zero == 2 and hides:  # a layer is reduced beside the next one, so of the last pass the last layer follows
            gradients = collectives.gathered(place, tensor, self.shards)
        if zero > 1 and self.shards < self.data:  # after all passes
            in_update = collectives.between_replicas(place, tensor, self.shards, collectives.parameters)
            gradients = gradients + in_update
        update = parameters * basis.update_seconds(zero, self.shards, place)
        return {
            "gradients": gradients - in_update,
            "update": update + gathered + in_update + coding,
            "gradients_in_update": in_update,
            "gathered": gathered,
            "tied": np.where(tied > 0, exchange + tied_reduction + tied_coding, 0.0),
            "tied_update": tied * basis.update_seconds(zero, self.shards, place),
        }

    def _bytes(self) -> dict[str, Array]:
        """[kinds] bytes on a device."""
        basis, strategy, tensor = self.basis, self.strategy, self.tensor
        parameters, tied = basis.data_collectives.parameters / tensor, basis.data_collectives.tied / tensor
        size = basis.parameter_bytes(strategy, self.shards)
        working = basis.activations.working(
            tensor,
            self.sequence,
            self.local,
            recompute=strategy.recompute,
            one_program=strategy.program != "per_stage",
        )
        return {
            "weights": parameters * size.weights,
            "optimizer": parameters * size.optimizer,
            "activations": basis.activations.all(tensor, self.sequence, self.local),
            "working": working + parameters * size.working,
            "tied_bytes": tied * (size.weights + size.optimizer),
        }


def _beside(compute: Array, filling: Array, gather: Array, exposed: float) -> tuple[Array, Array]:
    """(compute, filling) where weights are gathered beside the computation.

    exposed: share of the shorter of both that adds to the longer.
    """

    def together(compute: Array) -> Array:
        return np.maximum(compute, gather) + exposed * np.clip(gather, 0.0, compute)

    seconds = together(compute)
    return seconds, together(compute + filling) - seconds


def slot(basis: CostBasis, place: Place, tensor: int, strategy: LayerStrategy) -> Slot:
    """What every stage of a pipeline in one SPMD program reserves for embedding and head.

    Args:
      strategy: that of embedding and head.
    """
    data = place.devices // tensor
    zero = strategy.zero if data > 1 else 0
    collectives, (first, last) = basis.data_collectives, basis.index[[0, -1]]
    shared = collectives.tied[last] / tensor
    numbers = max(collectives.parameters[first] / tensor, collectives.parameters[last] / tensor + shared)
    shards = strategy.shards(data) if zero else data
    width, group = basis.profile.bytes_per_weight, place.group(shards, tensor)
    gathered = all_gather(group, numbers * width) if zero else 0.0
    size = basis.parameter_bytes(strategy, shards)
    sequence = tensor if strategy.sequence else 1
    return Slot(
        weights=numbers * size.weights,
        optimizer=numbers * size.optimizer,
        update=numbers * basis.update_seconds(zero, shards, place) + gathered,
        gathered=gathered,
        reduced=collectives.reduction(group, numbers, shares=zero > 0, summed=strategy.accumulates)
        + float(collectives.between_replicas(place, tensor, shards, np.array([numbers * tensor]))[0])
        + float(collectives.kernels(place, tensor, np.array([numbers]), shares=zero > 0)[0]),
        exchanged=collectives.between_first_and_last(place, np.array([shared * width]), one_program=True)[0]
        if shared
        else 0.0,
        output=-(-strategy.micro_batch // data) * float(basis.boundary[:-1].max()) / sequence,
    )
