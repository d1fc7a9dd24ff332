"""Usage reports for callers: inference from the usage ledger, compute from the totals of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from busbar.api.access.authorization import Authorizer
from busbar.api.access.identity import Caller
from busbar.api.access.tenancy import Tenancy
from busbar.api.records.compute import Compute, ComputeTotals
from busbar.api.records.usage_export import Group, Line, ObjectUse, Reach, UsageExport
from busbar.api.records.usage_ledger import By, InferenceTotals, UsageLedger
from busbar.kube.types.tenant import Role

_COMPUTE = (By.TENANT, By.NAMESPACE, By.SERVICE)


@dataclass(frozen=True)
class UsageReport:
    """Sums over a time range."""

    by: str
    since: datetime
    until: datetime
    inference: Sequence[InferenceTotals]
    compute: Sequence[ComputeTotals]


class Usage:
    """Makes usage reports for callers."""

    def __init__(
        self,
        ledger: UsageLedger,
        compute: Compute,
        export: UsageExport,
        authorizer: Authorizer,
        tenancy: Tenancy,
    ) -> None:
        self._ledger = ledger
        self._export = export
        self._compute = compute
        self._authorizer = authorizer
        self._tenancy = tenancy

    async def lines(self, caller: Caller, by: Group, since: datetime, until: datetime) -> Sequence[Line]:
        """The lines of an export: all tenants' for admins, those of the caller's own tenants otherwise."""
        return await self._export.lines(by, since, until, await self._reach(caller))

    async def days(self, caller: Caller, since: datetime, until: datetime) -> Sequence[ObjectUse]:
        """The use of each object on each day, as far as the caller may see it. Raises Invalid: too many."""
        return await self._export.days(since, until, await self._reach(caller))

    async def _reach(self, caller: Caller) -> Reach:
        if await self._authorizer.is_admin(caller):
            return Reach()
        held = self._tenancy.memberships(caller)
        whole = {m.tenant for m in held if m.role == Role.ADMIN}
        return Reach({m.tenant for m in held}, whole, caller.subject)

    async def report(self, caller: Caller, by: By, since: datetime, until: datetime) -> UsageReport:
        """Usage of all tenants for admins, of the caller's own tenants otherwise. By service the requests of other tenants
        to one's own services count too: whoever shares a service sees how much it is used."""
        held = self._tenancy.memberships(caller)
        tenants = None if await self._authorizer.is_admin(caller) else {m.tenant for m in held}
        served = {space for m in held for space in m.namespaces} if by is By.SERVICE else set()
        inference = await self._ledger.usage(by, since=since, until=until, tenants=tenants, namespaces=served)
        compute = (
            await self._compute.totals(by.value, since=since, until=until, tenants=tenants)
            if by in _COMPUTE
            else []
        )
        return UsageReport(by.value, since, until, inference, compute)
