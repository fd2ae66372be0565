"""What the backward pass finds saved, and what it computes again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

FLASH_FORWARD = "dot_product_attention_fwd"
"""cuDNN's forward primitive: its output and softmax statistics carry no name."""

ATTENTION = "attention_out"
"""The name that stands for both, where attention is that primitive."""

NAME = jax.make_jaxpr(lambda x: checkpoint_name(x, ATTENTION))(0.0).eqns[0].primitive
"""What `checkpoint_name` leaves in a program."""


def save_named(
    names: Sequence[str], host: Sequence[str] = (), *, flash: bool = False, loop: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a layer so that its backward pass finds the tensors of these names, and its input; the rest it computes.

    With every matrix product among the names none runs twice; only norms, activations and residual sums do.  They are
    cheap, and what they would leave behind is not: on an H100 (compiled, not run) gpt2-1.5b at batch 16 needs 37 GB of
    temporary memory instead of 121, the head's own backward pass (`jhpt.models.vocabulary`) included.

    Args:
      host: names of tensors that wait in the host's pinned memory.
      flash: attention is cuDNN's.  What is named is then the kernel's own result in another shape, so that is what is
        kept, with the softmax's statistics, and nothing twice.
      loop: the backward pass is in another loop than the forward pass, so no compiler sees that they compute the same.
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
    """The layer itself: its backward pass keeps what it likes."""
    return layer


def save_nothing(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer so that its backward pass keeps only its input."""
    return jax.checkpoint(layer)
