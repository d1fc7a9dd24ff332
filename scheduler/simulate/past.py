"""Past use of tenants and their users, as the operator keeps it in `Tenant.status`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..model.snapshot import DecayedUsage, Tenant, User


class Past:
    """Past use of all tenants and users of a simulation, in work units (accelerators x exchange rate x seconds)."""

    def __init__(self, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self._used: dict[tuple[str, str | None], DecayedUsage] = {}
        """By tenant and user; None: all of them."""

    def add(self, tenant: str, user: str, work: float, now: float) -> None:
        """Add the work that a job of this user did since the last call."""
        for key in ((tenant, None), (tenant, user)):
            self._used[key] = self._used.get(key, DecayedUsage()).add(work, now, self.half_life_s)

    def known(self, tenants: Iterable[Tenant]) -> tuple[Tenant, ...]:
        """The tenants and their users, with what they have used."""
        users: dict[str, list[User]] = {}
        for (tenant, user), usage in self._used.items():
            if user is not None:
                users.setdefault(tenant, []).append(User(user, usage=usage))
        return tuple(
            replace(
                tenant,
                usage=self._used.get((tenant.name, None), tenant.usage),
                users=tuple(sorted(users.get(tenant.name, ()), key=lambda user: user.name)),
            )
            for tenant in tenants
        )
