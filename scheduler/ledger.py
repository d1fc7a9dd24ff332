"""Who holds what while a plan is being made, against quota and fair share.

Rights of a job, best first:
    GUARANTEED   its tenant stays inside its guarantee: whatever others borrowed of it may be taken back
    ENTITLED     its tenant stays inside its fair share: tenants above theirs may have to give way
    BORROWING    only what nobody else wants
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import IntEnum

from .columns import Options, Sizes
from .entitlement import Claim, entitlements
from .plans import WaitCode
from .table import TableView
from .types import Quota, Snapshot, Tenant

EPS = 1e-6
MILLION = 1_000_000
_NOTHING: Mapping[str, int] = {}


class Right(IntEnum):
    """How strong a claim is; lower is stronger."""

    GUARANTEED = 0
    ENTITLED = 1
    BORROWING = 2


class Ledger:
    """Holdings per tenant and accelerator (thousandths), and in exchange-rate units.

    Everything that is added up is added up in whole numbers, so that books that followed a hundred changes
    are equal to the last bit to books that were opened afresh.
    """

    def __init__(self, snapshot: Snapshot, table: TableView, capacity_m: Mapping[str, int]) -> None:
        self.rate = {
            pool.accelerator: table.rate(pool.accelerator) / 1000 for pool in snapshot.pools
        }  # units per thousandth
        self.tenants: dict[str, Tenant] = {}
        self.capacity_m = dict(capacity_m)
        self._units: dict[str, float] = {}
        self.entitled: dict[str, float] = {}
        self.version: dict[str, int] = {}
        """Raised whenever what a tenant holds changes."""
        self._held: dict[str, dict[str, int]] = {}
        self._leaving: dict[str, dict[str, int]] = {}
        """Held by jobs that are being stopped: counts against limits until they are gone, and for nothing else."""
        self._demand: dict[str, dict[frozenset[str], int]] = {}
        """Millionths of units wanted by jobs that may use exactly these types."""
        self._rights: dict[str, dict[tuple[str, int], Right]] = {}
        self._turns: dict[str, dict[Sizes, Right]] = {}
        """Answers of `right` and `best_right`, by tenant, until what the tenant holds changes."""
        self._wants: dict[Sizes, tuple[frozenset[str], int]] = {}
        self._settled = False
        self.meet(snapshot.tenants)

    def meet(self, tenants: Iterable[Tenant]) -> None:
        """These are the tenants from now on."""
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self._forget()

    def resize(self, capacity_m: Mapping[str, int]) -> None:
        """The cluster has so much from now on."""
        self.capacity_m = dict(capacity_m)
        self._forget()

    def _forget(self) -> None:
        self._settled = False
        self._rights.clear()
        self._turns.clear()
        for name in self.version:
            self.version[name] += 1

    def want(self, option: Options, sign: int = 1) -> None:
        """A job with these columns is there (sign=-1: no longer)."""
        sizes = option.sizes
        if not sizes:
            return
        known = self._wants.get(sizes)
        if known is None:
            units = max(amount * self.rate[kind] for kind, amount in sizes)
            known = self._wants[sizes] = (frozenset(kind for kind, _ in sizes), round(units * MILLION))
        kinds, amount = known
        row = self._demand.setdefault(option.job.tenant, {})
        left = row.get(kinds, 0) + sign * amount
        if left:
            row[kinds] = left
        else:
            row.pop(kinds, None)
        self._settled = False

    def settle(self) -> None:
        """Work out who is entitled to what, if demand, capacity or tenants changed."""
        if self._settled:
            return
        capacity = {kind: amount * self.rate[kind] for kind, amount in self.capacity_m.items()}
        entitled = entitlements(self._claims(), capacity)
        if entitled != self.entitled:
            self._forget()
            self.entitled = entitled
        self._settled = True

    def _claims(self) -> list[Claim]:
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
            wanted = {kinds: amount / MILLION for kinds, amount in self._demand.get(name, {}).items()}
            rows = tuple(sorted(wanted.items(), key=lambda item: sorted(item[0])))
            type_limit = {
                q.accelerator: limit(q) * self.rate[q.accelerator]
                for q in tenant.quotas
                if q.accelerator in self.rate
            }
            claims.append(
                Claim(name, tenant.organisation, tenant.weight, guaranteed, over_all, rows, type_limit)
            )
        return claims

    @staticmethod
    def _row(tenant: Tenant, accelerator: str) -> Quota | None:
        return next((quota for quota in tenant.quotas if quota.accelerator == accelerator), None)

    def book(self, tenant: str, accelerator: str, amount_m: int) -> None:
        """Add to what a tenant holds (negative: it gave back)."""
        held = self._held.setdefault(tenant, {})
        held[accelerator] = held.get(accelerator, 0) + amount_m
        self._units.pop(tenant, None)
        self.version[tenant] = self.version.get(tenant, 0) + 1
        self._rights.pop(tenant, None)
        self._turns.pop(tenant, None)

    def book_leaving(self, tenant: str, accelerator: str, amount_m: int) -> None:
        """Add to what a tenant's stopping jobs hold."""
        row = self._leaving.setdefault(tenant, {})
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

    def units_of(self, accelerator: str, amount_m: int) -> float:
        """An amount in exchange-rate units."""
        return amount_m * self.rate.get(accelerator, 0.001)

    def refusal(self, tenant: str, accelerator: str, amount_m: int) -> tuple[WaitCode, str, int] | None:
        """Why quota forbids this much more: the code, the row's accelerator and its limit; None: it may."""
        known = self.tenants.get(tenant)
        if known is None:
            return (WaitCode.UNKNOWN_TENANT, accelerator, 0)
        for quota in known.quotas:
            if quota.accelerator == accelerator:
                leaving = self._leaving.get(tenant, _NOTHING)
                after = float(self.held(tenant, accelerator) + leaving.get(accelerator, 0) + amount_m)
            elif quota.accelerator == "*":
                units = self.units(tenant) + self.units_of(accelerator, amount_m)
                leaving = self._leaving.get(tenant, _NOTHING)
                units += math.fsum(self.units_of(kind, amount) for kind, amount in leaving.items())
                after = 1000 * units
            else:
                continue
            if quota.ceiling_m is not None and after > quota.ceiling_m + EPS:
                return (WaitCode.CEILING, quota.accelerator, quota.ceiling_m)
            if quota.borrowable_m is not None and after > quota.guaranteed_m + quota.borrowable_m + EPS:
                return (WaitCode.BORROW_LIMIT, quota.accelerator, quota.guaranteed_m + quota.borrowable_m)
        return None

    def right(self, tenant: str, accelerator: str, amount_m: int) -> Right:
        """The right to this much more."""
        known = self._rights.setdefault(tenant, {})
        key = (accelerator, amount_m)
        if key not in known:
            known[key] = self._right(tenant, accelerator, amount_m)
        return known[key]

    def best_right(self, tenant: str, sizes: Sizes) -> Right:
        """The strongest right to any of these."""
        known = self._turns.setdefault(tenant, {})
        if sizes not in known:
            rights = (self.right(tenant, accelerator, amount_m) for accelerator, amount_m in sizes)
            known[sizes] = min(rights, default=Right.BORROWING)
        return known[sizes]

    def _right(self, tenant: str, accelerator: str, amount_m: int) -> Right:
        if self.covered(tenant, accelerator, amount_m):
            return Right.GUARANTEED
        units = self.units(tenant) + self.units_of(accelerator, amount_m)
        return Right.ENTITLED if units <= self.entitled.get(tenant, 0.0) + EPS else Right.BORROWING

    def covered(self, tenant: str, accelerator: str, amount_m: int = 0) -> bool:
        """Whether what the tenant holds, and this much more, lies inside a guarantee."""
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

    def above_share(self, tenant: str, accelerator: str, amount_m: int) -> bool:
        """Whether the tenant would still have its fair share without this much."""
        rest = self.units(tenant) - self.units_of(accelerator, amount_m)
        return rest >= self.entitled.get(tenant, 0.0) - EPS

    def standing(self, tenant: str) -> float:
        """Units held per weight: who has least comes first."""
        known = self.tenants.get(tenant)
        weight = 1.0 if known is None else max(known.weight, 1e-9)
        return self.units(tenant) / weight


def limit(quota: Quota) -> float:
    """The most that a row lets its tenant hold; infinite where it sets no limit."""
    most = math.inf if quota.ceiling_m is None else float(quota.ceiling_m)
    if quota.borrowable_m is not None:
        most = min(most, quota.guaranteed_m + quota.borrowable_m)
    return most
