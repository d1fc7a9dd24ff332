"""Creates, reconciles and deletes PerformanceProfiles.

A class gets a profile when a job of it holds accelerators for the first time, under the class's name and with the
label ``busbar.dev/discovered``. People's own profiles are never deleted; of those made here, the one that was idle for
longest is deleted when there are more than `MOST_PROFILES`.

An attempt that its job's status no longer shows (its admission was cleared, or the job was deleted) is kept here
until its profile is written; a restart in between loses it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from busbar.kube.errors import Forbidden, Invalid
from busbar.kube.informer import Key
from busbar.kube.resources import PERFORMANCE_PROFILES, TRAINING_JOBS
from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import TERMINAL_PHASES, TrainingPhase
from busbar.operator.decisions import Decision
from busbar.operator.pools.nodes import DISCOVERED
from busbar.operator.profiles.observations import by_class, digests, read, slack_at
from busbar.operator.profiles.paces import LimitCurves, Work
from busbar.operator.profiles.phase_draws import PhaseDraws
from busbar.operator.profiles.power_curves import stored
from busbar.operator.profiles.reconcile import (
    PastAttempt,
    ProfileView,
    leaves,
    left_behind,
    reconcile,
    too_soon,
)
from busbar.operator.profiles.serving_speeds import checked, of_class
from busbar.operator.profiles.table import class_of, performance_table, report_of
from busbar.operator.queue.controller import Controller
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.caches import Caches, tenant_of_namespace
from busbar.operator.write.actions import Action, Create, Delete
from busbar.operator.write.writer import Writer
from busbar.scheduler import PerformanceTable
from busbar.scheduler.model.table import Fault
from busbar.scheduler.performance.learning import quarantined
from busbar.scheduler.power.curves import Evidence

log = logging.getLogger(__name__)

MOST_PROFILES = 200
MOST_LEFT = 256
"""Most attempts that are kept per class until the next write."""
TABLE_S = 5.0
"""A table is reused for this long, unless something changes."""
_WHY = {
    Fault.IMPOSSIBLE: "it is more than the hardware can do",
    Fault.COUNTERS: "its speed and its time do not add up to its work",
    Fault.OUTSIDE: "it is far from what is known of jobs like it",
    Fault.DISTRUSTED: "earlier jobs of this tenant reported speeds that did not add up",
}


class ProfileKeeper:
    """See the module's head."""

    def __init__(self, caches: Caches, writer: Writer, controller: Controller, settings: Settings) -> None:
        self.curves = LimitCurves(self._stored_curves)
        self.draws = PhaseDraws()
        self._caches, self._writer, self._controller = caches, writer, controller
        self._settings = settings
        self._left: dict[str, dict[str, PastAttempt]] = {}
        """By class and run."""
        self._table: tuple[float, PerformanceTable] | None = None
        self._shown: PerformanceTable | None = None
        """The table of the last round."""
        self._notified: set[tuple[str, str]] = set()
        self._may_make = True
        controller.handles("PerformanceProfile", self.handle)

    # -- what happens ----------------------------------------------------------------------------------

    def job_changed(self, old: TrainingJob | None, new: TrainingJob | None) -> None:
        """Called with each change of a job: keeps the attempt that its status no longer shows."""
        if old is None or new is None or phase_of(old) != phase_of(new):
            self._table = None
        if old is None or not leaves(old, new):
            return
        name = class_of(old)
        left = left_behind(old, report_of(old, self._tenant_of()), utc_now())
        if left is None or not name:
            return
        of_class = self._left.setdefault(name, {})
        of_class[left.run] = left
        while len(of_class) > MOST_LEFT:
            del of_class[next(iter(of_class))]
        profile = self._profile(name)
        if profile is not None:
            self._controller.add("PerformanceProfile", Key("", profile.metadata.name))

    async def after_round(self, table: PerformanceTable, classes: set[str], running: set[str]) -> None:
        """Makes profiles for classes that run, and queues the profiles of all classes that have a job.

        Args:
            table: the round's.
            classes: those that have a job.
            running: those of which a job runs.
        """
        if table is not self._shown:
            self._table, self._shown = None, table
            self._notify(table)
        there = by_class(self._caches.profiles.items.values())
        served = {m.workload_class for s in self._caches.services.items.values() for m in checked(s)}
        classes, running = served | classes, served | running
        for name in sorted(classes & there.keys()):
            self._controller.add("PerformanceProfile", Key("", there[name].metadata.name))
        missing = sorted(running - there.keys())
        if not missing or not self._may_make:
            return
        try:
            await self._writer.carry_out(made_room(missing, self._caches.profiles.items.values(), classes))
        except (Forbidden, Invalid) as error:
            self._may_make = False
            log.warning("profiles of workload classes are not made: %s", error)

    def counted(self, job: TrainingJob) -> bool:
        """Whether the profile has an ended job's speed, so that the job may be deleted."""
        if job.status is None or job.status.phase not in TERMINAL_PHASES:
            return True
        report = report_of(job, self._tenant_of())
        if report is None or not report.image_verified:
            return True
        profile = self._profile(report.record.workload_class)
        return profile is not None and read(profile, {}).has(report)

    def slack(self, job: TrainingJob) -> float | None:
        """Mean over lower bound of the profile's speed for the job's placement; None where it has none."""
        status = job.status
        if status is None or status.admission is None or not status.workload_class:
            return None
        profile = self._profile(status.workload_class)
        return None if profile is None else slack_at(profile, status.admission)

    # -- the handler -----------------------------------------------------------------------------------

    async def handle(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        profile = self._caches.profiles.items.get(key)
        if profile is None:
            return None
        soon = too_soon(profile, utc_now(), self._settings)
        if soon is not None:
            return soon
        name = profile.spec.workload_class
        jobs = tuple(self._caches.jobs.items.values())
        tenants = tuple(self._caches.tenants.items.values())
        left = dict(self._left.get(name, {}))
        view = ProfileView(
            profile=profile,
            counts=(self._profile(name) or profile).metadata.name,
            table=self._current(),
            jobs=tuple(job for job in jobs if class_of(job) == name),
            uids=frozenset(job.metadata.uid for job in jobs),
            left=tuple(left.values()),
            tenant_of=tenant_of_namespace(tenants),
            keys=digests(tenants),
            now=utc_now(),
            settings=self._settings,
            serving=tuple(of_class(self._caches.services.items.values(), name)),
            limits=self.curves.of_class(name),
            draws=self.draws.of_class(name),
        )
        update = reconcile(view)
        if update.status is not None:
            await self._writer.write_status(PERFORMANCE_PROFILES, profile, update.status)
            for run in left if view.counts == profile.metadata.name else ():
                self._left.get(name, {}).pop(run, None)
            for uid in update.refuted:
                self._notice(uid, Fault.COUNTERS)
        return update.again_s

    def _current(self) -> PerformanceTable:
        """The table as it is now, or was a moment ago."""
        if self._table is None or time.monotonic() - self._table[0] > TABLE_S:
            caches = self._caches
            table = performance_table(
                caches.jobs.items.values(),
                caches.pools.items.values(),
                self._tenant_of(),
                caches.profiles.items.values(),
                caches.tenants.items.values(),
                absent_too=True,
            )
            self._table = (time.monotonic(), table)
        return self._table[1]

    def _stored_curves(self, workload_class: str) -> Mapping[Work, Evidence]:
        profile = self._profile(workload_class)
        return {} if profile is None else stored(workload_class, profile.status)

    def _profile(self, workload_class: str) -> PerformanceProfile | None:
        return by_class(self._caches.profiles.items.values()).get(workload_class)

    def _tenant_of(self) -> dict[str, str]:
        return tenant_of_namespace(self._caches.tenants.items.values())

    def _notify(self, table: PerformanceTable) -> None:
        """Emits an event at each running job whose speed is quarantined, once per job and reason."""
        doubted = {(r.job, r.fault) for r in quarantined(table) if r.job}
        for uid, fault in sorted(doubted - self._notified):
            self._notice(uid, Fault(fault))
        self._notified = doubted

    def _notice(self, uid: str, fault: Fault) -> None:
        job = next((j for j in self._caches.jobs.items.values() if j.metadata.uid == uid), None)
        if job is not None:
            text = f"The speed that this job reports is not believed ({fault.value}): {_WHY[fault]}."
            self._writer.notice(TRAINING_JOBS, job, Reason.SPEED_QUARANTINED, text)


def made_room(
    missing: Iterable[str], profiles: Iterable[PerformanceProfile], classes: set[str]
) -> tuple[Action, ...]:
    """Makes the profiles that are missing, and deletes idle ones where there are too many.

    Args:
        classes: those that have a job now; their profiles are kept.
    """
    there = list(profiles)
    taken = {p.metadata.name for p in there}
    idle = [
        p
        for p in there
        if p.spec.workload_class not in classes and DISCOVERED in p.metadata.labels and not p.spec.cells
    ]
    idle.sort(key=_last_used, reverse=True)
    count = len(there)
    actions: list[Action] = []
    for name in missing:
        if count >= MOST_PROFILES:
            if not idle:
                break
            gone = idle.pop()
            actions.append(
                Delete(PERFORMANCE_PROFILES, Key("", gone.metadata.name), gone.metadata.uid, None, None)
            )
            count -= 1
        actions.append(new_profile(name, taken))
        count += 1
    return tuple(actions)


def new_profile(workload_class: str, taken: set[str]) -> Create:
    """A profile under the class's name; with a digest where that name is taken."""
    slug = re.sub(r"[^a-z0-9]+", "-", workload_class.lower()).strip("-")[:200] or "class"
    digest = hashlib.sha256(workload_class.encode()).hexdigest()[:8]
    name = slug if slug not in taken else f"{slug}-{digest}"
    taken.add(name)
    body = {
        "apiVersion": PERFORMANCE_PROFILES.api_version,
        "kind": "PerformanceProfile",
        "metadata": {"name": name, "labels": {DISCOVERED: "true"}},
        "spec": {"workloadClass": workload_class},
    }
    return Create(PERFORMANCE_PROFILES, Key("", name), body)


def phase_of(job: TrainingJob) -> TrainingPhase | None:
    return job.status.phase if job.status is not None else None


def _last_used(profile: PerformanceProfile) -> tuple[datetime, str]:
    status = profile.status
    written = status.last_updated if status is not None else None
    return (written or datetime.min.replace(tzinfo=UTC), profile.metadata.name)
