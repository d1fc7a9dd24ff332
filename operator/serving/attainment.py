"""How well a service kept its latency target in the last five minutes and the last hour, from the gateway's totals.

The gateway counts since it started. What a reading adds to the one before is put into a bin of a minute; totals that
have fallen are those of a gateway that restarted, and count from zero.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from busbar.kube.contracts.demand import Outcomes

RECENT_S, HOUR_S = 300.0, 3600.0
BIN_S = 60.0


@dataclass
class _Minute:
    since_s: float
    within: int = 0
    requests: int = 0


@dataclass
class Attainment:
    """One service's answers of the last hour."""

    _minutes: deque[_Minute] = field(default_factory=deque)
    _last: Outcomes | None = None

    def take(self, totals: Outcomes, now_s: float) -> None:
        """One reading of the gateway. The first one tells only where counting begins."""
        last, self._last = self._last, totals
        if last is None:
            return
        before = (last.within, last.answered, last.refused)
        after = (totals.within, totals.answered, totals.refused)
        restarted = any(b > a for b, a in zip(before, after, strict=True))
        within, answered, refused = (a - (0 if restarted else b) for b, a in zip(before, after, strict=True))
        if not self._minutes or now_s - self._minutes[-1].since_s >= BIN_S:
            self._minutes.append(_Minute(now_s))
        self._minutes[-1].within += within
        self._minutes[-1].requests += answered + refused
        while self._minutes[0].since_s < now_s - HOUR_S:
            self._minutes.popleft()

    def over(self, seconds: float, now_s: float) -> tuple[float | None, int]:
        """Answers within the target over all, and how many; refused ones are not within it. None: there were none."""
        minutes = [m for m in self._minutes if m.since_s >= now_s - seconds]
        requests = sum(m.requests for m in minutes)
        return (sum(m.within for m in minutes) / requests if requests else None), requests
