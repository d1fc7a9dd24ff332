"""What the nodes of feeds draw at least, and which work on them may be stopped: the scheduler's words for it. Pure.

A board that works counts with its lowest limit. It counts with its nameplate where nothing limits it: its node's domain
only observes, its agent may set no limits, somebody else writes them, or it takes none. A node that is silent counts
with what it may draw by all that was sent to it. A board without work counts with what an idle one of its type draws, or,
where nobody knows that, with its lowest limit. A board works if a pod that requests it has its place on the node; on a
node of no pool all of them do.

Nodes that have never reported, and those of domains at fault, count nothing here: work is stopped only where the others
prove the need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pools.nodes import pool_of_node
from busbar.operator.power.membership import Membership
from busbar.operator.power.readings import HOST, Metered, Reading
from busbar.operator.watch.projections import Node, Pod, Sleep
from busbar.scheduler.fit.accelerators import Accelerator, accelerator
from busbar.scheduler.power import DomainTree, NodeLeast, Tier, Work

SLEEPING = -1
"""Priority of a replica that sleeps: below every job's."""
RESTART_S = 30.0
"""What a job repeats besides the work since its last checkpoint; as the scheduler counts it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node, and what its pool says of its boards."""

    node: Node
    resource: str
    """Empty: it is in no pool."""
    kind: Accelerator | None

    def part(self, pod: Pod) -> float:
        """The part of the node's boards that the pod requests."""
        devices = self.node.device(self.resource)
        return pod.requests.device(self.resource) / devices if devices else 0.0


@dataclass(frozen=True)
class Objects:
    """What may hold boards, and what else is known of it."""

    pods: tuple[Pod, ...]
    jobs: Mapping[Key, TrainingJob]
    services: Mapping[Key, ModelService]
    ceilings: Mapping[str, int]
    """The highest priority that counts, by namespace."""


def places(found: Membership, nodes: Iterable[Node], pools: tuple[AcceleratorPool, ...]) -> dict[str, Place]:
    """The nodes of domains whose budget may stop work."""
    inside = {name for domain in found.preempting for name in found.members[domain]}
    made = {}
    for node in nodes:
        if node.name in inside:
            pool = pool_of_node(node, pools)
            spec = pool.spec if pool is not None else None
            made[node.name] = Place(
                node,
                spec.resource_name if spec is not None else "",
                accelerator(spec.accelerator) if spec is not None else None,
            )
    return made


def tree_of(found: Membership) -> DomainTree:
    """The domains without fault, with all nodes that hang on them."""
    nodes: dict[str, list[str]] = {}
    for node, feeds in found.feeds.items():
        if len(feeds) == 1:
            nodes.setdefault(feeds[0], []).append(node)
    made = {name: replace(domain, nodes=tuple(nodes.get(name, ()))) for name, domain in found.sound.items()}
    return DomainTree(made, tuple(sorted(made, key=lambda name: (-len(found.above[name]), name))))


def leasts(
    found: Membership,
    at: Mapping[str, Place],
    readings: Mapping[str, Reading],
    pods: Iterable[Pod],
    silent_w: Mapping[str, float],
    since_s: float,
) -> dict[str, NodeLeast]:
    """Of each node that has reported.

    Args:
        silent_w: what nodes may draw by all that was sent to them.
        since_s: a node that has not reported since then is silent; the clock of `Reading.at_s`.
    """
    held: dict[str, float] = {}
    for pod in pods:
        place = at.get(pod.place)
        if place is not None and not pod.ended:
            held[pod.place] = held.get(pod.place, 0.0) + place.part(pod)
    made = {}
    for name, place in at.items():
        reading, feeds = readings.get(name), found.feeds[name]
        if reading is None or len(feeds) != 1:
            continue
        boards = reading.boards
        host_w = _host_w(reading, found.host_w[feeds[0]])
        share_w = None
        if reading.at_s < since_s and boards:
            share_w = (silent_w.get(name, math.inf) - host_w) / len(boards)
        pairs = [
            _board_w(board, reading, found.is_limited(name), share_w, place.kind) for board in boards.values()
        ]
        made[name] = NodeLeast(
            idle_w=host_w + sum(idle for _, idle in pairs),
            gains_w=tuple(works - idle for works, idle in pairs),
            boards=len(boards) * min(1.0, held.get(name, 0.0)) if place.resource else float(len(boards)),
        )
    return made


def _host_w(reading: Reading, host_w: float | None) -> float:
    if host_w is not None:
        return host_w
    meter = reading.meters.get(HOST)
    return meter.nameplate_w if meter is not None else 0.0


def _board_w(
    board: Metered, reading: Reading, limited: bool, share_w: float | None, kind: Accelerator | None
) -> tuple[float, float]:
    """What it draws at most at work, and idle."""
    limits = reading.limits
    if not limited or limits is None or limits.conflicts or board.refuses:
        works = board.nameplate_w
    elif share_w is not None:
        works = min(board.nameplate_w, max(board.floor_w, share_w))
    else:
        works = board.floor_w
    known = kind.idle_watts if kind is not None else 0.0
    return works, min(works, known or board.floor_w)


def works(
    at: Mapping[str, Place], leasts: Mapping[str, NodeLeast], seen: Objects, now: datetime
) -> dict[str, tuple[Work, Key, int]]:
    """What may be stopped on these nodes, or is being stopped: by the work's id, with its object and replica.

    Pods of other controllers, and jobs with `preemptible: false`, run on.
    """
    gangs: dict[str, list[Pod]] = {}
    replicas: dict[str, list[Pod]] = {}
    for pod in seen.pods:
        if pod.place in leasts and not pod.ended and pod.owner_uid:
            if pod.kind == KIND_TRAINING:
                gangs.setdefault(pod.owner_uid, []).append(pod)
            elif pod.kind == KIND_SERVICE:
                replicas.setdefault(pod.owner_uid, []).append(pod)
    found: dict[str, tuple[Work, Key, int]] = {}
    for uid, pods in gangs.items():
        key = Key(pods[0].key.namespace, pods[0].job)
        job = seen.jobs.get(key)
        if job is not None and job.metadata.uid == uid:
            work = _gang(job, pods, at, leasts, seen.ceilings, now)
            if work is not None:
                found[work.id] = work, key, 0
    least: dict[str, set[str]] = {}
    for uid, pods in replicas.items():
        key = Key(pods[0].key.namespace, pods[0].job)
        service = seen.services.get(key)
        if service is None or service.metadata.uid != uid:
            continue
        if uid not in least:
            least[uid] = _needed(service, seen.pods)
        for pod in pods:
            tier = Tier.NEEDED if pod.uid in least[uid] else Tier.SPARE
            priority = min(service.spec.priority, seen.ceilings.get(key.namespace, service.spec.priority))
            if pod.sleep is Sleep.ASLEEP:
                tier, priority = Tier.JOB, SLEEPING
            work = Work(
                id=f"{uid}/{pod.rank}",
                boards=_boards([pod], at, leasts),
                tier=tier,
                priority=priority,
                lost=1.0 if pod.takes_requests else 0.0,
                going=pod.deleting or pod.draining_since is not None,
            )
            found[work.id] = work, key, pod.rank
    return {name: each for name, each in found.items() if each[0].boards}


def _gang(
    job: TrainingJob,
    pods: list[Pod],
    at: Mapping[str, Place],
    leasts: Mapping[str, NodeLeast],
    ceilings: Mapping[str, int],
    now: datetime,
) -> Work | None:
    status = job.status
    admission = status.admission if status is not None else None
    going = (
        status is None
        or admission is None
        or status.release is not None
        or job.metadata.deletion_timestamp is not None
    )
    if not going and not job.spec.preemptible:
        return None
    boards = _boards(pods, at, leasts)
    began = admission.admitted_at if admission is not None else None
    saved = status.checkpoint.saved_at if status is not None and status.checkpoint is not None else None
    since = max((each for each in (began, saved) if each is not None), default=now)
    kind = accelerator(admission.accelerator) if admission is not None else None
    lost_s = RESTART_S + max(0.0, (now - since) / timedelta(seconds=1))
    return Work(
        id=job.metadata.uid,
        boards=boards,
        priority=min(job.spec.priority, ceilings.get(job.metadata.namespace or "", job.spec.priority)),
        lost=lost_s * sum(boards.values()) * (kind.rate if kind is not None else 1.0),
        going=going,
    )


def _boards(
    pods: Iterable[Pod], at: Mapping[str, Place], leasts: Mapping[str, NodeLeast]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for pod in pods:
        boards = at[pod.place].part(pod) * len(leasts[pod.place].gains_w)
        if boards > 0:
            found[pod.place] = found.get(pod.place, 0.0) + boards
    return found


def _needed(service: ModelService, pods: Iterable[Pod]) -> set[str]:
    """The replicas that make up `minReplicas`, those that serve first, then the oldest; by uid."""
    alive = [pod for pod in pods if pod.owner_uid == service.metadata.uid and not (pod.leaving or pod.parked)]
    alive.sort(key=lambda pod: (not pod.ready, pod.gated, pod.rank))
    return {pod.uid for pod in alive[: service.spec.min_replicas]}
