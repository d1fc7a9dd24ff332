"""Power caps of nodes: those with which the jobs on them were admitted. Pure.

A job under a cap has its nodes to itself (the scheduler places it nowhere else), so the cap holds for all boards of the
node. It is told to the node's agent with the lease, and holds until the job's admission ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_job import TERMINAL_PHASES
from busbar.operator.power.membership import Membership


def job_caps(found: Membership, jobs: Iterable[TrainingJob]) -> dict[str, float]:
    """By node that a policy limits, the part of their nameplates that its boards may draw."""
    caps: dict[str, float] = {}
    if not found.limited:
        return caps
    for job in jobs:
        status = job.status
        admission = status.admission if status is not None else None
        if status is None or admission is None or admission.power_cap_percent is None:
            continue
        if status.phase in TERMINAL_PHASES:
            continue
        for node in admission.nodes:
            if found.is_limited(node):
                caps[node] = min(caps.get(node, 1.0), admission.power_cap_percent / 100)
    return caps
