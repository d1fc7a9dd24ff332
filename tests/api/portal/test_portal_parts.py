"""The portal's pure functions (forms to objects, objects to views) and its vendored files."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api.conftest import JOB, SERVICE

from busbar.api.errors import Invalid
from busbar.api.kubernetes.typed import read
from busbar.api.objects.budgets import budget_lines
from busbar.api.portal.drafts import EXAMPLE, PRESETS, draft, parse, to_yaml, whole_or_none
from busbar.api.portal.formatting import ago, number
from busbar.api.portal.pool_views import node_view, pool_view, profile_view, tenant_view
from busbar.api.portal.power_views import JobPower, feed_views, job_power
from busbar.api.portal.render import STATIC, static_files, templates
from busbar.api.portal.views import job_view, matches, service_view, waiting_facts
from busbar.kube.contracts.power import Backend
from busbar.kube.contracts.power_view import FeedPower, NodePower
from busbar.kube.contracts.preview import NodeLoad
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile, Tenant, TrainingJob

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
TRAIN = {
    "name": "run",
    "preset": "llama-tiny",
    "data": "builtin://python-stdlib",
    "output": "pvc://stdlib/model",
    "accelerators": "cpu, L4",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_training_form_makes_a_valid_job(preset: str) -> None:
    _, obj = draft(
        "train",
        {**TRAIN, "preset": preset, "priority": "7", "device_memory": "256Mi", "checkpoint_steps": "20"},
    )
    job = TrainingJob.model_validate(obj)
    assert job.spec.accelerators == ["cpu", "L4"]
    assert job.spec.engine is not None
    assert job.spec.engine.steps == 500
    assert job.spec.checkpoint.every_steps == 20


TUNE = {"name": "run", "base": "pvc://base/model", "data": "pvc://rows/a.jsonl", "output": "pvc://base/out"}


@pytest.mark.parametrize(
    ("given", "adapter"),
    [
        ({}, None),
        ({"rank": "8"}, {"rank": 8, "merge": True}),
        ({"rank": "8", "result": "adapter"}, {"rank": 8, "merge": False}),
    ],
)
def test_the_tuning_form_makes_a_valid_job(given: dict[str, str], adapter: dict[str, Any] | None) -> None:
    _, obj = draft("tune", {**TUNE, **given})
    job = TrainingJob.model_validate(obj)
    assert job.spec.engine is not None
    assert job.spec.engine.model.uri == "pvc://base/model"
    assert obj["spec"]["engine"].get("adapter") == adapter
    assert job.spec.engine.optimizer.learning_rate == 0.0002
    assert job.spec.engine.activations == "auto"


def test_the_training_forms_ask_what_to_do_with_activations() -> None:
    _, obj = draft("tune", {**TUNE, "activations": "recompute"})
    assert obj["spec"]["engine"]["activations"] == "recompute"
    told = {"step": 1, "activations": "recompute"}
    assert job_view(made(JOB, progress=told), NOW).activations == "activations are recomputed"
    assert job_view(made(JOB, progress={"step": 1, "activations": "keep"}), NOW).activations == ""


@pytest.mark.parametrize("form", ["train", "tune"])
def test_the_training_forms_ask_for_a_deadline_in_utc(form: str) -> None:
    given = TUNE if form == "tune" else TRAIN
    for written, stored in (
        ("2030-01-31T18:00", "2030-01-31T18:00:00Z"),
        ("2030-01-31T18:00:00+02:00", "2030-01-31T16:00:00Z"),
    ):
        _, obj = draft(form, {**given, "deadline": written})
        assert obj["spec"]["deadline"] == stored
    assert "deadline" not in draft(form, {**given, "deadline": " "})[1]["spec"]
    with pytest.raises(Invalid, match="deadline: 'soon' is no moment"):
        draft(form, {**given, "deadline": "soon"})


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


def test_a_profile_shows_predicted_and_measured_side_by_side() -> None:
    cell = {
        "accelerator": "L4", "accelerators": 1, "mode": "resident", "tokensPerSecond": 4100.4, "predicted": 5200.0,
        "memoryGib": 11.25, "measuredMemoryGib": 10.5, "source": "Measured", "reports": 9, "note": "seen",
    }  # fmt: skip
    [row] = profile_view(_profile(cell)).rows
    assert (row["speed"], row["predicted"]) == ("4,100", "5,200")
    assert (row["memory"], row["measured_memory"], row["note"]) == ("11.2 GiB", "10.5 GiB", "seen")
    del cell["predicted"], cell["measuredMemoryGib"]
    [row] = profile_view(_profile(cell)).rows
    assert (row["predicted"], row["measured_memory"]) == ("", "")


def _profile(cell: dict[str, Any]) -> PerformanceProfile:
    document = {"metadata": {"name": "c"}, "spec": {"workloadClass": "c"}, "status": {"cells": [cell]}}
    return PerformanceProfile.model_validate(document)


def test_the_image_form_splits_the_command_as_a_shell_would() -> None:
    _, obj = draft(
        "image", {"name": "g", "image": "img", "command": "torchrun train.py --name 'a b'", "pods": "2"}
    )
    job = TrainingJob.model_validate(obj)
    assert job.spec.template is not None
    assert job.spec.template.command == ["torchrun", "train.py", "--name", "a b"]
    assert (job.spec.shape.min_pods, job.spec.shape.max_pods) == (2, 2)


def test_the_service_form_makes_a_valid_service() -> None:
    _, obj = draft("serve", {"name": "chat", "training_job": "run", "min_replicas": "0", "max_replicas": "3"})
    service = ModelService.model_validate(obj)
    assert (service.spec.min_replicas, service.spec.max_replicas) == (0, 3)


def test_the_example_in_the_yaml_box_is_valid() -> None:
    _, obj = parse(EXAMPLE)
    TrainingJob.model_validate(obj)


@pytest.mark.parametrize(
    ("form", "fields", "field"),
    [
        ("train", {**TRAIN, "name": " "}, "name"),
        ("train", {**TRAIN, "preset": "gpt-9"}, "preset"),
        ("train", {**TRAIN, "steps": "many"}, "steps"),
        ("train", {**TRAIN, "steps": "0"}, "steps"),
        ("train", {**TRAIN, "learning_rate": "fast"}, "learning_rate"),
        ("tune", {**TUNE, "base": ""}, "base"),
        ("tune", {**TUNE, "rank": "0"}, "rank"),
        ("image", {"name": "g"}, "image"),
        ("image", {"name": "g", "image": "i", "command": "echo 'open"}, "command"),
        ("serve", {"name": "s"}, "training_job"),
        ("serve", {"name": "s", "training_job": "a", "uri": "pvc://b"}, "training_job"),
        ("yaml", {"yaml": "a: [1"}, "yaml"),
        ("yaml", {"yaml": "kind: A\n---\nkind: B\n"}, "yaml"),
        ("yaml", {"yaml": "kind: Pod"}, "kind"),
        ("yaml", {"yaml": "!!python/object/apply:os.system ['true']"}, "yaml"),
        ("yaml", {"yaml": "x" * 200_001}, "yaml"),
    ],
)
def test_a_wrong_form_names_its_field(form: str, fields: dict[str, str], field: str) -> None:
    with pytest.raises(Invalid) as refused:
        draft(form, fields)
    assert refused.value.field == field


def test_yaml_comes_back_as_it_was() -> None:
    assert parse(to_yaml(JOB))[1] == JOB


def obj(kind: dict[str, Any], **status: Any) -> dict[str, Any]:
    meta = {"name": "run", "namespace": "ada-lab", "uid": "u", "creationTimestamp": "2026-03-01T11:58:00Z"}
    return {**kind, "metadata": meta, "status": status}


def made(kind: dict[str, Any], **status: Any) -> TrainingJob:
    found = read(TrainingJob, obj(kind, **status))
    assert found is not None
    return found


def served(kind: dict[str, Any], **status: Any) -> ModelService:
    found = read(ModelService, obj(kind, **status))
    assert found is not None
    return found


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
                "etaSeconds": 3600,
            },
            checkpoint={"step": 20, "savedAt": "2026-03-01T11:59:30Z"},
            lostWork={"steps": 3, "seconds": 12.0},
        ),
        NOW,
    )
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


def load(ready: bool, capacity: float, allocated: float) -> NodeLoad:
    return NodeLoad(
        name="n", pool="p", accelerator="H100", ready=ready, capacity=capacity, allocated=allocated
    )


@pytest.mark.parametrize(("held", "heat"), [(0, 0), (0.3, 0), (4, 5), (8, 10), (9, 10)])
def test_heat_runs_from_0_to_10(held: float, heat: int) -> None:
    assert node_view(load(True, 8, held)).heat == heat
    assert node_view(load(False, 0, 0)).label.endswith("not ready")


def test_times_and_numbers_are_plain() -> None:
    assert ago(NOW + timedelta(seconds=5), NOW) == "0 s"
    assert ago(None, NOW) == ""
    assert (number(8.0, 1), number(1234.5, 1), number(None, 1), number(100, 0)) == ("8", "1,234.5", "", "100")


def test_vendored_files_are_the_published_ones() -> None:
    folder = STATIC / "vendor"
    lines = [line.split() for line in (folder / "SHA256SUMS.txt").read_text().splitlines()]
    listed = {name: digest for digest, name in lines}
    present = {path.name for path in folder.iterdir()} - {"SHA256SUMS.txt"}
    assert set(listed) == present
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    for library in ("htmx", "pico", "uplot"):
        assert f"{library}-LICENSE.txt" in present


def test_our_pages_carry_no_inline_script_or_style() -> None:
    templates = STATIC.parent / "templates"
    for path in templates.glob("*.html"):
        text = path.read_text()
        assert "<style" not in text, path
        assert " style=" not in text, path
        assert " onclick" not in text, path
        assert all("src=" in part.split(">")[0] for part in text.split("<script")[1:]), path


def test_browsers_may_keep_static_files_for_ever_under_their_digest() -> None:
    total = sum(len(content) for content, _, _ in static_files().values())
    assert total < 300_000


def with_spec(text: str) -> str:
    return f"kind: TrainingJob\nmetadata: {{name: a}}\nspec:\n{text}"


def test_yaml_stands_for_the_json_that_kubectl_would_send() -> None:
    _, obj = parse(with_spec("  template: {image: x, env: {day: 2026-01-31, 2: two, on: text}}\n"))
    env = obj["spec"]["template"]["env"]
    assert env == {"day": "2026-01-31", "2": "two", "true": "text"}


@pytest.mark.parametrize(
    "spec",
    [
        "  a: &a [x, x]\n  b: [*a, *a]\n",
        "  a: &a [*a]\n",
        "  a: .nan\n",
        "  a: !!binary aGk=\n",
        "  a: !!set {x}\n",
        "  ? [1, 2]\n  : x\n",
        "  a: !!python/object/apply:os.getcwd []\n",
    ],
)
def test_yaml_that_json_cannot_say_or_that_repeats_itself_is_refused(spec: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse(with_spec(spec))
    assert refused.value.field == "yaml"


@pytest.mark.parametrize("rate", ["nan", "inf", "-1e999", "fast"])
def test_a_learning_rate_is_a_number(rate: str) -> None:
    with pytest.raises(Invalid, match="is not a number"):
        draft("train", {**TRAIN, "learning_rate": rate})


@pytest.mark.parametrize(("text", "number"), [("", None), (" ", None), ("0", 0), (" 12 ", 12), ("٣", 3)])
def test_a_field_may_be_empty_or_a_whole_number(text: str, number: int | None) -> None:
    assert whole_or_none(text, "replicas", "the autoscaler") == number


@pytest.mark.parametrize("text", ["²", "-1", "1.5", "7d", "a"])
def test_a_field_with_anything_else_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="whole number"):
        whole_or_none(text, "replicas", "the autoscaler")


def test_a_field_may_have_a_least_number() -> None:
    assert whole_or_none("1", "days", "until it is revoked", least=1) == 1
    with pytest.raises(Invalid, match="of at least 1, or empty for until it is revoked"):
        whole_or_none("0", "days", "until it is revoked", least=1)


def test_a_feed_shows_its_draw_its_problem_and_what_is_known_of_it() -> None:
    def feed(name: str, parent: str = "", **more: Any) -> FeedPower:
        base = {
            "name": name,
            "parent": parent,
            "budget_watts": 2000.0,
            "ready": True,
            "reason": "Observing",
            "nodes": 2,
        }
        return FeedPower.model_validate(base | more)

    nodes = [
        NodePower(name="n1", feeds=("rack", "row"), watts=900.0, nameplate_watts=1000.0, age_seconds=0.5,
                  boards_from=Backend.SIMULATED, silent=False, capped=True),
        NodePower(name="n2", feeds=("rack", "row"), watts=500.0, nameplate_watts=1000.0, age_seconds=9.0),
        NodePower(name="n3", feeds=("rack", "row")),
    ]  # fmt: skip
    half = feed("rack", "row", draw_watts=900.0, assumed_watts=1000.0, silent_nodes=2, simulated_nodes=1)
    half = half.model_copy(update={"leased_watts": 1980.0, "capped_nodes": 1})
    rack, row = feed_views([half, feed("row", ready=False, reason="NoNodes")], nodes)[::-1]
    assert (row.name, row.draw, row.percent, row.nodes) == ("row", "not measured", None, [])
    assert row.problem == "Not ready: NoNodes."
    assert (rack.above, rack.draw, rack.budget, rack.headroom) == ("row", "900 W", "2 kW", "")
    assert (rack.percent, rack.problem) == (95.0, "")
    assert rack.told == "2 nodes, 1 capped, 2 silent (1 kW assumed), 1 simulated"
    assert (rack.leased, row.leased) == ("2 kW", "")
    assert [(n.heat, n.ready, n.label) for n in rack.nodes] == [
        (9, True, "n1: 900 W of 1 kW, capped, simulated"),
        (5, False, "n2: 500 W of 1 kW, silent for 9 s"),
        (0, False, "n3: has never reported"),
    ]
    (over,) = feed_views([feed("over", draw_watts=2001.0)], [])
    assert (over.percent, over.problem) == (100.0, "The draw is above the budget.")
    assert {view.name for view in feed_views([feed("a", "b"), feed("b", "a")], [])} == {"a", "b"}


def test_a_tenant_shows_its_use_of_each_limit() -> None:
    spec = {"namespaces": ["b", "a"], "limits": {"pods": 8, "storageGib": 100, "waitingJobs": 5}}
    use = [{"namespace": "a", "pods": 8, "storageGib": 1.5}]
    of = {"metadata": {"name": "t"}, "spec": spec, "status": {"limitUse": use, "waitingJobs": 2}}
    shown = tenant_view(Tenant.model_validate(of))
    assert [
        (row["namespace"], row["what"], row["used"], row["limit"], row["full"]) for row in shown.limits
    ] == [
        ("all", "waiting jobs", "2", "5", ""),
        ("a", "pods", "8", "8", "yes"),
        ("a", "storage, GiB", "1.5", "100", ""),
        ("b", "pods", "not counted yet", "8", ""),
        ("b", "storage, GiB", "not counted yet", "100", ""),
    ]
    page = (
        templates().get_template("pools_list.html").render(tenants=[shown], pools=[], profiles=[], problem="")
    )
    assert "<strong>8</strong><small>reached</small>" in page
    assert "not counted yet" in page
    unlimited = tenant_view(Tenant.model_validate({"metadata": {"name": "t"}, "spec": {}}))
    assert unlimited.limits == []


def test_a_pool_shows_what_others_hold_of_it_only_while_they_do() -> None:
    def shown(status: str) -> str:
        held = {
            "type": "CapacityHeldElsewhere", "status": status, "reason": "ForeignPods",
            "message": "4 accelerators are held.", "lastTransitionTime": NOW.isoformat(),
        }  # fmt: skip
        spec = {"accelerator": "H100", "resourceName": "nvidia.com/gpu", "nodeSelector": {"pool": "h100"}}
        of = {"metadata": {"name": "h100"}, "spec": spec, "status": {"conditions": [held]}}
        return pool_view(AcceleratorPool.model_validate(of), []).elsewhere

    assert (shown("True"), shown("False")) == ("4 accelerators are held.", "")


def test_a_tenants_budgets_are_a_line_for_each_limit() -> None:
    use = {
        "period": "day",
        "started": "2026-11-21T00:00:00Z",
        "ends": "2026-11-22T00:00:00Z",
        "state": "Within",
    }
    amounts = {
        "cost": 9.0,
        "acceleratorHours": 2.0,
        "acceleratorHoursLeft": 6.0,
        "kilowattHours": 1.0,
        "kilowattHoursLeft": 0.0,
    }
    of = Tenant.model_validate(
        {
            "metadata": {"name": "ada"},
            "kind": "Tenant",
            "spec": {},
            "status": {"budgets": [{**use, **amounts}]},
        }
    )
    hours, energy = budget_lines([of])
    assert (hours.tenant, hours.period, hours.resource) == ("ada", "day", "accelerator-hours")
    assert (hours.used, hours.left, hours.percent) == (2.0, 6.0, 25.0)
    assert (energy.resource, energy.percent) == ("kWh", 100.0)
    page = templates().get_template("usage_budgets.html").render(budgets=[hours, energy], number=number)
    assert "kWh" in page
    assert "2026-11-22 00:00" in page
    assert templates().get_template("usage_budgets.html").render(budgets=[], number=number).strip() == ""


def test_a_job_draws_its_part_of_its_nodes_as_far_as_they_report() -> None:
    def node(name: str, watts: float | None, **more: Any) -> NodePower:
        return NodePower(name=name, watts=watts, boards=8, silent=watts is None, **more)

    nodes = [
        node("a", 6000.0),
        node("b", 4000.0, capped=True, boards_from=Backend.SIMULATED),
        node("c", None),
    ]
    assert job_power(("a",), 4, nodes) == JobPower("3 kW", "with its part of the hosts")
    whole = job_power(("a", "b"), 8, nodes)
    assert whole == JobPower("10 kW", "with its part of the hosts, boards limited on 1 node, simulated")
    assert job_power(("a", "a", "c"), 4, nodes) == JobPower(
        "6 kW", "with its part of the hosts, 2 of 3 pods are on nodes that report"
    )
    assert job_power(("c",), 8, nodes) is None
    assert job_power((), 8, nodes) is None


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
    view = job_view(made(JOB, phase="Running", admission=capped, **used), NOW)
    assert (view.power_cap, view.energy, view.energy_in_all) == (
        "70 % of each board's limit (280 W)",
        "1 kWh",
        "4 kWh",
    )
    assert (view.nodes, view.accelerators_per_pod) == (("n",), 8)
    ended = job_view(made(JOB, phase="Succeeded", admission=admission, **used), NOW)
    assert (ended.power_cap, ended.energy_in_all, ended.nodes) == ("", "", ())
