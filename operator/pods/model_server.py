"""The state and speed of a model server that reports by metrics alone: vLLM, from its Prometheus exposition.

    /metrics ──► Exposition ──► what runs and waits, how full the cache is      ──► ServingStatus
                     └─ two in a row ─► steps, their content, their seconds ──► Speed (scheduler/fit/online.py)

vLLM counts its steps (`iteration_tokens_total`), the tokens that it generated, the prompt tokens that it computed,
and the gaps between the tokens of each stream. Between two readings these are n steps with their total content; if the
engine stepped all the time, they took the time between the readings, and the mean step is one row for the model of a
step. It did if requests ran at both ends and the n steps, as long as a mean gap between tokens, fill the time. Other
intervals teach nothing: a pause in them is not seen. The context is that of both ends, the mean.

The exposition is a tenant's, like all that its pods answer: numbers that no counter can have are dropped, counters
that fall are those of a process that restarted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from busbar.kube.contracts.report import ServingReport
from busbar.kube.contracts.workload import ServingStatus
from busbar.operator.errors import ProbeRefused
from busbar.scheduler.fit.online import Speed

EXPOSITION_LIMIT_BYTES = 1 << 20
"""A vLLM with one model answers some 50 KiB."""
LEAST_STEPS = 5
"""Of an interval, to be one row of the model."""
FILLED = (0.9, 1.15)
"""Steps times the mean gap between tokens, as a part of the interval, where the engine stepped all the time."""
_MOST = 2.0**53

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_CACHE = "vllm:cache_config_info"
_ASLEEP = "vllm:engine_sleep_state"
_STEPS = "vllm:iteration_tokens_total_count"
_COMPUTED = "vllm:prompt_tokens_by_source_total"
_GENERATED = "vllm:generation_tokens_total"
_ENDED = "vllm:request_success_total"
_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The present name, and that of older releases; so below."""
_GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
_PROMPT, _HITS = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"
"""Their difference is what was computed, where releases do not count it by source."""
_LEVELS = {"weights_offloaded": 1, "discard_all": 2}
_READ = tuple(
    name.encode()
    for name in (
        *(_RUNNING, _WAITING, _CACHE, _ASLEEP, _STEPS, _COMPUTED, _GENERATED, _ENDED, _PROMPT, _HITS, *_USED),
        *(gap + end for gap in _GAPS for end in ("_sum", "_count")),
    )
)
_DELIMITERS = (b"{", b" ")


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
    generated: float
    computed: float
    """Prompt tokens that were not in the prefix cache."""
    gaps: float
    gaps_s: float

    @classmethod
    def parsed(cls, answer: bytes) -> Exposition:
        """Raises ProbeRefused if it is not the exposition of a vLLM that counts."""
        values: dict[str, float] = {}
        engines: set[str] = set()
        cache, block, level = 0, 0, 0
        for name, labels, value in _samples(answer):
            if not (math.isfinite(value) and 0 <= value <= _MOST):
                continue
            if name == _RUNNING:
                engines.add(labels.get("engine", ""))
            if name == _CACHE:
                blocks, size = (_whole(labels.get(key)) for key in ("num_gpu_blocks", "block_size"))
                cache += _whole(labels.get("kv_cache_size_tokens")) or blocks * size
                block = size
            elif name == _ASLEEP:
                level = max(level, _LEVELS.get(labels.get("sleep_state", ""), 0) if value else 0)
            elif name != _COMPUTED or labels.get("source") == "local_compute":
                values[name] = values.get(name, 0.0) + value
        if _RUNNING not in values:
            raise ProbeRefused(
                f"/metrics has no {_RUNNING}: either this is no vLLM, or --disable-log-stats is among its arguments"
            )
        count = max(1, len(engines))
        gap = _GAPS[0] if f"{_GAPS[0]}_count" in values else _GAPS[1]
        without_hits = max(0.0, values.get(_PROMPT, 0.0) - values.get(_HITS, 0.0))
        used = values.get(_USED[0], values.get(_USED[1], 0.0)) / count
        return cls(
            engines=count,
            running=int(values[_RUNNING]),
            waiting=int(values.get(_WAITING, 0)),
            cache_used=min(1.0, used),
            cache_tokens=min(cache, int(_MOST)),
            block_tokens=block,
            sleep_level=level,
            ended=int(values.get(_ENDED, 0)),
            steps=values.get(_STEPS, 0.0),
            generated=values.get(_GENERATED, 0.0),
            computed=values.get(_COMPUTED, without_hits),
            gaps=values.get(f"{gap}_count", 0.0),
            gaps_s=values.get(f"{gap}_sum", 0.0),
        )

    @property
    def context_tokens(self) -> float:
        """Of all sequences of one engine, in whole blocks."""
        return self.cache_used * self.cache_tokens / self.engines


@dataclass
class ModelServer:
    """One replica that is read by its metrics."""

    owner_uid: str
    served: str = ""
    """What it runs: image and arguments, as `Pod.served`."""
    speed: Speed = field(default_factory=Speed)
    last: tuple[float, Exposition] | None = None

    def take(self, answer: bytes, at_s: float) -> ServingStatus:
        """Its status by this answer, which came at `at_s` of a steady clock.

        Raises:
            ProbeRefused: the answer is no exposition of a vLLM.
        """
        found = Exposition.parsed(answer)
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
                    "class": f"serve-vllm-{hashlib.sha256(told.encode()).hexdigest()[:10]}",
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
        if not FILLED[0] <= steps * gaps_s / gaps / seconds <= FILLED[1]:
            return
        context = (before.context_tokens + now.context_tokens) / 2
        # The first token of a stream comes with its prompt: a sequence that decodes has a gap in each step.
        self.speed.record(gaps, steps * context, computed, seconds, steps=steps)


def _samples(answer: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of the samples that are used; the other lines, most of them buckets, are not parsed."""
    lines = [
        line
        for line in answer.splitlines()
        if line.startswith(b"vllm:")
        and any(line.startswith(name + end) for name in _READ for end in _DELIMITERS)
    ]
    try:
        for family in text_string_to_metric_families(b"\n".join(lines).decode() + "\n"):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ProbeRefused(f"/metrics is no exposition that Prometheus reads: {error}") from error


def _whole(text: str | None) -> int:
    """A whole number of a label; 0 where it is none."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else 0
