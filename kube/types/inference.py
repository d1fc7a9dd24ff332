"""What inference may use and what it costs: limits of a Tenant or of one API token, and the prices of a ModelService."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from busbar.kube.types.budget import BudgetState, Period
from busbar.kube.types.meta import SpecModel, StatusModel
from busbar.kube.types.rules import Rule
from busbar.kube.types.training_status import Amount

PerMinute = Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)]
PerMillion = Annotated[float, Field(ge=0, le=10_000)]


class CostLimit(SpecModel):
    """The most that inference may cost in a period."""

    period: Period = Field(description="day, week (from Monday) or month, in UTC.")
    cost: Annotated[float, Field(strict=True, ge=0, le=1_000_000_000)] = Field(
        description="Money, at the services' spec.price."
    )


class InferenceLimits(SpecModel):
    """What inference may use; what is absent is not limited."""

    rules = (
        Rule(
            cel="has(self.requestsPerMinute) || has(self.tokensPerMinute) || has(self.budgets)",
            message="set at least one of requestsPerMinute, tokensPerMinute and budgets",
            holds=lambda limits: (
                limits.requests_per_minute is not None
                or limits.tokens_per_minute is not None
                or limits.budgets is not None
            ),
        ),
    )

    requests_per_minute: PerMinute | None = Field(
        default=None, description="Requests that are accepted in any 60 seconds."
    )
    tokens_per_minute: PerMinute | None = Field(
        default=None,
        description="Prompt and output tokens of the requests that are accepted in any 60 seconds. Until a request ends, "
        "its prompt's estimated length and its max_tokens count.",
    )
    budgets: (
        Annotated[
            list[CostLimit],
            Field(
                min_length=1,
                max_length=3,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["period"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Money per period; when it is spent, requests are refused with 429.")


class InferencePrice(SpecModel):
    """Prices per million tokens, in the currency of the pools' prices."""

    prompt_per_million: PerMillion = Field(default=0.0, description="Of prompt tokens.")
    cached_per_million: PerMillion | None = Field(
        default=None,
        description="Of prompt tokens that the prefix cache had; default promptPerMillion.",
    )
    output_per_million: PerMillion = Field(default=0.0, description="Of generated tokens.")


class CostUse(StatusModel):
    """Cost of inference in the current period."""

    period: Period = Field(description="Which period.")
    started: datetime = Field(description="When it began.")
    ends: datetime = Field(description="When the next one begins.")
    cost: Amount = Field(description="Spent, and reserved by requests that run.")
    cost_left: Amount = Field(description="What is left.")
    state: BudgetState = Field(description="Within, Warning (80 % are used) or Spent.")


class InferenceUse(StatusModel):
    """Use of spec.inference, as the gateway reports it."""

    requests_last_minute: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Requests that count against requestsPerMinute."
    )
    tokens_last_minute: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Tokens that count against tokensPerMinute."
    )
    budgets: (
        Annotated[
            list[CostUse],
            Field(
                max_length=3,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["period"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Money in the current periods.")
    as_of: datetime | None = Field(default=None, description="Time of these values.")


def use_words(limits: InferenceLimits | None, use: InferenceUse | None) -> str:
    """`70 of 200,000 tokens/min, 5 of 20 this month`: what is used of each limit, for people; empty without limits."""
    if limits is None:
        return ""
    used = use or InferenceUse()
    spent = {cost.period: cost.cost for cost in used.budgets or ()}
    rates = (
        (used.requests_last_minute, limits.requests_per_minute, "requests/min"),
        (used.tokens_last_minute, limits.tokens_per_minute, "tokens/min"),
    )
    parts = [f"{count or 0:,} of {most:,} {what}" for count, most, what in rates if most is not None]
    costs = [
        f"{spent.get(b.period, 0.0):.4g} of {b.cost:g} this {b.period.value}" for b in limits.budgets or ()
    ]
    return ", ".join([*parts, *costs])
