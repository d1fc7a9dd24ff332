"""The demand of several gateways as if it came from one. Pure.

Counts since a gateway's start would fall when one restarts; here they do not: what a former process counted stays in the
sum. Nor do they jump where a gateway is first heard after others: what it had counted by then is left out, unless all of it
is newer than this sum. A gateway that does not answer counts with its last reading for `SILENT_S`: it may be alive and full of requests, so
replicas do not leave because it is not heard. For so long the sum also says that it has just begun to count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from busbar.kube.contracts.allowances import CostAllowance
from busbar.kube.contracts.demand import (
    AccountUse,
    Demand,
    Outcomes,
    ServiceDemand,
    SizeCount,
    TenantDemand,
    Totals,
    WindowDemand,
)
from busbar.kube.informer import Key

FRESH_S = 15.0
SILENT_S = 300.0
_OUTCOMES = tuple(Outcomes.model_fields)
_TIMES = ("first_token", "per_token")
_COUNTS = tuple(name for name in Totals.model_fields if name not in _TIMES)


class _Totals:
    """What one gateway counted of one service: its former processes, and this one."""

    def __init__(self) -> None:
        self._before: Counter[_Name] = Counter()
        self._now: Counter[_Name] = Counter()

    def take(self, counts: Counter[_Name]) -> None:
        if any(counts[name] < count for name, count in self._now.items()):  # another process
            self._before.update(self._now)
        self._now = counts

    def forget(self) -> None:
        """What was counted until now is left out."""
        self._before = Counter({name: -count for name, count in self._now.items()})

    @property
    def all(self) -> Counter[_Name]:
        return self._before + self._now


@dataclass
class _Gateway:
    heard_at: float
    demand: Demand | None = None
    totals: dict[Key, _Totals] = field(default_factory=dict)


_Name = str | tuple[str, int]
"""A count, or a class of times of one."""


def _counts(each: ServiceDemand | None) -> Counter[_Name]:
    found: Counter[_Name] = Counter()
    if each is not None:
        totals = each.totals or Totals()
        found.update({name: getattr(totals, name) for name in _COUNTS})
        for name in _TIMES:
            found.update({(name, place): count for place, count in getattr(totals, name).items()})
        found["arrivals"] = each.arrivals
    return found


def _totals(found: Counter[_Name]) -> Totals:
    times: dict[str, dict[int, int]] = {name: {} for name in _TIMES}
    for name, count in found.items():
        if not isinstance(name, str):
            times[name[0]][name[1]] = count
    return Totals(
        **{name: found[name] for name in _COUNTS},
        first_token=times["first_token"],
        per_token=times["per_token"],
    )


class DemandSum:
    """The last readings of all gateways."""

    def __init__(self, names: Iterable[str], now: float) -> None:
        self._gateways = {name: _Gateway(now) for name in names}
        self._began_at, self._given = now, False

    def take(self, name: str, demand: Demand, now: float) -> None:
        """One gateway's answer."""
        gateway = self._gateways[name]
        counted = demand.counted_seconds
        older = counted is None or counted > now - self._began_at
        is_late = gateway.demand is None and self._given and older
        gateway.demand, gateway.heard_at = demand, now
        seen = {Key(each.namespace, each.name): each for each in demand.services}
        for key in seen.keys() | gateway.totals.keys():
            totals = gateway.totals.setdefault(key, _Totals())
            totals.take(_counts(seen.get(key)))
            if is_late:
                totals.forget()

    def sum(self, now: float) -> Demand | None:
        """The sum of all readings; None: no gateway has answered within `FRESH_S`."""
        heard = [(g, now - g.heard_at) for g in self._gateways.values() if now - g.heard_at < SILENT_S]
        fresh = [g.demand for g, age in heard if g.demand is not None and age <= FRESH_S]
        if not fresh:
            return None
        self._given = True
        readings = [(g.demand, age) for g, age in heard if g.demand is not None]
        rows: dict[Key, list[ServiceDemand]] = defaultdict(list)
        for demand, age in readings:
            for each in demand.services:
                rows[Key(each.namespace, each.name)].append(_aged(each, age))
        all_count = all(g.demand is not None and age <= FRESH_S for g, age in heard)
        counted = [demand.counted_seconds for demand in fresh if demand.counted_seconds is not None]
        for gateway in self._gateways.values():
            gateway.totals = {key: each for key, each in gateway.totals.items() if key in rows}
        return Demand(
            services=[self._service(key, each) for key, each in sorted(rows.items())],
            accounts=_accounts([demand for demand, _ in readings]),
            as_of=max(demand.as_of for demand in fresh),
            counted_seconds=min(counted, default=None) if all_count else 0.0,
        )

    def _service(self, key: Key, rows: Sequence[ServiceDemand]) -> ServiceDemand:
        counts: Counter[_Name] = Counter()
        for gateway in self._gateways.values():
            if key in gateway.totals:
                counts.update(gateway.totals[key].all)
        ages = [r.last_request_age_seconds for r in rows if r.last_request_age_seconds is not None]
        waits = [r.oldest_wait_seconds for r in rows if r.oldest_wait_seconds is not None]
        tenants: dict[str, list[TenantDemand]] = defaultdict(list)
        for row in rows:
            for tenant in row.tenants:
                tenants[tenant.tenant].append(tenant)
        return ServiceDemand(
            namespace=key.namespace,
            name=key.name,
            waiting=sum(row.waiting for row in rows),
            in_flight=sum(row.in_flight for row in rows),
            arrivals=counts["arrivals"],
            last_request_age_seconds=min(ages, default=None),
            overdue=sum(row.overdue for row in rows),
            oldest_wait_seconds=max(waits, default=None),
            windows=_windows(rows),
            totals=None if any(row.totals is None for row in rows) else _totals(counts),
            tenants=[
                TenantDemand(
                    tenant=name,
                    waiting=sum(each.waiting for each in found),
                    in_flight=sum(each.in_flight for each in found),
                )
                for name, found in sorted(tenants.items())
            ],
            replicas=[contact for row in rows for contact in row.replicas or ()],
        )


def _aged(row: ServiceDemand, age: float) -> ServiceDemand:
    """A reading of some seconds ago. Who waited too long then has been answered, or has left."""
    since = row.last_request_age_seconds
    changes: dict[str, float | None] = {"last_request_age_seconds": None if since is None else since + age}
    if age > FRESH_S:
        changes.update(overdue=0, oldest_wait_seconds=None, replicas=None)
    return row.model_copy(update=changes)


def _windows(rows: Sequence[ServiceDemand]) -> list[WindowDemand] | None:
    """None where one gateway tells none: a sum without it would be too small."""
    if any(row.windows is None for row in rows):
        return None
    lengths = sorted({window.seconds for row in rows for window in row.windows or ()})
    return [_window([window for row in rows if (window := row.window(s)) is not None], s) for s in lengths]


def _window(windows: Sequence[WindowDemand], seconds: int) -> WindowDemand:
    sizes: dict[tuple[int, int], list[SizeCount]] = defaultdict(list)
    for window in windows:
        for size in window.sizes:
            sizes[size.prompt, size.output].append(size)
    return WindowDemand(
        **{name: sum(getattr(window, name) for window in windows) for name in _OUTCOMES},
        seconds=seconds,
        arrivals=sum(window.arrivals for window in windows),
        sizes=[
            SizeCount(
                prompt=prompt,
                output=output,
                count=sum(each.count for each in found),
                prompt_tokens=sum(each.prompt_tokens for each in found),
                output_tokens=sum(each.output_tokens for each in found),
            )
            for (prompt, output), found in sorted(sizes.items())
        ],
    )


def _accounts(readings: Sequence[Demand]) -> list[AccountUse]:
    found: dict[str, list[AccountUse]] = defaultdict(list)
    for demand in readings:
        for account in demand.accounts:
            found[account.tenant].append(account)
    return [
        AccountUse(
            tenant=tenant,
            requests=sum(row.requests for row in rows),
            tokens=sum(row.tokens for row in rows),
            costs=_costs([cost for row in rows for cost in row.costs]),
        )
        for tenant, rows in sorted(found.items())
    ]


def _costs(costs: Sequence[CostAllowance]) -> list[CostAllowance]:
    """What the ledger has is told by each gateway, some later than others; what it has not, by one alone."""
    periods: dict[str, list[CostAllowance]] = defaultdict(list)
    for cost in costs:
        periods[cost.period].append(cost)
    summed = []
    for rows in periods.values():
        newest = max(rows, key=lambda row: row.ends)
        rows = [row for row in rows if row.ends == newest.ends]
        pending = sum(row.pending_nano for row in rows)
        booked = max(row.spent_nano - row.pending_nano for row in rows)
        summed.append(newest.model_copy(update={"spent_nano": booked + pending, "pending_nano": pending}))
    return summed
