"""The models of `jhpt bench hybrid`: small enough for half a core, with shapes that favour different plans.

    vgg   thirteen convolutions with a fifth of the parameters, three dense layers with the rest (a narrow VGG-16)
    mlp   residual blocks of wide matrices with few bytes between blocks
    gpt   an embedding and a head that take as long as all blocks
    bert  almost all of the time is that of blocks

Two have shapes that nobody chose to favour a plan: those of published models, a third as wide and with a third of the
layers, so that layers : width stays the same.  The vocabulary shrinks with layers x width, so that the share of the
head in the forward multiplications stays the same too, within 2 points:

    gpt2-like  GPT-2 124M   4 layers of 256, vocabulary 5,632, tied: 31 % (12 of 768, 50,257: 29 %)
    bert-like  BERT-base    4 layers of 256, vocabulary 3,328, tied: 20 % (12 of 768, 30,522: 20 %)

They read text (`benchmarks.hybrid.text`), 32 sequences a step: gpt2-like 2,048 tokens, bert-like 4,096.  More is what
the machine does not allow.  A token of gpt2-like takes 29 MFLOP, forward and backward, and the four hosts together
compute about 50 to 60 GFLOP/s, so that a step takes 1 s and what it sends; one of 16k tokens would take 8 to 10 s, and
the 260 steps of a launch 40 minutes.  Fewer tokens favour plans that send few gradients.

Bytes are those that the runtime moves, in float32.  The planner prices collectives over the tensor axis as all-reduces.
An all-gather of s bytes takes half as long as an all-reduce of s bytes, so it is counted as s / 2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np

from benchmarks.hybrid.text import Text
from benchmarks.networks.execution import Examples, Network, class_execution, class_parts
from benchmarks.networks.mlp import MLP
from benchmarks.networks.vgg import VGG
from jhpt.core.cluster import Device
from jhpt.core.config import Config
from jhpt.core.families.vgg import VGGConfig
from jhpt.core.load import load_config
from jhpt.core.plan import Plan
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.models.family import Rows, build
from jhpt.models.hooks import Hooks
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.sharding.layout import Layout
from jhpt.sharding.mesh import DeviceMesh
from jhpt.sharding.model_parts import ModelParts
from jhpt.sharding.stages.execution import StagesExecution
from jhpt.sharding.stages.layout import StagesLayout, place_stages
from jhpt.sharding.step import Execution
from jhpt.training.data.tokenizer import Tokenizer, load_tokenizer
from jhpt.training.parts import make_parts
from jhpt.training.setup import execution

ELEMENT = 4
"""Bytes of a float32."""

UNTIMED = (Timing(batches=(1.0,), forward=(0.0,), backward=(0.0,)),)


class Subject(Protocol):
    """A model and its batch."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    @property
    def batch(self) -> int:
        """Rows of a step."""
        ...

    @property
    def piped(self) -> bool:
        """Whether it can run as a pipeline."""
        ...

    def init(self, key: jax.Array) -> Any:
        """Parameters."""
        ...

    def parts(self, hooks: Hooks) -> ModelParts:
        """As one rank computes it."""
        ...

    def execution(self, plan: Plan, device_mesh: DeviceMesh) -> Execution:
        """Laid out by a plan."""
        ...

    def stages_execution(self, plan: Plan, devices: Sequence[jax.Device]) -> StagesExecution:
        """Laid out by a general plan."""
        ...

    def rows(self, count: int) -> Any:
        """Random rows, a tree of NumPy arrays."""
        ...

    def profile(self) -> ModelProfile:
        """Bytes and parameters; the seconds are zeros."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClassSubject:
    """A network that classifies."""

    name: str
    batch: int
    network: Network

    @property
    def piped(self) -> bool:
        """Whether blocks are alike, as one SPMD program needs."""
        return self.network.alike

    def init(self, key: jax.Array) -> Any:
        """Parameters."""
        return self.network.init(key)

    def parts(self, hooks: Hooks) -> ModelParts:
        """As one rank computes it."""
        return class_parts(replace(self.network, hooks=hooks))

    def execution(self, plan: Plan, device_mesh: DeviceMesh) -> Execution:
        """Laid out by a plan."""
        network = self.network
        return class_execution(
            network, Layout(plan=plan, device_mesh=device_mesh, num_layers=network.num_blocks, alike=network.alike)
        )

    def stages_execution(self, plan: Plan, devices: Sequence[jax.Device]) -> StagesExecution:
        """Laid out by a general plan."""
        layout = place_stages(plan, devices, self.network.num_blocks, alike=self.network.alike)
        made = tuple(class_execution(self.network, chunk.layout) for chunk in layout.chunks)
        return _in_stages(self, layout, made)

    def rows(self, count: int) -> Examples:
        """Normally distributed inputs with random classes."""
        rng, network = np.random.default_rng(0), self.network
        shape = (network.size, network.size, network.channels) if isinstance(network, VGG) else (network.inputs,)
        inputs = rng.standard_normal((count, *shape), np.float32)
        return Examples(inputs, rng.integers(0, network.classes, count).astype(np.int32))  # type: ignore[arg-type]

    def profile(self) -> ModelProfile:
        """Bytes and parameters."""
        layers = _vgg_layers(self.network) if isinstance(self.network, VGG) else _mlp_layers(self.network)
        return _profile(self.name, dict(layers), tuple(kind for kind, _ in layers), "a row")


@dataclass(frozen=True, kw_only=True)
class TextSubject:
    """A GPT or BERT.  text: what it reads; None: random bytes."""

    name: str
    config: Config
    text: Text | None = None

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.config.data.batch_size

    @property
    def piped(self) -> bool:
        """True, because blocks are alike."""
        return True

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.text.tokenizer if self.text else load_tokenizer(self.config.data.tokenizer)

    def init(self, key: jax.Array) -> Any:
        """Parameters."""
        return build(self.config.model).init(key)

    def parts(self, hooks: Hooks) -> ModelParts:
        """As one rank computes it."""
        model = build(self.config.model, hooks=hooks)
        return make_parts(model, self.config.data, self._tokenizer, self.config.optimizer.z_loss, train=True)

    def execution(self, plan: Plan, device_mesh: DeviceMesh) -> Execution:
        """Laid out by a plan."""
        layout = Layout(plan=plan, device_mesh=device_mesh, num_layers=self.config.model.num_layers)
        return execution(self.config, build(self.config.model), layout, self._tokenizer, train=True)

    def stages_execution(self, plan: Plan, devices: Sequence[jax.Device]) -> StagesExecution:
        """Laid out by a general plan."""
        model, blocks = build(self.config.model), self.config.model.num_layers
        layout = place_stages(plan, devices, blocks, shared=model.head_reads, rules=model.partition_rules)
        made = (execution(self.config, model, chunk.layout, self._tokenizer, train=True) for chunk in layout.chunks)
        return _in_stages(self, layout, tuple(made))

    def rows(self, count: int) -> Rows:
        """Windows of text, or of random tokens."""
        if self.text:
            return Rows(self.text.windows(self.config.data.sequence_length, count))  # type: ignore[arg-type]
        length = self.config.model.row_length(self.config.data.sequence_length)
        ids = np.random.default_rng(0).integers(0, 250, (count, length)).astype(np.int32)
        return Rows(ids)  # type: ignore[arg-type]

    def profile(self) -> ModelProfile:
        """Bytes and parameters of the analytic profile."""
        device = Device(name="host", peak_flops={"float32": 1.0}, memory=1.0, memory_bandwidth=1.0)
        analytic = analytic_profile(self.config, device, "float32")
        kinds = {name: kind.model_copy(update={"timings": UNTIMED}) for name, kind in analytic.kinds.items()}
        return _profile(self.name, kinds, analytic.layers, analytic.sample)


def _in_stages(subject: Subject, layout: StagesLayout, executions: tuple[Execution, ...]) -> StagesExecution:
    shapes = jax.eval_shape(subject.init, jax.random.key(0))
    rows = subject.rows(subject.batch)
    return StagesExecution(layout=layout, executions=executions, params=shapes, rows=rows)


def _profile(name: str, kinds: dict[str, LayerKind], layers: tuple[str, ...], sample: str) -> ModelProfile:
    return ModelProfile(
        name=name,
        device="emulated host",
        source="untimed",
        sample=sample,
        dtype="float32",
        bytes_per_weight=ELEMENT,
        state_bytes=4 * ELEMENT,  # weight, gradient, two moments
        kinds=kinds,
        layers=layers,
    )


def _layer(inputs: int, outputs: int, parameters: int, channels: int, *, first: bool, last: bool = False) -> LayerKind:
    """A layer cut by its output channels: outputs are all-gathered, gradients of the input all-reduced."""
    return LayerKind(
        parameters=parameters,
        boundary_bytes=ELEMENT * outputs * (not last),
        activation_bytes=ELEMENT * outputs,
        replicated_bytes=ELEMENT * inputs,
        tensor_forward_bytes=0.0 if last else ELEMENT * outputs / 2,
        tensor_backward_bytes=0.0 if first else ELEMENT * inputs,
        max_tensor=math.gcd(channels, 1 << 20),
        timings=UNTIMED,
    )


def _mlp_layers(network: MLP) -> list[tuple[str, LayerKind]]:
    width, hidden = network.width, network.hidden
    block = LayerKind(
        parameters=2 * width * hidden + hidden + width,
        boundary_bytes=ELEMENT * width,
        activation_bytes=2 * ELEMENT * hidden,
        replicated_bytes=ELEMENT * width,
        tensor_forward_bytes=ELEMENT * width,
        tensor_backward_bytes=ELEMENT * width,
        max_tensor=math.gcd(hidden, 1 << 20),
        timings=UNTIMED,
    )
    first = _layer(network.inputs, width, (network.inputs + 1) * width, width, first=True)
    last = _layer(width, network.classes, (width + 1) * network.classes, network.classes, first=False, last=True)
    return [("first", first), *[("block", block)] * network.num_blocks, ("last", last)]


def _vgg_layers(network: VGG) -> list[tuple[str, LayerKind]]:
    """The layers of the network by name; equal shapes are one kind."""
    layers: list[tuple[str, LayerKind]] = []
    side, inputs = network.size, network.size**2 * network.channels
    for index, (kind, shape) in enumerate(network.shapes):
        channels = shape[-1]
        name = f"{kind} {shape[-2]}-{channels}" + (f" at {side}" if kind != "dense" else "")
        side = side // 2 if kind == "conv_pooled" else side
        outputs = channels if kind == "dense" else side**2 * channels
        layer = _layer(
            inputs,
            outputs,
            math.prod(shape) + channels,
            channels,
            first=index == 0,
            last=index == len(network.shapes) - 1,
        )
        layers.append((name, layer))
        inputs = outputs
    return layers


def _vgg() -> ClassSubject:
    stages = ((16, 16), (32, 32), (64, 64, 64), (96, 96, 96), (96, 96, 96))
    network = VGG(config=VGGConfig(image_size=32, convolutions=stages, dense=(1280, 1280), num_classes=256))
    return ClassSubject(name="vgg", batch=128, network=network)


def _mlp() -> ClassSubject:
    return ClassSubject(
        name="mlp", batch=2048, network=MLP(inputs=256, width=256, hidden=1024, num_blocks=6, classes=128)
    )


def _text(name: str, family: str, *, length: int = 64, text: Text | None = None, **model: Any) -> TextSubject:
    shape = {"family": family, "d_model": 128, "num_heads": 4, "max_length": length, "dropout": 0.0, **model}
    data = {"sequence_length": length, "batch_size": 32}
    config = load_config({"name": name, "model": shape, "data": data})
    return TextSubject(name=name, config=config, text=text)


def _published(name: str, family: str, text: Text, length: int) -> TextSubject:
    """A third of the layers and of the width of GPT-2 124M and BERT-base."""
    return _text(name, family, length=length, text=text, vocab_size=text.vocab_size, num_layers=4, d_model=256)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "vgg": _vgg,
    "mlp": _mlp,
    "gpt": lambda: _text("gpt", "gpt", vocab_size=24576, num_layers=4, tied=False),
    "bert": lambda: _text("bert", "bert", vocab_size=1024, num_layers=6),
    "gpt2-like": lambda: _published("gpt2-like", "gpt", Text("bpe", 5632), 64),
    "bert-like": lambda: _published("bert-like", "bert", Text("wordpiece", 3328), 128),
}
"""The models by name."""
