"""What a model costs, layer by layer: seconds by batch and tensor degree, parameters, bytes.

A *sample* is one sequence (one image for the classic networks; one profiled mini-batch if a file gives nothing
smaller).  Layers that are equal share one `LayerKind`; a `ModelProfile` is the row of kinds in the order of the forward
pass.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from jhpt.core.cluster import parse, read_tree, write_json
from jhpt.core.framework import IDEAL, Framework
from jhpt.core.section import Count, NonNegative, NonNegativeInt, Positive, Section
from jhpt.core.state import FLOAT32, State
from jhpt.core.work import NamedTensor

_TOKENS = re.compile(r"a sequence of (\d+) tokens")


class Timing(Section):
    """Seconds of one layer on one device at one tensor degree, over micro-batch sizes in samples.

    Between grid points seconds are linear.  Below the first point they are those of the first (a kernel does not get
    faster for being emptier).  Above the last they grow in proportion to the batch, at the rate of the last point.
    """

    tensor: Count = 1
    batches: Annotated[tuple[Positive, ...], Field(min_length=1)]
    forward: tuple[NonNegative, ...]
    backward: tuple[NonNegative, ...]
    repeated: tuple[tuple[NonNegative, NonNegative], ...] = Field(
        (), description="of these, what every tensor rank does in full and sequence parallelism divides; empty: unknown"
    )
    spread: tuple[NonNegative, ...] | None = Field(
        None, description="(q90 - q10) / median of the repetitions behind the seconds; null: unknown, or not measured"
    )
    repetitions: Count | None = Field(None, description="how often each was measured; null: unknown, or not measured")

    @model_validator(mode="after")
    def _complete(self) -> "Timing":
        if not len(self.batches) == len(self.forward) == len(self.backward):
            raise ValueError("batches, forward and backward need the same number of entries")
        for name, entries in (("repeated", self.repeated), ("spread", self.spread)):
            if entries and len(entries) != len(self.batches):
                raise ValueError(f"{name} needs an entry for each of the batches {list(self.batches)}")
        passes = zip(self.repeated, self.forward, self.backward, strict=bool(self.repeated))
        if any(ahead > forward or back > backward for (ahead, back), forward, backward in passes):
            raise ValueError("what tensor ranks repeat is a part of the seconds, and cannot take longer")
        if list(self.batches) != sorted(set(self.batches)):
            raise ValueError(f"batches must ascend, found {list(self.batches)}")
        return self

    def at(self, batch: float, sequence: int = 1) -> tuple[float, float]:
        """(forward, backward) seconds of `batch` samples.

        sequence: number of parts into which sequence parallelism cuts what every tensor rank would do in full.
        """
        scale, saved = max(1.0, batch / self.batches[-1]), 1 - 1 / sequence
        whole = np.array([self.forward, self.backward])
        if self.repeated and saved:
            whole = whole - saved * np.array(self.repeated).T
        forward, backward = (float(np.interp(batch, self.batches, seconds)) * scale for seconds in whole)
        return forward, backward


class LayerKind(Section):
    """One kind of layer.  Bytes are per sample and, unless said, those of one device without tensor parallelism."""

    parameters: NonNegativeInt = Field(0, description="scalars of its own")
    tied_parameters: NonNegativeInt = Field(
        0, description="parameters shared with the first layer: a copy, and a sum of gradients, if its stage is another"
    )
    boundary_bytes: NonNegative = Field(description="output, which the next layer reads")
    activation_bytes: NonNegative = Field(description="saved for the backward pass, divided by the tensor degree")
    replicated_bytes: NonNegative = Field(0.0, description="saved for the backward pass on every tensor rank")
    tensor_forward_bytes: NonNegative = Field(0.0, description="all-reduced over the tensor axis in the forward pass")
    tensor_backward_bytes: NonNegative = Field(0.0, description="all-reduced over the tensor axis in the backward pass")
    max_tensor: Count = Field(1, description="largest tensor degree; every divisor of it works")
    timings: Annotated[tuple[Timing, ...], Field(min_length=1)]
    tensors: tuple[NamedTensor, ...] = ()

    @model_validator(mode="after")
    def _unsharded(self) -> "LayerKind":
        degrees = [timing.tensor for timing in self.timings]
        if degrees != sorted(set(degrees)) or degrees[0] != 1:
            raise ValueError(f"timings need ascending tensor degrees from 1, found {degrees}")
        return self

    @model_validator(mode="after")
    def _in_order(self) -> "LayerKind":
        seen = set[str]()
        for tensor in self.tensors:
            if tensor.name in seen or not seen.issuperset(tensor.inputs):
                raise ValueError(f"tensor {tensor.name} must have a name of its own and inputs from {sorted(seen)}")
            seen.add(tensor.name)
        return self

    def seconds(self, batch: float, tensor: int, sequence: int = 1) -> tuple[float, float]:
        """(forward, backward) seconds on one of `tensor` devices; between profiled degrees the one below is scaled.

        sequence: as for `Timing.at`.
        """
        timing = [timing for timing in self.timings if timing.tensor <= tensor][-1]
        forward, backward = timing.at(batch, sequence)
        return forward * timing.tensor / tensor, backward * timing.tensor / tensor


class ModelProfile(Section):
    """A model as the planner sees it."""

    name: str
    device: str = Field(description="the device the seconds hold for")
    source: str = Field(description="measured (how, when) or analytic (from what)")
    sample: str = Field("one sample", description="what one sample is, e.g. a sequence of 1024 tokens")
    causal: bool = Field(False, description="tokens see only those before them")
    flops_per_sample: NonNegative | None = Field(
        None, description="model FLOP of a sample in a training step, causal convention; null: not known"
    )
    dtype: str = "bfloat16"
    framework: Framework = Field(IDEAL, description="the program that the seconds hold for")
    products: Literal["same", "float8"] = Field("same", description="dtype of the matrix products of blocks")
    bytes_per_weight: Positive = Field(2.0, description="of a gradient and of a gathered weight on the wire")
    bytes_per_logit: Positive = Field(4.0, description="of a stored logit, whose gradient has bytes_per_weight")
    state_bytes: Positive = Field(
        16.0,
        description="per parameter: weight and gradient (2 + 2 bytes), and the state between steps (12)",
    )
    state: State = Field(State(), description="how weights and moments are stored from step to step")
    update_seconds: NonNegative = Field(0.0, description="optimizer, per parameter on one device")
    update_spread: NonNegative | None = Field(None, description="of update_seconds, as the spread of a `Timing`")
    kinds: dict[str, LayerKind]
    layers: Annotated[tuple[str, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _known(self) -> "ModelProfile":
        if unknown := sorted(set(self.layers) - set(self.kinds)):
            raise ValueError(f"layers name unknown kinds {unknown}; kinds: {sorted(self.kinds)}")
        if sum(self.kinds[name].tied_parameters > 0 for name in self.layers) > 1:
            raise ValueError("one layer at most can have tied_parameters: they are shared with the first layer")
        if self.state_bytes < 2 * self.bytes_per_weight:
            raise ValueError(
                f"state_bytes={self.state_bytes} must hold weight and gradient, "
                f"2 x bytes_per_weight={self.bytes_per_weight}"
            )
        return self

    @property
    def used_as_stored(self) -> bool:
        """Whether weights are stored in the dtype that models compute in, so that there is no copy of them."""
        if self.state.weights == "float32":
            return self.bytes_per_weight == FLOAT32
        return self.dtype == "bfloat16"

    @property
    def num_layers(self) -> int:
        """Layers, embedding and head included."""
        return len(self.layers)

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(self.kinds[name].parameters for name in self.layers)

    @property
    def sample_tokens(self) -> int | None:
        """Tokens in a sample, where a sample is a sequence of a known length."""
        match = _TOKENS.fullmatch(self.sample)
        return int(match[1]) if match else None

    def save(self, path: str | Path) -> None:
        """Writes JSON."""
        write_json(path, self.model_dump(mode="json", exclude_defaults=True))


def load_profile(path: str | Path) -> ModelProfile:
    """Reads a JSON or YAML profile; InputError names the file and every fault."""
    return parse(ModelProfile, read_tree(path), path)
