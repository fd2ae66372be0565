"""What every settings class is made of: the closed, immutable base, and the number types of its fields."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jhpt.core.amounts import parse_bytes

Count = Annotated[int, Field(ge=1, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[float, BeforeValidator(parse_bytes)]
"""A number, or text such as 24GiB."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
