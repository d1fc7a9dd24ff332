"""What the portal's pages show of jobs and services, from what their status says."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.conftest import JOB, SERVICE
from tests.api.portal.objects import NOW, made, obj, served

from busbar.api.portal.job_views import job_view, matches, waiting_facts
from busbar.api.portal.render import templates
from busbar.api.portal.service_views import service_view
from busbar.kube.types import TrainingJob


def test_the_page_of_a_job_says_what_is_promised() -> None:
    at = "2030-01-31T18:00:00Z"
    said = {"at": at, "answer": "Keeps", "message": "Promised: it needs 4 H100."}
    with_deadline = {**JOB, "spec": {**JOB["spec"], "deadline": at}}
    found = job_view(made(with_deadline, deadline=said), NOW)
    assert (found.deadline, found.deadline_said) == ("31 Jan 18:00 UTC", "Promised: it needs 4 H100.")
    assert job_view(made(JOB), NOW).deadline == ""


def test_the_page_of_a_job_shows_its_adapter_and_the_rows_that_were_left_out() -> None:
    model = {
        "adapter": "LoRA of rank 8 on all linear layers",
        "parameters": 5_000_000,
        "trainableParameters": 90_000,
    }
    view = job_view(made(JOB, model=model, progress={"step": 1, "badRows": 1200}), NOW)
    assert view.adapter == "LoRA of rank 8 on all linear layers"
    assert (view.trained, view.bad_rows) == ("90,000 of 5,000,000 parameters", "1,200")
    whole = job_view(made(JOB, model={"parameters": 5, "trainableParameters": 5}, progress={"step": 1}), NOW)
    assert (whole.adapter, whole.trained, whole.bad_rows) == ("", "", "")


def test_the_page_of_a_job_says_how_much_is_trained_beside_frozen_parts() -> None:
    model = {"parameters": 5_000_000, "trainableParameters": 1_250_000}
    view = job_view(made(JOB, model=model, progress={"step": 1}), NOW)
    assert view.adapter == "weights that are not frozen"
    assert view.trained == "1,250,000 of 5,000,000 parameters"


def test_a_job_shows_what_its_memory_is_planned_for() -> None:
    rows = [("device", "parameters", 2048), ("device", "gradients", 512), ("disk", "checkpoints", 300)]
    memory = {
        "plannedDeviceMib": 2560,
        "peakDeviceMib": 2000,
        "plannedHostMib": 100,
        "owners": [{"place": place, "owner": owner, "mib": mib} for place, owner, mib in rows],
    }
    assert job_view(made(JOB, phase="Running", memory=memory), NOW).memory == (
        (
            "Device",
            "2.5 GiB planned, peak 2.0 GiB",
            (("weights", "2.0 GiB", 100.0), ("gradients", "512 MiB", 25.0)),
        ),
        ("Disk", "300 MiB", (("checkpoints", "300 MiB", 100.0),)),
    )
    assert job_view(made(JOB, memory={"plannedDeviceMib": 1, "peakDeviceMib": 1}), NOW).memory == ()


def test_a_job_without_any_status_has_a_view() -> None:
    view = job_view(made(JOB), NOW)
    assert (view.badge.text, view.percent, view.loss, view.age) == ("Pending", None, "", "2 min")


def test_a_running_job_shows_progress_speed_and_time_left() -> None:
    view = job_view(
        made(
            JOB,
            phase="Running",
            progress={
                "step": 30,
                "totalSteps": 120,
                "loss": 2.34567,
                "tokensPerSecond": 2400.4,
                "phases": {"forward": 30, "backward": 61, "update": 9},
                "workers": [{"rank": 1, "ownSeconds": 0.8}, {"rank": 0, "ownSeconds": 0.2}],
                "etaSeconds": 3600,
            },
            checkpoint={"step": 20, "savedAt": "2026-03-01T11:59:30Z"},
            lostWork={"steps": 3, "seconds": 12.0},
        ),
        NOW,
    )
    assert view.spent_on == "backward 61 %, forward 30 %, update 9 %"
    assert view.slowest == "rank 1: 0.8 s of each step, 4.00 times the others"
    assert view.workers == ((0, "0.2", 25.0), (1, "0.8", 100.0))
    assert (view.percent, view.loss, view.speed, view.eta) == (25.0, "2.3457", "2,400", "1 h 00 min")
    assert (view.checkpoint, view.lost) == ("30 s", "3 steps, 12 s")


FULL: dict[str, Any] = {
    "phase": "Running",
    "reason": "Training",
    "message": "It trains.",
    "attempt": 2,
    "admission": {
        "id": "a",
        "pool": "cpu",
        "accelerator": "cpu",
        "mode": "resident",
        "pods": 1,
        "acceleratorsPerPod": 1,
        "nodes": ["n"],
        "admittedAt": "2026-03-01T11:59:00Z",
        "replaced": [{"rank": 0, "times": 1, "since": "2026-03-01T11:59:30Z"}],
        "reason": "free",
    },
    "forecast": {
        "madeAt": "2026-03-01T11:59:00Z",
        "startP50": "2026-03-01T12:20:00Z",
        "startP90": "2026-03-01T13:10:00Z",
        "endP50": "2026-03-01T14:00:00Z",
        "endP90": "2026-03-01T16:00:00Z",
    },
    "reservation": {
        "pool": "h100",
        "accelerator": "H100",
        "pods": 2,
        "acceleratorsPerPod": 8,
        "startBy": "2026-03-01T12:20:00Z",
        "collected": 1,
        "needed": 2,
        "nodes": [{"name": f"node-{i}", "since": "2026-03-01T11:30:00Z"} for i in range(2)],
    },
    "promise": {
        "madeAt": "2026-03-01T11:59:00Z",
        "startP50": "2026-03-01T12:20:00Z",
        "startP90": "2026-03-01T13:10:00Z",
        "simulatedP50Seconds": 1000.0,
        "simulatedP90Seconds": 4000.0,
        "generation": 1,
        "attempt": 0,
        "startedAt": "2026-03-01T12:00:00Z",
    },
    "preview": {"startsNow": True, "pool": "cpu", "mode": "resident", "reason": "free", "costPerHour": 1.5},
    "progress": {
        "step": 3,
        "totalSteps": 9,
        "loss": 2.5,
        "tokensPerSecond": 10.5,
        "tokens": 300,
        "etaSeconds": 60.0,
        "eta": "1m0s",
        "etaP50": "2026-03-01T12:01:00Z",
        "etaP90": "2026-03-01T12:02:00Z",
        "percent": 33.3,
        "workers": [{"rank": 1, "ownSeconds": 0.8}, {"rank": 0, "ownSeconds": 0.2}],
    },
    "memory": {
        "plannedDeviceMib": 5,
        "owners": [{"place": "device", "owner": "parameters", "mib": 5}],
    },
    "checkpoint": {"step": 2, "savedAt": "2026-03-01T11:59:00Z", "uri": "pvc://a/b"},
    "lostWork": {"steps": 4, "seconds": 8.5, "attempt": 1},
    "preemptions": 1,
    "restarts": 1,
    "evaluation": {
        "bitsPerByte": 1.5,
        "bigramBitsPerByte": 2.5,
        "ngramBitsPerByte": 2.0,
        "heldOutBytes": 100,
    },
    "usage": {"acceleratorSeconds": 7200.0, "workUnits": 7200.0, "energyJoules": 5.4e6, "cost": 3.0},
    "waiting": {
        "code": "x",
        "resource": "cpu",
        "requested": 1000,
        "limit": 2000,
        "position": 1,
        "changes": [{"kind": "pods", "current": "2", "needed": "1"}],
        "holders": [{"amount": 1, "own": False}],
    },
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Ready",
            "message": "",
            "lastTransitionTime": "2026-03-01T11:59:00Z",
        }
    ],
    "pods": {"ready": 1, "total": 1},
    "outputUri": "pvc://a/b",
}


def test_a_status_with_every_field_as_the_kind_defines_it_has_a_view_and_a_page() -> None:
    view = job_view(TrainingJob.model_validate(obj(JOB, **FULL)), NOW)
    assert view.eta_range == "60 s at this speed, 2 min at the slowest believed"
    assert (view.accelerator_hours, view.cost, view.lost) == ("2", "3.00", "4 steps, 8 s")
    assert view.energy == "1.5 kWh"
    page = templates().get_template("job_status.html").render(job=view)
    assert "at the slowest believed" in page
    assert "Likely starts" not in page  # it runs
    assert "The others wait for rank 1: 0.8 s of each step" in page
    assert "<h3>Device: 5 MiB planned</h3>" in page
    assert "weights: 5 MiB" in page
    assert "made again: rank 0" in page
    assert page.index("Rank 0: 0.2 s") < page.index("Rank 1: 0.8 s")
    assert 'value="25.0" aria-label="Rank 0"' in page


def test_a_waiting_job_shows_when_it_would_start_and_end() -> None:
    view = job_view(made(JOB, **{**FULL, "phase": "Queued"}), NOW)
    assert (view.forecast["start"], view.forecast["start_late"]) == ("in 20 min", "in 1 h 10 min")
    assert (view.forecast["end"], view.forecast["end_late"]) == ("in 2 h 00 min", "in 4 h 00 min")
    page = templates().get_template("job_status.html").render(job=view)
    assert "nine times in ten in 1 h 10 min or sooner" in page
    late = {**FULL["forecast"], "startP50": "2026-03-01T11:00:00Z"}
    assert job_view(made(JOB, phase="Queued", forecast=late), NOW).forecast["start"] == "any moment"
    assert job_view(made(JOB, phase="Queued", forecast={"startP50": "soon"}), NOW).forecast == {}


def test_a_job_that_is_first_in_line_shows_its_place() -> None:
    view = job_view(made(JOB, **{**FULL, "phase": "Queued"}), NOW)
    told = "Starts by 12:20 UTC on 2 × 8 H100 in pool h100: 1 of 2 nodes collected."
    assert view.place == told
    assert told in templates().get_template("job_status.html").render(job=view)
    later = {**FULL["reservation"], "startBy": "2026-03-02T12:20:00Z", "needed": 1}
    place = job_view(made(JOB, phase="Queued", reservation=later), NOW).place
    assert place.startswith("Starts by 02 Mar 12:20 UTC on ")
    assert place.endswith("1 of 1 node collected.")
    assert job_view(made(JOB, phase="Queued"), NOW).place == ""


@pytest.mark.parametrize("junk", ["", "soon", {}, [], True, -1, float("nan")])
def test_values_that_are_not_what_they_should_be_never_break_a_page(junk: object) -> None:
    progress = dict.fromkeys(
        ("step", "totalSteps", "loss", "tokensPerSecond", "etaSeconds", "etaP50", "etaP90"), junk
    )
    status = {
        "phase": "Running",
        "progress": progress,
        "usage": {"acceleratorSeconds": junk, "cost": junk},
        "lostWork": {"steps": junk, "seconds": junk},
        "checkpoint": {"savedAt": junk},
        "evaluation": {"bitsPerByte": junk},
    }
    templates().get_template("job_status.html").render(job=job_view(made(JOB, **status), NOW))


def test_conditions_that_hold_are_shown_and_one_sentence_is_not_said_six_times() -> None:
    def condition(kind: str, status: str, message: str) -> dict[str, str]:
        since = "2026-03-01T11:59:00Z"
        return {
            "type": kind,
            "status": status,
            "reason": "R",
            "message": message,
            "lastTransitionTime": since,
        }

    found = [condition(kind, "False", "It trains.") for kind in ("Ready", "Complete", "Failed", "Suspended")]
    found += [
        condition("Running", "True", "It trains."),
        condition("Admitted", "True", "It holds its quota."),
    ]
    view = job_view(made(JOB, phase="Running", message="It trains.", conditions=found), NOW)
    assert [(row["type"], row["message"]) for row in view.conditions.holding] == [
        ("Running", ""),
        ("Admitted", "It holds its quota."),
    ]
    page = templates().get_template("job_status.html").render(job=view)
    assert page.count("It trains.") == 1
    shown, folded = page.split("<details")
    assert "Admitted" in shown
    assert "4 that do not hold" in folded
    assert "Suspended" in folded
    assert "Suspended" not in shown


def test_filters_match_phase_and_words() -> None:
    job = made(JOB, phase="Running", reason="Training")
    assert matches(job, "active", "")
    assert not matches(job, "waiting", "")
    assert matches(job, "", "ADA-LAB/r")
    assert matches(job, "", "training")
    assert not matches(job, "active", "other")


def test_a_service_says_who_sets_its_replica_count() -> None:
    assert not service_view(served(SERVICE), NOW).external
    fixed = {**SERVICE, "spec": {**SERVICE["spec"], "replicas": 0}}
    assert service_view(served(fixed, phase="Idle"), NOW).external


def test_a_services_page_shows_how_the_latency_target_is_kept_and_each_changes_cause() -> None:
    change = {"time": NOW.isoformat(), "previous": 1, "desired": 3, "cause": "Panic", "reason": "It waited."}
    view = service_view(
        served(
            SERVICE,
            slo={"scaledBy": "Promise", "attainmentHour": 0.9951, "requestsHour": 7000},
            pools=[{"pool": "l4", "replicas": 1, "desired": 3}],
            scalingHistory=[change],
        ),
        NOW,
    )
    page = templates().get_template("service_status.html").render(service=view)
    for text in ("the latency target", "99.5 % of 7000 requests in an hour", "1 on l4 (3 wanted)", "Panic"):
        assert text in page


def test_waiting_amounts_are_accelerators_or_mebibytes() -> None:
    assert ("Asked for", "16") in waiting_facts(
        {"code": "x", "resource": "H100", "requested": 16000, "free": 500}
    )
    assert ("Free", "0.5") in waiting_facts(
        {"code": "x", "resource": "H100", "requested": 16000, "free": 500}
    )
    assert ("Asked for", "2,048 MiB") in waiting_facts({"resource": "memory", "requested": 2048})


def test_a_job_page_says_its_cap_and_what_it_will_have_used() -> None:
    admission = {
        "id": "x",
        "pool": "p",
        "accelerator": "A100",
        "pods": 1,
        "acceleratorsPerPod": 8,
        "nodes": ["n"],
    }
    capped = admission | {"powerCapPercent": 70, "powerCapWatts": 280.0}
    used = {"usage": {"energyJoules": 3.6e6}, "progress": {"step": 25, "totalSteps": 100}}
    used |= {"attempt": 2, "power": {"attempt": 2, "seconds": 60, "slowdown": 1.25}}
    view = job_view(made(JOB, phase="Running", admission=capped, **used), NOW)
    assert (view.power_cap, view.energy, view.energy_in_all) == (
        "70 % of each board's limit (280 W)",
        "1 kWh",
        "4 kWh",
    )
    assert view.power_limits == "1.25 times as long as without limits so far"
    again = job_view(made(JOB, phase="Running", admission=capped, **(used | {"attempt": 3})), NOW)
    assert again.power_limits == "", "that was the attempt before"
    assert (view.nodes, view.accelerators_per_pod) == (("n",), 8)
    ended = job_view(made(JOB, phase="Succeeded", admission=admission, **used), NOW)
    assert (ended.power_cap, ended.energy_in_all, ended.nodes) == ("", "", ())
