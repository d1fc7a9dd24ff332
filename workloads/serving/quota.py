"""How much of the KV cache each tenant may hold: a guaranteed part, and a most. Pure Python.

A tenant may hold more than its guarantee while the blocks are idle: it borrows. When a tenant needs blocks within its
guarantee and too few are free, borrowers give theirs back, the newest request of the most served one first
(`scheduler.py`). No tenant holds more than its most. A tenant without a quota has no guarantee and no limit, so it
borrows all that it holds.

Quotas may change while requests run. Where a tenant's most becomes less than one of its requests may need alone, that
request runs to its end: until then its need is the tenant's most for those that run, and the new one for those that come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from busbar.workloads.serving.errors import SettingsError


@dataclass(frozen=True)
class Quota:
    """Of one tenant, as shares of the pool, 0 to 1."""

    guaranteed: float = 0.0
    most: float = 1.0


class Quotas:
    """The quotas of a pool of `total` blocks."""

    def __init__(self, quotas: Mapping[str, Quota], total: int) -> None:
        """Guarantees are rounded down to whole blocks, so that together they fit. Raises SettingsError naming the
        tenant."""
        self.total = total
        self._kept: Mapping[str, int] = {}  # needs of requests that were taken under other quotas
        self.change(quotas)

    def change(self, quotas: Mapping[str, Quota]) -> None:
        """From now on these. Raises SettingsError as the start does, and stays as it is then."""
        total = self.total
        for tenant, quota in quotas.items():
            if not 0 <= quota.guaranteed <= quota.most <= 1:
                raise SettingsError(
                    f"the KV quota of {tenant!r} must be 0 <= guaranteed <= most <= 100 %, and is "
                    f"{100 * quota.guaranteed:g} % and {100 * quota.most:g} %"
                )
            if int(quota.most * total) < 1:
                raise SettingsError(
                    f"the KV quota of {tenant!r} allows at most {100 * quota.most:g} % of {total} blocks, which is "
                    "less than one block"
                )
        promised = sum(quota.guaranteed for quota in quotas.values())
        if promised > 1 + 1e-9:
            raise SettingsError(
                f"the guaranteed KV quotas add up to {100 * promised:g} % of the cache; at most 100 % can be promised"
            )
        self._guaranteed = {tenant: int(quota.guaranteed * total) for tenant, quota in quotas.items()}
        self._most = {tenant: int(quota.most * total) for tenant, quota in quotas.items()}

    def __bool__(self) -> bool:
        return bool(self._most)

    @property
    def tenants(self) -> list[str]:
        return list(self._most)

    def guaranteed(self, tenant: str) -> int:
        """Blocks that the tenant gets whoever holds them now."""
        return self._guaranteed.get(tenant, 0)

    def limit(self, tenant: str) -> int:
        """Blocks that a request of the tenant may need at most to be taken."""
        return self._most.get(tenant, self.total)

    def most(self, tenant: str) -> int:
        """Blocks that the tenant may hold at a time."""
        return max(self.limit(tenant), self._kept.get(tenant, 0))

    def keep(self, needs: Mapping[str, int]) -> None:
        """The largest needs of requests that were taken under other quotas and have not ended, by tenant."""
        self._kept = needs
