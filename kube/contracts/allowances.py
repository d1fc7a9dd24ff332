"""What a key and its tenant may use of served models: limits, with what the ledger has counted of them.

The API answers a key's look-up with one `Account` for the key and one for its tenant, as far as they have limits. Costs
of a period are the API's sums over its ledger, together with the number up to which it has this gateway's usage
records; the gateway adds its own records behind that number and the requests that it has accepted and not ended. So
each record counts once, wherever it is on its way.

Money is counted in integers, billionths of the currency's unit, because sums of them do not depend on their order.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

NANO = 10**9
"""Billionths in one unit of the currency."""
MOST_NANO = 10**17
"""No request costs more: a database's integer must hold the sums."""
Nano = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, le=10_000)]


class Price(WireModel):
    """What a service's tokens cost, per million."""

    prompt: Rate = 0.0
    cached: Rate = 0.0
    """Prompt tokens that the prefix cache had."""
    output: Rate = 0.0

    def cost_nano(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Cost of a request; `cached_tokens` are some of `prompt_tokens`."""
        cached = min(cached_tokens, prompt_tokens)
        cost = (prompt_tokens - cached) * self.prompt + cached * self.cached + output_tokens * self.output
        return min(round(cost * (NANO // 10**6)), MOST_NANO)


class CostAllowance(WireModel):
    """Money for one period."""

    period: str
    """day, week or month."""
    started: datetime
    ends: datetime
    limit_nano: Nano
    spent_nano: Nano = 0
    """By the records of this period that the API has."""
    pending_nano: Nano = 0
    """As a gateway tells the operator: of `spent_nano`, what is spent or reserved there and not in the ledger yet."""


class Account(WireModel):
    """Limits of one key or one tenant; None: not limited."""

    name: str
    """`key/ID`, `tenant/NAME`, or `share/NAMESPACE/NAME/TENANT`."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    costs: list[CostAllowance] = Field(default_factory=list)


def key_account(key_id: str) -> str:
    """The account of a key."""
    return f"key/{key_id}"


def tenant_account(tenant: str) -> str:
    """The account of a tenant."""
    return f"tenant/{tenant}"


def share_account(service: str, tenant: str) -> str:
    """The account of what a tenant uses of one service (`namespace/name`)."""
    return f"share/{service}/{tenant}"
