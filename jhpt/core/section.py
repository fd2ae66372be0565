"""What every section of a configuration and every part of a plan is made of: the base class and the types of values."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jhpt.core.amounts import parse_bytes

Count = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[float, BeforeValidator(parse_bytes)]
"""A number, or text such as 24GiB."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def divisors(n: int, up_to: int | None = None) -> list[int]:
    """The divisors of `n`, ascending."""
    return [d for d in range(1, (up_to or n) + 1) if n % d == 0]


def common_divisors(sizes: Iterable[int]) -> list[int]:
    """The numbers that divide every one of `sizes`, ascending."""
    sizes = list(sizes)
    return [d for d in divisors(min(sizes)) if all(size % d == 0 for size in sizes)]


def one_of(choices: Iterable[object]) -> str:
    """`"1, 2 or 4"` for an error message."""
    *rest, last = [str(choice) for choice in choices]
    return f"{', '.join(rest)} or {last}" if rest else last
