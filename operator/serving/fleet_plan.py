"""What `fleets.py` says about a service: the replicas that it shall have, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from busbar.kube.types import ModelService
from busbar.kube.types.service_status import ScaledBy, ScalingCause
from busbar.operator.serving.shares import Shares


@dataclass(frozen=True)
class Change:
    """Why the target changed last."""

    cause: ScalingCause
    reason: str
    load_rps: float | None = None
    capacity_rps: float | None = None


@dataclass(frozen=True)
class Ahead:
    """Requests per second."""

    now: float
    at_ready: float
    upper: float
    ready_in_s: float
    method: str
    inside: float | None
    late: float = 1.0
    """Of the replicas added for load, the part that was added when it was there already (`Fleet.late_share`)."""


@dataclass(frozen=True)
class Plan:
    """What the latency target says about a service."""

    target: Mapping[str, int] | None = None
    """Replicas by pool; None: the requests in flight decide."""
    message: str = ""
    """Why the target does not decide, or what it cannot do."""
    change: Change | None = None
    ahead: Ahead | None = None
    capacity_rps: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    """Requests per second of one replica, by pool."""
    attainment: tuple[float | None, int] = (None, 0)
    """Of the last five minutes, and of how many requests."""
    attainment_hour: tuple[float | None, int] = (None, 0)
    unreachable: str | None = ""
    """Why no type keeps the target at any load; None: not known yet."""
    shares: Shares = ()
    """Where the gateway shall send each class of prompts; empty: where it thinks best."""
    held: Change | None = None
    """What keeps the replicas from being as many as the load needs; None: nothing does."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Engine modes of replicas, by pool, where they are chosen."""
    predicted: frozenset[str] = frozenset()
    """Pools whose speed is not measured."""
    full: frozenset[str] = frozenset()
    """All pools, where the load needs more replicas and none has room for one."""
    caps: Mapping[str, float] | None = None
    """Power caps of all replicas in a pool, by pool that has one; None: they stay as the status has them."""
    caps_reason: str = ""
    """Why these changed last."""
    over_since_s: float | None = None
    """Since when more comes than the replicas sustain that were wanted before this plan, or requests wait too long: the moment
    of the first reading that said so (`Seen.now_s`). None: they suffice."""

    def scaled_by(self, service: ModelService) -> ScaledBy:
        if service.spec.external_replicas is not None:
            return ScaledBy.EXTERNAL
        return ScaledBy.PROMISE if self.target is not None else ScaledBy.IN_FLIGHT
