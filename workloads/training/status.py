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
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from busbar.kube.contracts.workload import TrainingStatus

WARM_UP_STEPS = 3  # not counted in speeds
LOSSES_SHOWN = 200
MESSAGE_LIMIT = 1024  # of the contract


class Status:
    """Thread-safe record of one run."""

    def __init__(self, clock: Any = time.time) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._facts: dict[str, Any] = {
            "kind": "training",
            "phase": "Preparing",
            "message": "starting",
            "step": 0,
            "totalSteps": 0,
            "loss": None,
            "tokensPerSecond": None,
            "tokens": 0,
            "etaSeconds": None,
            "checkpoint": None,
            "resumedFromStep": None,
            "lostSteps": 0,
            "restoredAttempt": None,
            "replayedSteps": 0,
            "replayMismatches": 0,
            "mode": None,
            "memory": None,
            "evaluation": None,
            "fingerprint": None,
            "report": {},
        }
        self._losses: deque[tuple[int, float]] = deque(maxlen=LOSSES_SHOWN)
        self._speeds: deque[tuple[float, int]] = deque(maxlen=200)
        self._steps_here = 0
        self._link = {"load": 0, "store": 0}
        self._stall_seconds = 0.0
        self._saved_at: float | None = None

    def update(self, **facts: Any) -> None:
        """Set fields by their JSON names; unknown ones are a mistake."""
        with self._lock:
            unknown = set(facts) - set(self._facts)
            if unknown:
                raise KeyError(f"no such status fields: {sorted(unknown)}")
            self._facts.update(facts)
            self._facts["message"] = str(self._facts["message"])[:MESSAGE_LIMIT]

    def finished_step(self, step: int, loss: float, seconds: float, tokens: int) -> None:
        finite = math.isfinite(loss)  # JSON has no word for the others, and API servers refuse them
        with self._lock:
            self._facts.update(step=step, loss=loss if finite else None)
            self._facts["tokens"] += tokens
            if finite:
                self._losses.append((step, loss))
            self._steps_here += 1
            if self._steps_here > WARM_UP_STEPS or not self._speeds:
                if self._steps_here == WARM_UP_STEPS + 1:
                    self._speeds.clear()
                self._speeds.append((seconds, tokens))
            per_step = statistics.median(seconds for seconds, _ in self._speeds)
            self._facts["tokensPerSecond"] = round(tokens / per_step, 1)
            if self._facts["totalSteps"]:
                self._facts["etaSeconds"] = round((self._facts["totalSteps"] - step) * per_step, 1)

    def durable_checkpoint(self, step: int, saved_at: float, size: int) -> None:
        """`saved_at` in seconds since the epoch."""
        moment = datetime.fromtimestamp(saved_at, UTC).isoformat(timespec="seconds")
        with self._lock:
            self._saved_at = saved_at
            self._facts["checkpoint"] = {"step": step, "savedAt": moment, "bytes": size}

    def count_traffic(self, loaded: int, stored: int, stall_seconds: float) -> None:
        with self._lock:
            self._link = {"load": loaded, "store": stored}
            self._stall_seconds = stall_seconds

    @property
    def phase(self) -> str:
        with self._lock:
            return str(self._facts["phase"])

    @property
    def step(self) -> int:
        with self._lock:
            return int(self._facts["step"])

    @property
    def steady_samples(self) -> int:
        """Steps after warm-up whose speed is known."""
        with self._lock:
            return len(self._speeds) if self._steps_here > WARM_UP_STEPS else 0

    def to_json(self, *, losses: bool = True) -> dict[str, Any]:
        with self._lock:
            document = dict(self._facts)
            if losses:
                document["losses"] = [[step, loss] for step, loss in self._losses]
            return document

    def to_prometheus(self) -> str:
        """The metrics of `GET /metrics`."""
        document = self.to_json(losses=False)
        with self._lock:
            link, stall = dict(self._link), self._stall_seconds
        memory, checkpoint = document["memory"] or {}, document["checkpoint"] or {}
        rows: list[tuple[str, str, str, Mapping[str, object], float | None]] = [
            ("step", "gauge", "Finished optimizer steps", {}, document["step"]),
            ("steps", "gauge", "Optimizer steps of the whole run", {}, document["totalSteps"]),
            ("loss", "gauge", "Mean loss of the last step, nats per token", {}, document["loss"]),
            ("tokens_total", "counter", "Tokens trained by this process", {}, document["tokens"]),
            ("tokens_per_second", "gauge", "Median speed after warm-up", {}, document["tokensPerSecond"]),
            (
                "lost_steps",
                "gauge",
                "Finished steps that the last restart had to repeat",
                {},
                document["lostSteps"],
            ),
            (
                "replay_mismatches",
                "gauge",
                "Repeated steps with another loss",
                {},
                document["replayMismatches"],
            ),
            ("checkpoint_step", "gauge", "Step of the last durable checkpoint", {}, checkpoint.get("step")),
            ("checkpoint_bytes", "gauge", "Size of the last durable checkpoint", {}, checkpoint.get("bytes")),
            (
                "checkpoint_age_seconds",
                "gauge",
                "Age of the last durable checkpoint",
                {},
                self._age(),
            ),
            ("checkpoint_stall_seconds_total", "counter", "Time training waited for checkpoints", {}, stall),
            ("link_bytes_total", "counter", "State copied by direction", {"direction": "load"}, link["load"]),
            (
                "link_bytes_total",
                "counter",
                "State copied by direction",
                {"direction": "store"},
                link["store"],
            ),
        ]
        for side in ("device", "host"):
            for owner, size in (memory.get(f"{side}Owners") or {}).items():
                labels = {"arena": side, "owner": owner}
                rows.append(("arena_bytes", "gauge", "Planned bytes by arena and owner", labels, size))
        return _exposition(rows)

    def _age(self) -> float | None:
        with self._lock:
            return None if self._saved_at is None else max(0.0, self._clock() - self._saved_at)

    def write_termination_message(self, path: Path) -> None:
        """Leave the last numbers for whoever looks at the finished container. Absent file: nobody looks."""
        if not path.exists():
            return
        text = TrainingStatus.model_validate(self.to_json(losses=False)).termination_message()
        path.write_text(text)


def _exposition(rows: list[tuple[str, str, str, Mapping[str, object], float | None]]) -> str:
    lines: list[str] = []
    announced: set[str] = set()
    for name, kind, text, labels, value in rows:
        if value is None:
            continue
        full = f"busbar_training_{name}"
        if full not in announced:
            announced.add(full)
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        shown = ",".join(f'{key}="{label}"' for key, label in labels.items())
        lines.append(f"{full}{{{shown}}} {value}" if shown else f"{full} {value}")
    return "\n".join(lines) + "\n"
