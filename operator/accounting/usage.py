"""Past use with a half-life: from allocations to `Tenant.status`, and from there to the scheduler's snapshot.

A status says what was used up to a moment and the rate of use from then on. Each write adds that rate times the
time since the last write, so no transition is counted twice, and a restarted operator plans on the same numbers.
Units are work units (accelerators x exchange rate x seconds).

At most `MOST_USERS` users of a tenant are kept: those who hold something, then those who have used most. A user
who is dropped counts as one who has used nothing, which is nearly true of the smallest of so many.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from busbar.kube.types import Tenant
from busbar.kube.types.tenant import MOST_USERS, SubjectKind, TenantStatus, UserUse
from busbar.kube.types.tenant import DecayedUsage as Kept
from busbar.scheduler import DecayedUsage, Policy, Quota, User
from busbar.scheduler import Tenant as STenant

HALF_LIFE_S = Policy().usage_half_life_s
NOTHING = 1e-3
"""A user with fewer work units than this is dropped."""


def now_used(kept: Kept | None, now: datetime, half_life_s: float) -> DecayedUsage:
    """What was used up to `now`, according to a status."""
    if kept is None or kept.as_of is None:
        return DecayedUsage(as_of_s=now.timestamp())
    elapsed_s = max(0.0, (now - kept.as_of) / timedelta(seconds=1))
    usage = DecayedUsage(kept.work, kept.as_of.timestamp())
    return usage.add(kept.rate * elapsed_s, now.timestamp(), half_life_s)


def counted(kept: Kept | None, rate: float, now: datetime, half_life_s: float) -> Kept:
    """The next status: what was used up to `now`, and the rate from now on (work units per second)."""
    usage = now_used(kept, now, half_life_s)
    return Kept(work=round(usage.work, 6), rate=round(rate, 9), as_of=now)


def users_counted(
    old: TenantStatus, held: Mapping[str, float], now: datetime, half_life_s: float
) -> list[UserUse] | None:
    """The same for each user; `held` contains the rates of those who hold something."""
    known = _users(old)
    rows = [
        UserUse(name=name, work=after.work, rate=after.rate)
        for name in sorted(known.keys() | held.keys())
        for after in (counted(known.get(name), held.get(name, 0.0), now, half_life_s),)
        if after.work > NOTHING or after.rate > 0
    ]
    rows.sort(key=lambda row: (row.rate <= 0, -row.work, row.name))
    return sorted(rows[:MOST_USERS], key=lambda row: row.name) or None


def same_rates(old: TenantStatus, held: Mapping[str, float]) -> bool:
    """Whether the rates in the status are those of `held`."""
    written = {user.name: user.rate for user in old.users or () if user.rate > 0}
    holds = {name: round(rate, 9) for name, rate in held.items() if rate > 0}
    return written == holds or len(holds) > MOST_USERS


def _users(status: TenantStatus) -> dict[str, Kept]:
    as_of = status.decayed.as_of if status.decayed is not None else None
    return {user.name: Kept(work=user.work, rate=user.rate, as_of=as_of) for user in status.users or ()}


def scheduler_tenant(tenant: Tenant, now: datetime, half_life_s: float = HALF_LIFE_S) -> STenant:
    """The tenant as the scheduler sees it."""
    spec, status = tenant.spec, tenant.status or TenantStatus()
    weights = {
        member.subject.name: member.weight
        for member in spec.members or ()
        if member.subject.kind is SubjectKind.USER
    }
    used = _users(status)
    return STenant(
        name=tenant.metadata.name,
        organisation=spec.organisation or "",
        weight=spec.weight,
        quotas=tuple(
            Quota(
                accelerator=q.accelerator,
                guaranteed_m=round(q.guaranteed * 1000),
                borrowable_m=None if q.borrowable is None else round(q.borrowable * 1000),
                ceiling_m=None if q.ceiling is None else round(q.ceiling * 1000),
            )
            for q in spec.quota or ()
        ),
        priority_ceiling=spec.priority_ceiling,
        usage=now_used(status.decayed, now, half_life_s) if status.decayed is not None else DecayedUsage(),
        users=tuple(
            User(
                name,
                weights.get(name, 1.0),
                now_used(used[name], now, half_life_s) if name in used else DecayedUsage(),
            )
            for name in sorted(used.keys() | {name for name, weight in weights.items() if weight != 1.0})
        ),
    )
