"""Activations and norms by name, in numbers: how many input matrices an activation takes, what parameters a norm has.

Their functions are registered in `jhpt.models.layers`, whose `register_activation` and `register_norm` also fill these.
"""

from collections.abc import Mapping

from jhpt.core.divisors import one_of
from jhpt.core.errors import did_you_mean

ACTIVATIONS: dict[str, int] = {"gelu": 1, "gelu_exact": 1, "swiglu": 2}
"""Input matrices of the MLP: an activation of two, such as swiglu, is gated and adds one more matrix product."""

NORMS: dict[str, int] = {"layernorm": 2, "rmsnorm": 1}
"""Parameters per number that is normalised: a scale, and for layernorm a bias."""


def check_registered(setting: str, name: str, known: Mapping[str, int]) -> str:
    """The name itself; ValueError where nothing is registered under it."""
    if name not in known:
        raise ValueError(f"{setting}={name!r}{did_you_mean(name, known)}; use {one_of(known)}")
    return name
