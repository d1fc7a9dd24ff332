"""What each board of a node may draw, by the power caps of those that hold boards there. Pure.

A training job has its cap until its admission ends, a replica for as long as its pod has its note. Whatever else holds boards
has none.

Where it is known which pods hold which board (`board_holders.py`), a board has the cap of its holder. A pod under a cap whose
boards are not known yet, because it was admitted or bound a moment ago, will be on boards that nobody holds: these have the
lowest such cap until it is known. Where it is not known, all boards of the node have one part: the highest cap of those that
hold boards there, so that nobody is slowed for another's cap. Then a pod under a cap has its node to itself by its placement.

A cap that is not applied costs others watts, and never takes a node above its lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import TERMINAL_PHASES, Admission
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pods.replica_place import place_of
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.membership import Membership
from busbar.operator.watch.projections import Pod


@dataclass(frozen=True, slots=True)
class Parts:
    """Of the boards of one node, parts of their nameplates."""

    rest: float = 1.0
    """Of the boards that are not named."""
    named: Mapping[str, float] = field(default_factory=dict)
    """By uuid."""

    def of(self, uuid: str) -> float:
        return self.named.get(uuid, self.rest)


WHOLE = Parts()


@dataclass(slots=True)
class _Capped:
    """Who holds boards of one node, or is about to."""

    pods: dict[Key, tuple[Pod, float]] = field(default_factory=dict)
    """With their caps; 1: none."""
    jobs: dict[Key, tuple[int, float]] = field(default_factory=dict)
    """Of capped jobs that were admitted to the node: how many pods, and the cap."""


def board_parts(
    found: Membership,
    pods: Iterable[Pod],
    jobs: Mapping[Key, TrainingJob],
    boards: Mapping[str, Boards],
) -> dict[str, Parts]:
    """By node that a policy limits; nodes whose boards may all draw their nameplates are left out.

    Args:
        boards: who holds them, by node of which it is known.
    """
    caps: dict[Key, float] = {}
    on: dict[str, _Capped] = {}
    for key, job in jobs.items():
        place = _place(job)
        if place is not None and place.power_cap_percent is not None:
            caps[key] = place.power_cap_percent / 100
            for node, count in Counter(place.nodes).items():
                if found.is_limited(node):
                    on.setdefault(node, _Capped()).jobs[key] = count, caps[key]
    for pod in pods:
        holds = not pod.ended and pod.requests.device_count > 0
        if holds and found.is_limited(pod.node):
            on.setdefault(pod.node, _Capped()).pods[pod.key] = pod, _pod_cap(pod, caps)
    parts = {
        node: _known(here, boards[node]) if node in boards else _unknown(here) for node, here in on.items()
    }
    return {node: own for node, own in parts.items() if own != WHOLE}


def _place(job: TrainingJob) -> Admission | None:
    status = job.status
    return None if status is None or status.phase in TERMINAL_PHASES else status.admission


def _pod_cap(pod: Pod, caps: Mapping[Key, float]) -> float:
    if pod.kind == KIND_TRAINING:
        return caps.get(Key(pod.key.namespace, pod.job), 1.0)
    place = place_of(pod) if pod.kind == KIND_SERVICE else None
    return 1.0 if place is None else place.power_cap


def _known(here: _Capped, boards: Boards) -> Parts:
    held: dict[str, float] = {}
    seen: set[Key] = set()
    for uuid, keys in boards.items():
        own = [here.pods[key][1] for key in keys if key in here.pods]
        seen.update(keys)
        if own:
            held[uuid] = max(own)
    found = (here.pods[key][0] for key in seen & here.pods.keys())
    counts = Counter(Key(pod.key.namespace, pod.job) for pod in found if pod.kind == KIND_TRAINING)
    coming = [cap for key, (pod, cap) in here.pods.items() if key not in seen and not pod.deleting]
    coming += [cap for job, (count, cap) in here.jobs.items() if counts[job] < count]
    rest = min(coming, default=1.0)
    return Parts(rest, {uuid: cap for uuid, cap in held.items() if cap != rest})


def _unknown(here: _Capped) -> Parts:
    """Pods that leave count only where nothing else is there or comes."""
    staying = [cap for pod, cap in here.pods.values() if not pod.deleting]
    coming = [cap for _, cap in here.jobs.values()]
    if staying:
        return Parts(max(staying))
    return Parts(min(coming) if coming else max(cap for _, cap in here.pods.values()))
