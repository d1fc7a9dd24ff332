"""When waiting jobs will start: which forecasts are made, and when, and what becomes of them.

    last plan's waiting jobs ──► due ──► foretell.py (own process) ──► Foretold ──► next round's orders ──► status
    POST /forecast with a draft ─────────────► the same process ──► ForecastAnswer

Nothing here holds up a round: a batch is small, computed elsewhere, and followed by a pause of three times its
length. Half of a batch is for the newest jobs without a forecast, whose people are looking; the rest for those
whose last one is longest ago. A forecast that could not be found in time is tried again after the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from busbar.kube.contracts.forecast import ForecastAnswer
from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.operator.controller import utc_now
from busbar.operator.errors import Busy
from busbar.operator.foretell import Answer, Question, foretell
from busbar.operator.metrics import Metrics
from busbar.operator.orders import Foretold
from busbar.operator.past import Past
from busbar.operator.rounds import Rounds
from busbar.operator.settings import Settings
from busbar.operator.world import World
from busbar.scheduler import JobId, Plan, Policy, Snapshot
from busbar.scheduler.plans import NEVER

log = logging.getLogger(__name__)

DRAFTS_AT_ONCE = 2
REST = 3.0
"""Pause after a batch, in lengths of the batch."""
LIMIT = 4.0
"""A batch is ended after so many times its computing time, however slow the machine."""


@dataclass(frozen=True)
class Waiting:
    """A waiting job, and when it was last foretold."""

    job: JobId
    submitted_at_s: float
    position: int
    told_at_s: float | None = None
    told_position: int | None = None


def due(jobs: Iterable[Waiting], now: float, renew_s: float, settle_s: float, limit: int) -> list[JobId]:
    """Whose forecast is made now, at most `limit`. See the module's head."""
    wanted = [job for job in jobs if _wanted(job, now, renew_s, settle_s)]
    fresh = sorted((j for j in wanted if j.told_at_s is None), key=lambda j: (-j.submitted_at_s, j.job))
    chosen = fresh[: -(-limit // 2)]
    rest = [job for job in wanted if job not in chosen]
    rest.sort(key=lambda j: (j.submitted_at_s if j.told_at_s is None else j.told_at_s, j.job))
    return [job.job for job in (*chosen, *rest)][:limit]


def _wanted(job: Waiting, now: float, renew_s: float, settle_s: float) -> bool:
    if job.told_at_s is None:
        return True
    age = now - job.told_at_s
    return age >= renew_s or (age >= settle_s and job.told_position not in (None, job.position))


class Forecasts:
    """See the module's head."""

    def __init__(
        self,
        world: World,
        rounds: Rounds,
        past: Past,
        settings: Settings,
        metrics: Metrics,
        policy: Policy | None = None,
    ) -> None:
        self._world, self._rounds, self._past = world, rounds, past
        self._settings, self._metrics = settings, metrics
        # The exchange by mixed-integer program changes who starts now, hardly when the others do.
        self._policy = replace(policy or Policy(), solver=False)
        self._tried: dict[JobId, tuple[float, int]] = {}  # when, and in which place
        self._drafts = asyncio.Semaphore(DRAFTS_AT_ONCE)

    async def run(self) -> None:
        """Foretells for ever; whatever goes wrong here is said and changes nothing else."""
        while True:
            began = time.monotonic()
            try:
                await self.batch(utc_now())
            except Exception:
                log.exception("no forecasts were made")
            self.count(utc_now().timestamp())
            took = time.monotonic() - began
            await asyncio.sleep(max(self._settings.forecast_pause_s, REST * took))

    async def batch(self, now: datetime) -> None:
        """Forecasts for the jobs of the last plan that are due."""
        last = self._rounds.last
        if last is None or len(self._past.ended) < self._settings.forecast_ended:
            return
        snapshot, made = last
        waiting = self._waiting(snapshot, made)
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
                continue  # never begun: it is due as before
            late = late or answer is None
            self._tried[job] = (now.timestamp(), waiting[job].position)
            if answer is not None and answer.start_s is not None:
                self._rounds.foretold[job] = Foretold(now, answer.start_s, answer.raw_s, answer.end_s)
        self._rounds.wake()

    async def of_draft(self, snapshot: Snapshot, draft: JobId) -> ForecastAnswer:
        """When a draft in this snapshot would start.

        Raises:
            Busy: as many others are being foretold as may be at once.
        """
        now = utc_now()
        found: Answer | None = None
        if len(self._past.ended) >= self._settings.forecast_ended:
            if self._drafts.locked():
                raise Busy("other previews are being computed; try again in a few seconds")
            async with self._drafts:
                limit_s = self._settings.forecast_draft_s
                answers = await self._ask(snapshot, [draft], now, limit_s, limit_s)
            found = answers[0] if answers else None
        start, end = (found.start_s, found.end_s) if found is not None else (None, None)
        p50, p90 = self._past.kept(now.timestamp())
        return ForecastAnswer(
            start_p50_seconds=start[0] if start else None,
            start_p90_seconds=start[1] if start else None,
            end_p50_seconds=end[0] if end else None,
            end_p90_seconds=end[1] if end else None,
            ended_jobs=len(self._past.ended),
            promises=p90.promises,
            before_p50=p50.share,
            before_p90=p90.share,
        )

    def count(self, now: float) -> None:
        """How promises turned out, as metrics."""
        for name, kept in zip(("0.5", "0.9"), self._past.kept(now), strict=True):
            self._metrics.promises.labels(name).set(kept.promises)
            if kept.share is not None:
                self._metrics.kept_promises.labels(name).set(kept.share)

    async def _ask(
        self,
        snapshot: Snapshot,
        jobs: list[JobId],
        now: datetime,
        computing_s: float,
        limit_s: float | None = None,
    ) -> list[Answer]:
        question = Question(
            snapshot, self._policy, now.timestamp(), tuple(jobs), self._past.ended, self._past.outcomes,
            computing_s,
        )  # fmt: skip
        with self._metrics.forecast_time.time():
            found = await foretell(question, limit_s or LIMIT * computing_s)
        told = sum(answer.start_s is not None for answer in found)
        for result, count in (
            ("made", told),
            ("none", len(found) - told),
            ("late", len(jobs) - len(found)),
        ):
            self._metrics.forecasts.labels(result).inc(count)
        return found

    def _waiting(self, snapshot: Snapshot, made: Plan) -> dict[JobId, Waiting]:
        """TrainingJobs that wait and could start some day, by id."""
        objects = {job.metadata.uid: job for job in self._world.jobs.items.values()}
        submitted = {job.id: job.submitted_at_s for job in snapshot.jobs if job.run is None}
        found: dict[JobId, Waiting] = {}
        for record in made.waiting:
            job = objects.get(record.job)
            if job is None or record.job not in submitted or not _queued(job):
                continue
            if record.code in NEVER:
                if _told_at(job) is not None:
                    self._rounds.foretold[record.job] = Foretold(utc_now())  # what was said holds no more
                continue
            at, position = self._tried.get(record.job, (_told_at(job), None))
            found[record.job] = Waiting(record.job, submitted[record.job], record.position, at, position)
        self._tried = {job: tried for job, tried in self._tried.items() if job in found}
        return found


def _queued(job: TrainingJob) -> bool:
    return job.status is not None and job.status.phase is TrainingPhase.QUEUED


def _told_at(job: TrainingJob) -> float | None:
    """What an operator before this one said stands in the status."""
    status = job.status
    return status.forecast.made_at.timestamp() if status is not None and status.forecast else None
