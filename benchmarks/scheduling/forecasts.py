"""The forecasts row: `what_if`'s forecasts for jobs that waited, compared with their true starts.

A forecast is made for every `EVERY`-th job that has to wait, at its submission, with the data of that time: the
snapshot (no lengths), the jobs that have finished, and the outcomes so far. The yardstick forecasts with the
quantiles of the waits that ended in the trailing week, by (virtual cluster, GPUs), then by virtual cluster, then of
all, with at least `LEAST` waits; once over all jobs and once over those that waited more than 60 s, and the better of
the two counts.

About 20 minutes of one core: four for the replay, the rest for the forecasts. Both resume where an interrupted run
stopped (parts.py).
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.progress import shown
from benchmarks.scheduling.parts import folder, kept, lines
from benchmarks.scheduling.philly import (
    EXACT_FROM,
    FIRST,
    JOBS,
    LAST,
    Board,
    Load,
    Row,
    agreement,
    exact,
    first_starts,
    light,
    load,
    size_m,
)
from numpy.typing import NDArray

from busbar.scheduler import Finished, Forecast, History, Job, Outcome, Policy, what_if

EVERY = 5
"""A forecast is made for one waiting job in so many: some 2,300 of the month."""
WAITS_S = 60.0
WEEK_S = 7 * 86400.0
LEAST = 5
LATEST = LAST + 30 * 86400.0
"""Arrivals after the window compete with the jobs that still wait."""


class Trailing:
    """Quantiles of the waits that ended in the trailing week."""

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self.rows: deque[tuple[float, str, int, float]] = deque()

    def add(self, now: float, job: Job) -> None:
        waited = now - job.submitted_at_s
        if waited > self.least_s:
            self.rows.append((now, job.tenant, size_m(job), waited))

    def quantiles(self, now: float, job: Job) -> tuple[float, float]:
        while self.rows and self.rows[0][0] < now - WEEK_S:
            self.rows.popleft()
        same = [(m, waited) for _, tenant, m, waited in self.rows if tenant == job.tenant]
        waits = [waited for m, waited in same if m == size_m(job)]
        if len(waits) < LEAST:
            waits = [waited for _, waited in same]
        if len(waits) < LEAST:
            waits = [row[3] for row in self.rows]
        return (float(np.quantile(waits, 0.5)), float(np.quantile(waits, 0.9))) if waits else (0.0, 0.0)


Asked = dict[str, Any]
Promise = tuple[tuple[float, float], tuple[float, float]]
"""(p50, p90) as simulated, and as corrected and published."""


class Promises:
    """Answers of `what_if`, one line of a file each; those of an interrupted run are reused."""

    def __init__(self, part: Path) -> None:
        self._known: dict[str, Promise | None] = dict(map(_read, lines(part)))
        self._part = part

    def get(self, job: str, make: Callable[[], Forecast]) -> Promise | None:
        """None: the job starts now, or can never start."""
        if job not in self._known:
            made = make()
            found: Promise | None = None
            if made.raw is not None and made.p50_s is not None and made.p90_s is not None:
                found = made.raw, (made.p50_s, made.p90_s)
            with self._part.open("a") as file:
                file.write(json.dumps([job, found]) + "\n")
            self._known[job] = found
        return self._known[job]


def _read(line: list[Any]) -> tuple[str, Promise | None]:
    job, found = line
    return job, None if found is None else (tuple(found[0]), tuple(found[1]))


def ask(
    trace: Load, rows: Iterable[Row], policy: Policy, promises: Promises, every: int = EVERY
) -> Iterator[tuple[float, Asked]]:
    """Yields forecasts for every n-th job that waits with its true wait, and the share of the window that is done."""
    board, history = Board(trace), History()
    yardsticks = Trailing(-1.0), Trailing(WAITS_S)
    coming, open_, count = deque(trace.jobs), dict[str, Asked](), 0
    pending = deque(sorted(rows, key=lambda row: row.at))
    while pending and (coming or open_):
        now = min(pending[0].at, coming[0].arrival_s if coming else pending[0].at)
        arrived = []
        while coming and coming[0].arrival_s <= now:
            board.submit(coming[0])
            arrived.append(coming.popleft().id)
        while pending and pending[0].at <= now:
            row = pending.popleft()
            before = board.apply(row)
            if row.kind == "end":
                history.add(_finished(before, now))
            elif row.kind == "start" and before.run is None and before.attained_s == 0:
                history.started(row.job, now)
                for yardstick in yardsticks:
                    yardstick.add(now, before)
                if row.job in open_:
                    found = open_.pop(row.job) | {"waited_s": now - before.submitted_at_s}
                    yield min(1.0, max(0.0, (now - EXACT_FROM) / (LAST - EXACT_FROM))), found
        for name in arrived:
            job = board.live.get(name)
            if job is None or job.run is not None or not EXACT_FROM <= now < LAST:
                continue
            count += 1
            if count % every:
                continue
            made = promises.get(name, partial(_what_if, board, policy, job, now, history, count))
            if made is None:
                continue
            raw, ours = made
            history.promised(name, Outcome(now, job.tenant, size_m(job), raw, promised=ours))
            open_[name] = {
                "job": name,
                "at_s": now,
                "tenant": job.tenant,
                "gpus": size_m(job) // 1000,
                "ours": ours,
                "raw": raw,
                "week": yardsticks[0].quantiles(now, job),
                "week_waiting": yardsticks[1].quantiles(now, job),
            }


def _what_if(board: Board, policy: Policy, job: Job, now: float, history: History, seed: int) -> Forecast:
    return what_if(board.snapshot(now), policy, job, now, history, seed)


def _finished(job: Job, now: float) -> Finished:
    seconds = job.attained_s / (size_m(job) / 1000)
    return Finished(job.tenant, size_m(job), seconds, job.submitted_at_s, now, job.min_pods)


def pinball(waited: NDArray[np.float64], forecast: NDArray[np.float64]) -> float:
    """Mean of the losses at p50 and p90, in hours."""
    total = 0.0
    for column, level in enumerate((0.5, 0.9)):
        off = (waited - forecast[:, column]) / 3600
        total += float(np.maximum(level * off, (level - 1) * off).mean()) / 2
    return total


def score(asked: list[Asked]) -> dict[str, Any]:
    """Coverage and loss of jobs that were measured: submitted in the window, waited more than 60 s."""
    asked = [a for a in asked if FIRST <= a["at_s"] < LAST and a["waited_s"] > WAITS_S]
    waited = np.array([a["waited_s"] for a in asked])
    row: dict[str, Any] = {
        "forecasts": len(asked),
        "median_wait_h": float(np.median(waited)) / 3600,
        "p99_wait_h": float(np.quantile(waited, 0.99)) / 3600,
    }
    for who in ("ours", "raw", "week", "week_waiting"):
        forecast = np.array([a[who] for a in asked])
        row[who] = {
            "before_p50": float((waited <= forecast[:, 0]).mean()),
            "before_p90": float((waited <= forecast[:, 1]).mean()),
            "pinball_h": pinball(waited, forecast),
        }
    best = min(row["week"]["pinball_h"], row["week_waiting"]["pinball_h"])
    row["pinball_below_best_week"] = 1 - row["ours"]["pinball_h"] / best
    row["bars"] = {
        "before_p50": {"between": [0.45, 0.55], "met": 0.45 <= row["ours"]["before_p50"] <= 0.55},
        "before_p90": {"between": [0.85, 0.95], "met": 0.85 <= row["ours"]["before_p90"] <= 0.95},
        "pinball_below_best_week": {"at_least": 0.2, "met": row["pinball_below_best_week"] >= 0.2},
    }
    return row


def by_week(asked: list[Asked]) -> list[dict[str, Any]]:
    """The same, week by week of submission."""
    weeks = []
    for week in range(math.ceil((LAST - FIRST) / WEEK_S)):
        begin = FIRST + week * WEEK_S
        part = [
            a for a in asked if begin <= a["at_s"] < min(begin + WEEK_S, LAST) and a["waited_s"] > WAITS_S
        ]
        if part:
            row = score(part)
            weeks.append(
                {"week": week + 1}
                | {key: row[key] for key in ("forecasts", "ours", "raw", "pinball_below_best_week")}
            )
    return weeks


def replayed(trace: Load, policy: Policy, model: list[Row]) -> Iterator[tuple[float, list[Any]]]:
    """The planner's actions until the last measured job has started, with the share of jobs that have started."""
    missing = {job.id for job in trace.jobs if FIRST <= job.arrival_s < LAST}
    measured = len(missing)
    for row in exact(trace, policy, [row for row in model if row.at < EXACT_FROM], EXACT_FROM):
        if row.kind == "start":
            missing.discard(row.job)
        yield 1 - len(missing) / measured, list(astuple(row))
        if not missing:
            return


def rows(data: Path, every: int = EVERY) -> list[dict[str, Any]]:
    """The row, and how well the light model, given the true durations, agrees with the planner."""
    trace, policy = load(data), Policy()
    parts = folder("forecasts", data / JOBS, policy.hash, every)
    model = light(trace, policy, LATEST)
    happened = [row for row in model if row.at < EXACT_FROM]
    replay = kept(parts / "replay.jsonl", shown("replay", replayed(trace, policy, model)))
    happened += [Row(at, kind, job, tuple(nodes)) for at, kind, job, nodes in replay]
    promises = Promises(parts / "forecasts.jsonl")
    asked = list(shown("forecasts", ask(trace, happened, policy, promises, every)))
    first = first_starts(happened)
    waits = np.array([first[job.id] - job.arrival_s for job in trace.jobs if FIRST <= job.arrival_s < LAST])
    forecast = {"name": "what_if, one waiting job in so many", "every": every} | score(asked)
    forecast |= {
        "by_week": by_week(asked),
        "jobs": len(waits),
        "waiting": float((waits > WAITS_S).mean()),
        "median_wait_of_all_h": float(np.median(waits[waits > WAITS_S])) / 3600,
    }
    alike = agreement(trace, happened, model, FIRST, FIRST + WEEK_S)
    return [forecast, {"name": "light model with true durations, first week, against the planner"} | alike]
