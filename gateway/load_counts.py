"""Counts one service's requests for the autoscaler: how many came, how large they were, how long clients waited.

Two entries per request, none per token: one when it arrives, one when it ends. Each second has a bin, and the windows
of `/demand` are sums over bins, made when the operator asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from busbar.kube.contracts.demand import (
    OUTPUT_EDGES,
    PROMPT_EDGES,
    TIME_EDGES_MS,
    WINDOWS_S,
    SizeCount,
    Totals,
    WindowDemand,
)
from busbar.kube.contracts.routes import Promise

_REFUSED = 429
_OUTCOMES = ("answered", "within", "late_first_token", "late_tokens", "refused")


@dataclass(eq=False, slots=True)
class Progress:
    """How far one request has come; times are monotonic seconds."""

    stream: bool
    arrived_at: float = 0.0
    first_at: float | None = None
    """When its first bytes went to the client; of an answer that is no stream those are all of it."""
    placed: bool = False
    """Whether a replica has taken it."""
    broken: bool = False
    """Whether its stream ended with an error event."""

    @property
    def waits(self) -> bool:
        """For its first token, as far as the gateway can see: an answer that is no stream shows none."""
        return self.first_at is None and not (self.placed and not self.stream)


@dataclass(slots=True)
class _Bin:
    second: int
    arrivals: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    sizes: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(prompt class, output class) → count, prompt tokens, output tokens."""


class LoadCounts:
    """One service's counts."""

    def __init__(self) -> None:
        self._bins: deque[_Bin] = deque()
        self._open: dict[Progress, None] = {}
        self._totals: Counter[str] = Counter()
        self._first_token: Counter[int] = Counter()
        self._per_token: Counter[int] = Counter()

    def arrived(self, progress: Progress, now: float) -> None:
        progress.arrived_at = now
        self._open[progress] = None
        self._bin(now).arrivals += 1

    def left(self, progress: Progress) -> None:
        """Nothing more comes of it, whether it was answered or not."""
        self._open.pop(progress, None)

    def ended(
        self, progress: Progress, promise: Promise | None, code: int, tokens: tuple[int, int], now: float
    ) -> None:
        """Counts what the client saw of a request, if it is one that tells something about the service."""
        if code == _REFUSED or code >= 500 or (code == 200 and progress.broken):
            self._count(now, "refused")
            return
        if code != 200:
            return
        first_late, tokens_late, late = _lateness(progress, promise or Promise(), tokens[1], now)
        self._count(now, "answered")
        for name, is_so in (
            ("within", not late),
            ("late_first_token", first_late),
            ("late_tokens", tokens_late),
        ):
            if is_so:
                self._count(now, name)
        self._count_times(progress, tokens[1], now)
        self._totals["prompt_tokens"] += tokens[0]
        self._totals["output_tokens"] += tokens[1]
        if min(tokens) > 0:
            place = bisect_left(PROMPT_EDGES, tokens[0]), bisect_left(OUTPUT_EDGES, tokens[1])
            row = self._bin(now).sizes.setdefault(place, [0, 0, 0])
            row[0] += 1
            row[1] += tokens[0]
            row[2] += tokens[1]

    def waits(self, promise: Promise | None, now: float) -> tuple[int, float | None]:
        """Requests that have waited half of the target for the first token, and how long the oldest has waited."""
        arrivals = [p.arrived_at for p in self._open if p.waits]
        if not arrivals:
            return 0, None
        limit = promise.ttft_ms if promise is not None else None
        overdue = 0 if limit is None else sum(now - at >= limit / 2000 for at in arrivals)
        return overdue, round(max(0.0, now - min(arrivals)), 3)

    def windows(self, now: float) -> list[WindowDemand]:
        """Sums over the last whole seconds; nothing where nothing was counted for longer than the longest window."""
        self._forget(now)
        return [self._window(seconds, now) for seconds in WINDOWS_S] if self._bins else []

    @property
    def totals(self) -> Totals:
        names = (*_OUTCOMES, "prompt_tokens", "output_tokens")
        return Totals(
            **{name: self._totals[name] for name in names},
            first_token=dict(self._first_token),
            per_token=dict(self._per_token),
        )

    def _count_times(self, progress: Progress, output_tokens: int, now: float) -> None:
        """Of a stream; another answer shows neither time."""
        if not progress.stream or progress.first_at is None:
            return
        self._first_token[_time_class(progress.first_at - progress.arrived_at)] += 1
        if output_tokens > 1:
            self._per_token[_time_class((now - progress.first_at) / (output_tokens - 1))] += 1

    def _window(self, seconds: int, now: float) -> WindowDemand:
        arrivals, outcomes = 0, dict.fromkeys(_OUTCOMES, 0)
        sizes: dict[tuple[int, int], list[int]] = {}
        for one in self._bins:
            if not int(now) - seconds <= one.second < int(now):
                continue
            arrivals += one.arrivals
            for name, count in one.outcomes.items():
                outcomes[name] += count
            for place, row in one.sizes.items():
                total = sizes.setdefault(place, [0, 0, 0])
                for i, value in enumerate(row):
                    total[i] += value
        return WindowDemand(
            seconds=seconds,
            arrivals=arrivals,
            sizes=[
                SizeCount(
                    prompt=prompt, output=output, count=row[0], prompt_tokens=row[1], output_tokens=row[2]
                )
                for (prompt, output), row in sorted(sizes.items())
            ],
            **outcomes,
        )

    def _bin(self, now: float) -> _Bin:
        second = int(now)
        if not self._bins or self._bins[-1].second < second:
            self._bins.append(_Bin(second))
            self._forget(now)
        return self._bins[-1]

    def _forget(self, now: float) -> None:
        while self._bins and self._bins[0].second < int(now) - max(WINDOWS_S):
            self._bins.popleft()

    def _count(self, now: float, name: str) -> None:
        self._totals[name] += 1
        self._bin(now).outcomes[name] += 1


def _time_class(seconds: float) -> int:
    return bisect_left(TIME_EDGES_MS, 1000 * seconds)


def _lateness(
    progress: Progress, promise: Promise, output_tokens: int, now: float
) -> tuple[bool, bool, bool]:
    """Whether the first token was late, whether the later ones were, and whether any target was missed.

    An answer that is no stream has no first token to see. It is late where it took longer than the target for the
    first token and the targets for all others together."""
    ttft_s = None if promise.ttft_ms is None else promise.ttft_ms / 1000
    tpot_s = None if promise.tpot_ms is None else promise.tpot_ms / 1000
    more = max(0, output_tokens - 1)
    if not progress.stream or progress.first_at is None:
        whole_s = None if ttft_s is None or tpot_s is None else ttft_s + tpot_s * more
        return False, False, whole_s is not None and now - progress.arrived_at > whole_s
    first_late = ttft_s is not None and progress.first_at - progress.arrived_at > ttft_s
    tokens_late = tpot_s is not None and more > 0 and (now - progress.first_at) / more > tpot_s
    return first_late, tokens_late, first_late or tokens_late
