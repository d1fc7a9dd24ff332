"""Usage, as far as a caller may read it: inference from the ledger, compute from the totals of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from busbar.api.compute import Totals
from busbar.api.identity import Caller
from busbar.api.ledger import By, Sum

if TYPE_CHECKING:
    from busbar.api.services import Services

_COMPUTE = (By.TENANT, By.NAMESPACE, By.SERVICE)


@dataclass(frozen=True)
class UsageReport:
    """Sums over a time range."""

    by: str
    since: datetime
    until: datetime
    inference: Sequence[Sum]
    compute: Sequence[Totals]


async def usage_for(
    services: Services, caller: Caller, by: By, since: datetime, until: datetime
) -> UsageReport:
    """Everybody's usage for admins, that of one's own tenants otherwise."""
    tenants = (
        None
        if await services.authorizer.is_admin(caller)
        else {m.tenant for m in services.tenancy.memberships(caller)}
    )
    inference = await services.ledger.usage(by, since=since, until=until, tenants=tenants)
    compute = (
        await services.history.compute.totals(by.value, since=since, until=until, tenants=tenants)
        if by in _COMPUTE
        else []
    )
    return UsageReport(by.value, since, until, inference, compute)
