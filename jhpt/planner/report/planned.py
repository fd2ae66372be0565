"""What `jhpt.plan` returns: the plan, and all that explains it."""

import io
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import PrivateAttr
from rich.console import Console

from jhpt.core.plan import Plan
from jhpt.planner.cost.estimate import Estimate
from jhpt.planner.report.alternatives import Alternative, alternatives
from jhpt.planner.report.answer import PLAIN_WIDTH, print_answer, to_json
from jhpt.planner.report.rent import Rent, read_prices, read_tokens, rent
from jhpt.planner.report.speed import Speed, headline, speed
from jhpt.planner.search.baselines import Baseline, baselines
from jhpt.planner.search.request import Request
from jhpt.planner.search.solve import Answer


class Planned(Plan):
    """The fastest plan with its explanation.  It is a `Plan`: it can be saved, compared and run as any other.

    `print` shows what `jhpt plan` does.  A changed copy is a mere `Plan`, because the explanation would not be its.
    """

    _answer: Answer = PrivateAttr()
    _request: Request = PrivateAttr()

    @classmethod
    def of(cls, answer: Answer, request: Request) -> "Planned":
        """The plan of an answer to this request."""
        planned = cls.model_validate(answer.plan.model_dump())
        planned._answer, planned._request = answer, request
        return planned

    @property
    def plan(self) -> Plan:
        """The plan alone."""
        return self._answer.plan

    @property
    def estimate(self) -> Estimate:
        """Predicted seconds and bytes, stage by stage and by cause."""
        return self._answer.estimate

    @property
    def speed(self) -> Speed:
        """Seconds of a step, tokens per second of all devices and of one, MFU."""
        return speed(self._answer)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices together; None if samples have no tokens."""
        return self.speed.tokens

    @property
    def mfu(self) -> float | None:
        """Share of the peak of all devices, causal convention; None where FLOP or peak are not known."""
        return self.speed.mfu

    def rent(self, tokens: float | str | None = None, price: float | str | None = None) -> Rent | None:
        """Days, device-hours and cost of training on so many tokens, as `jhpt plan --tokens 260B --price 2.5` says.

        Raises:
          InputError: these are no tokens or prices, or samples have no tokens.
        """
        return rent(self._answer, read_tokens(tokens), read_prices(price, [self._answer.model.cluster]))

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The fastest plans of other shapes, and what they lose."""
        return alternatives(self._answer)

    @cached_property
    def baselines(self) -> tuple[Baseline, ...]:
        """The plans that one would run without a planner."""
        return baselines(self._request, self._answer.model)

    def to_json(self) -> dict[str, Any]:
        """Everything that is known, in bytes and seconds: what `jhpt plan --json` prints."""
        return to_json(self._answer, self.baselines)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Plan:  # type: ignore[override]
        """A changed copy, without the explanation."""
        return self.plan.model_copy(update=update, deep=deep)

    def __str__(self) -> str:
        stream = io.StringIO()
        print_answer(Console(file=stream, width=PLAIN_WIDTH, highlight=False), self._answer, self.baselines)
        return stream.getvalue().rstrip()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {headline(self._answer)}>"

    def __eq__(self, other: object) -> bool:
        """Equal to any plan with the same content."""
        return isinstance(other, Plan) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.plan)
