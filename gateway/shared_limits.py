"""Limits that several gateways share: each accepts what its own parts of them allow.

Who runs short of a part asks the API at once (`lease_keeper`), and tries again. Everything else is told once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from busbar.gateway.account_state import AccountState, headers_of, money, who_is, whole_seconds
from busbar.gateway.errors import LimitReached, QuotaSpent, RateLimited
from busbar.gateway.leases import Lease, Measure
from busbar.gateway.request_cost import Estimate
from busbar.kube.contracts.allowances import Account
from busbar.kube.contracts.budget_leases import MOST_ASKS, LeaseAnswer, LeaseAsk, LeaseKind

NOT_OURS_S = 10.0
"""When to come again where other gateways have used the minute: when it becomes free is known there."""


class SharedLimits:
    """This gateway's parts of the limits of all accounts."""

    def __init__(
        self, states: Mapping[str, AccountState], gateways: int, now: Callable[[], datetime]
    ) -> None:
        self._states = states
        self._gateways = gateways
        self._now = now
        self._active: dict[str, AccountState] = {}
        """Those of which something is held or was asked for; who was told of last is at the end."""
        self.through = 0
        """Usage records up to this number are in the ledger, and in no account's purse."""

    @property
    def held(self) -> bool:
        """Whether there is anything to tell the API."""
        return bool(self._active)

    def delivered(self, through: int) -> None:
        """The ledger has the records up to this number: they are no longer held."""
        self.through = max(self.through, through)
        for state in self._states.values():
            state.drop_through(through)

    def check(self, states: Iterable[AccountState], asks: Estimate, cost: int, now: float) -> None:
        """Whether this gateway's parts of the limits suffice, too. All that lacks is noted, for the next question."""
        error: LimitReached | None = None
        for state in states:
            self._active[state.limits.name] = state
            for measure in state.measures(asks.tokens, cost):
                lease = state.lease(measure.kind)
                lease.tried_at = now
                if measure.needs and measure.used + measure.needs > lease.holds(now, measure.used):
                    short = lease.worth_asking(measure, now)
                    lease.blocked += measure.needs
                    if error is None or not short:
                        error = _share_spent(state, measure, lease, now, self._now())
                        error.short = short
        if error is not None:
            raise error

    def asks(self, now: float, *, last: bool = False) -> list[LeaseAsk]:
        """The limits of which the API has to hear. `last`: this process ends and gives back what it does not use."""
        found: list[LeaseAsk] = []
        for name, state in list(self._active.items()):
            state.window.expire(now)
            measures = {measure.kind: measure for measure in state.measures()}
            before = len(found)
            for kind in sorted(measures.keys() | state.leases.keys()):
                # A limit that was taken away, or is not known yet, is asked for to give back what is held of it.
                measure = measures.get(kind) or Measure(kind, 0, state.used(kind))
                lease = state.lease(kind)
                if (last and lease.amount) or lease.is_due(measure, now, self._gateways):
                    found.append(lease.ask(name, measure, now, self._gateways, last=last))
                if kind not in measures or lease.is_over(measure, now):
                    del state.leases[kind]
                    state.booked.pop(kind, None)  # it may be of a period that is over by the next request
            if not state.leases:
                del self._active[name]
            elif len(found) > before:
                self._active[name] = self._active.pop(name)
            if len(found) > MOST_ASKS - len(LeaseKind):
                break
        return found

    def take(self, answer: LeaseAnswer, asked_at: float) -> None:
        """The API has answered to what was asked at `asked_at` (monotonic)."""
        overtaken = answer.counted_through < self.through
        if not overtaken:
            self.delivered(answer.counted_through)
        for grant in answer.grants:
            state = self._states.get(grant.account)
            if state is not None and grant.kind in state.leases:
                state.leases[grant.kind].take(grant, asked_at, overtaken=overtaken)
                state.booked[grant.kind] = grant.spent
        for recall in answer.recalls:
            name = recall.account
            # Of an account that is not known here, a former process held something, or its return was lost.
            state = self._states.get(name) or self._active.get(name) or AccountState(Account(name=name))
            state.lease(recall.kind).target = recall.target
            self._active[name] = state


def _share_spent(
    state: AccountState, measure: Measure, lease: Lease, now: float, today: datetime
) -> LimitReached:
    """This gateway's part of a limit does not suffice: the whole limit is reached, or others hold what is left."""
    who, headers, kind = who_is(state.limits.name), headers_of([state], now), measure.kind
    hopeful, holds = lease.hopeful(measure), lease.holds(now, measure.used)
    if kind.is_money and not hopeful:
        ends = next(cost.ends for cost in state.limits.costs if cost.period == kind.value)
        left = max(0, (lease.reach or 0) - measure.used)
        return QuotaSpent(
            f"The budget of {who} for this {kind.value} ({money(measure.limit)}) has {money(left)} left, and this "
            f"request may cost {money(measure.needs)}. It begins anew at {ends:%Y-%m-%d %H:%M} UTC.",
            retry_after_s=whole_seconds((ends - today).total_seconds()),
            headers=headers,
        )
    limit = (
        f"{money(measure.limit)} a {kind.value}" if kind.is_money else f"{measure.limit} {kind} per minute"
    )
    wait = 1.0
    if not hopeful:
        of = (lambda each: each.requests) if kind is LeaseKind.REQUESTS else (lambda each: each.tokens)
        wait = state.window.free_in_s(now, measure.needs, of) or NOT_OURS_S
    part = (
        "" if not hopeful else f", of which this gateway has {money(holds) if kind.is_money else holds} now"
    )
    return RateLimited(
        f"Rate limit reached for {who}: {limit}{part}. Try again in {whole_seconds(wait)} s.",
        kind="money" if kind.is_money else kind.value,
        retry_after_s=whole_seconds(wait),
        headers=headers,
    )
