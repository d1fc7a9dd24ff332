"""The reconcile of a TrainingJob, one behaviour per test, without a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import (
    NOW,
    admit,
    admitted,
    ended,
    gang,
    gated,
    job,
    phase,
    placement,
    pod,
    running,
    running_job,
    view,
    with_status,
)

from busbar.kube.contracts.workload import TrainingStatus
from busbar.kube.resources import PODS, SECRETS, SERVICES, TRAINING_JOBS
from busbar.kube.types import TrainingJob
from busbar.kube.types.lost_work import LostWork
from busbar.kube.types.training_status import Progress, TrainingJobStatus, Usage
from busbar.operator.decisions import Lift, Release, Wait
from busbar.operator.pods.readings import parse_reading
from busbar.operator.training.progress import merge_reading
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.view import JobUpdate, placement_of
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Apply, Create, Delete, LiftGate
from busbar.operator.write.pace import next_at_s


def reading(**said: object) -> TrainingStatus:
    made = parse_reading({"kind": "training", "phase": "Training", **said})
    assert made is not None
    return made


def test_a_new_job_waits_for_the_scheduler_without_a_write() -> None:
    assert reconcile(view(job())) == JobUpdate()


def test_a_waiting_job_says_the_schedulers_sentence() -> None:
    update = reconcile(
        view(job()), Wait("InsufficientCapacity", "Needs 4 H100, 1 of 16 are free.", {"code": "x"})
    )
    assert phase(update) == "Queued"
    assert update.status is not None
    assert (update.status.reason, update.status.message) == (
        "InsufficientCapacity",
        "Needs 4 H100, 1 of 16 are free.",
    )
    assert update.status.preview is not None
    assert not update.status.preview.starts_now


def test_an_admission_is_one_write_and_no_action() -> None:
    update = reconcile(view(job()), admit())
    assert phase(update) == "Admitted"
    assert update.actions == ()
    assert update.status is not None
    assert update.status.admission is not None
    assert update.status.admission.nodes == ["node-0"]
    assert update.status.attempt == 1


def test_a_power_cap_is_written_with_the_admission_and_lifted_without_a_restart() -> None:
    decision = replace(admit(), placement=placement(power_cap=0.7))
    of = with_status(job(), reconcile(view(job()), decision))
    assert of.status is not None
    assert of.status.admission is not None
    assert of.status.admission.power_cap_percent == 70
    assert placement_of(of.status.admission) == decision.placement
    own = running(0)
    for cap, percent in ((0.85, 85), (1.0, None)):
        update = reconcile(view(of, own), Lift(cap, "has watts", decision.placement))
        assert update.actions == ()
        assert update.status is not None
        lifted = update.status.admission
        assert lifted is not None
        assert (lifted.power_cap_percent, lifted.power_cap_changed_at) == (percent, NOW)
        assert (lifted.id, lifted.admitted_at, update.status.attempt) == (
            of.status.admission.id,
            of.status.admission.admitted_at,
            1,
        )
    elsewhere = replace(decision.placement, nodes=("node-1",))
    late = reconcile(view(of, own), Lift(1.0, "has watts", elsewhere)).status
    assert late is None or late.admission is None or late.admission.power_cap_percent == 70
    assert reconcile(view(job()), admit()).status.admission.power_cap_percent is None  # type: ignore[union-attr]


def test_an_order_made_on_an_older_object_is_refused() -> None:
    assert reconcile(view(job()), admit(version="6")).status is None


def test_missing_pods_are_created_after_the_service_and_all_are_gated() -> None:
    update = reconcile(view(admitted(gang(3), 3)))
    assert update.status is None
    kinds = [a.resource for a in update.actions if isinstance(a, Create)]
    assert kinds == [SERVICES, PODS, PODS, PODS]
    bodies = [a.body for a in update.actions if isinstance(a, Create)][1:]
    assert all(b["spec"]["schedulingGates"] for b in bodies)
    assert [b["metadata"]["name"] for b in bodies] == ["job-1-0", "job-1-1", "job-1-2"]


def test_no_gate_is_lifted_before_the_gang_is_complete() -> None:
    update = reconcile(view(admitted(gang(3), 3), gated(0), gated(2)))
    assert [type(a) for a in update.actions] == [Create, Create]  # the Service again, and rank 1


def test_the_bearers_are_written_before_the_pods_that_mount_them() -> None:
    first, *rest = reconcile(view(admitted(job()))).actions
    assert isinstance(first, Apply)
    assert (first.resource, first.body["type"]) == (SECRETS, "busbar.dev/bearers")
    assert [a.resource for a in rest if isinstance(a, Create)] == [PODS]


def test_all_gates_are_lifted_together() -> None:
    update = reconcile(view(admitted(gang(2), 2), gated(0), gated(1)))
    assert [type(a) for a in update.actions] == [LiftGate, LiftGate]


def test_the_remaining_gates_of_a_gang_are_lifted_after_an_interruption() -> None:
    update = reconcile(view(admitted(gang(2), 2), running(0), gated(1)))
    assert [(type(a), a.key.name) for a in update.actions] == [(LiftGate, "job-1-1")]


def test_a_pod_that_vanishes_after_the_start_ends_the_attempt_without_counting() -> None:
    update = reconcile(view(admitted(gang(2), 2), running(0)))
    assert phase(update) == "Queued"
    assert update.status is not None
    assert update.status.admission is None
    assert update.status.restarts == 0


@pytest.mark.parametrize("left", [(), (gated(1),)])
def test_a_pod_that_was_seen_and_is_gone_is_not_made_again_in_its_attempt(left: tuple[Pod, ...]) -> None:
    of = admitted(gang(2), 2)
    update = reconcile(view(of, *left, gone_pods=frozenset({"job-1-0"})))
    assert (phase(update), update.actions) == ("Queued", ())
    assert update.status is not None
    assert (update.status.admission, update.status.restarts) == (None, 0)
    assert "rank 0 was deleted" in (update.status.message or "")


def test_a_pod_lost_in_an_earlier_attempt_keeps_no_later_one_from_being_made() -> None:
    update = reconcile(view(admitted(job(status={"attempt": 1})), gone_pods=frozenset({"job-1-0"})))
    assert [a.key.name for a in update.actions if isinstance(a, Create)] == ["job-2-0"]


def test_pods_of_an_earlier_attempt_go_before_new_ones_come() -> None:
    update = reconcile(view(admitted(job(status={"attempt": 1})), running(0, attempt=1)))
    assert [(type(a), a.key.name) for a in update.actions] == [(Delete, "job-1-0")]


def test_a_job_is_not_admitted_while_old_pods_still_run() -> None:
    old = job(status={"attempt": 1, "phase": "Queued"})
    update = reconcile(view(old, running(0)), admit())
    assert update.status is None
    assert [type(a) for a in update.actions] == [Delete]


def test_running_is_said_when_all_pods_run() -> None:
    of = admitted(gang(2), 2)
    assert phase(reconcile(view(of, running(0), pod(1)))) == "Starting"
    update = reconcile(view(of, running(0), running(1)))
    assert phase(update) == "Running"
    assert update.status is not None
    assert update.status.start_time == NOW


def test_progress_is_written_at_a_bounded_rate() -> None:
    of = running_job()
    said = {running().uid: reading(step=5, totalSteps=100, loss=2.0)}
    soon = view(of, running(), now=NOW + timedelta(seconds=1), readings=said)
    assert reconcile(soon).status is None
    later = reconcile(replace(soon, now=NOW + timedelta(seconds=6)))
    assert later.status is not None
    assert later.status.progress is not None
    assert (later.status.progress.step, later.status.progress.percent) == (5, 5.0)


def test_usage_is_counted_from_the_last_count_to_now_and_never_twice() -> None:
    of = running_job()
    update = reconcile(view(of, running(), now=NOW + timedelta(seconds=60)))
    assert update.status is not None
    assert update.status.usage is not None
    assert update.status.usage.accelerator_seconds == 60
    again = reconcile(view(with_status(of, update), running(), now=NOW + timedelta(seconds=60)))
    assert again.status is None


def test_a_success_takes_its_numbers_from_the_termination_message() -> None:
    message = '{"kind": "training", "phase": "Done", "step": 100, "totalSteps": 100, "loss": 1.25}'
    update = reconcile(view(running_job(), ended(0, 0, message)))
    assert phase(update) == "Succeeded"
    assert update.status is not None
    assert update.status.progress is not None
    assert update.status.progress.loss == 1.25
    assert update.status.output_uri == "pvc://claim/model"


def test_a_job_that_ended_before_it_was_seen_to_run_says_when_it_began() -> None:
    began = NOW - timedelta(seconds=10)
    pod_ = ended()
    assert pod_.exit is not None
    told = replace(pod_, exit=replace(pod_.exit, started_at=began))
    update = reconcile(view(admitted(job()), told))
    assert phase(update) == "Succeeded"
    assert update.status is not None
    assert update.status.admission is not None
    assert (update.status.start_time, update.status.admission.started_at) == (began, began)


def test_an_attempt_of_which_not_all_pods_have_run_says_no_start() -> None:
    first = replace(running(0), started_at=NOW)
    update = reconcile(view(admitted(gang(2), pods=2), first, ended(1, 1)))
    assert phase(update) == "Queued"
    assert update.status is not None
    assert update.status.start_time is None


def test_a_failure_counts_and_waits_twice_as_long_each_time() -> None:
    waits = []
    for restarts in (0, 1, 2):
        update = reconcile(view(running_job(restarts=restarts), ended(0, 1)))
        assert phase(update) == "Queued"
        assert update.status is not None
        assert update.status.restarts == restarts + 1
        assert update.status.retry_at is not None
        waits.append((update.status.retry_at - NOW).total_seconds())
    assert waits == [2, 4, 8]


def test_the_last_try_fails_with_the_cause() -> None:
    update = reconcile(view(running_job(restarts=3), ended(0, 1, "KeyError: 'x'")))
    assert phase(update) == "Failed"
    assert update.status is not None
    assert update.status.reason == "RetryLimitReached"
    assert "KeyError: 'x'" in (update.status.message or "")


@pytest.mark.parametrize("pod_", [ended(0, 143), ended(0, 137, evicted=True)])
def test_a_saved_or_evicted_pod_is_resumed_without_counting(pod_: object) -> None:
    update = reconcile(view(running_job(restarts=3), pod_))  # type: ignore[arg-type]
    assert phase(update) == "Queued"
    assert update.status is not None
    assert update.status.restarts == 3


def test_a_pod_over_its_own_limit_loses_a_try_and_is_told_in_the_kubelets_words() -> None:
    said = "Evicted: Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
    update = reconcile(view(running_job(restarts=1), ended(0, 137, problem=said)))
    assert update.status is not None
    assert (update.status.phase, update.status.restarts) == ("Queued", 2)
    assert f"Pod job-1-0 failed: {said} The next" in (update.status.message or "")


def test_a_job_that_our_engine_refuses_fails_at_once() -> None:
    update = reconcile(view(running_job(), ended(0, 2, "no such model type")))
    assert phase(update) == "Failed"
    assert update.status is not None
    assert update.status.reason == "InvalidSpec"


def test_a_failed_rank_ends_the_gang_and_the_others_are_deleted_next() -> None:
    of = admitted(gang(2), 2)
    of = with_status(of, reconcile(view(of, running(0), running(1))))
    update = reconcile(view(of, running(0), ended(1, 1)))
    assert phase(update) == "Queued"
    after = reconcile(view(with_status(of, update), running(0), ended(1, 1)))
    assert [(type(a), a.key.name) for a in after.actions] == [(Delete, "job-1-0")]


def test_the_engines_memory_stands_in_the_status_beside_its_plan_until_the_next_attempt() -> None:
    report = {
        "class": "c",
        "accelerator": "cuda",
        "plannedDeviceBytes": 3 << 30,
        "peakDeviceBytes": (2 << 30) + 1,
    }
    said = reading(step=9, totalSteps=10, tokensPerSecond=5.0, report=report)
    first = merge_reading(TrainingJobStatus(), said, NOW)
    assert first.memory is not None
    assert (first.memory.planned_device_mib, first.memory.peak_device_mib) == (3072, 2049)
    assert first.memory.peak_host_mib is None
    # Its last message had no room for the report.
    last = merge_reading(first, reading(step=10, totalSteps=10, tokensPerSecond=5.0), NOW)
    assert last.memory == first.memory
    assert merge_reading(last, reading(step=0, totalSteps=10), NOW).memory is None


def test_the_plans_bytes_by_owner_stand_in_the_status_from_the_start_of_an_attempt_to_its_end() -> None:
    mib = 1 << 20
    plan = {
        "deviceBytes": 5 * mib,
        "hostBytes": 9 * mib,
        "deviceOwners": {"staging": 0, "gradients": mib + 1, "parameters": 3 * mib, "x" * 64: mib},
        "hostOwners": {"checkpoint": 9 * mib},
        "diskOwners": {"checkpoints": 30 * mib, "tokens": 1},
    }
    begun = merge_reading(TrainingJobStatus(), reading(totalSteps=10, memory=plan), NOW).memory
    assert begun is not None
    assert (begun.planned_device_mib, begun.peak_device_mib, begun.planned_host_mib) == (5, None, 9)
    assert [(row.place.value, row.owner, row.mib) for row in begun.owners or ()] == [
        ("device", "parameters", 3),
        ("device", "gradients", 2),
        ("host", "checkpoint", 9),
        ("disk", "checkpoints", 30),
        ("disk", "tokens", 1),
    ]
    report = {"class": "c", "accelerator": "cuda", "plannedDeviceBytes": 5 * mib, "peakDeviceBytes": 4 * mib}
    said = reading(step=9, totalSteps=10, tokensPerSecond=5.0, report=report, memory=plan)
    running = merge_reading(TrainingJobStatus(memory=begun), said, NOW)
    assert running.memory is not None
    assert (running.memory.peak_device_mib, running.memory.owners) == (4, begun.owners)
    ended = reading(
        step=10, totalSteps=10, tokensPerSecond=5.0, report=report, memory={"deviceBytes": 5 * mib}
    )
    assert merge_reading(running, ended, NOW).memory == running.memory
    elsewhere = reading(totalSteps=10, memory={**plan, "diskOwners": {}, "hostOwners": {}})
    again = merge_reading(running, elsewhere, NOW).memory
    assert again is not None
    assert {row.place.value for row in again.owners or ()} == {"device"}
    assert again.peak_device_mib is None


def test_a_finished_job_goes_after_its_time() -> None:
    of = job(ttlSecondsAfterFinished=30, status={"phase": "Succeeded", "completionTime": NOW.isoformat()})
    assert reconcile(view(of, now=NOW + timedelta(seconds=29))).actions == ()
    update = reconcile(view(of, now=NOW + timedelta(seconds=31)))
    assert [a.resource for a in update.actions if isinstance(a, Delete)] == [TRAINING_JOBS]


def test_a_job_over_its_active_deadline_fails() -> None:
    of = running_job()
    of = of.model_copy(update={"spec": of.spec.model_copy(update={"active_deadline_seconds": 10})})
    assert phase(reconcile(view(of, running(), now=NOW + timedelta(seconds=11)))) == "Failed"


def test_time_in_the_queue_does_not_count_against_the_active_deadline() -> None:
    of = running_job(
        start_time=NOW - timedelta(hours=2), usage=Usage(accelerator_seconds=5.0), last_usage_time=NOW
    )
    of = of.model_copy(update={"spec": of.spec.model_copy(update={"active_deadline_seconds": 10})})
    assert phase(reconcile(view(of, running(), now=NOW + timedelta(seconds=4)))) != "Failed"
    assert phase(reconcile(view(of, running(), now=NOW + timedelta(seconds=5)))) == "Failed"


def test_a_running_job_is_looked_at_again_when_its_use_is_due_and_when_its_deadline_is() -> None:
    of = running_job(last_usage_time=NOW)
    idle = reconcile(view(of, running(), now=NOW + timedelta(seconds=10)))
    assert idle.status is None
    assert idle.again_s is not None
    at_s = next_at_s("uid-job", NOW.timestamp(), 60.0) - NOW.timestamp()
    assert 10 < at_s <= 61
    assert idle.again_s == pytest.approx(max(5.0, at_s - 10))
    due = reconcile(view(of, running(), now=NOW + timedelta(seconds=10.01 + idle.again_s)))
    assert due.status is not None
    limited = of.model_copy(update={"spec": of.spec.model_copy(update={"active_deadline_seconds": 12})})
    assert reconcile(view(limited, running(), now=NOW + timedelta(seconds=10))).again_s == pytest.approx(2.0)


@pytest.mark.parametrize("of", [job(managedBy="example.com/other"), job(deleting=True)])
def test_what_is_not_ours_or_is_going_away_is_left_alone(of: TrainingJob) -> None:
    assert reconcile(view(of, running()), admit()) == JobUpdate()


def test_lost_work_is_counted_once_per_attempt() -> None:
    before = Progress(step=40, total_steps=100, tokens=400, tokens_per_second=10.0)
    of = running_job(attempt=2, progress=before)
    lead = running(attempt=2)
    said = {lead.uid: reading(step=30, totalSteps=100, resumedFromStep=25, lostSteps=15)}
    first = reconcile(view(of, lead, readings=said, now=NOW + timedelta(seconds=10)))
    assert first.status is not None
    assert first.status.lost_work is not None
    assert (first.status.lost_work.steps, first.status.lost_work.seconds) == (15, 15.0)
    later = view(with_status(of, first), lead, readings=said, now=NOW + timedelta(seconds=80))
    second = reconcile(later)
    assert second.status is not None
    assert second.status.lost_work == first.status.lost_work


def test_steps_that_a_crash_within_an_attempt_costs_are_added_once() -> None:
    before = Progress(step=40, total_steps=100, tokens=400, tokens_per_second=10.0)
    of, lead = running_job(attempt=2, progress=before), running(attempt=2)
    found = []
    for number, told in enumerate((5, 5, 8, 8), start=1):  # the engine adds up what its crashes cost
        said = {lead.uid: reading(step=39, totalSteps=100, resumedFromStep=38, lostSteps=told)}
        update = reconcile(view(of, lead, readings=said, now=NOW + timedelta(seconds=80 * number)))
        of = with_status(of, update)
        assert of.status is not None
        assert of.status.lost_work is not None
        found.append(of.status.lost_work.steps)
    assert found == [5, 5, 8, 8]


def test_what_an_earlier_version_counted_for_an_attempt_is_not_counted_again() -> None:
    of = running_job(attempt=2, lost_work=LostWork(steps=7, attempt=2))
    lead = running(attempt=2)
    said = {lead.uid: reading(step=39, totalSteps=100, resumedFromStep=38, lostSteps=7)}
    update = reconcile(view(of, lead, readings=said, now=NOW + timedelta(seconds=80)))
    assert update.status is None or update.status.lost_work == LostWork(steps=7, attempt=2)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, 2),
            st.sampled_from(["gated", "pending", "running", "ok", "failed"]),
        ),
        max_size=6,
        unique_by=lambda t: (t[0], t[1]),
    ),
    st.sampled_from(["new", "admitted", "preempting"]),
)
def test_no_pod_is_ever_created_beside_a_living_one_of_another_attempt(
    pods: list[tuple[int, int, str]], state: str
) -> None:
    make: dict[str, Callable[..., Pod]] = {
        "gated": gated, "pending": pod, "running": running,
        "ok": lambda r, **k: ended(r, 0, **k), "failed": lambda r, **k: ended(r, 1, **k),
    }  # fmt: skip
    seen = tuple(make[how](rank, attempt=attempt) for rank, attempt, how in pods)
    of = gang(3) if state == "new" else admitted(gang(3, status={"attempt": 1}), 3)
    if state == "preempting":
        of = with_status(of, reconcile(view(of), Release("Preempted", "x", "7", taken=True)))
    update = reconcile(view(of, *seen))
    creates = [a for a in update.actions if isinstance(a, Create) and a.resource is PODS]
    old = [p for p in seen if p.attempt == 1 and not p.ended]
    assert not (creates and old)
    assert len({a.key for a in creates}) == len(creates)
    if state == "preempting":
        assert not creates


def test_a_start_under_way_is_told_when_it_lasts_and_not_at_each_pod() -> None:
    of = admitted(gang(3), 3)
    soon = reconcile(view(of, running(0), pod(1), pod(2), counts_due=False))
    assert soon.status is None
    assert soon.again_s == 2.0
    assert phase(reconcile(view(of, running(0), pod(1), pod(2)))) == "Starting"
    assert phase(reconcile(view(of, running(0), running(1), running(2), counts_due=False))) == "Running"


def test_only_pods_that_meet_get_a_service() -> None:
    def made(size: int) -> list[str]:
        actions = reconcile(view(admitted(gang(size), size))).actions
        return [a.resource.kind for a in actions if isinstance(a, Create)]

    assert made(1) == ["Pod"]
    assert made(2) == ["Service", "Pod", "Pod"]


def test_the_energy_of_a_job_is_written_with_its_use() -> None:
    of = admitted(gang(1))
    late = view(of, running(0), now=NOW + timedelta(minutes=2))
    for joules, written in ((None, None), (1234.5, 1234.5)):
        update = reconcile(replace(late, energy_joules=joules))
        assert update.status is not None
        assert update.status.usage is not None
        assert update.status.usage.energy_joules == written
