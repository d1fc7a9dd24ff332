"""Under which power caps a service's replicas run, one for each pool, where a power domain binds.

    last round's room, speeds under caps, target ──► Capping.decide, with the columns ──► caps by pool
                                                                                           │
       status.pools[].powerCapPercent ◄── the plan ◄───────────────────────────────────────┘
         ├──► the claim of a missing replica: placed under this cap, its watts counted so
         └──► the annotation of each replica's pod ──► the node's agent, with the leases (`power/work.py`)

A cap is lowered at once, and raised when nothing has changed for the time after which surplus replicas leave. Limits are
written while replicas serve, so no change of a cap restarts anything. Replicas whose watts are not there yet cost no
overrun: leases bound what the boards draw, whatever their caps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from busbar.kube.types import ModelService
from busbar.operator.serving.fleet_input import EFFORT, Seen
from busbar.scheduler.autoscale.caps import (
    Caps,
    Ways,
    carrying,
    decided,
    fits,
    lifted,
    weighed,
    within,
)
from busbar.scheduler.autoscale.columns import Column, LimitKind, Limits
from busbar.scheduler.errors import ServingModelError

LOST_S = 30.0
"""So long a cap stays where replicas cannot be limited any more by the last room: an operator that has just started hears of
boards some seconds after its first round."""


@dataclass
class Capping:
    """The caps of one service between decisions."""

    caps: dict[str, float] | None = None
    """By pool, below 1; None: not decided since the start, so those of the status hold."""
    reason: str = ""
    """Why they changed last, as sentences."""
    ways: Ways = field(default_factory=lambda: Ways({}))
    changed_at_s: float = -math.inf
    lost_at_s: float = math.inf
    """Since when replicas cannot be limited in a pool with a cap; inf: they can."""
    waits: bool = False
    """Whether the caps stay until it is known where replicas can be limited."""

    def decide(
        self,
        seen: Seen,
        ways: Ways,
        target: Mapping[str, int],
        limits: Limits,
        wanted: Sequence[float],
        hold_s: float,
    ) -> bool:
        """Choose the caps; whether they changed.

        Args:
            target: replicas wanted by pool.
            limits: of the mix, with the rows of power as the room has them.
            wanted: requests per second by bucket that power keeps the mix from carrying; empty: it does not.
            hold_s: a cap is raised only after so long without a change.
        """
        self.ways = ways
        before = self.caps if self.caps is not None else caps_of(seen.service)
        if seen.room is None:  # nothing is known of watts before the scheduler's first round
            self.caps, self.waits = before, bool(before)
            return False
        lost = not before.keys() <= seen.room.boards.keys()
        self.lost_at_s = min(self.lost_at_s, seen.now_s) if lost else math.inf
        self.waits = lost and seen.now_s - self.lost_at_s < LOST_S
        if self.waits:
            self.caps = before
            return False
        rows, there = seen.room.rows, _by_pool(seen)
        replicas = {pool: max(target.get(pool, 0), there.get(pool, 0)) for pool in {*target, *there}}
        known = ways.known(before)
        why = "their power domains leave the replicas no more"
        # What draws is limited as far as that goes; for what is still to start, only where it fits then.
        found = within(ways, known, there, rows)
        lower = within(ways, found, replicas, rows)
        found = lower if fits(ways, lower, replicas, rows) else found
        if found == known and wanted:
            why = "more replicas at lower limits carry more of the load"
            with suppress(ServingModelError):  # the mix says why it keeps no limits
                found = carrying(ways, known, wanted, limits, target, EFFORT)
        elif found == known and seen.now_s - self.changed_at_s >= hold_s:
            found, why = lifted(ways, known, replicas, rows, seen.room.short), "their power domains have room"
        if found == known and known != before:
            why = "they cannot be limited there any more, or what that costs is not known any more"
        self.caps = found
        if found == before:
            return False
        self.reason, self.changed_at_s = _sentences(before, found, why), seen.now_s
        return True

    def columns(self) -> tuple[Column, ...]:
        """One for each pool, under its cap."""
        return decided(self.ways.under(self.caps or {}))

    def weighed(self, seen: Seen) -> Seen:
        """With the rows of power as replicas under these caps take of them."""
        if seen.room is None or not self.caps:
            return seen
        rows = weighed(seen.room.rows, self.ways.under(self.caps))
        return replace(seen, room=replace(seen.room, rows=rows))


def capped_sentences(caps: Caps) -> tuple[str, ...]:
    """That the boards of pools are limited, a sentence for each."""
    return tuple(f"{_sentence(pool, cap)}." for pool, cap in sorted(caps.items()))


def caps_of(service: ModelService) -> dict[str, float]:
    """The caps that the status has, by pool."""
    rows = (service.status.pools if service.status is not None else None) or ()
    return {row.pool: row.power_cap_percent / 100 for row in rows if row.power_cap_percent is not None}


def as_measured(limits: Limits, seen: Seen) -> Limits:
    """The limits with the rows of power as the last round leaves them, also where what is wanted is above them."""
    others = tuple(row for row in limits.rows if row.kind is not LimitKind.POWER)
    rows = seen.room.rows if seen.room is not None else ()
    return replace(limits, rows=(*others, *(row for row in rows if row.kind is LimitKind.POWER)))


def _by_pool(seen: Seen) -> dict[str, int]:
    """All replicas that are there, also those that leave: they draw, too."""
    there: dict[str, int] = {}
    for pod in seen.pods:
        there[pod.pool] = there.get(pod.pool, 0) + 1
    return there


def _sentences(before: Caps, after: Caps, why: str) -> str:
    said = [_sentence(pool, after.get(pool)) for pool in _changed(before, after)]
    return f"{'; '.join(said)}: {why}." if said else ""


def _changed(before: Caps, after: Caps) -> Iterable[str]:
    return (pool for pool in sorted({*before, *after}) if before.get(pool) != after.get(pool))


def _sentence(pool: str, cap: float | None) -> str:
    if cap is None:
        return f"Boards of pool {pool} have no power cap any more"
    return f"Boards of pool {pool} are limited to {100 * cap:.0f} % of their watts"
