"""Which training jobs run on boards that policies limit, and under which limits; and what is known of nodes by it. Pure.

A gang runs at the speed of its slowest pod, so the lowest limit of its boards is its own. Where nobody says which boards of a
node a pod holds and these have different limits, a job's limit is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from busbar.kube.contracts.workload import TrainingStatus
from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import PowerUse, TrainingJobStatus
from busbar.operator.pods.manifests import KIND_TRAINING
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.board_limits import OwnBoards, in_force, own_boards
from busbar.operator.power.membership import Membership
from busbar.operator.power.readings import Reading
from busbar.operator.power.work import PLAIN, NodeWork, WorkKind
from busbar.operator.profiles.paces import UNSEEN, Cost, LimitCurves, LimitedRun, Told, Work
from busbar.operator.profiles.speeds import run_of
from busbar.operator.profiles.table import class_of
from busbar.operator.watch.projections import Pod
from busbar.scheduler.power import CapCurve, Phase


def limited_runs(
    found: Membership,
    readings: Mapping[str, Reading],
    pods: Iterable[Pod],
    jobs: Mapping[Key, TrainingJob],
    told: Mapping[str, TrainingStatus],
    fresh_from_s: float,
    boards: Mapping[str, Boards] = MappingProxyType({}),
) -> list[LimitedRun]:
    """Of this moment.

    Args:
        told: what training pods said last, by uid.
        fresh_from_s: readings of before count for nothing.
        boards: who holds them, by node of which it is known.
    """
    if not found.limited:
        return []
    places: dict[Key, list[Pod]] = {}
    for pod in pods:
        if pod.kind == KIND_TRAINING and pod.node and not pod.ended and pod.requests.devices:
            places.setdefault(Key(pod.key.namespace, pod.job), []).append(pod)
    runs = []
    for key, placed in places.items():
        job = jobs.get(key)
        if job is None or job.status is None or job.status.admission is None:
            continue
        nodes = tuple(sorted({pod.node for pod in placed}))
        if all(map(found.is_limited, nodes)):
            own = [
                own_boards(reading, (pod for pod in placed if pod.node == node), boards.get(node))
                for node in nodes
                if (reading := in_force(readings.get(node), fresh_from_s)) is not None
            ]
            runs.append(_run(job, job.status, placed, nodes, own, told))
    return runs


def power_use(job: TrainingJob, curves: LimitCurves) -> PowerUse | None:
    """What limits have cost the job's attempt, for its status; None: it is on no boards that are limited."""
    known = curves.cost(run_of(job))
    if known is None or job.status is None:
        return None
    cost, part = known
    return PowerUse(
        attempt=job.status.attempt or 0,
        limit_percent=None if part is None else round(100 * part),
        seconds=round(cost.seconds),
        slowdown=round(cost.slowdown, 3),
    )


def _run(
    job: TrainingJob,
    status: TrainingJobStatus,
    placed: Collection[Pod],
    nodes: tuple[str, ...],
    boards: Collection[OwnBoards],
    told: Mapping[str, TrainingStatus],
) -> LimitedRun:
    place = status.admission
    assert place is not None
    known = [own.part for own in boards if own.part is not None]
    lead = min(placed, key=lambda pod: pod.rank)
    verified = place.image is not None and place.image.verified
    spent = status.power_of_attempt
    return LimitedRun(
        name=run_of(job),
        work=Work(class_of(job), place.accelerator, place.mode or "resident"),
        part=min(known) if len(known) == len(nodes) else None,
        told=_told(told.get(lead.uid)) if verified and lead.rank == 0 else None,
        nodes=nodes,
        binds=any(own.at_limit for own in boards),
        cap=1.0 if place.power_cap_percent is None else place.power_cap_percent / 100,
        before=UNSEEN if spent is None else Cost(float(spent.seconds), spent.slowdown),
    )


def _told(reading: TrainingStatus | None) -> Told | None:
    if reading is None or reading.phase_seconds is None:
        return None
    return Told(reading.tokens, sum(seconds for _, seconds in reading.phase_seconds))


def with_curves(
    works: Mapping[str, NodeWork], runs: Iterable[LimitedRun], curves: LimitCurves, now_s: float
) -> dict[str, NodeWork]:
    """The works of nodes with what is known of their jobs and replicas, and with trials of what is not.

    A node has a curve of a phase where all its boards do the same work in it, and a trial where they are one job's.
    Replicas are not tried: somebody waits for their answers, and as their load moves so do their limits.
    """
    on: dict[str, list[LimitedRun]] = {}
    for run in runs:
        for node in run.nodes:
            on.setdefault(node, []).append(run)
    found = dict(works)
    for node, here in on.items():
        known = found.get(node, PLAIN)
        if known.kind is WorkKind.UNKNOWN:
            continue
        tried = known.kind is WorkKind.TRAINING and len(here) == 1
        factor = curves.weight(here[0], now_s) if tried else 1.0
        found[node] = replace(known, curves=_curves(here, curves), weight=factor * known.weight)
    return found


def _curves(here: Iterable[LimitedRun], curves: LimitCurves) -> dict[Phase, CapCurve]:
    """Of each phase in which all do the same work, if enough is known of it."""
    works: dict[Phase, set[Work]] = {}
    for run in here:
        works.setdefault(run.work.phase, set()).add(run.work)
    alike = {phase: next(iter(of)) for phase, of in works.items() if len(of) == 1}
    return {phase: curve for phase, work in alike.items() if (curve := curves.curve(work)) is not None}
