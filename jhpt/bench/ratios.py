"""How many times as fast: the one way in which benchmarks compare the seconds of two competitors.

    ratio = seconds of the other / seconds of jhpt's          above 1: jhpt's takes less time

Every claim about such a ratio is made here, has `vs_` in its name and says in its unit whose seconds are divided by
whose.  Where several set-ups were measured, the geometric mean and the worst stand beside the best, so that none is
quoted without them.
"""

import statistics
from collections.abc import Mapping, Sequence

from jhpt.bench.results import Claim

WORD = "vs_"
"""Part of the name of every claim that is a ratio of seconds, and of no other."""


def times_as_fast(other: Sequence[float], ours: Sequence[float]) -> float:
    """The median over rounds of (seconds of the other / seconds of ours), so that drift of the machine cancels.

    Args:
      other, ours: seconds of every round, in which both were timed in turn.
    """
    return statistics.median(a / b for a, b in zip(other, ours, strict=True))


def ratio_unit(other: str, ours: str, kind: str = "") -> str:
    """The unit of a ratio.  kind: of the seconds, if they were not measured: "predicted"."""
    return f"{kind} seconds of {other} / seconds of {ours}".strip()


def speed_claim(ratio: float, *, unit: str, setup: str) -> Claim:
    """The claim of a single ratio.  unit: of `ratio_unit`."""
    return Claim(value=ratio, unit=unit, setup=setup)


def speed_claims(name: str, ratios: Mapping[str, float], *, unit: str, place: str) -> dict[str, Claim]:
    """`NAME_max`, `NAME_geomean` and `worst_NAME` of several set-ups; nothing of none.

    Args:
      name: has `WORD` in it.
      ratios: by set-up.  unit: of `ratio_unit`.  place: what all set-ups share.
    """
    if WORD not in name:
        raise ValueError(f"{name}: the name of a ratio of seconds says {WORD}whom")
    if not ratios:
        return {}
    best, worst = (pick(ratios, key=ratios.__getitem__) for pick in (max, min))
    count = len(ratios)
    return {
        f"{name}_max": speed_claim(ratios[best], unit=unit, setup=f"{best}, the best of {count}, {place}"),
        f"{name}_geomean": speed_claim(
            statistics.geometric_mean(ratios.values()), unit=unit, setup=f"{count} entries, {place}"
        ),
        f"worst_{name}": speed_claim(ratios[worst], unit=unit, setup=f"{worst}, the worst of {count}, {place}"),
    }
