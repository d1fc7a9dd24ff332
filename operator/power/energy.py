"""What the keeper of the domains asks of the energy ledger (operator/energy), which stands above it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from busbar.kube.types.power_domain import PowerDomainStatus
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.membership import Membership
from busbar.operator.power.readings import Reading


@dataclass(frozen=True, slots=True)
class FeedEnergy:
    """Totals of a PowerDomain."""

    joules: float
    unassigned_joules: float


class EnergyBook(Protocol):
    """Books joules."""

    def tick(
        self, readings: Mapping[str, Reading], found: Membership, now_s: float, boards: Mapping[str, Boards]
    ) -> None:
        """Books what was drawn since the last time.

        Args:
            now_s: the clock of `Reading.at_s`.
            boards: of each node of which it is known, which pods hold which board.
        """

    def feed(self, uid: str, told: PowerDomainStatus | None) -> FeedEnergy | None:
        """The totals of a PowerDomain with this status; None: nothing was ever measured there."""

    def feed_sent(self, uid: str, status: PowerDomainStatus) -> None:
        """To be told before a status is sent."""
