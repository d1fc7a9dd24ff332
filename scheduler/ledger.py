"""Who holds what while a plan is being made, against quota and fair share.

Rights of a job, best first:
    GUARANTEED   its tenant stays inside its guarantee: whatever others borrowed of it may be taken back
    ENTITLED     its tenant stays inside its fair share: tenants above theirs may have to give way
    BORROWING    only what nobody else wants
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

from .columns import Options
from .entitlement import Claim, entitlements
from .plans import WaitCode
from .table import TableView
from .types import Quota, Snapshot, Tenant

EPS = 1e-6


class Right(IntEnum):
    """How strong a claim is; lower is stronger."""

    GUARANTEED = 0
    ENTITLED = 1
    BORROWING = 2


class Ledger:
    """Holdings per tenant and accelerator (thousandths), and in exchange-rate units."""

    def __init__(
        self,
        snapshot: Snapshot,
        table: TableView,
        options: Mapping[str, Options],
        capacity_m: Mapping[str, int],
    ) -> None:
        self.tenants: dict[str, Tenant] = {tenant.name: tenant for tenant in snapshot.tenants}
        self.rate = {
            pool.accelerator: table.rate(pool.accelerator) / 1000 for pool in snapshot.pools
        }  # units per thousandth
        self.held_m: dict[tuple[str, str], int] = {}
        self.units: dict[str, float] = dict.fromkeys(self.tenants, 0.0)
        self.leaving_m: dict[tuple[str, str], int] = {}
        """Held by jobs that are being stopped: counts against limits until they are gone, and for nothing else."""
        self._rights: dict[str, dict[tuple[str, int], Right]] = {}
        """Answers of `right`, by tenant, until what the tenant holds changes."""
        self.capacity_m = dict(capacity_m)
        capacity = {kind: amount * self.rate[kind] for kind, amount in capacity_m.items()}
        self.entitled = entitlements(self._claims(options), capacity)

    def _claims(self, options: Mapping[str, Options]) -> list[Claim]:
        demand: dict[str, dict[frozenset[str], float]] = {}
        for option in options.values():
            largest: dict[str, int] = {}
            for column in option.columns:
                largest[column.accelerator] = max(largest.get(column.accelerator, 0), column.accelerators_m)
            if largest:
                units = max(amount * self.rate[kind] for kind, amount in largest.items())
                row = demand.setdefault(option.job.tenant, {})
                kinds = frozenset(largest)
                row[kinds] = row.get(kinds, 0.0) + units
        claims = []
        for name, tenant in sorted(self.tenants.items()):
            star = self._row(tenant, "*")
            limit = math.inf if star is None else _limit(star) / 1000
            guaranteed = 0.0 if star is None else star.guaranteed_m / 1000
            guaranteed += sum(
                min(q.guaranteed_m, self.capacity_m.get(q.accelerator, 0)) * self.rate[q.accelerator]
                for q in tenant.quotas
                if q.accelerator in self.rate
            )
            rows = tuple(sorted(demand.get(name, {}).items(), key=lambda item: sorted(item[0])))
            type_limit = {
                q.accelerator: _limit(q) * self.rate[q.accelerator]
                for q in tenant.quotas
                if q.accelerator in self.rate
            }
            claims.append(
                Claim(name, tenant.organisation, tenant.weight, guaranteed, limit, rows, type_limit)
            )
        return claims

    @staticmethod
    def _row(tenant: Tenant, accelerator: str) -> Quota | None:
        return next((quota for quota in tenant.quotas if quota.accelerator == accelerator), None)

    def book(self, tenant: str, accelerator: str, amount_m: int) -> None:
        """Add to what a tenant holds (negative: it gave back)."""
        key = (tenant, accelerator)
        self._rights.pop(tenant, None)
        self.held_m[key] = self.held_m.get(key, 0) + amount_m
        self.units[tenant] = self.units.get(tenant, 0.0) + amount_m * self.rate.get(accelerator, 0.001)

    def held(self, tenant: str, accelerator: str) -> int:
        return self.held_m.get((tenant, accelerator), 0)

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
                leaving = self.leaving_m.get((tenant, accelerator), 0)
                after = float(self.held(tenant, accelerator) + leaving + amount_m)
            elif quota.accelerator == "*":
                units = self.units[tenant] + self.units_of(accelerator, amount_m)
                units += sum(self.units_of(k, m) for (t, k), m in self.leaving_m.items() if t == tenant)
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

    def _right(self, tenant: str, accelerator: str, amount_m: int) -> Right:
        if self.covered(tenant, accelerator, amount_m):
            return Right.GUARANTEED
        units = self.units.get(tenant, 0.0) + self.units_of(accelerator, amount_m)
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
                units = self.units[tenant] + self.units_of(accelerator, amount_m)
                if 1000 * units <= quota.guaranteed_m + EPS:
                    return True
        return False

    def above_share(self, tenant: str, accelerator: str, amount_m: int) -> bool:
        """Whether the tenant would still have its fair share without this much."""
        rest = self.units.get(tenant, 0.0) - self.units_of(accelerator, amount_m)
        return rest >= self.entitled.get(tenant, 0.0) - EPS

    def standing(self, tenant: str) -> float:
        """Units held per weight: who has least comes first."""
        known = self.tenants.get(tenant)
        weight = 1.0 if known is None else max(known.weight, 1e-9)
        return self.units.get(tenant, 0.0) / weight


def _limit(quota: Quota) -> float:
    limit = math.inf if quota.ceiling_m is None else float(quota.ceiling_m)
    if quota.borrowable_m is not None:
        limit = min(limit, quota.guaranteed_m + quota.borrowable_m)
    return limit
