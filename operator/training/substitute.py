"""Another node for lost pods of a gang that goes on: they ask the scheduler as a job of their own, with the gang's rights.

replace.py: a pod is lost, and its node takes none ──► `needs_node` in the status
  ──► a claim beside that of the others ──► a round finds nodes ──► their names in the admission ──► the pods are made
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.shape import Domain
from busbar.kube.types.training_status import Admission
from busbar.operator.decisions import Admit, Decision, Wait
from busbar.operator.pools.nodes import TOPOLOGY
from busbar.operator.training.attempt_end import retry
from busbar.operator.training.replace import named
from busbar.operator.training.status import count_usage, in_phase
from busbar.operator.training.view import JobUpdate, JobView, placement_of, without_node
from busbar.operator.watch.projections import Node
from busbar.scheduler import Job, JobId, JobKind

LOST_PART = 1
"""Index of the claim for lost pods; the gang's own has none."""
WITHIN_S = 120.0
"""The others wait so long for a node; then the gang starts again from its checkpoint."""


def lost_part(obj: TrainingJob, whole: Job, admission: Admission, nodes: Mapping[Key, Node]) -> Job | None:
    """The lost pods as a job that waits; None where the domain that the gang must not leave has no name any more.

    Its speed is nobody's question: it may run on the gang's type, in the gang's pool.

    Args:
        whole: the gang.
        nodes: all of the cluster.
    """
    lost, placement = without_node(admission), placement_of(admission)
    stays = [node for rank, node in enumerate(admission.nodes) if rank not in lost]
    domain = domain_labels(obj.spec.shape.within, stays, nodes)
    if domain is None:
        return None
    return Job(
        id=JobId(f"{whole.id}/{LOST_PART}"),
        name=f"{whole.name}-lost",
        namespace=whole.namespace,
        tenant=whole.tenant,
        kind=JobKind.OPAQUE,
        user=whole.user,
        min_pods=len(lost),
        max_pods=len(lost),
        per_pod=placement.per_pod,
        accelerators=(placement.accelerator,),
        pools=(placement.pool,),
        node_selector=domain,
        priority=whole.priority,
        preemptible=whole.preemptible,
        submitted_at_s=whole.submitted_at_s,
    )


def domain_labels(
    within: Domain | None, stays: list[str], nodes: Mapping[Key, Node]
) -> tuple[tuple[str, str], ...] | None:
    """The label of the domain in which the gang's other pods are; empty: it may leave any. None: there is none."""
    if within is None:
        return ()
    labels = [dict(node.labels) for name in stays if (node := nodes.get(Key("", name))) is not None]
    found = (((key, seen[key]),) for seen in labels for key in TOPOLOGY.get(within, ()) if key in seen)
    return next(found, None)


def on_another_node(view: JobView, admission: Admission, decision: Decision | None) -> JobUpdate:
    """The update of a gang of which pods wait for another node: they have one, or are waited for, or it starts again."""
    ranks = without_node(admission)
    if (
        isinstance(decision, Admit)
        and decision.index == LOST_PART
        and decision.assumed_version == view.job.metadata.resource_version
        and decision.placement.pods == len(ranks)
    ):
        return _placed(view, admission, dict(zip(ranks, decision.placement.nodes, strict=True)))
    since = min(each.since for each in admission.replaced or () if each.needs_node)
    left_s = WITHIN_S - (view.now - since) / timedelta(seconds=1)
    if left_s <= 0:
        text = (
            f"No other node took the pod of {named(ranks)} within {WITHIN_S:.0f} s; the job starts again from its "
            "checkpoint."
        )
        return retry(view, Reason.NODE_LOST, text, counts=False)
    told = view.status
    if isinstance(decision, Wait) and decision.index == LOST_PART:
        text = f"The pod of {named(ranks)} waits for another node: {decision.message}"
        told = in_phase(view, told, TrainingPhase.STARTING, Reason.POD_REPLACED, text)
    return JobUpdate(told if told != view.status else None, (), left_s)


def _placed(view: JobView, admission: Admission, places: Mapping[int, str]) -> JobUpdate:
    replaced = [
        each.model_copy(update={"needs_node": None, "since": view.now}) if each.rank in places else each
        for each in admission.replaced or ()
    ]
    nodes = [places.get(rank, node) for rank, node in enumerate(admission.nodes)]
    moved = admission.model_copy(update={"replaced": replaced, "nodes": nodes})
    status = count_usage(view, view.status.model_copy(update={"admission": moved}), view.now)
    text = f"The pod of {named(sorted(places))} is made again on {', '.join(dict.fromkeys(places.values()))}."
    return JobUpdate(in_phase(view, status, TrainingPhase.STARTING, Reason.POD_REPLACED, text))
