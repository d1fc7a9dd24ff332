"""Limits of keys and tenants: a request is accepted if every account that it counts in has room for all it may use.

Accepting reserves the prompt's estimated length and the output that the request allows (`request_cost`); the end of the
request puts what the engine counted in its place. What is accepted lies in a mapped ring (`admissions`), and what it
cost in the usage records, so a gateway that is killed has forgotten nothing after its restart. Costs come as the API's
sums with the look-up of a key, and this module adds what the API does not have yet.

Several gateways share the limits: each accepts what its parts of them allow (`shared_limits`).

Limits that are reached are answered with 429 (`Retry-After`, OpenAI's `x-ratelimit-*`), a request that no empty account
could take with 400.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from busbar.gateway.account_state import AccountState, headers_of, money, who_is, whole_seconds
from busbar.gateway.admissions import AdmissionRing
from busbar.gateway.errors import BadRequest, QuotaSpent, RateLimited
from busbar.gateway.request_cost import Estimate
from busbar.gateway.shared_limits import SharedLimits
from busbar.gateway.spool import Record
from busbar.gateway.windows import WINDOW_S, Second, Undelivered
from busbar.kube.contracts.allowances import (
    Account,
    CostAllowance,
    Price,
    key_account,
    share_account,
    tenant_account,
)
from busbar.kube.contracts.budget_leases import LeaseKind
from busbar.kube.contracts.demand import AccountUse
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import ServiceRoute

FREE = Price()
LEAST_UNSTATED = 64
"""Output tokens for which there must be room where a request states no most."""


@dataclass(frozen=True)
class _Share:
    state: AccountState
    second: Second


class Grant:
    """An accepted request's part of its accounts, until `settle`."""

    def __init__(self, accounts: Accounts, headers: Mapping[str, str]) -> None:
        self._accounts = accounts
        self.headers = headers
        """`x-ratelimit-*`, as of its acceptance."""
        self.shares: list[_Share] = []
        self.tokens = 0
        self.cost_nano = 0
        self.entry = 0

    def settle(self, tokens: int) -> None:
        """The request has ended with so many tokens; its cost is in its usage record. A second call does nothing."""
        shares, self.shares = self.shares, []
        if shares:
            self._accounts.settle(self, shares, tokens)


class Accounts:
    """All accounts with limits that this gateway has heard of."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        gateways: int = 1,
    ) -> None:
        """`gateways`: how many share the limits; one alone needs no leases."""
        self._clock = clock
        self._now = now
        self._states: dict[str, AccountState] = {}
        self.shared = SharedLimits(self._states, gateways, now) if gateways > 1 else None
        self._unnumbered: dict[str, list[Undelivered]] = {}
        self._ring: AdmissionRing | None = None

    def restore(self, ring: AdmissionRing, delivered: Mapping[str, int], through: int = 0) -> None:
        """Take over what a former process accepted in the last minute.

        Args:
            delivered: tokens of requests that had not ended, by request id.
            through: number of the last usage record that the API has taken.
        """
        self._ring = ring
        if self.shared is not None:
            self.shared.through = through
        wall, now = self._now().timestamp(), self._clock()
        found = list(ring.left_over(delivered, wall - WINDOW_S - 1))
        # A clock that was set back makes an entry of the future: it counts as accepted now.
        for each in sorted(found, key=lambda entry: entry.at):
            at = now - max(0.0, wall - each.at)
            share = share_account(each.service, each.tenant)
            for name in (key_account(each.key_id), tenant_account(each.tenant), share):
                self._state(name).window.add(at, each.tokens)

    def learn(self, key: KeyIdentity, gateway_id: str) -> None:
        """Take in what the API said of a key's accounts."""
        for account in key.accounts:
            state = self._state(account.name)
            if self.shared is not None:  # the answers of leases say what the ledger has
                state.limits = account
                continue
            purse = state.purse
            if purse.gateway_id == gateway_id and key.counted_through < purse.counted_through:
                continue  # overtaken by a later answer
            state.limits = account
            purse.gateway_id, purse.counted_through = gateway_id, key.counted_through
            purse.drop_through(key.counted_through)
        mine = {account.name for account in key.accounts}
        for name in (key_account(key.key_id), tenant_account(key.tenant)):
            if name in self._states and name not in mine:
                self._states[name].limits = Account(name=name)

    def accept(
        self,
        key: KeyIdentity,
        request_id: str,
        asks: Estimate,
        service: ServiceRoute,
        *,
        adapter: str = "",
        again: bool = False,
    ) -> Grant:
        """Reserve what the request may use. Raises RateLimited, QuotaSpent or BadRequest, and then reserves nothing.

        Args:
            again: more of the limits was asked for since the last try, so the request takes what there is.
        """
        now = self._clock()
        states = [self._state(account.name) for account in key.accounts]
        terms = service.terms_of(key.tenant)
        if terms is not None and terms.tokens_per_minute is not None:
            share = self._state(share_account(service.key, key.tenant))
            share.limits = Account(name=share.limits.name, tokens_per_minute=terms.tokens_per_minute)
            states.append(share)
        if not states:
            return Grant(self, {})
        for state in states:
            state.window.expire(now)
        asks = _within(asks, states, now if again and self.shared is not None else None)
        cost = (service.price_of(adapter) or FREE).cost_nano(asks.prompt_tokens, 0, asks.output_tokens)
        for state in states:
            self._check(state, asks, cost, now)
        if self.shared is not None:
            self.shared.check(states, asks, cost, now)
        grant = Grant(self, {})
        grant.tokens, grant.cost_nano = asks.tokens, cost
        for state in states:
            grant.shares.append(_Share(state, state.window.add(now, asks.tokens)))
            state.purse.reserved_nano += cost
        if self._ring is not None:
            at = self._now().timestamp()
            grant.entry = self._ring.add(at, request_id, key.key_id, key.tenant, service.key, asks.tokens)
        grant.headers = headers_of(states, now)
        return grant

    def settle(self, grant: Grant, shares: list[_Share], tokens: int) -> None:
        if self._ring is not None:
            self._ring.settle(grant.entry, tokens)
        for share in shares:
            share.state.window.correct(share.second, tokens - grant.tokens)
            share.state.purse.reserved_nano -= grant.cost_nano

    def ended(self, record: Record) -> None:
        """A request has become a usage record, with or without its number."""
        cost = int(record.get("costNano", 0))
        if not cost:
            return
        finished = datetime.fromisoformat(record["finishedAt"])
        for name in (key_account(record["keyId"]), tenant_account(record["tenant"])):
            entry = Undelivered(record["requestId"], finished, cost, record.get("seq"))
            self._state(name).purse.add(entry)
            if entry.seq is None:
                self._unnumbered.setdefault(entry.request_id, []).append(entry)

    def numbered(self, records: Iterable[Record]) -> None:
        """Records have got their numbers."""
        for record in records:
            for entry in self._unnumbered.pop(record["requestId"], ()):
                entry.seq = record["seq"]

    def delivered(self, through: int) -> None:
        """The API has the records up to this number. Accounts without a limit of money need not remember them, nor those
        whose part of it the API has lowered by them."""
        if self.shared is not None:
            self.shared.delivered(through)
        for name, state in list(self._states.items()):
            if self.shared is None and not state.limits.costs:
                state.purse.drop_through(through)
            if not state.limits.costs:
                self._forget(name, state)

    def tenants(self) -> list[AccountUse]:
        """What tenants with limits use now, for the operator."""
        now, today = self._clock(), self._now()
        found = []
        for name, state in self._states.items():
            kind, _, tenant = name.partition("/")
            limits = state.limits
            if kind != "tenant" or (
                limits.requests_per_minute is limits.tokens_per_minute is None and not limits.costs
            ):
                continue
            state.window.expire(now)
            costs = [self._spent(state, cost, today) for cost in limits.costs if today < cost.ends]
            window = state.window
            found.append(
                AccountUse(tenant=tenant, requests=window.requests, tokens=window.tokens, costs=costs)
            )
        return found

    def _spent(self, state: AccountState, cost: CostAllowance, now: datetime) -> CostAllowance:
        if self.shared is not None and (booked := state.booked.get(LeaseKind(cost.period))) is not None:
            cost = cost.model_copy(update={"spent_nano": booked})
        spent = state.purse.spent_nano(cost, now)
        return cost.model_copy(update={"spent_nano": spent, "pending_nano": max(0, spent - cost.spent_nano)})

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()

    def _check(self, state: AccountState, asks: Estimate, cost: int, now: float) -> None:
        limits, window = state.limits, state.window
        who = who_is(limits.name)
        if limits.requests_per_minute is not None and window.requests >= limits.requests_per_minute:
            surplus = window.requests + 1 - limits.requests_per_minute
            wait = window.free_in_s(now, surplus, lambda second: second.requests)
            raise RateLimited(
                f"Rate limit reached for {who}: {limits.requests_per_minute} requests per minute. "
                f"Try again in {whole_seconds(wait)} s.",
                kind="requests",
                retry_after_s=whole_seconds(wait),
                headers=headers_of([state], now),
            )
        if limits.tokens_per_minute is not None and window.tokens + asks.tokens > limits.tokens_per_minute:
            surplus = window.tokens + asks.tokens - limits.tokens_per_minute
            wait = window.free_in_s(now, surplus, lambda second: second.tokens)
            raise RateLimited(
                f"Rate limit reached for {who}: {limits.tokens_per_minute} tokens per minute, used {window.tokens}, "
                f"requested {asks.tokens} (prompt and max_tokens). Try again in {whole_seconds(wait)} s.",
                kind="tokens",
                retry_after_s=whole_seconds(wait),
                headers=headers_of([state], now),
            )
        self._check_money(state, asks, cost, who, now)

    def _check_money(self, state: AccountState, asks: Estimate, cost: int, who: str, at: float) -> None:
        now = self._now()
        for allowance in state.limits.costs:
            if cost > allowance.limit_nano > 0:
                raise BadRequest(
                    f"This request may cost {money(cost)}, more than the whole budget of {who} "
                    f"({money(allowance.limit_nano)} a {allowance.period}). Lower {asks.output_field or 'max_tokens'}.",
                    param=asks.output_field or "max_tokens",
                )
            if self.shared is not None:
                continue  # the lease is what counts
            spent = state.purse.spent_nano(allowance, now)
            if cost and spent + cost > allowance.limit_nano:
                ends = allowance.ends if now < allowance.ends else None
                wait = (ends - now).total_seconds() if ends else WINDOW_S
                until = f" It begins anew at {ends:%Y-%m-%d %H:%M} UTC." if ends else ""
                raise QuotaSpent(
                    f"The budget of {who} for this {allowance.period} ({money(allowance.limit_nano)}) has "
                    f"{money(max(0, allowance.limit_nano - spent))} left, and this request may cost "
                    f"{money(cost)}.{until}",
                    retry_after_s=whole_seconds(wait),
                    headers=headers_of([state], at),
                )

    def _state(self, name: str) -> AccountState:
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = AccountState(Account(name=name))
        return state

    def _forget(self, name: str, state: AccountState) -> None:
        """Drop an account of which nothing is left to know."""
        limits = state.limits
        if state.leases:
            return
        if limits.requests_per_minute is limits.tokens_per_minute is None and not state.purse.undelivered:
            state.window.expire(self._clock())
            if not state.window.requests and not state.purse.reserved_nano:
                del self._states[name]


def _within(asks: Estimate, states: Iterable[AccountState], held_at: float | None) -> Estimate:
    """The estimate; of a request that states no most, its output is what the accounts have left (with `held_at`, what this
    gateway holds of that), at least `LEAST_UNSTATED`. Raises BadRequest for a request that no empty account could take."""
    for state in states:
        most = state.limits.tokens_per_minute
        if most is None:
            continue
        if asks.tokens > most and (asks.output_field is not None or asks.prompt_tokens >= most):
            shorter = asks.output_field if asks.prompt_tokens < most else None
            raise BadRequest(
                f"This request may use {asks.tokens} tokens (about {asks.prompt_tokens} of the prompt), and "
                f"{who_is(state.limits.name)} may use {most} a minute. "
                + (f"Lower {shorter}." if shorter else "Make the prompt shorter."),
                param=shorter,
            )
        if asks.output_field is None:
            room = most
            if held_at is not None:
                room = min(most, state.lease(LeaseKind.TOKENS).holds(held_at, state.window.tokens))
            left = max(room - state.window.tokens - asks.prompt_tokens, LEAST_UNSTATED)
            output = min(asks.output_tokens, left, most - asks.prompt_tokens)
            asks = replace(asks, output_tokens=output)
    return asks
