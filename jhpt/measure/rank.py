"""One tensor rank's share of a model, as a smaller model that a single device can time."""

from jhpt.core.divisors import common_divisors, one_of
from jhpt.core.errors import InputError
from jhpt.core.families.family import ModelConfig


def tensor_degrees(model: ModelConfig) -> list[int]:
    """Tensor degrees that divide everything the tensor axis cuts, ascending."""
    return common_divisors(model.cut_sizes.values())


def rank_share(model: ModelConfig, tensor: int) -> ModelConfig:
    """The part of the model that one rank of this tensor degree computes (`ModelConfig.rank_share`).

    Raises:
      InputError: `tensor` does not divide what the tensor axis cuts.
    """
    if tensor == 1:
        return model
    if tensor not in (degrees := tensor_degrees(model)):
        raise InputError(f"tensor degree {tensor} does not divide this model; use {one_of(degrees)}")
    return model.rank_share(tensor)
