"""Decides for which waiting jobs a forecast of their start is computed next, and passes the results on.

    last plan's waiting jobs ──► due ──► worker.py (own process) ──► Forecast ──► next round's decisions ──► status
    a preview's draft ──► question_of ──► previews/worker.py (a process that stays)

Forecasts never delay a round: a batch is small, computed in another process, and followed by a pause that keeps its
CPU time to a share of one core. None is made in the first minute of a burst of jobs. Half of a batch is for the newest jobs without a forecast, whose owners are likely to look; the
rest is for the jobs with the oldest forecasts. A forecast that took too long is tried again after the others.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.operator.decisions import Forecast
from busbar.operator.forecasts.job_history import JobHistory, PromiseStatistics
from busbar.operator.forecasts.worker import Answer, Question, compute
from busbar.operator.metrics import Metrics
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.caches import Caches
from busbar.scheduler import JobId, Plan, Policy, Snapshot

log = logging.getLogger(__name__)

BURST_JOBS = 20
"""Submitted within `BURST_S`: a burst. Its jobs are admitted or told why they wait before anything is forecast."""
BURST_S = 60.0
LIMIT = 4.0
"""A batch is stopped after this many times its computing time, however slow the machine is."""


@dataclass(frozen=True)
class Waiting:
    """A waiting job, and when its last forecast was made."""

    job: JobId
    submitted_at_s: float
    position: int
    forecast_at_s: float | None = None
    forecast_position: int | None = None


def due(jobs: Iterable[Waiting], now: float, renew_s: float, settle_s: float, limit: int) -> list[JobId]:
    """The jobs whose forecasts are made now, at most `limit`. See the module's head."""
    wanted = [job for job in jobs if _wanted(job, now, renew_s, settle_s)]
    fresh = sorted((j for j in wanted if j.forecast_at_s is None), key=lambda j: (-j.submitted_at_s, j.job))
    chosen = fresh[: -(-limit // 2)]
    rest = [job for job in wanted if job not in chosen]
    rest.sort(key=lambda j: (j.submitted_at_s if j.forecast_at_s is None else j.forecast_at_s, j.job))
    return [job.job for job in (*chosen, *rest)][:limit]


def _wanted(job: Waiting, now: float, renew_s: float, settle_s: float) -> bool:
    if job.forecast_at_s is None:
        return True
    age = now - job.forecast_at_s
    return age >= renew_s or (age >= settle_s and job.forecast_position not in (None, job.position))


class Forecaster:
    """See the module's head."""

    def __init__(
        self,
        caches: Caches,
        rounds: Rounds,
        history: JobHistory,
        settings: Settings,
        metrics: Metrics,
        policy: Policy | None = None,
    ) -> None:
        self._caches, self._rounds, self._history = caches, rounds, history
        self._settings, self._metrics = settings, metrics
        # The integer program changes which jobs start now, but hardly when the others start.
        self._policy = replace(policy or Policy(), solver=False)
        self._burst_at: float | None = None
        self._tried: dict[
            JobId, tuple[float, int]
        ] = {}  # time of the last try, and the job's position in the queue then

    async def run(self) -> None:
        """Makes forecasts for ever; errors are logged and affect nothing else."""
        while True:
            began = _computed_s()
            try:
                await self.batch(utc_now())
            except Exception:
                log.exception("no forecasts were made")
            self.count(utc_now().timestamp())
            rest_s = (_computed_s() - began) * (1 / self._settings.forecast_cpu_share - 1)
            await asyncio.sleep(max(self._settings.forecast_pause_s, rest_s))

    async def batch(self, now: datetime) -> None:
        """Forecasts for the jobs of the last plan that are due."""
        last = self._rounds.last
        if last is None or len(self._history.ended) < self._settings.forecast_ended:
            return
        snapshot, made = last
        waiting = self._waiting(snapshot, made)
        if self._burst_begins([job.submitted_at_s for job in waiting.values()], now.timestamp()):
            return
        settings = self._settings
        jobs = due(
            waiting.values(), now.timestamp(), settings.forecast_renew_s, settings.forecast_settle_s,
            settings.forecast_jobs,
        )  # fmt: skip
        if not jobs:
            return
        answers = {a.job: a for a in await self._ask(snapshot, jobs, now, settings.forecast_computing_s)}
        late = False
        for job in jobs:
            answer = answers.get(job)
            if answer is None and late:
                continue  # the worker did not reach it: it stays due
            late = late or answer is None
            self._tried[job] = (now.timestamp(), waiting[job].position)
            if answer is not None and answer.start_s is not None:
                self._rounds.forecasts[job] = Forecast(now, answer.start_s, answer.raw_s, answer.end_s)
        self._rounds.wake()

    def _burst_begins(self, submitted: list[float], now: float) -> bool:
        """Whether many jobs were submitted just now, and the burst that they belong to is less than a minute old."""
        recent = [at for at in submitted if now - at < BURST_S]
        if len(recent) < BURST_JOBS:
            self._burst_at = None
            return False
        self._burst_at = min(recent) if self._burst_at is None else self._burst_at
        return now - self._burst_at < BURST_S

    def question_of(self, draft: JobId, now: datetime) -> Question | None:
        """When a draft would start, in a snapshot to be filled in; None: too few jobs have ended here to say."""
        if len(self._history.ended) < self._settings.forecast_ended:
            return None
        return self._question(Snapshot(), [draft], now, self._settings.forecast_draft_s)

    def kept(self, now: float) -> tuple[PromiseStatistics, PromiseStatistics]:
        """How earlier forecasts turned out: those of the median, those of the ninth decile."""
        return self._history.kept(now)

    def count(self, now: float) -> None:
        """Publishes as metrics how many promises were kept."""
        for name, kept in zip(("0.5", "0.9"), self._history.kept(now), strict=True):
            self._metrics.promises.labels(name).set(kept.promises)
            if kept.share is not None:
                self._metrics.kept_promises.labels(name).set(kept.share)

    async def _ask(
        self,
        snapshot: Snapshot,
        jobs: list[JobId],
        now: datetime,
        computing_s: float,
    ) -> list[Answer]:
        question = self._question(snapshot, jobs, now, computing_s)
        with self._metrics.forecast_time.time():
            found = await compute(question, LIMIT * computing_s)
        dated = sum(answer.start_s is not None for answer in found)
        for result, count in (
            ("made", dated),
            ("none", len(found) - dated),
            ("late", len(jobs) - len(found)),
        ):
            self._metrics.forecasts.labels(result).inc(count)
        return found

    def _question(self, snapshot: Snapshot, jobs: list[JobId], now: datetime, computing_s: float) -> Question:
        return Question(
            snapshot, self._policy, now.timestamp(), tuple(jobs), self._history.ended, self._history.outcomes,
            computing_s,
        )  # fmt: skip

    def _waiting(self, snapshot: Snapshot, made: Plan) -> dict[JobId, Waiting]:
        """TrainingJobs that wait and could start some day, by id."""
        objects = {job.metadata.uid: job for job in self._caches.jobs.items.values()}
        submitted = {job.id: job.submitted_at_s for job in snapshot.jobs if job.run is None}
        found: dict[JobId, Waiting] = {}
        for record in made.waiting:
            job = objects.get(record.job)
            if job is None or record.job not in submitted or not _queued(job):
                continue
            if not record.foreseeable:
                if _forecast_at(job) is not None:
                    self._rounds.forecasts[record.job] = Forecast(
                        utc_now()
                    )  # the written forecast is no longer true
                continue
            at, position = self._tried.get(record.job, (_forecast_at(job), None))
            found[record.job] = Waiting(record.job, submitted[record.job], record.position, at, position)
        self._tried = {job: tried for job, tried in self._tried.items() if job in found}
        return found


def _computed_s() -> float:
    """CPU seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _queued(job: TrainingJob) -> bool:
    return job.status is not None and job.status.phase is TrainingPhase.QUEUED


def _forecast_at(job: TrainingJob) -> float | None:
    """When the forecast in the status was made; an earlier process may have made it."""
    status = job.status
    return status.forecast.made_at.timestamp() if status is not None and status.forecast else None
