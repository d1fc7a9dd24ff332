"""What this gateway holds of each limit, where several gateways share them. Pure: time is an argument.

A lease is lowered here first and then told to the API (`busbar.kube.contracts.budget_leases`), and raised by the API's
answer alone. A gateway holds what it uses, what it asked for in vain since it last told, and some headroom, so that most
requests find room without asking; the rest stays with the API, for whoever needs it next.

While the API is away a lease lasts `LEASE_S`, then the fall-back part of it does for as long as keys are remembered.
Money has no fall-back: what is held of it lasts as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from busbar.kube.contracts.budget_leases import (
    FALLBACK_PART,
    FALLBACK_S,
    LEASE_S,
    LeaseAsk,
    LeaseGrant,
    LeaseKind,
)

RENEW_S = 20.0
"""A lease that nothing happens to is renewed so often."""
ASK_AGAIN_S = 1.0
"""Where nothing is left of a limit, the API is not asked more often."""
IDLE_S = 600.0
"""After so long without a request a gateway gives back the fall-back part, too."""
HEADROOM_PART = 16
"""At least one part in so many of a limit is kept ready for the next requests."""


class Measure(NamedTuple):
    """One limit of an account, what this gateway uses of it, and what a request needs of it. Several are made for each
    request, so it is a named tuple, which costs least."""

    kind: LeaseKind
    limit: int
    used: int
    needs: int = 0


@dataclass
class Lease:
    """This gateway's part of one limit."""

    kind: LeaseKind
    amount: int = 0
    fallback: int = 0
    until: float = -math.inf
    fallback_until: float = -math.inf
    reach: int | None = None
    """What it could hold of all that is free, by the API's last answer; None: the API has not answered yet."""
    elsewhere: int = 0
    target: int | None = None
    """To what the API wants it to go down."""
    blocked: int = 0
    """What requests lacked since the API was last asked."""
    tried_at: float = -math.inf
    asked_at: float = -math.inf
    booked_since: int = 0
    """Of money, what the ledger took since the API was last asked."""

    def holds(self, now: float, used: int) -> int:
        """What may be used now, in all."""
        if now < self.until:
            return self.amount
        if self.kind.is_money:
            return min(used, self.amount)
        return min(self.amount, self.fallback) if now < self.fallback_until else 0

    def hopeful(self, measure: Measure) -> bool:
        """Whether there is enough for a request, here, at the API or at other gateways that do not use it; the API has
        said so, or nothing yet."""
        return self.reach is None or measure.used + measure.needs <= self.reach + self.elsewhere

    def worth_asking(self, measure: Measure, now: float) -> bool:
        """Whether asking the API may help a request that does not fit."""
        return self.hopeful(measure) or now - self.asked_at >= ASK_AGAIN_S

    def is_due(self, measure: Measure, now: float, gateways: int) -> bool:
        """Whether the API has to be asked."""
        if (
            self.target is not None
        ):  # also where nothing is held: the API counts more, and does not know better
            return True
        if self.blocked or now - self.asked_at >= RENEW_S:
            return bool(self.blocked or self.amount or measure.used or now - self.tried_at < IDLE_S)
        room, headroom = self.amount - measure.used, self._headroom(measure, gateways)
        return 2 * room < headroom or room > 2 * headroom + measure.limit // HEADROOM_PART

    def ask(
        self, account: str, measure: Measure, now: float, gateways: int, *, last: bool = False
    ) -> LeaseAsk:
        """Lower it to what is needed, and the question that tells so. `last`: this process ends."""
        used, limit = measure.used, measure.limit
        most = max(limit, used)
        needed = min(most, used + self.blocked)
        wanted = used
        if not last and now - self.tried_at < IDLE_S:
            wanted = min(most, needed + self._headroom(measure, gateways))
        keep = min(self.holds(now, used), wanted)
        if self.target is not None:
            keep = min(keep, self.target)
        self.amount = max(used, keep)
        self.fallback = min(self.fallback, self.amount)
        self.target, self.blocked, self.asked_at, self.booked_since = None, 0, now, 0
        return LeaseAsk(
            account=account,
            kind=self.kind,
            limit=limit,
            used=used,
            held=self.amount,
            fallback=self.fallback,
            needed=needed,
            wanted=wanted,
        )

    def take(self, grant: LeaseGrant, asked_at: float, *, overtaken: bool) -> None:
        """What the API has answered to a question of `asked_at`. `overtaken`: it has booked more since; then all that it
        booked since the question is taken off, which may be too much until the next one."""
        self.amount = max(0, grant.amount - (self.booked_since if overtaken else 0))
        self.fallback = min(grant.fallback, self.amount)
        self.reach, self.elsewhere = grant.reach, grant.elsewhere
        self.until = asked_at + (FALLBACK_S if self.kind.is_money else LEASE_S)
        self.fallback_until = asked_at + FALLBACK_S

    def is_over(self, measure: Measure, now: float) -> bool:
        """Whether there is nothing left to know of it."""
        return not (self.amount or self.blocked or measure.used) and now - self.tried_at >= IDLE_S

    def booked(self, cost_nano: int) -> None:
        """The ledger has taken so much of what this gateway held of money."""
        self.amount = max(0, self.amount - cost_nano)
        self.booked_since += cost_nano

    def _headroom(self, measure: Measure, gateways: int) -> int:
        fallback = measure.limit // (FALLBACK_PART * gateways)
        if self.kind.is_money:
            return fallback
        # An eighth of a minute's use is some seconds of it; at the beginning nothing is used yet.
        return max(measure.used // 8, measure.limit // HEADROOM_PART, fallback - measure.used)
