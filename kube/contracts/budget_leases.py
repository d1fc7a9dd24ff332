"""`POST /internal/leases`: which part of each limit each of several gateways may use.

A gateway never raises its part itself: it states what it still holds, which it may have lowered before it asks, and the
API answers with what it holds from then on. So an answer that is lost leaves a gateway with less than the API counts,
never with more, and the parts of all gateways together are at most the limit. Requests are numbered, because a late one
would state what is no longer held.

Parts of a minute's requests and tokens end with their time. A part of a period's money contains what its holder has
spent and the ledger does not have yet; booking a record lowers it by the record's cost in the same transaction.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.allowances import Nano
from busbar.kube.contracts.wire import WireModel

PATH = "/internal/leases"
MOST_ASKS = 500
LEASE_S = 60.0
"""A gateway uses its part of a minute for so long after it asked for it."""
FALLBACK_S = 3600.0
"""So long it uses the fall-back part of it, and what it holds of money: as long as it remembers a key without the API
(`keys.STALE_S`)."""
FALLBACK_PART = 8
"""One part in so many of a limit is shared equally among the gateways for the time that the API is away."""
MONEY_LOCK_S = 86_400.0
"""The money of a gateway that is silent for so long is given to others. It may come back with requests that are in no
ledger yet, so this is long."""


class LeaseKind(StrEnum):
    """What is limited."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"

    @property
    def is_money(self) -> bool:
        return self not in (LeaseKind.REQUESTS, LeaseKind.TOKENS)


_Name = Annotated[str, Field(max_length=700)]


class LeaseAsk(WireModel):
    """One limit of one account."""

    account: _Name
    kind: LeaseKind
    limit: Nano
    used: Nano = 0
    """Accepted within the last minute; of money, spent or reserved and in no ledger yet."""
    held: Nano
    """The gateway uses at most this from now on; of money, as of the record `LeaseRequest.through`."""
    fallback: Nano = 0
    needed: Nano = 0
    """What is used, and what requests lack that wait or were turned away since the last question."""
    wanted: Nano
    """The same with headroom for the next requests."""


class LeaseRequest(WireModel):
    """POST body. Without `asks` it asks only for what is recalled."""

    gateway: Annotated[str, Field(max_length=128)]
    number: Annotated[int, Field(ge=1, lt=2**63)]
    """Larger than in every request before, also of processes before this one."""
    gateways: Annotated[int, Field(ge=1, le=1000)] = 1
    through: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Usage records up to this number are not in what is held of money."""
    asks: list[LeaseAsk] = Field(default_factory=list, max_length=MOST_ASKS)


class LeaseGrant(WireModel):
    """What the gateway holds from now on."""

    account: str
    kind: LeaseKind
    amount: Nano
    fallback: Nano = 0
    """Of `amount`, what it may use while the API is away."""
    reach: Nano = 0
    """What it could hold if it were given all that nobody holds."""
    elsewhere: Nano = 0
    """What other gateways hold and do not use, which may come back within seconds."""
    spent: Nano = 0
    """Of money, what the ledger has for the present period."""


class LeaseRecall(WireModel):
    """Others need some of what the gateway holds: it shall keep this, or what it has used if that is more."""

    account: str
    kind: LeaseKind
    target: Nano


class LeaseAnswer(WireModel):
    """Answer. `number` above the request's own: the request came too late, and nothing was changed."""

    number: int
    counted_through: int = 0
    """What is held of money contains no usage records up to this number: the ledger has them."""
    grants: list[LeaseGrant] = Field(default_factory=list)
    recalls: list[LeaseRecall] = Field(default_factory=list)
