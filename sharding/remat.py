"""What the backward pass finds saved, and what it computes again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

FLASH_FORWARD = "dot_product_attention_fwd"
"""cuDNN's forward primitive: its output and softmax statistics carry no name, and running it twice is dear."""


def save_named(names: Sequence[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a layer so that its backward pass keeps only the tensors of these names and what attention needs.

    With every matrix product among the names none runs twice; only norms, activations and residual sums do.  They are
    cheap, and what they would leave behind is not: on an H100 (compiled, not run) gpt2-1.5b at batch 16 needs 37 GB of
    temporary memory instead of 121, the head's own backward pass (`jhpt.models.vocabulary`) included.
    """
    named = jax.checkpoint_policies.save_only_these_names(*names)

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        return primitive.name.startswith(FLASH_FORWARD) or named(primitive, *arguments, **parameters)

    def wrap(layer: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

    return wrap


def everything(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The layer itself: its backward pass keeps what it likes."""
    return layer


def keep_nothing(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer so that its backward pass keeps only its input."""
    return jax.checkpoint(layer)
