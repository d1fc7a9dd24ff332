"""What a run says about itself: one object, written by the training thread and read by the HTTP threads.

`to_json` is the document of `GET /status`, which the operator reads; without the losses it is also the
container's termination message. `to_prometheus` is the same as metrics.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from busbar.kube.contracts.workload import TrainingStatus

PREFIX = "busbar_training_"
WARM_UP_STEPS = 3  # not counted in speeds
LOSSES_SHOWN = 200
MESSAGE_LIMIT = 1024  # of the contract
FIELDS = frozenset(field.alias or name for name, field in TrainingStatus.model_fields.items()) - {"losses"}


class Status(Collector):
    """Thread-safe record of one run."""

    def __init__(self, clock: Any = time.time) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._said = TrainingStatus(message="starting")
        self._losses: deque[tuple[int, float]] = deque(maxlen=LOSSES_SHOWN)
        self._speeds: deque[tuple[float, int]] = deque(maxlen=200)
        self._steps_here = 0
        self._link = {"load": 0, "store": 0}
        self._link_seconds: dict[str, float] = {}
        self._stall_seconds = 0.0
        self._saved_at: float | None = None

    def update(self, **facts: Any) -> None:
        """Set fields by their JSON names; unknown ones are a mistake."""
        with self._lock:
            unknown = set(facts) - FIELDS
            if unknown:
                raise KeyError(f"no such status fields: {sorted(unknown)}")
            if "message" in facts:
                facts["message"] = str(facts["message"])[:MESSAGE_LIMIT]
            self._set(facts)

    def _set(self, facts: Mapping[str, Any]) -> None:
        self._said = TrainingStatus.model_validate({**self._said.model_dump(by_alias=True), **facts})

    def finished_step(
        self, step: int, loss: float, seconds: float, tokens: int, *, whole: bool = True
    ) -> None:
        """`whole`: its sequences are; only such steps tell how fast the run is."""
        finite = math.isfinite(loss)  # JSON has no word for the others, and API servers refuse them
        with self._lock:
            if finite:
                self._losses.append((step, loss))
            self._steps_here += whole
            if not whole or self._steps_here == 1:
                self._speeds.clear()  # those before were of shorter sequences
            if self._steps_here > WARM_UP_STEPS or not self._speeds:
                if self._steps_here == WARM_UP_STEPS + 1:
                    self._speeds.clear()
                self._speeds.append((seconds, tokens))
            per_step = statistics.median(seconds for seconds, _ in self._speeds)
            total = self._said.total_steps
            self._set(
                {
                    "step": step,
                    "loss": loss if finite else None,
                    "tokens": self._said.tokens + tokens,
                    "tokensPerSecond": round(tokens / per_step, 1),
                    "etaSeconds": round((total - step) * per_step, 1) if total else None,
                }
            )

    def durable_checkpoint(
        self, step: int, saved_at: float, size: int, pace: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """`saved_at` in seconds since the epoch; `pace` as `DiskPace.said` gives it."""
        moment = datetime.fromtimestamp(saved_at, UTC).isoformat(timespec="seconds")
        with self._lock:
            self._saved_at = saved_at
            self._set({"checkpoint": {"step": step, "savedAt": moment, "bytes": size, **pace}})

    def count_traffic(
        self,
        moved: Mapping[str, int],
        stall_seconds: float,
        link_seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Bytes by direction, and the seconds that their copies took, where that is known."""
        with self._lock:
            self._link, self._link_seconds = dict(moved), dict(link_seconds)
            self._stall_seconds = stall_seconds

    def traffic(self) -> tuple[dict[str, int], float]:
        """Bytes moved by direction, and seconds that training waited for checkpoints."""
        with self._lock:
            return dict(self._link), self._stall_seconds

    @property
    def phase(self) -> str:
        with self._lock:
            return self._said.phase.value

    @property
    def step(self) -> int:
        with self._lock:
            return self._said.step

    @property
    def tokens_per_second(self) -> float | None:
        with self._lock:
            return self._said.tokens_per_second

    @property
    def steady_samples(self) -> int:
        """Steps after warm-up whose speed is known."""
        with self._lock:
            return len(self._speeds) if self._steps_here > WARM_UP_STEPS else 0

    @property
    def steady_step_s(self) -> float | None:
        """Median seconds of a step after warm-up."""
        with self._lock:
            if self._steps_here <= WARM_UP_STEPS:
                return None
            return statistics.median(seconds for seconds, _ in self._speeds)

    def to_json(self, *, losses: bool = True) -> dict[str, Any]:
        with self._lock:
            document = self._said.model_dump(mode="json", by_alias=True, exclude={"losses"})
            if losses:
                document["losses"] = [[step, loss] for step, loss in self._losses]
            return document

    def to_prometheus(self) -> bytes:
        """The metrics of `GET /metrics`, in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment; what is not known yet has none."""
        said = self.to_json(losses=False)
        link, stall = self.traffic()
        with self._lock:
            link_seconds = dict(self._link_seconds)
        checkpoint = said["checkpoint"] or {}
        yield from _gauge("step", "Finished optimizer steps", said["step"])
        yield from _gauge("steps", "Optimizer steps of the whole run", said["totalSteps"])
        yield from _gauge("loss", "Mean loss of the last step, nats per token", said["loss"])
        yield _counter("tokens", "Tokens trained by this process", said["tokens"])
        yield from _gauge("tokens_per_second", "Median speed after warm-up", said["tokensPerSecond"])
        yield from _gauge("model_tflops", "The same in model TFLOP/s", said["modelTflops"])
        yield from _gauge(
            "lost_steps", "Finished steps that the last restart had to repeat", said["lostSteps"]
        )
        yield from _gauge(
            "skipped_steps", "Steps whose gradient norm was not finite, in this run", said["skippedSteps"]
        )
        yield from _gauge("replay_mismatches", "Repeated steps with another loss", said["replayMismatches"])
        yield from _gauge("checkpoint_step", "Step of the last durable checkpoint", checkpoint.get("step"))
        yield from _gauge("checkpoint_bytes", "Size of the last durable checkpoint", checkpoint.get("bytes"))
        yield from _gauge(
            "checkpoint_age_seconds", "Age of the last durable checkpoint", self.checkpoint_age_s()
        )
        yield from _gauge(
            "checkpoint_bytes_per_second",
            "Rate at which the disk took the last checkpoint",
            checkpoint.get("bytesPerSecond"),
        )
        yield _counter("checkpoint_stall_seconds", "Time training waited for checkpoints", stall)
        spent = CounterMetricFamily(
            PREFIX + "phase_seconds", "What steps were spent on, in this process", labels=("phase",)
        )
        for phase, seconds in (said["phaseSeconds"] or {}).items():
            spent.add_metric((phase,), seconds)
        yield spent
        workers = GaugeMetricFamily(
            PREFIX + "rank_own_seconds",
            "Seconds of a step that a rank does not spend in exchanges",
            labels=("rank",),
        )
        for worker in said["workers"]:
            workers.add_metric((str(worker["rank"]),), worker["ownSeconds"])
        if workers.samples:
            yield workers
        moved = CounterMetricFamily(PREFIX + "link_bytes", "State copied by direction", labels=("direction",))
        for direction, size in link.items():
            moved.add_metric((direction,), size)
        yield moved
        copied = CounterMetricFamily(
            PREFIX + "link_seconds", "Seconds in which a direction of the link copied", labels=("direction",)
        )
        for direction, seconds in link_seconds.items():
            copied.add_metric((direction,), seconds)
        if copied.samples:
            yield copied
        arena = GaugeMetricFamily(
            PREFIX + "arena_bytes", "Planned bytes by arena and owner", labels=("arena", "owner")
        )
        for side in ("device", "host"):
            for owner, size in ((said["memory"] or {}).get(f"{side}Owners") or {}).items():
                arena.add_metric((side, owner), size)
        if arena.samples:
            yield arena

    def checkpoint_age_s(self) -> float | None:
        with self._lock:
            return None if self._saved_at is None else max(0.0, self._clock() - self._saved_at)

    def write_termination_message(self, path: Path) -> None:
        """Leave the last numbers for whoever looks at the finished container. Absent file: nobody looks."""
        if not path.exists():
            return
        with self._lock:
            path.write_text(self._said.termination_message())


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(PREFIX + name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)
