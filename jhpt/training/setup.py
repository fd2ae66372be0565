"""Everything that is decided before the first step: data, mesh, model, objective, optimizer.

Only token caches are written here, so a configuration that cannot work leaves nothing behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jhpt.core.config import Config, MemoryConfig, WeightStorage
from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.families.text import TextConfig
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.load import load_config
from jhpt.core.plan import Plan, SavedTensors
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.plan_check import choices_of
from jhpt.core.rules import SETTINGS, check
from jhpt.kernels.implementation import Implementation, KernelChoice, choose_kernels
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.models.attention import AttentionChoice, choose_attention
from jhpt.models.family import Model, build
from jhpt.models.hooks import Hooks
from jhpt.models.layers import CHOICE
from jhpt.models.products import check_products
from jhpt.sharding.layer_loop import unrolled_on_gpu
from jhpt.sharding.layout import Layout
from jhpt.sharding.mesh import make_device_mesh
from jhpt.sharding.model_parts import ModelParts, Recompute
from jhpt.sharding.operators import with_cut_sequence
from jhpt.sharding.ordering import ORDERING_TOKEN
from jhpt.sharding.recompute import everything, save_named, save_nothing
from jhpt.sharding.step import Execution
from jhpt.training.data.cache import Progress, TokenCache, unseen
from jhpt.training.data.corpus import find_files
from jhpt.training.data.labelled import labelled_rows, with_classes
from jhpt.training.data.mixture import Mixture, Sequences, whole_shares
from jhpt.training.data.padded import padded_rows
from jhpt.training.data.pairs import paired_rows
from jhpt.training.data.sources import Source, open_sources
from jhpt.training.data.synthetic import synthetic_images
from jhpt.training.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from jhpt.training.data.windows import (
    TokenStream,
    causal_windows,
    check_documents,
    check_masked,
    check_words,
    masked_windows,
    visible_keys,
)
from jhpt.training.moments import check_blocks
from jhpt.training.optimizer import make_optimizer
from jhpt.training.parts import compressed_hooks, make_parts, sequence_hooks, tensor_hooks
from jhpt.training.weights import Weights, rounding_keys


@dataclass(frozen=True, kw_only=True)
class Design:
    """The parts of a step, without data.

    model: the unsharded model, as it is initialised, saved and sampled from.  training, evaluation: its parts, laid out
    by the plan.
    """

    config: Config
    device: DeviceInfo
    tokenizer: Tokenizer
    layout: Layout
    attention: AttentionChoice
    kernels: KernelChoice
    model: Model
    training: Execution
    evaluation: Execution
    optimizer: optax.GradientTransformation
    weights: Weights

    @property
    def plan(self) -> Plan:
        """The plan of the layout."""
        return self.layout.plan


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run reads.

    visible_keys: keys that an average token sees, where documents are kept apart; None: all of its sequence.
    """

    sources: tuple[Source, ...]
    train_windows: Sequences
    validation_windows: Sequences | None
    visible_keys: float | None = None


@dataclass(frozen=True, kw_only=True)
class Setup(Data, Design):
    """The pieces of a run, ready to be compiled."""


def prepare(
    config: Config,
    plan: Plan | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = unseen,
) -> Setup:
    """Opens the data, builds the mesh and chooses kernels; `say` and `progress` report steps that take long.

    Args:
      plan: None: the one that the section `parallel` describes.

    Raises:
      InputError: data, tokenizer, plan, device count, sequence length or attention kernel do not fit the configuration.
    """
    # Data comes last: reading a large text for the first time takes long, and a refusal should be quick.
    config = decided(config)
    tokenizer = fitting_tokenizer(config)
    plan = plan or plan_by_hand(config, jax.device_count())
    design = design_step(config, plan, tokenizer, jax.devices(), budgeted(device_info(), config.memory))
    return Setup(**vars(design), **vars(open_data(config, tokenizer, say, progress)))


def open_data(config: Config, tokenizer: Tokenizer, say: Callable[[str], None], progress: Progress = unseen) -> Data:
    """The text, the rows with a class, or the images that the configuration names.

    Raises:
      InputError: there is too little of it, or it cannot be read.
    """
    if config.model.classifies:
        images = config.model.reads == "images"
        rows = synthetic_images(config) if images else labelled_rows(config, tokenizer, say)
        path = "a synthetic set" if images else config.data.path
        return Data(
            sources=(Source(setting="data.path", path=path, weight=1.0, cache=rows),),
            train_windows=rows.train,
            validation_windows=rows.validation if len(rows.validation) else None,
        )
    sources = open_sources(config.data, tokenizer, say, progress)
    caches = list[tuple[TokenCache, str]]()
    for source in sources:
        assert isinstance(source.cache, TokenCache)
        caches.append((source.cache, f" ({source.setting})" if len(sources) > 1 else ""))
    train = [_windows(config, tokenizer, cache.train, f"training{name}") for cache, name in caches]
    held = [
        _windows(config, tokenizer, cache.validation, f"validation{name}")
        for cache, name in caches
        if cache.validation.size
    ]
    train_windows = _mixed(train, whole_shares([source.weight for source in sources]))
    return Data(
        sources=sources,
        train_windows=train_windows,
        validation_windows=_mixed(held, [len(windows) for windows in held]) if held else None,
        visible_keys=_visible_keys(config, tokenizer, train_windows),
    )


def _visible_keys(config: Config, tokenizer: Tokenizer, windows: Sequences) -> float | None:
    if config.data.packing != "documents" or tokenizer.end is None:
        return None
    return visible_keys(windows, config.data.sequence_length, tokenizer.end, causal=config.model.causal)


def _mixed(windows: Sequence[Sequences], shares: Sequence[int]) -> Sequences:
    return windows[0] if len(windows) == 1 else Mixture(sources=tuple(windows), shares=tuple(shares))


def budgeted(device: DeviceInfo, memory: MemoryConfig) -> DeviceInfo:
    """The device with its memory limited to the budget of the section `memory`."""
    if memory.budget_bytes == "auto":
        return device
    return replace(device, memory=int(min(memory.budget_bytes, device.memory or memory.budget_bytes)))


def check_data(config: Config) -> None:
    """Refuses an unsuitable tokenizer and missing text, before anything that takes long."""
    fitting_tokenizer(config)
    if config.model.reads == "images":
        return
    for number, source in enumerate(config.data.sources):
        find_files(source.path, f"data.sources.{number}.path")
    if not config.data.sources:
        find_files(config.data.path)
    if config.data.validation_path is not None:
        find_files(config.data.validation_path, "data.validation_path")


def decided(config: Config) -> Config:
    """The configuration with what it leaves to the tokenizer and to labels (`with_vocabulary`, `with_classes`)."""
    return with_classes(with_vocabulary(config))


def with_vocabulary(config: Config) -> Config:
    """The configuration with `model.vocab_size: auto` decided: as many ids as the tokenizer has.

    Raises:
      InputError: the tokenizer cannot be read, a setting does not go with its number of ids, or raw bytes are to train
        a model that is made for more than their 256 ids: nobody wants its large table by oversight.
    """
    if not isinstance(config.model, TextConfig) or config.model.vocab_size != "auto":
        return config
    tokenizer, nominal = load_tokenizer(config.data.tokenizer), config.model.nominal_vocab
    if config.data.tokenizer == BYTES and nominal > tokenizer.vocab_size:
        kind = " --kind wordpiece" if config.model.masked else ""
        raise InputError(
            f"{config.name} is made for a vocabulary of {nominal:,} ids, and data.tokenizer=bytes has "
            f"{tokenizer.vocab_size}; make a tokenizer of your text (jhpt tokenizer train FILES{kind} --vocab-size "
            f"{nominal} --out tokenizer.json) and set data.tokenizer=tokenizer.json, or set "
            f"model.vocab_size={tokenizer.vocab_size} (or {nominal}) to train on bytes all the same"
        )
    return load_config(config, {"model.vocab_size": tokenizer.vocab_size})


def fitting_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the data; InputError if the model cannot use it.  Of images: raw bytes, which nothing reads."""
    if not isinstance(config.model, TextConfig):
        return load_tokenizer(BYTES)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab:
        raise InputError(
            f"data.tokenizer has {tokenizer.vocab_size} ids and model.vocab_size={config.model.vocab}; "
            f"set model.vocab_size to {tokenizer.vocab_size} or more, or to auto"
        )
    if config.data.packing != "stream":
        check_documents(tokenizer, config.data.packing)
    if config.data.whole_words:
        check_words(tokenizer)
    if config.model.masked:
        check_masked(tokenizer, config.data.sequence_length, masks=not config.model.classifies)
    return tokenizer


def design_step(
    config: Config, plan: Plan, tokenizer: Tokenizer, devices: Sequence[jax.Device], device: DeviceInfo
) -> Design:
    """The configured model laid out by the plan on these devices, which need not be attached to any machine.

    Raises:
      InputError: plan, device, sequence length, attention kernel or coded moments do not fit the configuration.
    """
    check_products(config.model, device.platform, device.capability)
    dtype = compute_dtype(config, device)
    layout = Layout(
        plan=plan,
        device_mesh=make_device_mesh(plan, devices),
        num_layers=config.model.num_layers,
        alike=config.model.alike,
    )
    attention = choose_attention(config.model, device.platform, dtype, device.capability, config.data)
    kernels = choose_kernels(device.platform, device.capability)
    model = build(config.model, dtype=dtype, implementation=attention.implementation)
    layout = replace(layout, rules=model.partition_rules)
    if config.optimizer.moments == "int8":
        shapes = jax.eval_shape(lambda: layout.stored(model.init(jax.random.key(0))))
        check_blocks(shapes, layout)
    run = partial(execution, config, model, layout, tokenizer, kernels=kernels.implementation)
    return Design(
        config=config,
        device=device,
        tokenizer=tokenizer,
        layout=layout,
        attention=attention,
        kernels=kernels,
        model=model,
        training=run(train=True),
        evaluation=run(train=False),
        optimizer=make_optimizer(config.optimizer, layout),
        weights=stored_weights(config.optimizer.weights, model, layout.stored),
    )


def stored_weights(storage: WeightStorage, model: Model, stored: Callable[[Any], Any] = lambda tree: tree) -> Weights:
    """How parameters are stored, with the keys of stochastic rounding.  stored: the model's own tree -> the plan's."""
    if storage != "bfloat16_stochastic":
        return Weights(storage=storage)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return Weights(storage=storage, keys=rounding_keys(shapes, stored))


def execution(
    config: Config,
    model: Model,
    layout: Layout,
    tokenizer: Tokenizer,
    *,
    train: bool,
    kernels: Implementation = "reference",
) -> Execution:
    """The configured model, laid out and ready to be traced.  kernels: those of communication compression, and of a
    model alone on a GPU."""
    device_mesh = layout.device_mesh
    check_sequence(config, layout.plan)
    unroll = unrolled(config, layout.plan, on_gpu=_on_gpu(layout))
    loop = layout.stages > 1 or not unroll
    sums, flash = not config.model.post_norm, model.implementation == "cudnn"
    recompute, less = (
        layer_policy(
            plan, few=loop or _on_gpu(layout), loop=loop, flash=flash, sums=sums, names=config.model.named_tensors
        )
        for plan in (layout.plan.of_first_blocks, layout.plan.of_other_blocks)
    )

    def parts_at(degree: int) -> ModelParts:
        axes = device_mesh.axes(degree).tensor

        def cut(hooks: Hooks) -> ModelParts:
            hooked = replace(model, hooks=hooks)
            return make_parts(hooked, config.data, tokenizer, config.optimizer.z_loss, train=train)

        alone = _on_gpu(layout) and unrolled_on_gpu(layout.plan)
        parts = cut(replace(tensor_hooks(axes, degree), alone=alone, kernels=kernels))
        if layout.plan.compression.on and degree > 1:
            compression, causal = layout.plan.compression, config.model.causal
            hooks = compressed_hooks(axes, degree, compression, causal=causal, implementation=kernels)
            compressed = cut(hooks)
            parts = replace(parts, block=compressed.block, halves=compressed.halves)
        if layout.plan.sequence and degree > 1:
            parts = with_cut_sequence(parts, cut(sequence_hooks(axes, degree)), axes)
        return parts

    return Execution(
        layout=layout,
        parts={degree: parts_at(degree) for degree in device_mesh.degrees},
        dtype=model.dtype,
        tied=config.model.tied_table,
        unroll=unroll,
        overlap=_on_gpu(layout) and config.model.alike,
        recompute=recompute if train else everything,
        recompute_less=less if train else everything,
        kernels=kernels,
    )


def check_sequence(config: Config, plan: Plan) -> None:
    """Refuses to cut a sequence into unequal pieces, and to compress one whose documents are kept apart."""
    data = config.data
    choices = replace(choices_of(plan), sequence_length=data.sequence_length, documents=data.packing == "documents")
    check(replace(choices, names=SETTINGS if plan.origin == "hand" else {}))


def _on_gpu(layout: Layout) -> bool:
    return layout.device_mesh.mesh.devices.flat[0].platform in ("gpu", "cuda")


def compute_dtype(config: Config, device: DeviceInfo) -> jnp.dtype:
    """`model.dtype`, with "auto" resolved: bfloat16 on a GPU, float32 elsewhere."""
    name = config.model.dtype
    return jnp.dtype(("bfloat16" if device.is_gpu else "float32") if name == "auto" else name)


MOST_UNROLLED_LAYERS = 8
"""With more layers the layer loop is not unrolled on CPUs, because compile time grows with unrolled layers."""


def unrolled(config: Config, plan: Plan, *, on_gpu: bool) -> bool:
    """Whether the loop over blocks is unrolled.

    On CPU a loop copies every layer's residuals in and out of stacked buffers, a quarter of a gpt-tiny step
    (docs/reports/cpu-performance.md), so a few layers are unrolled.  On GPUs `unrolled_on_gpu` decides.  Blocks that
    differ are in no loop.
    """
    if not config.model.alike:
        return True
    return unrolled_on_gpu(plan) if on_gpu else config.model.num_layers <= MOST_UNROLLED_LAYERS


def layer_policy(
    plan: Plan,
    *,
    few: bool,
    loop: bool,
    flash: bool = False,
    sums: bool = False,
    names: Sequence[str] = NAMED_TENSORS,
) -> Recompute:
    """The activations that the plan saves for the backward pass of a block.

    Without recomputation these are all, or with `few` the tensors of all `names`.  All activations are four times as
    many bytes, which a stack also writes to memory and reads again: by layer in a loop, or by micro-batch in a
    pipeline.  loop: such a stack is there.  flash: attention is cuDNN's.

    With sample chunks, the input of a block comes in parts (`sharding.sample_chunks`), which are half as many bytes
    again with two chunks.  sums: the input is just the sum of the parts, which is saved instead.  In BERT it is the
    norm of the sum, whose derivative needs the parts.
    """
    always: tuple[str, ...] = CHOICE, ORDERING_TOKEN
    if not plan.recompute:
        return save_named((*names, *always), flash=flash, loop=loop) if few else everything
    saved = plan.saved or SavedTensors()
    if sums and plan.sample_chunks != (1,) and BLOCK_INPUT not in saved.host:
        always = BLOCK_INPUT, *always
    elif plan.saved is None:
        return save_nothing
    return save_named((*saved.device, *always), saved.host, flash=flash, loop=loop)


def _windows(config: Config, tokenizer: Tokenizer, tokens: TokenStream, name: str) -> Sequences:
    if config.model.pairs:
        return paired_rows(tokens, config.data.sequence_length, name, tokenizer)
    if config.data.packing == "pad":
        return padded_rows(tokens, config.data.sequence_length, name, tokenizer, masked=config.model.masked)
    if config.model.masked:
        return masked_windows(tokens, config.data.sequence_length, name, tokenizer)
    return causal_windows(tokens, config.data.sequence_length, name)
