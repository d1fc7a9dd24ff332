"""One service's load over the last hour and day, in memory of a fixed size. Pure.

A sample is taken every few seconds. What came and was answered is what the gateway's totals have grown by since the sample
before; replicas and their capacity are means of the samples. Totals that have fallen are those of a gateway that restarted.
Periods without a sample are gaps. What another process goes on from (`kept`) is every period, the one that goes on as far as it
is known; the time in which nobody took samples is a gap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from busbar.kube.contracts.demand import ServiceDemand, Totals
from busbar.kube.contracts.service_series import Numbers, PoolSeries, SeriesSpan, ServiceSeries
from busbar.operator.ring import Ring
from busbar.operator.serving.history import Counts, counts_since, percentile_ms
from busbar.operator.serving.replica_speed import PERCENTILE

_DEMAND = "demand"
_READY, _CAPACITY, _ALL = "ready/", "capacity/", ""
"""What the columns of pools are called, with the pool's name; without one, of all together."""


Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KeptColumns(BaseModel):
    """`Columns` as they are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: Annotated[int, Field(ge=0)] = 0
    """Period since 1970 of the first number in each column."""
    columns: Annotated[
        dict[
            Annotated[str, Field(max_length=300)],
            Annotated[list[Positive | None], Field(max_length=SeriesSpan.DAY.periods)],
        ],
        Field(max_length=1000),
    ] = Field(default_factory=dict)


class KeptSeries(BaseModel):
    """A `LoadSeries` as it is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spans: dict[SeriesSpan, KeptColumns]

    @property
    def requests(self) -> float:
        """That came in the last day, about."""
        day = self.spans.get(SeriesSpan.DAY, KeptColumns())
        return SeriesSpan.DAY.period_s * sum(rate or 0.0 for rate in day.columns.get(_DEMAND, ()))


@dataclass(frozen=True)
class Sample:
    """A service at one moment."""

    demand: ServiceDemand | None = None
    """None: no gateway answers."""
    ready: Mapping[str, int] = field(default_factory=dict)
    """Replicas that take requests, by pool."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Requests per second that one replica sustains, by pool; without those whose speed is not known."""
    capacity_rps: float | None = None
    """That they sustain together; None: not known."""
    percentile: float = PERCENTILE

    def by_pool(self) -> dict[str, float]:
        """Each pool's part of the capacity, by what its replicas sustain alone: where prompts of different lengths go to
        different pools they sustain more together."""
        if self.capacity_rps is None:
            return {}
        alone = {pool: count * self.rates.get(pool, 0.0) for pool, count in self.ready.items()}
        total = sum(alone.values())
        return {pool: self.capacity_rps * rate / total for pool, rate in alone.items()} if total else {}


class Columns:
    """Numbers by name in the last periods; what was not put is a gap."""

    def __init__(self, periods: int) -> None:
        self._periods = periods
        self._rings: dict[str, Ring] = {}

    def put(self, name: str, index: int, value: float) -> None:
        """In this period, in place of what was there."""
        self._rings.setdefault(name, Ring(self._periods)).put(index, value)

    def put_all(self, kept: KeptColumns, index: int) -> None:
        """What another process had until this period; what it says of later ones is by a clock that was wrong."""
        for name, values in kept.columns.items():
            for period, value in enumerate(values, kept.first):
                if value is not None and index - self._periods < period <= index:
                    self.put(name, period, value)

    def copied(self) -> Columns:
        """For another thread to read."""
        found = Columns(self._periods)
        found._rings = {name: ring.copied() for name, ring in self._rings.items()}
        return found

    def kept(self) -> KeptColumns:
        """All numbers, from the first period in which there is one; each column ends with its last one."""
        newest = max((ring.newest for ring in self._rings.values()), default=-1)
        columns = {name: self.last(name, newest) for name in sorted(self._rings)}
        begins = [at for values in columns.values() if (at := _first(values)) is not None]
        if not begins:
            return KeptColumns()
        first = min(begins)
        return KeptColumns.model_construct(
            first=newest - self._periods + 1 + first,
            columns={
                name: list(values[first : len(values) - end])
                for name, values in columns.items()
                if (end := _first(values[::-1])) is not None
            },
        )

    def last(self, name: str, index: int) -> Numbers:
        """Of as many periods as are kept, ending with this one; the oldest first."""
        ring = self._rings.get(name)
        if ring is None:
            return (None,) * self._periods
        found = ring.last(index, self._periods)
        return tuple(None if value is None else float(f"{value:.4g}") for value in found)

    def is_zero(self, name: str, index: int) -> bool:
        """Whether there was nothing but zero in the periods that end with this one."""
        return not any(self.last(name, index))

    def forget(self, name: str) -> None:
        self._rings.pop(name, None)

    def with_prefix(self, prefix: str) -> list[str]:
        """What comes after it in names of columns."""
        return [name.removeprefix(prefix) for name in self._rings if name.startswith(prefix)]


@dataclass
class _Period:
    """The one that goes on."""

    index: int
    told_s: float = 0.0
    """For how long the gateway's counts are in it."""
    arrivals: int = 0
    counts: Counts = field(default_factory=Counts)
    sampled: Counter[str] = field(default_factory=Counter)
    """Samples by what was known: `_READY` always, `_CAPACITY` where it was."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, kind: str, by_pool: Mapping[str, float]) -> None:
        """A sample of all pools; those that are not named have none."""
        self.sampled[kind] += 1
        for pool, value in by_pool.items():
            self.sums[kind + pool] += value

    def values(self, percentile: float) -> dict[str, float]:
        """What is known of it so far."""
        found = {name: total / self.sampled[name[: name.index("/") + 1]] for name, total in self.sums.items()}
        if self.told_s > 0:
            found[_DEMAND] = self.arrivals / self.told_s
            found["tokens"] = self.counts.output_tokens / self.told_s
        if self.counts.requests:
            found["attainment"] = self.counts.within / self.counts.requests
        for name, times in (("ttft", self.counts.first_token), ("tpot", self.counts.per_token)):
            for column, part in ((name, percentile / 100), (f"{name}/median", 0.5)):
                value = percentile_ms(times, part)
                if value is not None:
                    found[column] = value
        return found


@dataclass(frozen=True)
class _Told:
    """The gateway's last reading."""

    at_s: float
    arrivals: int
    totals: Totals


class LoadSeries:
    """Of one service."""

    def __init__(self) -> None:
        self._columns = {span: Columns(span.periods) for span in SeriesSpan}
        self._periods: dict[SeriesSpan, _Period] = {}
        self._told: _Told | None = None
        self._percentile = PERCENTILE

    @classmethod
    def of(cls, kept: KeptSeries, now_s: float) -> LoadSeries:
        """Goes on from what another process had.

        Args:
            now_s: seconds since 1970.
        """
        found = cls()
        for span, columns in kept.spans.items():
            found._columns[span].put_all(columns, int(now_s) // span.period_s)
        return found

    def copied(self) -> LoadSeries:
        """For another thread, which only reads what is kept."""
        found = LoadSeries()
        found._columns = {span: columns.copied() for span, columns in self._columns.items()}
        return found

    def kept(self) -> KeptSeries | None:
        """What another process goes on from; None: nothing is known."""
        spans = {span: columns.kept() for span, columns in self._columns.items()}
        if not any(columns.columns for columns in spans.values()):
            return None
        return KeptSeries.model_construct(spans=spans)

    def take(self, sample: Sample, now_s: float) -> None:
        """Counts a sample in.

        Args:
            now_s: seconds since 1970, by a clock that never goes back.
        """
        self._percentile = sample.percentile
        arrivals, counts, seconds = self._since(sample.demand, now_s)
        parts = sample.by_pool()
        for span, columns in self._columns.items():
            index = int(now_s) // span.period_s
            period = self._periods.get(span)
            if period is None or period.index != index:
                period = self._periods[span] = _Period(index)
                _forget_empty_pools(columns, index)
            period.told_s += seconds
            period.arrivals += arrivals
            period.counts.add(counts)
            pools = {*sample.ready, *columns.with_prefix(_READY)}
            period.add(_READY, {pool: sample.ready.get(pool, 0) for pool in pools})
            if sample.capacity_rps is not None:
                period.add(_CAPACITY, {pool: parts.get(pool, 0.0) for pool in pools})
                period.sums[_CAPACITY + _ALL] += sample.capacity_rps
            for name, value in period.values(sample.percentile).items():
                columns.put(name, index, value)

    def _since(self, demand: ServiceDemand | None, now_s: float) -> tuple[int, Counts, float]:
        """Arrivals and answers since the reading before, and for how long. Of the first one nothing is known but where
        counting begins; nor of a gateway that is silent, until it answers again."""
        last = self._told
        if demand is None:
            return 0, Counts(), 0.0
        self._told = _Told(now_s, demand.arrivals, demand.totals or Totals())
        if last is None:
            return 0, Counts(), 0.0
        fallen = demand.arrivals < last.arrivals
        arrivals = demand.arrivals - (0 if fallen else last.arrivals)
        return arrivals, counts_since(last.totals, self._told.totals), now_s - last.at_s

    def answer(
        self, namespace: str, name: str, span: SeriesSpan, now_s: float, type_of: Callable[[str], str]
    ) -> ServiceSeries:
        """The series until now.

        Args:
            type_of: a pool's accelerator type; empty for one that is deleted.
        """
        columns, index = self._columns[span], int(now_s) // span.period_s

        def last(column: str) -> Numbers:
            return columns.last(column, index)

        return ServiceSeries(
            namespace=namespace,
            name=name,
            span=span,
            begins=datetime.fromtimestamp((index - span.periods + 1) * span.period_s, UTC),
            percentile=self._percentile,
            requests_per_second=last(_DEMAND),
            capacity_per_second=last(_CAPACITY + _ALL),
            tokens_per_second=last("tokens"),
            attainment=last("attainment"),
            ttft_milliseconds=last("ttft"),
            ttft_median_milliseconds=last("ttft/median"),
            tpot_milliseconds=last("tpot"),
            tpot_median_milliseconds=last("tpot/median"),
            pools=tuple(
                PoolSeries(
                    pool=pool,
                    accelerator=type_of(pool),
                    ready_replicas=last(_READY + pool),
                    capacity_per_second=last(_CAPACITY + pool),
                )
                for pool in sorted(columns.with_prefix(_READY))
            ),
        )


def _first(values: Numbers) -> int | None:
    """Where the first number is; None: there are gaps only."""
    return next((place for place, value in enumerate(values) if value is not None), None)


def _forget_empty_pools(columns: Columns, index: int) -> None:
    for pool in columns.with_prefix(_READY):
        if columns.is_zero(_READY + pool, index):
            columns.forget(_READY + pool)
            columns.forget(_CAPACITY + pool)
