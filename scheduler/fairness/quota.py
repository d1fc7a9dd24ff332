"""Who holds what while a plan is being made, against quota and fair share.

Rights of a job, strongest first:
    GUARANTEED   its tenant stays inside its guarantee: what others borrowed of it may be reclaimed
    ENTITLED     its tenant stays inside its fair share: tenants above theirs may have to give way
    BORROWING    only what nobody else wants

A tenant's users share what it is entitled to in the same way (fair_share.py). That gives no job a right that
its tenant does not have; it decides which of the tenant's jobs comes first, and which may be stopped for
another.

Between claims of the same right, the one with least for its weight comes first: what it holds now, plus its
past use (usage with a half-life, expressed as the mean amount held). So of two that would borrow the same
room, it goes to the one that has had less, and a week's use is forgiven in a few weeks. Past use orders
claims and never takes part in an entitlement, so nobody loses a right by having used one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

from ..candidates.candidate import Options, Sizes
from ..model.plans import Policy, WaitCode
from ..model.snapshot import Quota, Snapshot, Tenant, User
from ..model.table import TableView
from .fair_share import Claim, Demand, entitlements, user_shares, with_demand

EPS = 1e-6
MILLION = 1_000_000
_NOTHING: Mapping[str, int] = {}


class Right(IntEnum):
    """How strong a claim is; lower is stronger."""

    GUARANTEED = 0
    ENTITLED = 1
    BORROWING = 2


class Holdings:
    """What each tenant holds, in thousandths per accelerator and in exchange-rate units.

    All sums are over whole numbers, so holdings that followed a hundred changes equal holdings built afresh
    to the last bit.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        table: TableView,
        capacity_m: Mapping[str, int],
        policy: Policy,
        at_s: float,
    ) -> None:
        """Empty holdings of these tenants, with past use as of `at_s`."""
        self.rate = {
            pool.accelerator: table.rate(pool.accelerator) / 1000 for pool in snapshot.pools
        }  # units per thousandth
        self.half_life_s, self.at_s = policy.usage_half_life_s, at_s
        self.tenants: dict[str, Tenant] = {}
        self.capacity_m = dict(capacity_m)
        self._units: dict[str, float] = {}
        self.entitled: dict[str, float] = {}
        self.version: dict[str, int] = {}
        """Raised whenever a tenant's holdings change."""
        self._held: dict[str, dict[str, int]] = {}
        self._releasing: dict[str, dict[str, int]] = {}
        """Held by jobs that are being stopped: counts against limits until they are gone, and for nothing
        else."""
        self._demand: dict[str, dict[str, dict[frozenset[str], int]]] = {}
        """Millionths of units wanted by jobs that may use exactly these types, by tenant and user."""
        self._rights: dict[str, dict[tuple[str, int], Right]] = {}
        self._best_rights: dict[str, dict[Sizes, Right]] = {}
        """Results of `right` and `best_right`, by tenant, until its holdings change."""
        self._known_demand: dict[Sizes, tuple[frozenset[str], int]] = {}
        self._past: dict[tuple[str, str | None], tuple[float, float]] = {}
        """Weight, and mean amount held in the past, of tenants (user None) and users."""
        self._user_held: dict[tuple[str, str], dict[str, int]] = {}
        self._claims: list[Claim] = []
        self._user_shares: dict[str, dict[str, float]] = {}
        self._settled = False
        self.set_tenants(snapshot.tenants)

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Replace the tenants."""
        known, self.tenants = self.tenants, {tenant.name: tenant for tenant in tenants}
        self._past.clear()
        if {name: _terms(t) for name, t in known.items()} != {n: _terms(t) for n, t in self.tenants.items()}:
            self._forget()

    def set_capacity(self, capacity_m: Mapping[str, int]) -> None:
        """Replace the capacity."""
        self.capacity_m = dict(capacity_m)
        self._forget()

    def _forget(self) -> None:
        self._settled = False
        self._rights.clear()
        self._best_rights.clear()
        for name in self.version:
            self.version[name] += 1

    def count_demand(self, option: Options, sign: int = 1) -> None:
        """Add a job's demand (sign=-1: remove it)."""
        if not option.sizes:
            return
        kinds, amount = self._demand_of(option.sizes)
        users = self._demand.setdefault(option.job.tenant, {})
        row = users.setdefault(option.job.user, {})
        left = row.get(kinds, 0) + sign * amount
        if left:
            row[kinds] = left
        else:
            row.pop(kinds, None)
            if not row:
                del users[option.job.user]
        self._settled = False

    def _demand_of(self, sizes: Sizes) -> tuple[frozenset[str], int]:
        """Types that a job may use and millionths of units that it requests."""
        known = self._known_demand.get(sizes)
        if known is None:
            units = max(amount * self.rate[kind] for kind, amount in sizes)
            known = self._known_demand[sizes] = (frozenset(kind for kind, _ in sizes), round(units * MILLION))
        return known

    def entitled_now(self) -> dict[str, float]:
        """All entitlements, computed afresh."""
        return entitlements(self._claimed(), self._capacity())

    def entitled_if(self, now: Options, then: Options) -> dict[str, float]:
        """All entitlements if a job had other candidates; changes nothing."""
        if now.sizes == then.sizes:
            return self.entitled
        rows = [(self._demand_of(o.sizes), sign) for o, sign in ((now, -1), (then, 1)) if o.sizes]
        change = [(kinds, sign * amount / MILLION) for (kinds, amount), sign in rows]
        return entitlements(with_demand(self._claims, now.job.tenant, change), self._capacity())

    @contextmanager
    def assuming_entitlements(self, entitled: dict[str, float]) -> Iterator[None]:
        """Within this context, tenants are entitled to these amounts."""
        known = self.entitled
        self._entitle(entitled)
        try:
            yield
        finally:
            self._entitle(known)

    def _entitle(self, entitled: dict[str, float]) -> None:
        if entitled != self.entitled:
            self._forget()
            self._user_shares.clear()
            self.entitled, self._settled = entitled, True

    def update_entitlements(self) -> None:
        """Compute entitlements again if demand, capacity or tenants changed."""
        if self._settled:
            return
        self._claims = self._claimed()
        self._user_shares.clear()
        self._entitle(entitlements(self._claims, self._capacity()))
        self._settled = True

    def _capacity(self) -> dict[str, float]:
        return {kind: amount * self.rate[kind] for kind, amount in self.capacity_m.items()}

    def _claimed(self) -> list[Claim]:
        claims = []
        for name, tenant in sorted(self.tenants.items()):
            star = self._row(tenant, "*")
            over_all = math.inf if star is None else limit(star) / 1000
            guaranteed = 0.0 if star is None else star.guaranteed_m / 1000
            guaranteed += sum(
                min(q.guaranteed_m, self.capacity_m.get(q.accelerator, 0)) * self.rate[q.accelerator]
                for q in tenant.quotas
                if q.accelerator in self.rate
            )
            wanted: dict[frozenset[str], int] = {}
            for row in self._demand.get(name, {}).values():
                for kinds, amount in row.items():
                    wanted[kinds] = wanted.get(kinds, 0) + amount
            type_limit = {
                q.accelerator: limit(q) * self.rate[q.accelerator]
                for q in tenant.quotas
                if q.accelerator in self.rate
            }
            claims.append(
                Claim(
                    name,
                    tenant.organisation,
                    tenant.weight,
                    guaranteed,
                    over_all,
                    _demand(wanted),
                    type_limit,
                )
            )
        return claims

    @staticmethod
    def _row(tenant: Tenant, accelerator: str) -> Quota | None:
        return next((quota for quota in tenant.quotas if quota.accelerator == accelerator), None)

    def add_held(self, tenant: str, user: str, accelerator: str, amount_m: int) -> None:
        """Add to what a user of a tenant holds (negative: it gave back)."""
        held = self._held.setdefault(tenant, {})
        held[accelerator] = held.get(accelerator, 0) + amount_m
        own = self._user_held.setdefault((tenant, user), {})
        own[accelerator] = own.get(accelerator, 0) + amount_m
        self._units.pop(tenant, None)
        self.version[tenant] = self.version.get(tenant, 0) + 1
        self._rights.pop(tenant, None)
        self._best_rights.pop(tenant, None)

    def add_releasing(self, tenant: str, accelerator: str, amount_m: int) -> None:
        """Add to what a tenant's stopping jobs hold."""
        row = self._releasing.setdefault(tenant, {})
        row[accelerator] = row.get(accelerator, 0) + amount_m

    def held(self, tenant: str, accelerator: str) -> int:
        return self._held.get(tenant, _NOTHING).get(accelerator, 0)

    def units(self, tenant: str) -> float:
        """All that a tenant holds, in exchange-rate units."""
        known = self._units.get(tenant)
        if known is None:
            held = self._held.get(tenant, _NOTHING)
            known = math.fsum(self.units_of(kind, amount) for kind, amount in held.items())
            self._units[tenant] = known
        return known

    def units_without(self, tenant: str, less_m: Mapping[str, int]) -> float:
        """The same without so much of each type."""
        held = self._held.get(tenant, _NOTHING)
        return math.fsum(self.units_of(kind, amount - less_m.get(kind, 0)) for kind, amount in held.items())

    def units_of(self, accelerator: str, amount_m: int) -> float:
        """An amount in exchange-rate units."""
        return amount_m * self.rate.get(accelerator, 0.001)

    def counted_m(self, tenant: str, accelerator: str) -> float:
        """What counts against a limit on this type ("*": on all, in thousandths of units), stopping jobs
        included."""
        leaving = self._releasing.get(tenant, _NOTHING)
        if accelerator != "*":
            return float(self.held(tenant, accelerator) + leaving.get(accelerator, 0))
        units = math.fsum(self.units_of(kind, amount) for kind, amount in leaving.items())
        return 1000 * (self.units(tenant) + units)

    def refusal(self, tenant: str, accelerator: str, amount_m: int) -> tuple[WaitCode, str, int] | None:
        """Why quota forbids this much more: the code, the row's accelerator and its limit; None: it is
        allowed."""
        known = self.tenants.get(tenant)
        if known is None:
            return (WaitCode.UNKNOWN_TENANT, accelerator, 0)
        for quota in known.quotas:
            after = self._after_m(quota, tenant, accelerator, amount_m)
            if after is None:
                continue
            if quota.ceiling_m is not None and after > quota.ceiling_m + EPS:
                return (WaitCode.CEILING, quota.accelerator, quota.ceiling_m)
            if quota.borrowable_m is not None and after > quota.guaranteed_m + quota.borrowable_m + EPS:
                return (WaitCode.BORROW_LIMIT, quota.accelerator, quota.guaranteed_m + quota.borrowable_m)
        return None

    def within_limits(self, tenant: str, accelerator: str, amount_m: int) -> bool:
        """Whether quota would allow this much if the tenant held nothing."""
        known = self.tenants.get(tenant)
        alone = {accelerator: float(amount_m), "*": 1000 * self.units_of(accelerator, amount_m)}
        return known is not None and all(
            alone.get(quota.accelerator, 0.0) <= limit(quota) + EPS for quota in known.quotas
        )

    def _after_m(self, quota: Quota, tenant: str, accelerator: str, amount_m: int) -> float | None:
        """What would count against a quota row with this much more; None: the row is about another type."""
        if quota.accelerator == accelerator:
            return self.counted_m(tenant, accelerator) + amount_m
        if quota.accelerator == "*":
            return self.counted_m(tenant, "*") + 1000 * self.units_of(accelerator, amount_m)
        return None

    def limits_needed(self, tenant: str, accelerator: str, amount_m: int) -> dict[str, int]:
        """For every quota row that forbids this much more: the limit, in thousandths, that would allow it."""
        known, found = self.tenants.get(tenant), {}
        for quota in () if known is None else known.quotas:
            after = self._after_m(quota, tenant, accelerator, amount_m)
            if after is not None and after > limit(quota) + EPS:
                found[quota.accelerator] = math.ceil(after - EPS)
        return found

    def right(self, tenant: str, accelerator: str, amount_m: int) -> Right:
        """The right to this much more."""
        known = self._rights.setdefault(tenant, {})
        key = (accelerator, amount_m)
        if key not in known:
            known[key] = self._right(tenant, accelerator, amount_m)
        return known[key]

    def best_right(self, tenant: str, sizes: Sizes) -> Right:
        """The strongest right to any of these."""
        known = self._best_rights.setdefault(tenant, {})
        if sizes not in known:
            rights = (self.right(tenant, accelerator, amount_m) for accelerator, amount_m in sizes)
            known[sizes] = min(rights, default=Right.BORROWING)
        return known[sizes]

    def _right(self, tenant: str, accelerator: str, amount_m: int) -> Right:
        if self.inside_guarantee(tenant, accelerator, amount_m):
            return Right.GUARANTEED
        units = self.units(tenant) + self.units_of(accelerator, amount_m)
        return Right.ENTITLED if units <= self.entitled.get(tenant, 0.0) + EPS else Right.BORROWING

    def inside_guarantee(self, tenant: str, accelerator: str, amount_m: int = 0) -> bool:
        """Whether what the tenant holds, plus this much, lies inside a guarantee."""
        known = self.tenants.get(tenant)
        if known is None:
            return False
        for quota in known.quotas:
            if quota.guaranteed_m <= 0:
                continue
            if (
                quota.accelerator == accelerator
                and self.held(tenant, accelerator) + amount_m <= quota.guaranteed_m
            ):
                return True
            if quota.accelerator == "*":
                units = self.units(tenant) + self.units_of(accelerator, amount_m)
                if 1000 * units <= quota.guaranteed_m + EPS:
                    return True
        return False

    def part_of_share(self, tenant: str, accelerator: str = "", amount_m: int = 0) -> float:
        """What the tenant holds, or would hold with this much more, as a part of its fair share."""
        units = self.units(tenant) + self.units_of(accelerator, amount_m)
        return units / max(self.entitled.get(tenant, 0.0), EPS)

    def keeps_share_without(self, tenant: str, accelerator: str, amount_m: int, part: float = 1.0) -> bool:
        """Whether the tenant would still have its fair share, or this part of it, without this much."""
        rest = self.units(tenant) - self.units_of(accelerator, amount_m)
        return rest >= part * self.entitled.get(tenant, 0.0) - EPS

    def held_per_weight(self, tenant: str) -> float:
        """Units held, now and in the past, per weight; the lowest comes first."""
        weight, past = self._known(tenant, None)
        return (self.units(tenant) + past) / weight

    def _known(self, tenant: str, user: str | None) -> tuple[float, float]:
        known = self._past.get((tenant, user))
        if known is None:
            one: Tenant | User | None = self.tenants.get(tenant)
            if isinstance(one, Tenant) and user is not None:
                one = next((found for found in one.users if found.name == user), None)
            weight, past = 1.0, 0.0
            if one is not None:
                weight, past = max(one.weight, 1e-9), one.usage.mean_held(self.at_s, self.half_life_s)
            known = self._past[tenant, user] = (weight, past)
        return known

    # -- the users of a tenant ----------------------------------------------------------------------------

    def has_several_users(self, tenant: str) -> bool:
        """Whether more than one user of the tenant has jobs."""
        return len(self._demand.get(tenant, ())) > 1

    def user_entitled(self, tenant: str, user: str) -> float:
        """Units that the user is entitled to of its tenant's fair share."""
        if tenant not in self.entitled:
            return 0.0
        shares = self._user_shares.get(tenant)
        if shares is None:
            users = {
                name: (self._known(tenant, name)[0], _demand(row))
                for name, row in self._demand.get(tenant, {}).items()
            }
            shares = user_shares(self._claims, self.entitled, tenant, users, self._capacity())
            self._user_shares[tenant] = shares
        return shares.get(user, 0.0)

    def user_units(self, tenant: str, user: str) -> float:
        """All that a user holds, in exchange-rate units."""
        held = self._user_held.get((tenant, user), _NOTHING)
        return math.fsum(self.units_of(kind, amount) for kind, amount in held.items())

    def user_inside_share(self, tenant: str, user: str, accelerator: str, amount_m: int) -> bool:
        """Whether the user stays inside its share with this much more."""
        units = self.user_units(tenant, user) + self.units_of(accelerator, amount_m)
        return units <= self.user_entitled(tenant, user) + EPS

    def user_keeps_share_without(self, tenant: str, user: str, accelerator: str, amount_m: int) -> bool:
        """Whether the user would still have its share without this much."""
        rest = self.user_units(tenant, user) - self.units_of(accelerator, amount_m)
        return rest >= self.user_entitled(tenant, user) - EPS

    def user_order(self, tenant: str, user: str, sizes: Sizes) -> tuple[bool, float]:
        """Sort key of a tenant's users: whether each of these sizes exceeds the user's share, then its
        `held_per_weight`."""
        inside = any(self.user_inside_share(tenant, user, kind, amount_m) for kind, amount_m in sizes)
        weight, past = self._known(tenant, user)
        return not inside, (self.user_units(tenant, user) + past) / weight


def _demand(wanted: Mapping[frozenset[str], int]) -> Demand:
    """Demand in a claim's form, from millionths of units by set of types."""
    rows = ((kinds, amount / MILLION) for kinds, amount in wanted.items())
    return tuple(sorted(rows, key=lambda row: sorted(row[0])))


def _terms(tenant: Tenant) -> tuple[object, ...]:
    """What rights depend on: everything but past use."""
    users = {user.name: user.weight for user in tenant.users}
    return tenant.organisation, tenant.weight, tenant.quotas, tenant.priority_ceiling, users


def limit(quota: Quota) -> float:
    """The most that a row lets its tenant hold; infinite if it sets no limit."""
    most = math.inf if quota.ceiling_m is None else float(quota.ceiling_m)
    if quota.borrowable_m is not None:
        most = min(most, quota.guaranteed_m + quota.borrowable_m)
    return most
