"""What one policy made of a load: requests within the target, cost, replicas, decisions."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

from .serving_member import Told


def late_for_each(result: ServingResult, calm: ServingResult) -> float | None:
    """Requests that are late for each replica that failed; None: none did.

    Args:
        calm: the same fleet on the same load without failures.
    """
    return round((result.late - calm.late) / result.told.stopped, 1) if result.told.stopped else None


@dataclass(slots=True)
class ServingResult:
    """One policy on one trace."""

    policy: str
    requests: int = 0
    within: int = 0
    late_ttft: int = 0
    late_tpot: int = 0
    refused: int = 0
    """Those whose context the KV cache of their replica cannot hold."""
    output_tokens: int = 0
    cost: float = 0.0
    asleep_cost: float = 0.0
    """The part of it for replicas that slept (`ServingSettings.warm`)."""
    hours: float = 0.0
    replica_hours: dict[str, float] = field(default_factory=dict)
    peak: Counter[str] = field(default_factory=Counter)
    peak_watts: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    ttft_s: array[float] = field(default_factory=lambda: array("f"))
    """Of all that were not refused; infinite where no token came."""
    calibration: float | None = None
    told: Told = field(default_factory=Told)

    @property
    def attainment(self) -> float:
        return self.within / self.requests if self.requests else 1.0

    @property
    def late(self) -> int:
        """Requests outside of the target."""
        return self.requests - self.within

    def unheld(self) -> str:
        """A sentence about the requests that were refused; none: there are none."""
        if not self.refused:
            return ""
        return (
            f"{self.policy}: {self.refused} requests were refused, because prompt and answer have more tokens than the KV cache"
            " of the replica."
        )

    @property
    def cost_per_h(self) -> float:
        return self.cost / self.hours if self.hours else 0.0

    def to_json(self) -> dict[str, object]:
        """Numbers for people and programs."""
        order = sorted(self.ttft_s)
        million = self.output_tokens / 1e6
        return {
            "policy": self.policy,
            "requests": self.requests,
            "attainment": round(self.attainment, 5),
            "late_ttft": self.late_ttft,
            "late_tpot": self.late_tpot,
            "refused": self.refused,
            "ttft_p50_s": _rounded(order[len(order) // 2 : len(order) // 2 + 1]),
            "ttft_p99_s": _rounded(order[int(0.99 * (len(order) - 1)) :]),
            "cost_per_h": round(self.cost_per_h, 3),
            "cost_asleep_per_h": round(self.asleep_cost / self.hours, 3) if self.hours else 0.0,
            "cost_per_million_output_tokens": round(self.cost / million, 3) if million else None,
            "replica_hours": {key: round(value, 2) for key, value in sorted(self.replica_hours.items())},
            "peak_replicas": dict(sorted(self.peak.items())),
            "peak_watts": round(self.peak_watts),
            "decisions": dict(sorted(self.causes.items())),
            "decisions_per_h": round(sum(self.causes.values()) / self.hours, 2) if self.hours else None,
            "node_failures": self.told.node_failures,
            "replicas_lost_with_nodes": self.told.lost_replicas,
            "replica_failures": self.told.replica_failures,
            "replica_hangs": self.told.replica_hangs,
            "lost_by_gateway": self.told.by_gateway,
            "lost_by_node": self.told.by_node,
            "requests_resumed": self.told.resumed,
            "requests_retried": self.told.retried,
            "streams_moved_by_drains": self.told.moved,
            "forecast_calibration": None if self.calibration is None else round(self.calibration, 4),
        }


def _rounded(seconds: list[float]) -> float | None:
    """The first of them; None: there is none, or no token came."""
    return round(seconds[0], 3) if seconds and math.isfinite(seconds[0]) else None
