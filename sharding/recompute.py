"""Activation checkpointing: which activations are saved for the backward pass, and which are recomputed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

FLASH_FORWARD = "dot_product_attention_fwd"
"""cuDNN's forward primitive: its output and softmax statistics carry no name."""

ATTENTION = "attention_out"
"""The name under which both are saved, if attention is that primitive."""

NAME = jax.make_jaxpr(lambda x: checkpoint_name(x, ATTENTION))(0.0).eqns[0].primitive
"""The primitive of `checkpoint_name`."""


def save_named(
    names: Sequence[str], host: Sequence[str] = (), *, flash: bool = False, loop: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a layer so that its input and the tensors of these names are saved; the backward pass recomputes the rest.

    If every matrix product is among the names, none runs twice; only norms, activation functions and residual sums do.
    They are cheap to compute and expensive to save: on an H100 (compiled, not run) gpt2-1.5b at batch 16 needs 37 GB of
    temporary memory instead of 121, the head's backward pass (`jhpt.models.vocabulary`) included.

    Args:
      host: names of tensors that are offloaded to the host's pinned memory.
      flash: attention is cuDNN's.  The named tensor is then the kernel's result in another shape, so the result itself
        is saved, with the softmax's statistics, and nothing is saved twice.
      loop: forward and backward pass are in different loops, so that the compiler cannot find common subexpressions.
    """
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=tuple(names),
        names_which_can_be_offloaded=tuple(host),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        if flash and primitive.name.startswith(FLASH_FORWARD):
            return named(NAME, name=ATTENTION)
        if flash and primitive is NAME and parameters["name"] == ATTENTION:
            return named(NAME, name="")
        return named(primitive, *arguments, **parameters)

    def wrap(layer: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(layer, policy=policy, prevent_cse=not loop)

    return wrap


def everything(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The layer itself: everything that its backward pass needs is saved."""
    return layer


def save_nothing(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer so that only its input is saved."""
    return jax.checkpoint(layer)
