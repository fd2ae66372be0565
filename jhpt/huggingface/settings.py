"""Reading `config.json`: what is understood is taken, what would change the result and is not understood is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jhpt.core.errors import InputError


@dataclass(frozen=True)
class Settings:
    """The keys of a `config.json`.  place: the file, for messages."""

    keys: Mapping[str, Any]
    place: str

    def get(self, name: str, default: Any = None) -> Any:
        """The value; where it is absent or null, the default."""
        value = self.keys.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A count that the model cannot do without."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.place}: {name}={value!r} is not a count of 1 or more; repair the file")
        return value

    def positive(self, name: str, default: float) -> float:
        """A number above zero."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise InputError(f"{self.place}: {name}={value!r} is not a number above 0; repair the file")
        return float(value)

    def one_of(self, name: str, known: Mapping[Any, Any], default: Any = None) -> Any:
        """What a value stands for here.

        Raises:
          InputError: it stands for nothing.
        """
        value = self.get(name, default)
        if not isinstance(value, str | bool | int) or value not in known:
            raise InputError(f"{self.place}: {name}={value!r} is not supported; supported: {_listed(known)}")
        return known[value]

    def only(self, **expected: Any) -> None:
        """Refuses values that would need other computations.  expected: the value of each key that is possible."""
        for name, value in expected.items():
            if self.get(name, value) != value:
                raise InputError(
                    f"{self.place}: {name}={self.keys[name]!r} is not supported, only {value!r}; train such a model "
                    "with another library"
                )


def _listed(known: Mapping[Any, Any]) -> str:
    return ", ".join(str(name) for name in known)
