"""What is decided before the first step of a plan of space=general, whose stages have a program each.

It is the counterpart of `training.setup`, which is about plans that one program runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from jhpt.core.config import Config
from jhpt.core.plan import Plan
from jhpt.kernels.implementation import KernelChoice, choose_kernels
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.models.attention import AttentionChoice, choose_attention
from jhpt.models.family import Model, Rows, build
from jhpt.models.products import check_products
from jhpt.sharding.compiler_options import compiler_options
from jhpt.sharding.stages.execution import StagesExecution
from jhpt.sharding.stages.layout import StagesLayout, place_stages
from jhpt.training.data.cache import Progress, unseen
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.moments import check_blocks
from jhpt.training.optimizer import make_optimizer
from jhpt.training.setup import (
    Data,
    Setup,
    budgeted,
    compute_dtype,
    decided,
    execution,
    fitting_tokenizer,
    open_data,
    prepare,
    stored_weights,
)
from jhpt.training.weights import Weights


@dataclass(frozen=True, kw_only=True)
class StagesDesign:
    """The parts of a step, without data.  training, evaluation, optimizers, weights: of every chunk."""

    config: Config
    device: DeviceInfo
    tokenizer: Tokenizer
    layout: StagesLayout
    attention: AttentionChoice
    kernels: KernelChoice
    model: Model
    training: StagesExecution
    evaluation: StagesExecution
    optimizers: tuple[optax.GradientTransformation, ...]
    weights: tuple[Weights, ...]

    @property
    def plan(self) -> Plan:
        """The plan of the layout."""
        return self.layout.plan


@dataclass(frozen=True, kw_only=True)
class StagesSetup(Data, StagesDesign):
    """The pieces of a run."""


AnySetup = Setup | StagesSetup


def prepare_run(
    config: Config,
    plan: Plan | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = unseen,
) -> AnySetup:
    """`setup.prepare`, for plans of any space; its arguments and errors."""
    if plan is None or plan.space == "spmd":
        return prepare(config, plan, say, progress)
    config = decided(config)
    tokenizer = fitting_tokenizer(config)
    design = design_stages(config, plan, tokenizer, jax.devices(), budgeted(device_info(), config.memory))
    return StagesSetup(**vars(design), **vars(open_data(config, tokenizer, say, progress)))


def design_stages(
    config: Config, plan: Plan, tokenizer: Tokenizer, devices: Sequence[jax.Device], device: DeviceInfo
) -> StagesDesign:
    """`setup.design_step` of a plan whose stages have a program each; its arguments and errors."""
    check_products(config.model, device.platform, device.capability)
    dtype = compute_dtype(config, device)
    attention = choose_attention(config.model, device.platform, dtype, device.capability, config.data)
    kernels = choose_kernels(device.platform, device.capability)
    model: Model = build(config.model, dtype=dtype, implementation=attention.implementation)
    layout = place_stages(plan, devices, config.model.num_layers, shared=model.head_reads, rules=model.partition_rules)
    shapes, size = jax.eval_shape(model.init, jax.random.key(0)), config.data.batch_size
    windows: Any = np.zeros((size, config.model.row_length(config.data.sequence_length)), np.int32)

    weights: Any = np.zeros(size, np.float32)

    def executed(rows: Rows, train: bool) -> StagesExecution:
        made = (execution(config, model, chunk.layout, tokenizer, train=train) for chunk in layout.chunks)
        options = compiler_options(device.platform, plan)
        return StagesExecution(layout=layout, executions=tuple(made), params=shapes, rows=rows, options=options)

    training = executed(Rows(windows), train=True)
    if config.optimizer.moments == "int8":
        for chunk, params in zip(layout.chunks, training.stored, strict=True):
            check_blocks(params, chunk.layout)
    numbers = range(len(layout.chunks))
    return StagesDesign(
        config=config,
        device=device,
        tokenizer=tokenizer,
        layout=layout,
        attention=attention,
        kernels=kernels,
        model=model,
        training=training,
        evaluation=executed(Rows(windows, weights), train=False),
        optimizers=tuple(make_optimizer(config.optimizer, chunk.layout) for chunk in layout.chunks),
        weights=tuple(stored_weights(config.optimizer.weights, model, partial(layout.part, at)) for at in numbers),
    )
