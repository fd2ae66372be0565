"""All cases by name: `plan-17` is the 17th of its kind, others are made by hand."""

from tests.malformed.by_hand import BY_HAND
from tests.malformed.seeded import KINDS, Kind

CASES: dict[str, Kind] = {f"{kind.__name__}-{number}": kind for kind, count in KINDS.items() for number in range(count)}
CASES |= BY_HAND
