"""What it takes to train on so many tokens: days, device-hours and money.

    steps        = ceil(tokens / (batch * tokens of a sample))
    device-hours = steps * seconds of a step / 3600 * devices of the cluster
    cost         = sum over kinds of (device-hours of the kind * its price)

All devices of the cluster are paid for, idle ones too.  Only steps count: starting, compiling, checkpoints, evaluation
and failures come on top.  The price's currency is the user's.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jhpt.core.amounts import parse_count
from jhpt.core.catalogue import kind_by_driver
from jhpt.core.cluster import Cluster, Device
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.profile import ModelProfile
from jhpt.planner.report.speed import speed
from jhpt.planner.report.words import devices_word, large, long_duration
from jhpt.planner.search.solve import Answer

EVERY = ""
"""The kind under which a price for all devices stands."""

HOUR = 3600.0

Prices = Mapping[str, float]
"""Money for an hour of a device, by kind."""


@dataclass(frozen=True, kw_only=True)
class Rent:
    """What the steps on `tokens` tokens take; without tokens only what one token costs.

    seconds: of all steps.  device_hours: of all devices of the cluster.  hourly: money for an hour of the cluster; None
    without prices.  per_token: money for a token.
    """

    devices: int
    idle: int
    tokens: float | None
    steps: int | None
    seconds: float | None
    hourly: float | None
    per_token: float | None

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices, idle ones too."""
        return None if self.seconds is None else self.seconds / HOUR * self.devices

    @property
    def cost(self) -> float | None:
        """Money for all steps."""
        return None if self.seconds is None or self.hourly is None else self.seconds / HOUR * self.hourly

    def to_json(self) -> dict[str, Any]:
        """All figures that are known."""
        figures = {
            "tokens": self.tokens,
            "steps": self.steps,
            "days": None if self.seconds is None else self.seconds / HOUR / 24,
            "device_hours": self.device_hours,
            "cost": self.cost,
            "cost_per_hour": self.hourly,
            "cost_per_billion_tokens": None if self.per_token is None else 1e9 * self.per_token,
        }
        return {name: value for name, value in figures.items() if value is not None}


def read_tokens(text: float | str | None) -> float | None:
    """A number of tokens, or text such as `260B`; InputError for anything else."""
    try:
        return None if text is None else parse_count(text)
    except ValueError as error:
        raise InputError(f"tokens={error}") from None


def read_prices(text: float | str | None, clusters: Iterable[Cluster]) -> Prices | None:
    """Prices for the devices of these clusters: `2.5`, or `h100=2.5,a100=1.3`.

    Raises:
      InputError: no price, a kind without one, or a price for a kind that none of the clusters has.
    """
    if text is None:
        return None
    prices: dict[str, float] = {}
    text = str(text)
    for part in text.split(","):
        kind, given, price = part.rpartition("=")
        kind = kind.strip().lower()
        if kind in prices or (given and not kind) or (not given and "," in text):
            raise InputError(f"price={text}: write one price for all devices, or one per kind as in h100=2.5,a100=1.3")
        prices[kind] = _price(price, text)
    found = {price_kind(node.device) for cluster in clusters for node in cluster.nodes}
    for kind in found if EVERY not in prices else ():
        if kind not in prices:
            raise InputError(f"price={text}: there is no price for {kind}; add {kind}=PRICE")
    for kind in prices:
        if kind and kind not in found:
            hint = did_you_mean(kind, found) or f"; leave {kind} out"
            raise InputError(f"price={text}: no cluster has devices of the kind {kind!r}{hint}")
    return prices


def _price(text: str, whole: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < math.inf:
        raise InputError(f"price={whole}: {text!r} is no price of a device for an hour; write it as 2.5")
    return price


def price_kind(device: Device) -> str:
    """The name under which the price of a device stands: its kind in the catalogue, or else its own name."""
    return kind_by_driver(device.name) or device.name.lower()


def rent(answer: Answer, tokens: float | None, prices: Prices | None) -> Rent | None:
    """What training takes; None if neither tokens nor prices are given.

    Raises:
      InputError: the model's samples have no tokens.
    """
    if tokens is None and prices is None:
        return None
    check_tokens(answer.model.profile, tokens, prices)
    cluster, found = answer.model.cluster, speed(answer)
    in_step = answer.plan.batch * (answer.model.profile.sample_tokens or 1)
    steps = None if tokens is None else math.ceil(tokens / in_step)
    hourly = None if prices is None else hourly_price(cluster, prices)
    return Rent(
        devices=found.devices,
        idle=found.devices - answer.plan.devices,
        tokens=tokens,
        steps=steps,
        seconds=None if steps is None else steps * found.seconds,
        hourly=hourly,
        per_token=None if hourly is None else hourly / HOUR * found.seconds / in_step,
    )


def check_tokens(profile: ModelProfile, tokens: float | None, prices: Prices | None) -> None:
    """Refuses tokens and prices for a model whose samples have no tokens."""
    given = [name for name, value in (("tokens", tokens), ("price", prices)) if value is not None]
    if given and not profile.sample_tokens:
        raise InputError(f"{profile.name}: {profile.sample} has no tokens to count; leave out {' and '.join(given)}")


def hourly_price(cluster: Cluster, prices: Prices) -> float:
    """Money for an hour of all devices."""
    return sum(
        node.count * node.devices * prices.get(price_kind(node.device), prices.get(EVERY, 0.0))
        for node in cluster.nodes
    )


def rent_lines(rent: Rent, answer: Answer) -> list[str]:
    """The figures as text."""
    word = devices_word(answer.model.cluster)
    if rent.seconds is None or rent.device_hours is None:
        first = f"cost: {_money_per_tokens(rent)}"
    else:
        cost = f"; cost {money(rent.cost)}, {_money_per_tokens(rent)}" if rent.cost is not None else ""
        first = (
            f"{large(rent.tokens or 0)} tokens: {rent.steps:,} steps in {long_duration(rent.seconds)}, "
            f"{rent.device_hours:,.{0 if rent.device_hours >= 100 else 1}f} {word}-hours{cost}"
        )
    what = f"all {rent.devices} {word}s" if rent.devices > 1 else f"the {word}"
    idle = f", {rent.idle} idle one{'s' if rent.idle > 1 else ''} included," if rent.idle else ""
    price = "" if rent.hourly is None else f" at {rent.hourly / rent.devices:,.4g} per {word}-hour"
    return [first, f"paid for: {what}{idle}{price}; not counted: start, checkpoints, evaluation, failures"]


def money(amount: float | None) -> str:
    """An amount in the user's currency: without one that is not known."""
    return "" if amount is None else f"{amount:,.0f}" if amount >= 1000 else f"{amount:,.2f}"


def _money_per_tokens(rent: Rent) -> str:
    """`148.20 per billion tokens`; above 10,000 per million."""
    billion = 1e9 * (rent.per_token or 0.0)
    return f"{money(billion)} per billion tokens" if billion < 1e4 else f"{money(billion / 1e3)} per million tokens"
