"""The handler of TrainingJobs."""

from __future__ import annotations

import time

from busbar.kube.contracts.workload import CHECKPOINT_PATH
from busbar.kube.informer import Key
from busbar.kube.resources import TRAINING_JOBS
from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.kube.types.training_status import TrainingJobStatus
from busbar.operator.decisions import Admit, Deadline, Decision, Forecast, Reserved
from busbar.operator.handlers.shared import NOT_REFUSED, Shared, sooner
from busbar.operator.pods.manifests import KIND_TRAINING
from busbar.operator.pods.room import PodRoom, Promised, pod_room
from busbar.operator.pods.silent_nodes import silent_nodes
from busbar.operator.pods.volume_claims import claims_of_job, missing
from busbar.operator.power.limited_runs import power_use
from busbar.operator.queue.controller import Item
from busbar.operator.steady_clock import utc_now
from busbar.operator.training.deadline import news as deadline_news
from busbar.operator.training.health import news as health_news
from busbar.operator.training.reconcile import reconcile as reconcile_job
from busbar.operator.training.view import JobView, holders, waits_for_its_turn

POD_ROOM_S = 5.0
"""For so long a count of a namespace's pods serves jobs that are not about to be admitted."""


class TrainingJobs:
    """Reconciles one job at a time; remembers when its status was written and what pods its namespace has room for."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._promised = Promised()
        self._rooms: dict[
            str, tuple[float, PodRoom | None]
        ] = {}  # by namespace: when it was counted, what is left
        self._written_at: dict[Key, float] = {}  # when a job's last status was written

    async def reconcile(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        job = self._shared.caches.jobs.items.get(key)
        if job is None:
            self._shared.refused.pop((KIND_TRAINING, key), None)
            self._written_at.pop(key, None)
            return None
        forecast = next((d for d in decisions if isinstance(d, Forecast)), None)
        reserved = next((d for d in decisions if isinstance(d, Reserved)), None)
        deadline = next((d for d in decisions if isinstance(d, Deadline)), None)
        decision = next((d for d in decisions if not isinstance(d, Forecast | Reserved | Deadline)), None)
        status = job.status
        name = decision.placement.pool if isinstance(decision, Admit) else ""
        if not name and status is not None and status.admission is not None:
            name = status.admission.pool
        own = self._shared.caches.owned_pods(KIND_TRAINING, job)
        view = JobView(
            job=job,
            pods=own,
            now=utc_now(),
            settings=self._shared.paced(),
            rendering=self._shared.rendering,
            pool=self._shared.caches.pools.items.get(Key("", name)),
            readings=self._shared.prober.training,
            refusals=self._shared.prober.refusals,
            asked=self._shared.prober.asked.get(CHECKPOINT_PATH, {}),
            counted=self._shared.profiles.counted(job),
            slack=self._shared.profiles.slack(job),
            refused=self._shared.refused.get((KIND_TRAINING, key), NOT_REFUSED).why,
            has_tenant=self._shared.has_tenant(key),
            counts_due=time.monotonic() - self._written_at.get(key, 0.0) >= self._counts_s(status),
            holders=holders(job, own, self._shared.caches.pods.items),
            gone_pods=self._shared.caches.gone_pods(job.metadata.uid),
            absent_nodes=self._absent_nodes(job),
            silent=silent_nodes(own, self._shared.caches.nodes.items),
            energy_joules=self._shared.energy_total(
                job.metadata.uid, status.usage if status is not None else None
            ),
            power=power_use(job, self._shared.profiles.curves),
            budget=self._shared.holds.of_namespace(key.namespace),
            missing_claims=missing(
                key.namespace, claims_of_job(job), self._shared.caches.volume_claims.items
            ),
            is_ending=self._shared.is_ending(key.namespace),
            held_back=self._shared.rounds.held_back.get(Item("TrainingJob", key), ""),
            pod_room=self._pod_room(job, key, isinstance(decision, Admit)),
        )
        update = reconcile_job(view, decision, forecast, reserved, deadline)
        if update.status is not None:
            self._shared.energy_sent(job.metadata.uid, update.status.usage)
            acts, waits = bool(update.actions), bool(decisions)
            if view.pod_room is not None and update.status.admission is not None:
                self._promised.pods[key] = update.status.admission.pods
            try:
                await self._shared.writer.write_status(
                    TRAINING_JOBS, job, update.status, acts=acts, waits=waits
                )
            finally:
                self._promised.pods.pop(key, None)
            self._written_at[key] = time.monotonic()
            for told in (deadline_news(status, update.status), *health_news(status, update.status)):
                if told is not None:
                    self._shared.writer.notice(TRAINING_JOBS, job, *told)
            if update.status.admission is None:
                self._shared.refused.pop((KIND_TRAINING, key), None)
        await self._shared.carry_out(KIND_TRAINING, key, update.actions)
        if update.offer:
            self._shared.rounds.wake()
        return sooner(update.again_s, self._shared.given_up_s(view))

    def _absent_nodes(self, job: TrainingJob) -> frozenset[str]:
        """Nodes of a gang that take no pod now, where one may be replaced."""
        admission = job.status.admission if job.status is not None else None
        if admission is None or job.spec.checkpoint.memory is None:
            return frozenset()
        nodes = self._shared.caches.nodes.items
        known = {name: nodes.get(Key("", name)) for name in admission.nodes}
        return frozenset(name for name, node in known.items() if node is None or not node.ready)

    def _counts_s(self, status: TrainingJobStatus | None) -> float:
        """How long after a job's last status the pods that run are counted in the next."""
        told = status is not None and status.phase is TrainingPhase.STARTING
        return self._shared.settings.count_period_s if told else self._shared.settings.start_told_s

    def _pod_room(self, job: TrainingJob, key: Key, admits: bool) -> PodRoom | None:
        """What the limit of pods leaves for a waiting job: exact where it is to be admitted, else some seconds old."""
        if not waits_for_its_turn(job):
            return None
        counted_at, room = self._rooms.get(key.namespace, (float("-inf"), None))
        if not admits and time.monotonic() - counted_at < POD_ROOM_S:
            return room
        caches = self._shared.caches
        name = caches.tenant_of.get(key.namespace, "")
        found = caches.tenants.items.get(Key("", name))
        room = pod_room(found, key, caches.pods.items.values(), caches.jobs.items.values(), self._promised)
        self._rooms[key.namespace] = time.monotonic(), room
        return room
