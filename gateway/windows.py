"""What one account was granted in the last minute, and what it spends of its money. Pure: time is an argument.

A window counts requests by the second in which they were accepted, so its memory does not depend on their number. A
request's tokens are those it may use at most, until it ends; then those it did use. A second's entries leave once all of
them are older than 60 s: in any 60 s no more is accepted than the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from busbar.kube.contracts.allowances import CostAllowance

WINDOW_S = 60


@dataclass(eq=False)
class Second:
    """What was accepted in one second."""

    second: int
    requests: int = 0
    tokens: int = 0
    live: bool = True
    """Still within the window."""

    def age_s(self, now: float) -> float:
        """Seconds until it leaves the window, at least 0."""
        return max(0.0, self.second + WINDOW_S + 1 - now)


class Window:
    """Requests and tokens accepted within the last minute."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque()
        self.requests = 0
        self.tokens = 0

    def expire(self, now: float) -> None:
        """Forget what is older than the window."""
        while self._seconds and not self._seconds[0].age_s(now):
            gone = self._seconds.popleft()
            gone.live = False
            self.requests -= gone.requests
            self.tokens -= gone.tokens

    def add(self, at: float, tokens: int) -> Second:
        """A request that was accepted at `at`, which is no earlier than all before it."""
        second = int(at)
        if not self._seconds or self._seconds[-1].second < second:
            self._seconds.append(Second(second))
        last = self._seconds[-1]
        last.requests += 1
        last.tokens += tokens
        self.requests += 1
        self.tokens += tokens
        return last

    def correct(self, second: Second, by: int) -> None:
        """A request of this second has used so many more tokens (or, below 0, fewer) than it counted so far."""
        if second.live:
            second.tokens += by
            self.tokens += by

    def empty_in_s(self, now: float) -> float:
        """Seconds until nothing counts any more."""
        return self._seconds[-1].age_s(now) if self._seconds else 0.0

    def free_in_s(self, now: float, surplus: int, of: Callable[[Second], int]) -> float:
        """Seconds until at least `surplus` of what `of` counts has left."""
        freed = 0
        for second in self._seconds:
            freed += of(second)
            if freed >= surplus:
                return second.age_s(now)
        return self.empty_in_s(now)


@dataclass
class Undelivered:
    """Cost of a request that ended and that the API's sums do not contain yet."""

    request_id: str
    finished_at: datetime
    cost_nano: int
    seq: int | None = None
    """Its number for the API; None: it has none yet."""


@dataclass
class Purse:
    """Money of one account: what the API has counted, and what it has not."""

    counted_through: int = 0
    gateway_id: str = ""
    reserved_nano: int = 0
    """By requests that run."""
    undelivered: deque[Undelivered] = field(default_factory=deque)
    sum_nano: int = 0
    """Of all undelivered."""

    def add(self, cost: Undelivered) -> None:
        self.undelivered.append(cost)
        self.sum_nano += cost.cost_nano

    @property
    def pending_nano(self) -> int:
        """Spent or reserved, and not in the API's sums."""
        return self.sum_nano + self.reserved_nano

    def drop_through(self, seq: int) -> int:
        """Forget what the API's sums contain; its cost. Numbers are given in the order in which requests end."""
        before = self.sum_nano
        while self.undelivered and (first := self.undelivered[0]).seq is not None and first.seq <= seq:
            self.undelivered.popleft()
            self.sum_nano -= first.cost_nano
        return before - self.sum_nano

    def spent_nano(self, allowance: CostAllowance, now: datetime) -> int:
        """Spent and reserved in the present period, which may have begun after the allowance was told."""
        started, told = allowance.started, allowance.spent_nano
        if now >= allowance.ends:
            started, told = allowance.ends, 0
        ours = self.sum_nano
        if self.undelivered and self.undelivered[0].finished_at < started:
            ours = sum(each.cost_nano for each in self.undelivered if each.finished_at >= started)
        return told + ours + self.reserved_nano
