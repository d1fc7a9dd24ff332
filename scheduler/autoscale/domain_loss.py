"""What is left when a failure domain is lost: `Limits.domain_reserve` says which part of the load the other replicas must carry.

A replica of a column without a domain may stand in the one that is lost, so it does not count in what is left. Buckets that
no column outside of a domain can serve are left out: nothing could be kept for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .columns import TOLERANCE, Column, Limits, domains_of
from .spread import served_by, spread


@dataclass(frozen=True, slots=True)
class Loss:
    """One domain is gone."""

    domain: str
    columns: tuple[Column, ...]
    """Those outside of it."""
    load: tuple[float, ...]
    """What they must carry, in requests per second by bucket."""

    def carried(self, replicas: Mapping[str, int]) -> float:
        """The part of this load that these replicas carry, at most 1."""
        left = spread(self.columns, self.load, replicas)
        missed = set(left.impossible) & set(served_by(self.columns, self.load))
        return 0.0 if missed else left.carried


def losses(columns: Sequence[Column], load: Sequence[float], part: float) -> list[Loss]:
    """The domains of which each may be lost, with the part of the load that the others must carry."""
    if part <= 0:
        return []
    less = tuple(part * rate for rate in load)
    found = []
    for domain in sorted(domains_of(columns)):
        others = tuple(c for c in columns if c.failure_domain not in {"", domain})
        if others:
            found.append(Loss(domain, others, less))
    return found


def worst_loss(
    columns: Sequence[Column], load: Sequence[float], replicas: Mapping[str, int]
) -> tuple[float, str]:
    """The part of the load that these replicas still carry, at most 1, without the domain that leaves least; and that domain."""
    parts = [(loss.carried(replicas), loss.domain) for loss in losses(columns, load, 1.0)]
    return min(parts, default=(1.0, ""))


def bears_loss(
    columns: Sequence[Column], load: Sequence[float], replicas: Mapping[str, int], limits: Limits
) -> bool:
    """Whether these replicas carry as much as the limits ask for, whichever domain is lost."""
    return all(
        loss.carried(replicas) >= 1 - TOLERANCE for loss in losses(columns, load, limits.domain_reserve)
    )
