"""A gang that goes on without lost pods gets another node for them, with the rights that it has."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.operator.builders import (
    ENGINE,
    NOW,
    SETTINGS,
    admitted,
    job,
    phase,
    placement,
    pool,
    running,
    tenant,
    view,
    with_status,
)

from busbar.kube.resources import PODS
from busbar.kube.types import TrainingJob
from busbar.operator.decisions import Admit, Release, Wait
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.substitute import LOST_PART, WITHIN_S
from busbar.operator.training.view import JobUpdate
from busbar.operator.watch.projections import Node, Pod
from busbar.operator.write.actions import Create, Delete
from busbar.scheduler import ActionKind, Job, Plan, Policy, Snapshot, check_plan, plan

LATER = NOW + timedelta(minutes=30)
SILENT = {"node-1": LATER - timedelta(seconds=SETTINGS.node_lost_s)}
ABSENT = frozenset(SILENT)


def gang(pods: int = 3, **spec: Any) -> TrainingJob:
    """It runs on node-0 to node-2, a pod on each."""
    shape = {"minPods": pods, "maxPods": pods, "cpu": "1", "memory": "1Gi"} | spec.pop("shape", {})
    of = admitted(job(**{"shape": shape, "checkpoint": {"memory": {}}, **spec}), pods)
    return with_status(of, reconcile(view(of, *(running(rank) for rank in range(pods)))))


def lost(of: TrainingJob, *pods: Pod, decision: Any = None, at: datetime = LATER, **fields: Any) -> JobUpdate:
    return reconcile(
        view(of, *pods, now=at, **{"silent": SILENT, "absent_nodes": ABSENT, **fields}), decision
    )


def all_run(pods: int = 3) -> tuple[Pod, ...]:
    return tuple(running(rank) for rank in range(pods))


def mended(of: TrainingJob, **fields: Any) -> TrainingJob:
    """The gang after the pod of rank 1 was given up with its node."""
    return with_status(of, lost(of, *all_run(), **fields))


def found(of: TrainingJob, node: str = "node-3", **fields: Any) -> Admit:
    version = of.metadata.resource_version or ""
    return Admit(placement(1, nodes=(node,)), "there is room", version, **{"index": LOST_PART, **fields})


def test_a_pod_whose_node_is_silent_is_made_again_on_another_one() -> None:
    of = gang()
    update = lost(of, *all_run())
    assert (phase(update), update.status and update.status.reason) == ("Starting", "PodReplaced")
    assert update.status is not None
    assert update.status.restarts == 0
    assert update.status.message == (
        "The pod of rank 1 is lost: node node-1 does not answer. It is made again on another node, and gets its state from "
        "the memory of the others."
    )
    of = with_status(of, update)
    waits = lost(of, *all_run())
    assert [(each.key.name, each.grace_s) for each in waits.actions if isinstance(each, Delete)] == [
        ("job-1-1", 0)
    ]
    others = running(0), running(2)
    assert lost(of, *others).actions == (), "none is made where it was"
    placed = lost(of, *others, decision=found(of))
    assert placed.status is not None
    assert placed.status.admission is not None
    assert placed.status.admission.nodes == ["node-0", "node-3", "node-2"]
    assert placed.status.message == "The pod of rank 1 is made again on node-3."
    made = lost(with_status(of, placed), *others)
    bodies = [each.body for each in made.actions if isinstance(each, Create) and each.resource is PODS]
    assert [each["metadata"]["name"] for each in bodies] == ["job-1-1-r1"]
    assert bodies[0]["spec"]["hostname"] == "job-1-1"
    assert "node-3" in str(bodies[0]["spec"]["affinity"])


def test_a_pod_that_was_evicted_from_a_cordoned_node_goes_elsewhere_too() -> None:
    update = lost(gang(), running(0), running(2), silent={}, gone_pods=frozenset({"job-1-1"}))
    assert update.status is not None
    assert (update.status.message or "").startswith(
        "The pod of rank 1 is lost. It is made again on another node,"
    )


@pytest.mark.parametrize(
    "changes",
    [{"index": 0}, {"assumed_version": "6"}, {"placement": placement(2)}],
    ids=lambda each: str(*each),
)
def test_only_a_decision_about_these_pods_as_they_are_places_them(changes: dict[str, Any]) -> None:
    of = mended(gang())
    assert lost(of, running(0), running(2), decision=replace(found(of), **changes)).status is None


def test_a_gang_waits_so_long_for_a_node_and_then_starts_again() -> None:
    of = mended(gang())
    others = running(0), running(2)
    why = Wait("InsufficientCapacity", "Its 1 cpu do not fit now.", index=LOST_PART)
    told = lost(of, *others, decision=why)
    assert phase(told) == "Starting"
    assert told.status is not None
    assert told.status.message == "The pod of rank 1 waits for another node: Its 1 cpu do not fit now."
    assert lost(with_status(of, told), *others, decision=why).status is None, "it is told once"
    soon = lost(of, *others, at=LATER + timedelta(seconds=WITHIN_S - 1))
    assert (soon.status, soon.again_s) == (None, 1.0)
    late = lost(of, *others, at=LATER + timedelta(seconds=WITHIN_S))
    assert late.status is not None
    assert (late.status.phase, late.status.reason, late.status.restarts) == ("Queued", "NodeLost", 0)
    assert (late.status.message or "").startswith(
        "No other node took the pod of rank 1 within 120 s; the job starts again from its checkpoint."
    )


def test_another_loss_meanwhile_ends_the_attempt() -> None:
    of = mended(gang())
    gone = frozenset({"job-1-1", "job-1-2"})
    assert phase(lost(of, running(0), gone_pods=gone)) == "Queued"


def test_a_gang_of_pods_without_copies_starts_again_at_once() -> None:
    of = gang(checkpoint={})
    update = lost(of, *all_run())
    assert update.status is not None
    assert (update.status.phase, update.status.reason) == ("Queued", "NodeLost")


def test_a_stop_is_obeyed_while_a_node_is_looked_for() -> None:
    of = mended(gang())
    stop = Release("Preempted", "for another", of.metadata.resource_version or "", taken=True)
    assert phase(lost(of, running(0), running(2), decision=stop)) == "Preempting"


def test_what_it_does_not_hold_is_not_charged() -> None:
    of = mended(gang())
    assert of.status is not None
    assert of.status.usage is not None
    before = of.status.usage.accelerator_seconds
    assert before == 3 * 1800.0
    placed = lost(of, running(0), running(2), decision=found(of), at=LATER + timedelta(seconds=60))
    assert placed.status is not None
    assert placed.status.usage is not None
    assert placed.status.usage.accelerator_seconds == before + 2 * 60.0


# -- what the scheduler makes of it -----------------------------------------------------------------------------------


def nodes(count: int, cpu_m: int = 1000, **changes: Any) -> tuple[Node, ...]:
    """node-1 is silent."""
    return tuple(
        Node(
            f"node-{n}",
            tuple(sorted({"pool": "cpu", "topology.kubernetes.io/rack": "ab"[n % 2]}.items())),
            (), cpu_m, 32768, 100_000, (), n != 1,
        )
        for n in range(count)
    )  # fmt: skip


def snapshot(of: TrainingJob, *others: TrainingJob, count: int = 4, **tenants: Any) -> Snapshot:
    owner = tenant("team", ["team"], **tenants)
    return build(
        ClusterObjects(jobs=(of, *others), pools=(pool(),), tenants=(owner,), nodes=nodes(count)), LATER
    )


def planned(made: Snapshot) -> Plan:
    done, _ = plan(made, Policy(), LATER.timestamp(), None)
    assert check_plan(made, done) == []
    return done


def parts(made: Snapshot) -> tuple[Job, Job]:
    whole, part = sorted(made.jobs, key=lambda each: each.id)
    return whole, part


def test_its_lost_pods_are_a_job_beside_the_gang_and_get_the_free_node() -> None:
    made = snapshot(mended(gang()))
    whole, part = parts(made)
    assert whole.run is not None
    assert (whole.run.placement.nodes, whole.min_pods, whole.max_pods) == (("node-0", "node-2"), 2, 2)
    assert (part.id, part.run, part.min_pods, part.per_pod) == (f"{whole.id}/1", None, 1, placement().per_pod)
    [action] = planned(made).actions
    assert (action.job, action.kind, action.to and action.to.nodes) == (
        part.id,
        ActionKind.START,
        ("node-3",),
    )


def test_where_nothing_is_free_it_waits_and_the_gang_is_left_alone() -> None:
    made = snapshot(mended(gang()), count=3)
    done = planned(made)
    assert done.actions == ()
    assert [record.job for record in done.waiting] == [parts(made)[1].id]


def test_it_takes_the_place_of_a_lower_priority_as_the_gang_would() -> None:
    other = admitted(job("other", priority=10, shape={"cpu": "1", "memory": "1Gi"}), admitted_at=NOW)
    assert other.status is not None
    assert other.status.admission is not None
    there = other.status.admission.model_copy(update={"nodes": ["node-3"]})
    other = other.model_copy(update={"status": other.status.model_copy(update={"admission": there})})
    done = planned(snapshot(mended(gang()), other))
    stopped = [action.job for action in done.actions if action.kind is ActionKind.PREEMPT]
    assert stopped == ["uid-other"]


def test_it_stays_in_the_domain_that_the_gang_must_not_leave() -> None:
    of = mended(gang(shape={"within": "rack"}))  # node-0 and node-2 are in rack a
    assert [action.to and action.to.nodes for action in planned(snapshot(of, count=4)).actions] == []
    [action] = planned(snapshot(of, count=5)).actions
    assert action.to is not None
    assert action.to.nodes == ("node-4",)


def test_a_gang_of_a_known_class_is_planned_without_the_lost_pods() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    engine = {**ENGINE, "model": {"config": config}}
    of = mended(gang(engine=engine, shape={"minPods": 2, "maxPods": 4}))
    made = snapshot(of)
    whole, _ = parts(made)
    assert whole.workload_class
    assert [action.kind for action in planned(made).actions] == [ActionKind.START]


def test_a_gang_that_is_being_stopped_looks_for_no_node() -> None:
    of = mended(gang())
    stop = Release("Preempted", "for another", of.metadata.resource_version or "", taken=True)
    stopping = with_status(of, lost(of, running(0), running(2), decision=stop))
    [whole] = snapshot(stopping).jobs
    assert whole.run is not None
    assert (whole.run.releasing, whole.run.placement.pods) == (True, 2)
