"""The portal's forms and YAML box: what they make of what people type, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.conftest import JOB
from tests.api.portal.objects import NOW, made

from busbar.api.errors import Invalid
from busbar.api.portal.drafts import EXAMPLE, PRESETS, draft, parse, to_yaml, whole_or_none
from busbar.api.portal.job_views import job_view
from busbar.kube.types import ModelService, TrainingJob

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
    swapped = job_view(made(JOB, progress={"step": 1, "activations": "swap"}), NOW).activations
    assert swapped == "activations are recomputed from inputs in host memory"


def test_the_training_forms_ask_in_which_format_moments_are_kept() -> None:
    _, obj = draft("tune", {**TUNE, "state": "int8"})
    assert obj["spec"]["engine"]["state"] == "int8"


def test_documents_are_kept_apart_where_it_is_asked_for() -> None:
    for packing, said in (("within-documents", "within-documents"), ("across-documents", None), ("", None)):
        _, obj = draft("tune", {**TUNE, "packing": packing})
        assert obj["spec"]["engine"]["data"].get("packing") == said
    assert "state" not in draft("tune", {**TUNE, "state": "exact"})[1]["spec"]["engine"]
    spec = {**JOB["spec"], "engine": {**JOB["spec"]["engine"], "state": "bf16"}}
    assert job_view(made({**JOB, "spec": spec}), NOW).moments == "in bf16"
    assert job_view(made(JOB), NOW).moments == ""


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


@pytest.mark.parametrize(
    ("kinds", "processes", "micro_batch"), [("", 4, 2), ("H100, cpu", 4, 2), ("cpu", None, 8)]
)
def test_a_pod_of_several_accelerators_has_a_process_for_each(
    kinds: str, processes: int | None, micro_batch: int
) -> None:
    _, obj = draft("train", {**TRAIN, "batch": "8", "accelerators_per_pod": "4", "accelerators": kinds})
    engine = TrainingJob.model_validate(obj).spec.engine
    assert engine is not None
    assert engine.batch.micro_batch == micro_batch
    assert (engine.parallelism and engine.parallelism.processes_per_pod) == processes


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
        ("train", {**TRAIN, "batch": "6", "accelerators_per_pod": "4"}, "batch"),
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
