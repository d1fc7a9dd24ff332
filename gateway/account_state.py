"""One account, and how its limits are told to clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from busbar.gateway.leases import Lease, Measure
from busbar.gateway.windows import Purse, Window
from busbar.kube.contracts.allowances import NANO, Account
from busbar.kube.contracts.budget_leases import LeaseKind

HEADER = "x-ratelimit-"
_KINDS = {kind.value: kind for kind in LeaseKind}


@dataclass
class AccountState:
    """One account."""

    limits: Account
    window: Window = field(default_factory=Window)
    purse: Purse = field(default_factory=Purse)
    leases: dict[LeaseKind, Lease] = field(default_factory=dict)
    """Of several gateways: this one's parts of the limits."""
    booked: dict[LeaseKind, int] = field(default_factory=dict)
    """What the ledger has of each budget, as the API said with the leases."""

    def measures(self, tokens: int = 0, cost: int = 0) -> Iterator[Measure]:
        """Each limit, and what a request of so many tokens and so much money needs of it."""
        limits, window = self.limits, self.window
        if limits.requests_per_minute is not None:
            yield Measure(LeaseKind.REQUESTS, limits.requests_per_minute, window.requests, 1)
        if limits.tokens_per_minute is not None:
            yield Measure(LeaseKind.TOKENS, limits.tokens_per_minute, max(0, window.tokens), tokens)
        for budget in limits.costs:
            yield Measure(_KINDS[budget.period], budget.limit_nano, self.purse.pending_nano, cost)

    def used(self, kind: LeaseKind) -> int:
        """What is used of a limit, whether there is one or not."""
        if kind.is_money:
            return self.purse.pending_nano
        return max(0, self.window.requests if kind is LeaseKind.REQUESTS else self.window.tokens)

    def lease(self, kind: LeaseKind) -> Lease:
        found = self.leases.get(kind)
        if found is None:
            found = self.leases[kind] = Lease(kind)
        return found

    def drop_through(self, seq: int) -> None:
        """The ledger has the records up to this number."""
        cost = self.purse.drop_through(seq)
        for kind, lease in self.leases.items():
            if cost and kind.is_money:
                lease.booked(cost)
                if kind in self.booked:
                    self.booked[kind] += cost


def headers_of(states: Iterable[AccountState], now: float) -> dict[str, str]:
    """OpenAI's headers: of several accounts the one with the least left."""
    found: dict[str, str] = {}
    least: dict[str, int] = {}
    for state in states:
        for kind, limit, used in (
            ("requests", state.limits.requests_per_minute, state.window.requests),
            ("tokens", state.limits.tokens_per_minute, state.window.tokens),
        ):
            if limit is None:
                continue
            left = limit - used
            if state.leases:
                reach = state.lease(_KINDS[kind]).reach
                left = left if reach is None else min(limit, reach) - used
            if kind in least and least[kind] <= left:
                continue
            least[kind] = left
            found[f"{HEADER}limit-{kind}"] = str(limit)
            found[f"{HEADER}remaining-{kind}"] = str(max(0, left))
            found[f"{HEADER}reset-{kind}"] = f"{math.ceil(state.window.empty_in_s(now))}s"
    return found


def who_is(account: str) -> str:
    kind, _, name = account.partition("/")
    if kind == "share":
        service, _, tenant = name.rpartition("/")
        return f"tenant {tenant} at {service}"
    return "this key" if kind == "key" else f"tenant {name}"


def whole_seconds(wait: float) -> int:
    return max(1, math.ceil(wait))


def money(nano: int) -> str:
    return f"{nano / NANO:.6g}"
