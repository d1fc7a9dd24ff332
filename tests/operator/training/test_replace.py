"""Lost pods of a gang whose state the others have in memory are made again, and the others run on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, admitted, ended, gated, job, phase, pod, running, view, with_status

from busbar.kube.resources import PODS
from busbar.kube.types import TrainingJob
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.view import JobUpdate, attempt_pods
from busbar.operator.watch.projections import Exit, Pod
from busbar.operator.write.actions import Create, LiftGate

LATER = NOW + timedelta(minutes=30)


def gang(pods: int = 3, memory: dict[str, Any] | None = None, **spec: Any) -> TrainingJob:
    """A gang of the engine that runs, whose pods hold each other's state."""
    checkpoint = {"memory": {} if memory is None else memory}
    spec = {"shape": {"minPods": pods, "maxPods": pods}, "checkpoint": checkpoint, **spec}
    of = admitted(job(**spec), pods)
    return with_status(of, reconcile(view(of, *(running(rank) for rank in range(pods)))))


def lost(of: TrainingJob, *pods: Pod, **fields: Any) -> JobUpdate:
    return reconcile(view(of, *pods, now=LATER, **fields))


def again(rank: int, times: int = 1, **fields: Any) -> Pod:
    """A pod that took the place of another one."""
    own = running(rank, **{"replacement": times, "started_at": LATER, **fields})
    return replace(own, key=own.key._replace(name=f"{own.key.name}-r{times}"), uid=f"{own.uid}-r{times}")


def replaced(update: JobUpdate) -> list[tuple[int, int]]:
    assert update.status is not None
    assert update.status.admission is not None
    return [(each.rank, each.times) for each in update.status.admission.replaced or ()]


def test_a_pod_that_was_killed_is_made_again_under_another_name_and_the_same_hostname() -> None:
    of = gang()
    update = lost(of, running(0), ended(1, 137), running(2))
    assert (phase(update), replaced(update)) == ("Starting", [(1, 1)])
    assert update.status is not None
    assert (update.status.reason, update.status.restarts, update.status.attempt) == ("PodReplaced", 1, 1)
    assert "The pod of rank 1 is lost: exit code 137." in (update.status.message or "")
    made = lost(with_status(of, update), running(0), ended(1, 137), running(2))
    bodies = [each.body for each in made.actions if isinstance(each, Create) and each.resource is PODS]
    assert [each["metadata"]["name"] for each in bodies] == ["job-1-1-r1"]
    assert bodies[0]["spec"]["hostname"] == "job-1-1"  # the others know it by this name
    assert bodies[0]["metadata"]["labels"]["busbar.dev/replacement"] == "1"


def test_a_pod_that_is_gone_is_made_again_and_does_not_count() -> None:
    update = lost(gang(), running(0), running(2), gone_pods=frozenset({"job-1-1"}))
    assert (phase(update), replaced(update)) == ("Starting", [(1, 1)])
    assert update.status is not None
    assert update.status.restarts == 0


def test_the_new_pod_starts_alone_and_the_job_runs_on() -> None:
    of = gang()
    of = with_status(of, lost(of, running(0), ended(1, 137), running(2)))
    others = running(0), ended(1, 137), running(2)
    held = again(1, phase="Pending", started_at=None, gates=("busbar.dev/admission",))
    assert [type(each) for each in lost(of, *others, held).actions] == [LiftGate]
    update = lost(of, *others, again(1))
    assert (phase(update), replaced(update)) == ("Running", [(1, 1)])
    current = attempt_pods(view(of, *others, again(1)))
    assert {rank: each.replacement for rank, each in current.items()} == {0: 0, 1: 1, 2: 0}


def test_it_is_replaced_once_more_after_it_has_its_state_again() -> None:
    of = gang()
    of = with_status(of, lost(of, running(0), ended(1, 137), running(2)))
    kept = running(0), ended(1, 137), running(2)
    fresh = lost(of, *kept, again(1), gone_pods=frozenset())
    assert phase(fresh) == "Running"
    of = with_status(of, fresh)
    update = lost(of, *kept, gone_pods=frozenset({"job-1-1", "job-1-1-r1"}))
    assert replaced(update) == [(1, 2)]
    made = lost(with_status(of, update), *kept, gone_pods=frozenset({"job-1-1", "job-1-1-r1"}))
    assert [each.key.name for each in made.actions if isinstance(each, Create)][1:] == ["job-1-1-r2"]


def test_another_pod_that_is_lost_before_the_first_is_rebuilt_ends_the_attempt() -> None:
    of = gang()
    of = with_status(of, lost(of, running(0), ended(1, 137), running(2)))
    others = ended(1, 137), running(2)
    for new in (again(1), again(1, phase="Pending", started_at=None)):
        assert phase(lost(of, ended(0, 137), *others, new)) == "Queued"
    settled = again(1, started_at=LATER - timedelta(minutes=5))
    assert replaced(lost(of, ended(0, 137), *others, settled)) == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("memory", "codes", "goes_on"),
    [
        ({}, (137, 137, 0), False),
        ({"parity": 2}, (137, 1, 0), True),
        ({"parity": 0}, (137, 0, 0), False),
        ({"parity": 2}, (137, 1, 137), False),
    ],
)
def test_as_many_pods_are_replaced_as_there_are_parities(
    memory: dict[str, Any], codes: tuple[int, ...], goes_on: bool
) -> None:
    pods = [ended(rank, code) if code else running(rank) for rank, code in enumerate(codes)]
    update = lost(gang(3, memory), *pods)
    assert phase(update) == ("Starting" if goes_on else "Queued")


ENDS: dict[str, Pod] = {
    "it saved its state on request": ended(1, 143),
    "the job cannot run": ended(1, 2),
    "it was evicted": ended(1, 137, evicted=True),
    "nobody knows how it ended": pod(1, phase="Failed"),
    "it is being deleted": running(1, deleting=True),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_an_end_of_another_kind_ends_the_attempt(end: Pod) -> None:
    assert phase(lost(gang(), running(0), end, running(2))) in ("Queued", "Failed")


def test_pods_that_fail_for_themselves_count_as_retries() -> None:
    of = gang(retryLimit=1)
    first = lost(of, running(0), ended(1, 137), running(2))
    assert phase(first) == "Starting"
    of = with_status(of, first)
    settled = again(1, phase="Failed", exit=Exit(1, "", "", LATER), started_at=NOW)
    assert phase(lost(of, running(0), ended(1, 137), running(2), settled)) == "Failed"


def test_a_gang_that_never_ran_is_not_mended() -> None:
    of = admitted(job(shape={"minPods": 3, "maxPods": 3}, checkpoint={"memory": {}}), 3)
    assert phase(reconcile(view(of, gated(0), ended(1, 137), gated(2)))) == "Queued"


def test_a_gang_without_copies_in_memory_starts_again_as_a_whole() -> None:
    of = gang()
    without = of.model_copy(update={"spec": of.spec.model_copy(update={"checkpoint": job().spec.checkpoint})})
    assert phase(lost(without, running(0), ended(1, 137), running(2))) == "Queued"


def test_a_job_that_is_to_be_suspended_is_not_mended() -> None:
    of = gang()
    suspended = of.model_copy(update={"spec": of.spec.model_copy(update={"suspend": True})})
    assert phase(lost(suspended, running(0), ended(1, 137), running(2))) == "Queued"


def test_a_new_pod_that_does_not_start_ends_the_attempt_after_its_own_time() -> None:
    of = gang()
    of = with_status(of, lost(of, running(0), ended(1, 137), running(2)))
    others = running(0), ended(1, 137), running(2)
    waiting = again(1, phase="Pending", started_at=None)
    soon = reconcile(view(of, *others, waiting, now=LATER + timedelta(minutes=5)))
    assert soon.status is None or soon.status.release is None  # the gang was admitted half an hour ago
    late = reconcile(view(of, *others, waiting, now=LATER + timedelta(minutes=16)))
    assert phase(late) == "Preempting"
