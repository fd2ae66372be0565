"""Update rules by name, weight decay, and learning-rate schedules.

    register_optimizer("rmsprop", rmsprop, numbers=OptimizerNumbers(moments=1))

A rule is a function of the section `optimizer`: it makes the transformation of clipped gradients into descent
directions, which the step multiplies by minus the learning rate.  It sees the arrays that a plan stores, under `jit`:
the arithmetic is that of whole arrays, however they are cut over devices.  The dimensions before those of a parameter
itself count layers or stages.  A rule with extra arguments is given `on_whole_layers` (`Layout.on_whole_layers`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jhpt.core.config import OptimizerConfig
from jhpt.core.optimizers import OPTIMIZERS, OptimizerNumbers
from jhpt.sharding.layout import Layout
from jhpt.sharding.types import Params
from jhpt.training.matrices import of_block_matrices, scale_by_factored_squares, scale_by_orthogonal_momentum
from jhpt.training.moments import coded_moments

DECAYED = {"kernel", "tokens", "positions", "types"}
"""Names of matrices and tables; biases and norm scales do not decay."""

UNTRAINED = {"pooler"}
"""Parameters that only a classifier of rows or pairs reads.  Without one they have no gradient, and decay alone would
erase them."""

READERS = {"classifier", "pair"}
"""What reads them, in the head."""


def learning_rate(config: OptimizerConfig, steps: int, step: jax.Array) -> jax.Array:
    """Learning rate of the update at `step` (counted from 0).

    Warm-up: peak (step + 1) / warmup.  Then with u = progress from the end of the warm-up to the last step:
    cosine: peak (f + (1 - f) (1 + cos(pi u)) / 2);  linear: peak (1 - (1 - f) u);  constant: peak;
    wsd (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395): linear, with u = progress through the last
    `decay_fraction` of all steps.
    """
    warmup, floor = config.warmup_steps, config.final_fraction
    step = jnp.asarray(step, jnp.float32)
    decaying = max(round(config.decay_fraction * steps), 1)
    progress = jnp.clip((step - warmup) / max(steps - 1 - warmup, 1), 0, 1)
    decay = {
        "cosine": floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        "linear": 1 - (1 - floor) * progress,
        "constant": jnp.ones_like(progress),
        "wsd": 1 - (1 - floor) * jnp.clip((step - (steps - 1 - decaying)) / decaying, 0, 1),
    }[config.schedule]
    return config.learning_rate * jnp.minimum((step + 1) / max(warmup, 1), decay)


def decay_mask(params: Params) -> Any:
    """True for the leaves that weight decay acts on."""
    untrained = UNTRAINED if READERS.isdisjoint(params.get("head", {})) else set()

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        keys = [key.key for key in path]
        return keys[-1] in DECAYED and keys[0] not in untrained

    return jax.tree_util.tree_map_with_path(decays, params)


UpdateRule = Callable[[OptimizerConfig], optax.GradientTransformation]
"""The settings -> clipped gradients into descent directions, decay included (`decay_mask`)."""


def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    return _decayed(config, coded_moments(adam) if config.moments == "int8" else adam)


def lion(config: OptimizerConfig) -> optax.GradientTransformation:
    """Lion: sign(b1 m + (1 - b1) g) (Chen et al. 2023, arXiv 2302.06675)."""
    return _decayed(config, optax.scale_by_lion(config.b1, config.b2))


def sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    """SGD with momentum: m = momentum m + g (Sutskever et al. 2013, PMLR 28(3): 1139)."""
    momentum = 0.9 if config.momentum is None else config.momentum
    return _decayed(config, optax.trace(momentum, nesterov=bool(config.nesterov)))


def adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adafactor without a learning rate of its own (Shazeer & Stern 2018, arXiv 1804.04235)."""
    return _decayed(config, scale_by_factored_squares())


def muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon for the matrices of blocks, Adam for all other parameters (Jordan et al. 2024, kellerjordan.github.io)."""
    momentum, nesterov = config.momentum, config.nesterov
    orthogonal = scale_by_orthogonal_momentum(
        momentum=0.95 if momentum is None else momentum, nesterov=nesterov is None or nesterov
    )
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    return _decayed(config, of_block_matrices(orthogonal, others=adam))


def _decayed(config: OptimizerConfig, rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The rule with decoupled weight decay."""
    return optax.chain(rule, optax.add_decayed_weights(config.weight_decay, mask=decay_mask))


_RULES: dict[str, UpdateRule] = {"adamw": adamw, "lion": lion, "sgd": sgd, "adafactor": adafactor, "muon": muon}


def register_optimizer(name: str, rule: UpdateRule, *, numbers: OptimizerNumbers) -> None:
    """Registers an update rule with training, and its numbers with configurations and the planner.

    Raises:
      ValueError: the name is taken.
    """
    if name in _RULES:
        raise ValueError(f"the optimizer {name!r} is registered twice; give one of them another name")
    OPTIMIZERS[name], _RULES[name] = numbers, rule


def make_optimizer(config: OptimizerConfig, layout: Layout | None = None) -> optax.GradientTransformation:
    """The update rule `optimizer.name` with its settings.

    Args:
      layout: the plan that cuts what the rule sees; None: nothing is cut.
    """
    rule = optax.with_extra_args_support(_RULES[config.name](config))
    on_whole_layers = layout.on_whole_layers if layout else lambda function, tree: function(tree)
    return optax.GradientTransformation(rule.init, partial(rule.update, on_whole_layers=on_whole_layers))
