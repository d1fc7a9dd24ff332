"""The state and speed of a model server that reports by metrics alone, from its Prometheus exposition.

    /metrics ──► Exposition ──► what runs and waits, how full the cache is      ──► ServingStatus
                     └─ two in a row ─► steps, their content, their seconds ──► Speed (scheduler/fit/online.py)

How each engine names these is a row of `kube/types/engines.py`. It counts its steps, the tokens that it generated, the
prompt tokens that it computed, and the gaps between the tokens of each stream. Between two readings these are n steps with
their total content; if the engine stepped all the time, they took the time between the readings, and the mean step is one
row for the model of a step. It did if requests ran at both ends and the steps that made tokens, each as long as a mean gap
between tokens, fill the time. Other intervals teach nothing: a pause in them is not seen. The context is that of both ends,
the mean, and is read by the steps that make tokens.

The exposition is a tenant's, like all that its pods answer: numbers that no counter can have are dropped, counters
that fall are those of a process that restarted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from busbar.kube.contracts.report import ServingReport
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types.engines import EngineMetrics, ForeignEngine, Reading, Series
from busbar.operator.errors import ProbeRefused
from busbar.scheduler.fit.online import Speed

EXPOSITION_LIMIT_BYTES = 1 << 20
"""A vLLM with one model answers some 50 KiB."""
LEAST_STEPS = 5
"""Of an interval, to be one row of the model."""
FILLED = (0.9, 1.15)
"""Steps times the mean gap between tokens, as a part of the interval, where the engine stepped all the time."""
_MOST = 2.0**53
_DELIMITERS = (b"{", b" ")


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Exposition:
    """What one answer says, added up over the engines of a data-parallel server."""

    engines: int
    running: int
    waiting: int
    cache_used: float
    """Part of the KV cache, 0 to 1."""
    cache_tokens: int
    block_tokens: int
    sleep_level: int
    ended: int
    steps: float
    decode_steps: float
    """Those that made a token for each sequence."""
    generated: float
    computed: float
    """Prompt tokens that were not in the prefix cache."""
    gaps: float
    gaps_s: float

    @classmethod
    def parsed(cls, engine: ForeignEngine, answer: bytes) -> Exposition:
        """Raises ProbeRefused if it is not the exposition of such an engine that counts."""
        metrics = engine.metrics
        samples = [s for s in _samples(metrics, answer) if math.isfinite(s.value) and 0 <= s.value <= _MOST]
        first = _first_ranks(metrics, samples)
        if not first:
            raise ProbeRefused(
                f"/metrics has no {metrics.engines}, which {engine.title} {engine.version} has: either this is no"
                f" {engine.title}, or {engine.uncounted}"
            )
        counted = [s for s in samples if _rank(metrics, s) in (None, first.get(_engine_of(metrics, s)))]
        levels = [_total(reading, counted) > 0 for reading in metrics.levels]
        return cls(
            engines=len(first),
            running=int(_total(metrics.running, counted)),
            waiting=int(_total(metrics.waiting, counted)),
            cache_used=min(1.0, _total(metrics.used, counted) / len(first)),
            cache_tokens=int(min(_total(metrics.cache_tokens, counted), _MOST)),
            block_tokens=int(max(_values(metrics.block_tokens, counted), default=0)),
            sleep_level=max((level for level, is_on in enumerate(levels, 1) if is_on), default=0),
            ended=int(_total(metrics.ended, counted)),
            steps=_total(metrics.steps, counted),
            decode_steps=_total(metrics.decode_steps, counted),
            generated=_total(metrics.generated, counted),
            computed=_total(metrics.computed, counted),
            gaps=_total(metrics.gaps, counted),
            gaps_s=_total(metrics.gaps_s, counted),
        )

    @property
    def context_tokens(self) -> float:
        """Of all sequences of one engine, in whole blocks."""
        return self.cache_used * self.cache_tokens / self.engines


@dataclass
class ModelServer:
    """One replica that is read by its metrics."""

    engine: ForeignEngine
    owner_uid: str
    served: str = ""
    """What it runs: image and arguments, as `Pod.served`."""
    speed: Speed = field(default_factory=Speed)
    last: tuple[float, Exposition] | None = None

    def take(self, answer: bytes, at_s: float) -> ServingStatus:
        """Its status by this answer, which came at `at_s` of a steady clock.

        Raises:
            ProbeRefused: the answer is no exposition of its engine.
        """
        found = Exposition.parsed(self.engine, answer)
        self.saw(found, at_s)
        blocks = found.cache_tokens // found.block_tokens if found.block_tokens else 0
        told = f"{self.owner_uid}/{self.served}"
        return ServingStatus(
            ready=found.sleep_level == 0,
            running=found.running,
            waiting=found.waiting,
            kv_blocks_total=blocks,
            kv_blocks_free=blocks - round(blocks * found.cache_used),
            requests_total=found.ended,
            tokens_total=int(found.generated),
            sleep_level=found.sleep_level,
            report=ServingReport.model_validate(
                {
                    # The class of this service alone, as long as it runs this image with these arguments.
                    "class": f"serve-{self.engine.engine}-{hashlib.sha256(told.encode()).hexdigest()[:10]}",
                    "accelerator": "",
                    "kvTokens": found.cache_tokens,
                    "kvBlockTokens": found.block_tokens,
                    **self.speed.report(),
                }
            ),
        )

    def saw(self, found: Exposition, at_s: float) -> None:
        """Learns from what one answer says."""
        if self.last is not None:
            self._learn(*self.last, at_s, found)
        self.last = (at_s, found)

    def _learn(self, before_s: float, before: Exposition, now_s: float, now: Exposition) -> None:
        steps, generated = now.steps - before.steps, now.generated - before.generated
        computed, gaps = now.computed - before.computed, now.gaps - before.gaps
        gaps_s, seconds = now.gaps_s - before.gaps_s, (now_s - before_s) * now.engines
        is_restarted = min(steps, generated, computed, gaps, gaps_s) < 0 or now.engines != before.engines
        if is_restarted or steps < LEAST_STEPS or not gaps or min(before.running, now.running) < 1:
            return
        decoded = now.decode_steps - before.decode_steps
        if not FILLED[0] <= decoded * gaps_s / gaps / seconds <= FILLED[1]:
            return
        context = (before.context_tokens + now.context_tokens) / 2
        # The first token of a stream comes with its prompt: a sequence that decodes has a gap in each step of these.
        self.speed.record(gaps, decoded * context, computed, seconds, steps=steps)


def _samples(metrics: EngineMetrics, answer: bytes) -> list[_Sample]:
    """The samples that are used; the other lines, most of them buckets, are not parsed."""
    prefix, names = metrics.prefix.encode(), _names(metrics)
    lines = [
        line
        for line in answer.splitlines()
        if line.startswith(prefix)
        and any(line.startswith(name + end) for name in names for end in _DELIMITERS)
    ]
    try:
        families = list(text_string_to_metric_families(b"\n".join(lines).decode() + "\n"))
    except (ValueError, KeyError, IndexError) as error:
        raise ProbeRefused(f"/metrics is no exposition that Prometheus reads: {error}") from error
    return [_Sample(s.name, s.labels, s.value) for family in families for s in family.samples]


def _names(metrics: EngineMetrics) -> frozenset[bytes]:
    return frozenset(name.encode() for name in metrics.names)


def _engine_of(metrics: EngineMetrics, sample: _Sample) -> str:
    return sample.labels.get(metrics.engine_label, "")


def _rank(metrics: EngineMetrics, sample: _Sample) -> tuple[int, ...] | None:
    """Which process of its engine tells it; None: it is the whole engine's or server's."""
    if not metrics.ranks or not all(label in sample.labels for label in metrics.ranks):
        return None
    return tuple(_whole(sample.labels[label]) for label in metrics.ranks)


def _first_ranks(metrics: EngineMetrics, samples: Iterable[_Sample]) -> dict[str, tuple[int, ...]]:
    """The first process of each engine."""
    found: dict[str, tuple[int, ...]] = {}
    for sample in samples:
        if sample.name == metrics.engines:
            engine, rank = _engine_of(metrics, sample), _rank(metrics, sample) or ()
            found[engine] = min(found.get(engine, rank), rank)
    return found


def _total(reading: Reading, samples: Iterable[_Sample]) -> float:
    """At least 0."""
    return max(0.0, math.fsum(_values(reading, samples)))


def _values(reading: Reading, samples: Iterable[_Sample]) -> list[float]:
    """What the first sum adds up of which there is a sample; empty where there is none."""
    for terms in reading:
        found = [series.sign * _value(series, s) for series in terms for s in samples if _is_of(series, s)]
        if found:
            return found
    return []


def _is_of(series: Series, sample: _Sample) -> bool:
    if sample.name != series.name or any(sample.labels.get(k, "") != v for k, v in series.labels):
        return False
    return not series.in_labels or _value(series, sample) > 0


def _value(series: Series, sample: _Sample) -> float:
    if not series.in_labels:
        return sample.value
    return math.prod(_whole(sample.labels.get(label)) for label in series.in_labels)


def _whole(text: str | None) -> int:
    """A whole number of a label; 0 where it is none."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else 0
