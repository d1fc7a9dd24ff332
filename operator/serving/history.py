"""A service's last day: what was answered, how long it took, what it cost; and how its load goes over a day. Pure.

The gateway's totals and the usage in the status only grow; what a reading adds to the one before goes into a bin of an hour.
Totals that have fallen are those of a gateway that restarted, and count from zero. Hours in which nothing came and nothing was
spent have no bin. Of a day there are the last 24 whole hours and what has passed of this one. The load over a day
(`scheduler.autoscale.day_profile`) is counted for services with a latency target only, by the forecast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from busbar.kube.contracts.demand import TIME_EDGES_MS, Totals
from busbar.scheduler.autoscale.day_profile import BINS, DAYS, DayProfile

HOUR_S = 3600
HOURS = 24
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]
Times = Annotated[dict[Annotated[int, Field(ge=0, le=len(TIME_EDGES_MS))], Whole], Field(max_length=100)]


class Counts(BaseModel):
    """What came and was spent within some time."""

    model_config = ConfigDict(extra="forbid")

    requests: Whole = 0
    """Answered or refused."""
    within: Whole = 0
    prompt_tokens: Whole = 0
    output_tokens: Whole = 0
    first_token: Times = Field(default_factory=dict)
    per_token: Times = Field(default_factory=dict)
    """By class of `TIME_EDGES_MS`."""
    cost: Positive = 0.0
    joules: Positive = 0.0

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.output_tokens

    def add(self, other: Counts) -> None:
        for name in ("requests", "within", "prompt_tokens", "output_tokens", "cost", "joules"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_token = dict(Counter(self.first_token) + Counter(other.first_token))
        self.per_token = dict(Counter(self.per_token) + Counter(other.per_token))


class Hour(Counts):
    """One hour."""

    number: int
    """Since 1970."""


class Spent(BaseModel):
    """Totals of a status."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cost: Positive = 0.0
    joules: Positive = 0.0


class Load(BaseModel):
    """A `DayProfile` as it is kept: without the bin that is not over yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    means: Annotated[list[Positive | None], Field(min_length=BINS, max_length=BINS)]
    days: Annotated[list[Annotated[int, Field(ge=0, le=DAYS)]], Field(min_length=BINS, max_length=BINS)]
    """By bin of the day; a day at least where there is a mean."""
    first: int = 0
    """Bin since 1970 of the first entry in `today`."""
    today: Annotated[list[Positive | None], Field(max_length=BINS)] = Field(default_factory=list)
    """Means of the bins of this half day."""

    @model_validator(mode="after")
    def _has_days(self) -> Load:
        if any((mean is None) != (days == 0) for mean, days in zip(self.means, self.days, strict=True)):
            raise ValueError("a bin has a mean without days, or days without a mean")
        return self

    @classmethod
    def of(cls, profile: DayProfile) -> Load | None:
        """None: there is nothing to keep."""
        means, today = profile.means, dict(list(profile.today.items())[:-1])
        first = min(today, default=0)
        lasting = max(today, default=first - 1) - first + 1
        if not (means or today) or lasting > BINS:  # the latter: of a clock that went back
            return None
        return cls(
            means=[_short(means[bin_][0]) if bin_ in means else None for bin_ in range(BINS)],
            days=[means[bin_][1] if bin_ in means else 0 for bin_ in range(BINS)],
            first=first,
            today=[
                _short(today[bin_][0] / today[bin_][1]) if bin_ in today else None
                for bin_ in range(first, first + lasting)
            ],
        )

    def profile(self) -> DayProfile:
        means = zip(self.means, self.days, strict=True)
        return DayProfile(
            {bin_: (mean, days) for bin_, (mean, days) in enumerate(means) if mean is not None},
            {self.first + i: (mean, 1) for i, mean in enumerate(self.today) if mean is not None},
        )


class History(BaseModel):
    """One service's hours, the oldest first; it goes on in another process from what `kept` says."""

    model_config = ConfigDict(extra="forbid")

    hours: Annotated[list[Hour], Field(max_length=HOURS + 1)] = Field(default_factory=list)
    spent: Spent | None = None
    """At the last look."""
    load: Load | None = None
    """As it was read; `profile` goes on from there."""
    _profile: DayProfile = PrivateAttr(default_factory=DayProfile)
    _last: Totals | None = None
    _past: tuple[int, Counts] | None = None
    """Of an hour, the sum of those before it that are in its day."""

    def model_post_init(self, context: object, /) -> None:
        if self.load is not None:
            self._profile = self.load.profile()

    @property
    def profile(self) -> DayProfile:
        """Of the load; the service's forecast adds to it."""
        return self._profile

    def copied(self) -> History:
        """For another thread to read."""
        found = History.model_construct(hours=[hour.model_copy() for hour in self.hours], spent=self.spent)
        found._profile = DayProfile(self._profile.means.copy(), self._profile.today.copy())
        return found

    def kept(self, oldest: int) -> History | None:
        """What another process goes on from; None where there is nothing to keep since the hour `oldest`."""
        load = Load.of(self._profile)
        if self.spent is None and load is None and all(hour.number < oldest for hour in self.hours):
            return None
        return History.model_construct(hours=self.hours, spent=self.spent, load=load)

    def answered(self, totals: Totals, now_s: float) -> None:
        """One reading of the gateway; the first one tells only where counting begins.

        Args:
            now_s: time of day, in seconds since 1970.
        """
        last, self._last = self._last, totals
        if last is not None and totals != last:
            self._add(counts_since(last, totals), now_s)

    def used(self, spent: Spent, now_s: float) -> None:
        """One look at the status' totals of money and joules."""
        last, self.spent = self.spent, spent
        if last is not None and spent != last:
            more = Counts(cost=max(0.0, spent.cost - last.cost), joules=max(0.0, spent.joules - last.joules))
            self._add(more, now_s)

    def day(self, now_s: float) -> Counts:
        number = int(now_s // HOUR_S)
        if self._past is None or self._past[0] != number:
            past = Counts()
            for hour in self.hours:
                if number - HOURS <= hour.number < number:
                    past.add(hour)
            self._past = number, past
        found = self._past[1].model_copy()
        for hour in self.hours:
            if hour.number >= number:
                found.add(hour)
        return found

    def _add(self, counts: Counts, now_s: float) -> None:
        number = int(now_s // HOUR_S)
        if not self.hours or self.hours[-1].number < number:
            self.hours.append(Hour(number=number))
        self.hours[-1].add(counts)  # of a clock that went back, too
        if self._past is not None and self.hours[-1].number != self._past[0]:
            self._past = None
        self.hours = [hour for hour in self.hours if hour.number >= self.hours[-1].number - HOURS]


def percentile_ms(times: Mapping[int, int], part: float) -> float | None:
    """The time that this part of the answers did not exceed, within the width of a class; None: there were none.

    Within its class it is where the answers would be if they were spread evenly by the logarithm of their time.
    """
    left = part * sum(times.values())
    if not left:
        return None
    for place, count in sorted(times.items()):
        if left <= count:
            upper = TIME_EDGES_MS[min(place, len(TIME_EDGES_MS) - 1)]
            return float(upper * 2 ** ((left / count - 1) / 4)) if place < len(TIME_EDGES_MS) else upper
        left -= count
    return TIME_EDGES_MS[-1]


def counts_since(last: Totals, now: Totals) -> Counts:
    """What a reading adds to the one before; all of it where totals have fallen."""
    before = _counters(last)
    after = _counters(now)
    if any(after[i][name] < count for i, counter in enumerate(before) for name, count in counter.items()):
        before = (Counter(), Counter(), Counter())
    counts, first, each = (b - a for a, b in zip(before, after, strict=True))
    return Counts(
        requests=counts["answered"] + counts["refused"],
        within=counts["within"],
        prompt_tokens=counts["prompt_tokens"],
        output_tokens=counts["output_tokens"],
        first_token={int(place): count for place, count in first.items()},
        per_token={int(place): count for place, count in each.items()},
    )


def _counters(totals: Totals) -> tuple[Counter[str], Counter[str], Counter[str]]:
    names = ("answered", "refused", "within", "prompt_tokens", "output_tokens")
    return (
        Counter({name: getattr(totals, name) for name in names}),
        Counter({str(place): count for place, count in totals.first_token.items()}),
        Counter({str(place): count for place, count in totals.per_token.items()}),
    )


def _short(rate: float) -> float:
    """Four digits: what is kept of hundreds of services has to fit into one object."""
    return float(f"{rate:.4g}")
