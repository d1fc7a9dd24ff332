"""What one gateway has had from one replica: when it last answered, and the requests since then that it did not answer.

    contact.heard(now) · contact.failed(now)      as requests end
    said = contact.said(waits, now)               what the operator is told of it; None: nothing was sent there lately

And how long a gateway waits before it takes a silent replica for dead. Needs nothing of the scheduler: the gateway and the
simulator both count by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PROBE_AFTER_S = 10.0
"""A replica from which a request has heard nothing for so long is asked for its health, and that request counts as not answered."""
PROBE_TIMEOUT_S = 5.0
STRIKES = 2
"""Failed looks at its health in a row before a replica is given up: one may be lost on a busy machine."""
ASK_AGAIN = 0.5
"""The next look comes after this part of `PROBE_AFTER_S`."""
NOTICED_S = PROBE_AFTER_S * (1 + (STRIKES - 1) * ASK_AGAIN) + STRIKES * PROBE_TIMEOUT_S
"""After so much silence the requests of a replica that hangs, or whose node is dead, go on elsewhere."""
TOLD_S = 60.0
"""An answer, or a request without one, is told of for so long: what was not tried since may be well again, or dead."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a gateway tells of a replica."""

    failures: int
    failing_seconds: float | None
    heard_seconds: float | None


@dataclass(slots=True)
class Waits:
    """The requests that wait for one replica now."""

    heard_at: float | None = None
    silent_since: float | None = None
    silent: int = 0

    @classmethod
    def of(
        cls, waits: Iterable[tuple[float | None, float | None]], now: float, silent_s: float = PROBE_AFTER_S
    ) -> Waits:
        """From each request's time of the last answer, and since when it has waited for the replica; None: none, or it does not."""
        found = cls()
        for heard_at, since in waits:
            if heard_at is not None:
                found.heard_at = max(found.heard_at or 0.0, heard_at)
            if since is not None and now - since >= silent_s:
                found.silent_since = min(since, found.silent_since or since)
                found.silent += 1
        return found


@dataclass(slots=True)
class Contact:
    """One replica, as one gateway knows it."""

    heard_at: float | None = None
    failed_at: float | None = None
    """When the last request got no answer."""
    failing_since: float | None = None
    failures: int = 0
    """Requests since then that got none."""

    def heard(self, at: float) -> None:
        """It answered, whatever it said."""
        self.heard_at, self.failing_since, self.failures = at, None, 0

    def failed(self, at: float) -> None:
        """A request got no answer, or one that broke off."""
        self.failed_at = at
        self.failing_since = at if self.failing_since is None else self.failing_since
        self.failures += 1

    def said(self, waits: Waits | None, now: float) -> Said | None:
        """What the operator is told; None: nothing was sent there lately."""
        if waits is not None and waits.heard_at is not None and waits.heard_at > (self.heard_at or 0.0):
            self.heard_at = waits.heard_at
            if self.failed_at is not None and waits.heard_at > self.failed_at:
                self.heard(waits.heard_at)
        if self.failed_at is not None and now - self.failed_at > TOLD_S:
            self.failing_since, self.failures = None, 0
        heard_at, since, failures = self.heard_at, self.failing_since, self.failures
        if waits is not None and waits.silent_since is not None and waits.silent_since >= (heard_at or 0.0):
            since = waits.silent_since if since is None else min(since, waits.silent_since)
            failures += waits.silent
        if since is None and (heard_at is None or now - heard_at > TOLD_S):
            return None
        return Said(failures, _ago(since, now), _ago(heard_at, now))


def _ago(at: float | None, now: float) -> float | None:
    return None if at is None else round(max(0.0, now - at), 3)
