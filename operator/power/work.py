"""What the boards of each node are used for, and what a second lost there counts beside a second lost elsewhere. Pure.

The pods say it: the kubelet gives a board to one pod only, and a pod is of a job or of a replica that have a priority.
What is not known (boards of foreign pods, nodes whose boards nobody holds) weighs as a plain job does.

What caps let each board draw (`board_parts.py`) is told to the node's agent with the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from busbar.kube.informer import Key
from busbar.kube.types import ModelService, TrainingJob
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.board_parts import WHOLE, Parts, board_parts
from busbar.operator.power.membership import Membership
from busbar.operator.watch.projections import Pod
from busbar.scheduler.power import CapCurve, Phase

PLAIN_PRIORITY = 100
"""Weighs 1: what jobs have unless they say otherwise. Twice the priority is twice the weight."""
LEAST_WEIGHT, MOST_WEIGHT = 0.25, 4.0
"""However low and however high a priority is: nobody's work is brought to a halt for another's few per cent."""


class WorkKind(StrEnum):
    """What the holders of a node's boards do."""

    UNKNOWN = "unknown"
    """Nobody holds boards, or not all holders do the same, or a pod does that is not ours."""
    TRAINING = "training"
    SERVING = "serving"


@dataclass(frozen=True, slots=True)
class NodeWork:
    """Of one node."""

    parts: Parts = WHOLE
    """Of their nameplates, what its boards may draw by the caps of their holders."""
    weight: float = 1.0
    """By the priorities of the boards' holders, in the mean of the boards that are held."""
    first_token: float = 0.0
    """The part of the held boards whose services have a target for first tokens."""
    kind: WorkKind = WorkKind.UNKNOWN
    prompt_part: float | None = None
    """Of a serving node's busy time, what its engines spend on prompts, in the mean of its boards; None: some do not tell."""
    curves: Mapping[Phase, CapCurve] = field(default_factory=dict)
    """What limits cost the work on its boards by phase, where that was measured."""


PLAIN = NodeWork()


def weight_of(priority: int) -> float:
    return min(max(priority / PLAIN_PRIORITY, LEAST_WEIGHT), MOST_WEIGHT)


@dataclass(slots=True)
class _Held:
    """The boards of one node that pods hold."""

    boards: int = 0
    weighted: float = 0.0
    timed: int = 0
    kinds: set[WorkKind] | None = None
    prompts: float | None = 0.0
    """Boards times parts; None: a holder does not tell."""


def node_work(
    found: Membership,
    pods: Iterable[Pod],
    jobs: Mapping[Key, TrainingJob],
    services: Mapping[Key, ModelService],
    prompt_shares: Mapping[str, float] = MappingProxyType({}),
    boards: Mapping[str, Boards] = MappingProxyType({}),
) -> dict[str, NodeWork]:
    """By node that a policy limits; nodes of which nothing is known are left out (`PLAIN`).

    Args:
        prompt_shares: what replicas spend on prompts, by uid (`prompt_shares.py`).
        boards: who holds them, by node of which it is known.
    """
    if not found.limited:
        return {}
    pods = tuple(pods)
    held: dict[str, _Held] = {}
    for pod in pods:
        count = pod.requests.device_count
        if count and pod.node and not pod.ended and found.is_limited(pod.node):
            kind, priority, timed = _holder(pod, jobs, services)
            on = held.setdefault(pod.node, _Held(kinds=set()))
            on.boards += count
            on.weighted += count * weight_of(priority)
            on.timed += count * timed
            share = prompt_shares.get(pod.uid)
            on.prompts = None if on.prompts is None or share is None else on.prompts + count * share
            assert on.kinds is not None
            on.kinds.add(kind)
    works = {
        name: NodeWork(
            weight=on.weighted / on.boards,
            first_token=on.timed / on.boards,
            kind=next(iter(on.kinds)) if on.kinds and len(on.kinds) == 1 else WorkKind.UNKNOWN,
            prompt_part=None if on.prompts is None else on.prompts / on.boards,
        )
        for name, on in held.items()
    }
    for name, parts in board_parts(found, pods, jobs, boards).items():
        works[name] = replace(works.get(name, PLAIN), parts=parts)
    return works


def _holder(
    pod: Pod, jobs: Mapping[Key, TrainingJob], services: Mapping[Key, ModelService]
) -> tuple[WorkKind, int, bool]:
    """What the pod does, its priority, and whether it has a target for first tokens."""
    key = Key(pod.key.namespace, pod.job)
    if pod.kind == KIND_TRAINING and (job := jobs.get(key)) is not None:
        return WorkKind.TRAINING, job.spec.priority, False
    if pod.kind == KIND_SERVICE and (service := services.get(key)) is not None:
        slo = service.spec.slo
        timed = slo is not None and slo.ttft_milliseconds is not None
        return WorkKind.SERVING, service.spec.priority, timed
    return WorkKind.UNKNOWN, PLAIN_PRIORITY, False
