"""A model's `ModelProfile` from its configuration and a device's datasheet, without running anything.

Layers: embedding, L blocks, head.  The model's family states the operations of each layer (`jhpt.core.families`).
Operations run one after the other, and a roofline gives the seconds of each (`jhpt.core.roofline`); between the kernels
of a pass the device waits for launches:

    seconds of a layer = sum over its operations of their seconds + launches (twice as many in the backward pass)

A block saves those of its named tensors that the backward pass reads, as in the runtime.  Norms, activations and
attention scores are recomputed.

Left out: caches (operands in the L2 cache count as read from memory); unaligned matrices; the softmax statistics of
flash attention (0.2 % of what is saved); and the conversion of float32 weights to the compute dtype, since the profile
counts a 16-bit copy of the weights as part of the state.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from jhpt.core import roofline
from jhpt.core.calibration import ours
from jhpt.core.catalogue import capability_by_driver
from jhpt.core.cluster import Device
from jhpt.core.config import Config
from jhpt.core.divisors import divisors, one_of
from jhpt.core.errors import InputError
from jhpt.core.families.family import LayerKindCost, ModelConfig, Sizes
from jhpt.core.families.text import TextConfig
from jhpt.core.framework import IDEAL, Framework
from jhpt.core.optimizers import optimizer_numbers
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.core.state import State, most_cuts, state_of
from jhpt.core.work import Operation, Work, size_of

MAX_DEGREE = 64
"""Largest tensor degree with timings of its own; for larger degrees `LayerKind.seconds` divides the last ones."""

FLASH_HEAD = 128
"""Widest head, a multiple of 8, of cuDNN's flash attention (`jhpt.models.attention`)."""

FLASH_CAPABILITY = 8.0
"""The compute capability that cuDNN's flash attention needs at least."""

EIGHT_BITS = {"float8": "; products in 8 bits count as that, and may take less"}
"""Note in a profile's source, by `model.matmul_dtype`: no 8-bit rates have been measured."""

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one number of the compute dtypes."""

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batch sizes of the grid, in samples; `Timing` extrapolates in proportion above the last."""


def analytic_profile(
    config: Config, device: Device, dtype: str = "bfloat16", framework: Framework | None = None
) -> ModelProfile:
    """The profile of `config` on `device`; one sample is a sequence of `data.sequence_length` tokens, or
    an image.

    Parameters include padding.  The seconds of a tensor degree exclude its collectives, whose bytes are
    in `tensor_forward_bytes` and `tensor_backward_bytes`.

    Args:
      framework: the program that trains; None: jhpt's own.

    Raises:
      InputError: the device has no rate for `dtype`.
    """
    check_dtype(device, dtype)
    framework = framework or ours()
    model, sizes = config.model, sizes_of(config, device, dtype, keeps_scores=framework.keeps_scores)
    run = Runner(device=device, dtype=dtype, framework=framework)
    state = state_of(model, config.optimizer)
    profile = ModelProfile(
        name=config.name,
        device=device.name,
        source=f"analytic: roofline of {device.name}, {dtype}" + EIGHT_BITS.get(config.model.matmul_dtype, ""),
        sample=model.sample(config.data.sequence_length),
        causal=model.causal,
        flops_per_sample=_model_flops(model, sizes),
        dtype=dtype,
        framework=framework,
        products=model.matmul_dtype,
        bytes_per_weight=sizes.element,
        bytes_per_logit=model.bytes_per_logit(sizes.element),
        state=state,
        kinds=_kinds(model, sizes, _max_tensor(model, state), run),
        layers=model.layers,
    )
    # Clipping reads the gradient once more, for its norm.
    clip = sizes.element if config.optimizer.clip_norm is not None else 0
    copy = 0 if profile.used_as_stored else sizes.element
    return profile.model_copy(
        update={
            "state_bytes": sizes.element + copy + state.bytes,
            "update_seconds": (update_bytes(state, sizes.element, copy) + clip) / device.stream_rate
            + update_flops(config) / device.sustained("float32" if "float32" in device.peak_flops else dtype),
        }
    )


def update_bytes(state: State, element: int, copy: int) -> float:
    """Bytes that an update reads and writes per parameter: `element + copy + 2 state.bytes`.

    It reads the gradient (element), reads and writes the stored state, and writes the copy of the weight that is
    computed with, if there is one.  Left out: decoding and coding of low-precision moments.
    """
    return element + copy + 2 * state.bytes


def update_flops(config: Config) -> float:
    """FLOP of an update's products per parameter of the model, which are float32.

    Left out: what devices exchange where a plan cuts the matrices, and that one of them may have a layer more than
    others (`jhpt.sharding.layout.Layout.on_whole_layers`).
    """
    steps = optimizer_numbers(config.optimizer.name).orthogonal
    flops = sum(each.orthogonal_flops for each in config.model.matrices() if each.of_blocks)
    return steps * flops / config.model.parameter_count().allocated


def _model_flops(model: ModelConfig, sizes: Sizes) -> float:
    """FLOP that the model's definition asks for: no recomputation, and the head on predicted tokens only.

    With `data.packing=documents` an upper bound: how long documents are is known only once the text is read.
    """
    return sizes.tokens * model.flops_per_token(sizes.tokens, predicted_share=sizes.predicted / sizes.tokens).total


def sizes_of(config: Config, device: Device, dtype: str, *, keeps_scores: bool = False) -> Sizes:
    """What the costs of layers depend on beside the model.  keeps_scores: as in `Framework`."""
    tokens = config.model.units(config.data.sequence_length)
    return Sizes(
        tokens=tokens,
        predicted=config.model.predicted_tokens(tokens, config.data.mask_fraction),
        element=ELEMENT_BYTES[dtype],
        flash=_flash(config, device, dtype),
        keeps_scores=keeps_scores,
    )


def _flash(config: Config, device: Device, dtype: str) -> bool:
    """Whether attention runs in cuDNN's flash kernel, by the rules of `jhpt.models.attention.choose_attention`."""
    model, data = config.model, config.data
    if not isinstance(model, TextConfig):
        return False
    width = model.head_dim
    if data.packing == "documents" and data.sequence_length % 2:
        return False
    fits = ELEMENT_BYTES[dtype] == 2 and width is not None and width % 8 == 0 and width <= FLASH_HEAD
    capability = capability_by_driver(device.name)
    return model.attention != "xla" and fits and (capability is None or capability >= FLASH_CAPABILITY)


def _max_tensor(model: ModelConfig, state: State) -> int:
    """The largest tensor degree.  With coded moments the axis cuts rows between blocks of codes."""
    coded = model.coded_sizes if state.moments == "int8" else ()
    return math.gcd(*(most_cuts(size) if name in coded else size for name, size in model.cut_sizes.items()))


def _kinds(model: ModelConfig, sizes: Sizes, max_tensor: int, run: "Runner") -> dict[str, LayerKind]:
    """The kinds of layers with their timings."""
    degrees = divisors(max_tensor, up_to=min(max_tensor, MAX_DEGREE))

    def kind(of: LayerKindCost) -> LayerKind:
        cost = of.cost
        saved = size_of(cost.tensors, model.named_tensors) if cost.tensors else None
        return LayerKind(
            parameters=of.parameters,
            tied_parameters=of.tied,
            boundary_bytes=cost.boundary_bytes,
            activation_bytes=saved.divided if saved else cost.activation_bytes,
            replicated_bytes=saved.whole if saved else cost.replicated_bytes,
            tensor_forward_bytes=cost.tensor_forward_bytes,
            tensor_backward_bytes=cost.tensor_backward_bytes,
            max_tensor=max_tensor,
            timings=timings(cost.work, degrees, run),
            tensors=cost.tensors,
        )

    return {name: kind(each) for name, each in model.layer_kinds(sizes).items()}


def check_dtype(device: Device, dtype: str) -> None:
    """InputError if the device has no rate for `dtype`, or `ELEMENT_BYTES` does not list it."""
    known = [name for name in ELEMENT_BYTES if name in device.peak_flops]
    if dtype not in known:
        use = f"use {one_of(known)}" if known else f"name its rates {one_of(ELEMENT_BYTES)}"
        raise InputError(f"{device.name} has no rate for dtype={dtype}; {use}")


@dataclass(frozen=True, kw_only=True)
class Runner:
    """What runs the operations of a layer: a framework's program on a device, in one dtype."""

    device: Device
    dtype: str
    framework: Framework = IDEAL

    def seconds(self, operations: Iterable[Operation], launches: int) -> tuple[float, float]:
        """(seconds of a pass, those of them that every tensor rank repeats).

        launches: multiples of `Device.launch`.
        """
        total, repeated = launches * self.device.launch, 0.0
        for operation in operations:
            seconds = roofline.seconds(operation, self.device, self.dtype, self.framework)
            total += seconds
            repeated += seconds * operation.repeated
        return total, repeated


def timings(work: Callable[[int, int], Work], degrees: Iterable[int], run: Runner) -> tuple[Timing, ...]:
    """The timings of `work(batch, tensor)` over `BATCHES` and ascending tensor `degrees`.

    A larger micro-batch is never faster; a larger degree is never slower, nor more than proportionally faster.  Where
    tiles or a tabulated efficiency imply otherwise between two sizes, the nearest such value is used.
    """
    table: list[Timing] = []
    for tensor in degrees:
        works = [work(batch, tensor) for batch in BATCHES]
        passes = [(run.seconds(each.forward, 1), run.seconds(each.backward, 2)) for each in works]
        forward, backward = (list(accumulate((each[way][0] for each in passes), max)) for way in (0, 1))
        if table:
            share = table[-1].tensor / tensor
            forward = [_between(one, last, share) for one, last in zip(forward, table[-1].forward, strict=True)]
            backward = [_between(one, last, share) for one, last in zip(backward, table[-1].backward, strict=True)]
        repeated = tuple(
            (min(ahead[1], fully), min(back[1], fully_back))
            for (ahead, back), fully, fully_back in zip(passes, forward, backward, strict=True)
        )
        table.append(
            Timing(tensor=tensor, batches=BATCHES, forward=tuple(forward), backward=tuple(backward), repeated=repeated)
        )
    return tuple(table)


def _between(seconds: float, last: float, share: float) -> float:
    """Seconds at a degree of which the last one, which takes `last`, is this share."""
    return min(max(seconds, share * last), last)
