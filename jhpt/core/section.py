"""What every section of a configuration and every part of a plan is made of: the base class and the types of values."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jhpt.core.amounts import parse_bytes

Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Float32 = Annotated[float, Field(ge=1.2e-38, le=3.4e38, allow_inf_nan=False)]
"""A positive number that float32, in which updates are computed, can hold."""
Bytes = Annotated[float, BeforeValidator(parse_bytes)]
"""A number, or text such as 24GiB."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
