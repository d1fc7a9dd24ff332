"""Makes the object that a filled submit form describes. Pure; the API server checks what the fields mean."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import yaml

from busbar.api.errors import Invalid
from busbar.api.kubernetes.client import Object
from busbar.api.objects.objects import KINDS, check_unicode
from busbar.kube.documents import DocumentError, documents_of_yaml
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS, Resource

FORMS = ("train", "tune", "image", "serve", "yaml")
MAX_YAML_CHARS = 200_000
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tiny": (
        "Llama, tiny (3.8 million parameters)",
        {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    "llama-small": (
        "Llama, small (about 30 million)",
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    ),
    "llama-medium": (
        "Llama, medium (about 110 million)",
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12},
    ),
}
EXAMPLE = """\
apiVersion: busbar.dev/v1alpha1
kind: TrainingJob
metadata:
  name: my-run
spec:
  template:
    image: docker.io/library/python:3.12-slim
    command: [python, -c, "print('hello from the gang')"]
  shape: {minPods: 1, maxPods: 1, acceleratorsPerPod: 1, memory: 512Mi}
  accelerators: [cpu]
"""

Fields = Mapping[str, str]


def draft(form: str, fields: Fields) -> tuple[Resource, Object]:
    """The kind and the object that a filled form describes.

    Raises:
        Invalid: a field is missing or not a number; the form says which.
    """
    if form == "yaml":
        return parse(fields.get("yaml", ""))
    if form == "serve":
        return MODEL_SERVICES, _object(MODEL_SERVICES, fields, _service(fields))
    spec = {"image": _image, "tune": _tuning}.get(form, _training)(fields)
    return TRAINING_JOBS, _object(TRAINING_JOBS, fields, spec)


def parse(text: str) -> tuple[Resource, Object]:
    """One object of ours as YAML or JSON.

    Raises:
        Invalid: it is not one object of our kinds.
        BadRequest: an escape in it stands for text that is not Unicode.
    """
    if len(text) > MAX_YAML_CHARS:
        raise Invalid(f"the YAML is longer than {MAX_YAML_CHARS} characters", field="yaml")
    try:
        documents = documents_of_yaml(text, aliases=False)
    except DocumentError as error:
        raise Invalid(f"this is not YAML that stands for JSON: {error}", field="yaml") from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise Invalid("write exactly one object here", field="yaml")
    found: Object = documents[0]
    check_unicode(found)
    resource = next((r for r in KINDS if r.kind == found.get("kind")), None)
    if resource is None:
        raise Invalid(f"kind must be {' or '.join(r.kind for r in KINDS)}", field="kind")
    return resource, found


def to_yaml(obj: Object) -> str:
    """An object as people like to read it, in the order it was made."""
    return str(yaml.safe_dump(obj, sort_keys=False, allow_unicode=True))


def whole_or_none(text: str, name: str, otherwise: str, least: int = 0) -> int | None:
    """The number in a form's field; None when it was left empty, which means `otherwise`.

    Raises:
        Invalid: there is something else in it.
    """
    text = text.strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        rule = f"of at least {least}, " if least else ""
        raise Invalid(f"{name} must be a whole number, {rule}or empty for {otherwise}", field=name)
    return int(text)


def positive_or_none(text: str, name: str, most: float, least: float = 0.0) -> float | None:
    """The number in a form's field; None when it was left empty.

    Raises:
        Invalid: there is something else in it.
    """
    value = _decimal({name: text}, name, math.nan) if text.strip() else None
    if value is not None and not (value > 0 and least <= value <= most):
        bound = f"from {least:g} to {most:,.0f}" if least else f"above 0 and at most {most:,.0f}"
        raise Invalid(f"{name} must be {bound}", field=name)
    return value


def _object(resource: Resource, fields: Fields, spec: Object) -> Object:
    name = fields.get("name", "").strip()
    if not name:
        raise Invalid("give it a name", field="name")
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def _training(fields: Fields) -> Object:
    """A new model, with its own tokenizer."""
    preset = PRESETS.get(fields.get("preset", ""))
    if preset is None:
        raise Invalid("choose a model", field="preset")
    heads = preset[1]["num_attention_heads"]
    config = {
        "model_type": "llama",
        **preset[1],
        "num_key_value_heads": heads,
        "max_position_embeddings": max(512, _whole(fields, "sequence_length", 256)),
        "tie_word_embeddings": True,
    }
    model: Object = {
        "model": {"config": config},
        "tokenizer": {"train": {"vocabSize": _whole(fields, "vocabulary", 4096)}},
    }
    return _engine(fields, model, 0.003)


def _tuning(fields: Fields) -> Object:
    """A saved model, trained on: all of its weights, or an adapter where a rank is given."""
    base = fields.get("base", "").strip()
    if not base:
        raise Invalid("name the model's folder, pvc://claim/path", field="base")
    model: Object = {"model": {"uri": base}}
    rank = whole_or_none(fields.get("rank", ""), "rank", "all weights", least=1)
    if rank is not None:
        model["adapter"] = {"rank": rank, "merge": fields.get("result") != "adapter"}
    return _engine(fields, model, 0.0002)


def _engine(fields: Fields, model: Object, rate: float) -> Object:
    batch, processes = _whole(fields, "batch", 4), _processes(fields)
    if batch % processes:
        raise Invalid(
            f"sequences per step: {batch} cannot be divided among {processes} accelerators; make it a multiple of them",
            field="batch",
        )
    engine: Object = {
        **model,
        "data": {
            "uri": fields.get("data", "").strip(),
            "sequenceLength": _whole(fields, "sequence_length", 256),
        },
        "steps": _whole(fields, "steps", 500),
        "batch": {"sequences": batch, "microBatch": batch // processes},
        "optimizer": {"learningRate": _decimal(fields, "learning_rate", rate), "warmupSteps": 20},
        "mode": fields.get("mode") or "auto",
        "activations": fields.get("activations") or "auto",
        "evaluation": {"ngramOrder": 3},
    }
    if processes > 1:
        engine["parallelism"] = {"processesPerPod": processes}
    if fields.get("packing", "") == "within-documents":
        engine["data"]["packing"] = fields["packing"]
    if fields.get("state", "exact") != "exact":
        engine["state"] = fields["state"]
    if fields.get("device_memory", "").strip():
        engine["deviceMemory"] = fields["device_memory"].strip()
    spec: Object = {"engine": engine, "shape": _shape(fields), **_placing(fields)}
    if fields.get("deadline", "").strip():
        spec["deadline"] = _moment(fields, "deadline")
    if fields.get("checkpoint_steps", "").strip():
        spec["checkpoint"] = {"everySteps": _whole(fields, "checkpoint_steps", 50)}
    spec["output"] = {"uri": fields.get("output", "").strip()}
    return spec


def _processes(fields: Fields) -> int:
    """Of the pod: one for each of its accelerators, and one in all where they are cores."""
    return 1 if _kinds(fields) == ["cpu"] else _whole(fields, "accelerators_per_pod", 1)


def _image(fields: Fields) -> Object:
    import shlex

    image = fields.get("image", "").strip()
    if not image:
        raise Invalid("name the image", field="image")
    template: Object = {"image": image}
    if fields.get("command", "").strip():
        try:
            template["command"] = shlex.split(fields["command"])
        except ValueError as error:
            raise Invalid(f"the command has an open quote: {error}", field="command") from error
    shape = _shape(fields)
    pods = _whole(fields, "pods", 1)
    shape |= {"minPods": pods, "maxPods": pods}
    return {"template": template, "shape": shape, **_placing(fields)}


def _service(fields: Fields) -> Object:
    job, uri = fields.get("training_job", "").strip(), fields.get("uri", "").strip()
    if bool(job) == bool(uri):
        raise Invalid("name a training job or a URI, one of the two", field="training_job")
    spec: Object = {
        "model": {"trainingJob": job} if job else {"uri": uri},
        "minReplicas": _whole(fields, "min_replicas", 1, least=0),
        "maxReplicas": _whole(fields, "max_replicas", 1),
        "shape": _shape(fields),
    }
    if fields.get("kv_cache", "").strip():
        spec["kvCacheMemory"] = fields["kv_cache"].strip()
    return {**spec, **_placing(fields)}


def _shape(fields: Fields) -> Object:
    shape: Object = {"acceleratorsPerPod": _whole(fields, "accelerators_per_pod", 1)}
    for key, name in (("cpu", "cpu"), ("memory", "memory")):
        if fields.get(name, "").strip():
            shape[key] = fields[name].strip()
    return shape


def _placing(fields: Fields) -> Object:
    placing: Object = {}
    if kinds := _kinds(fields):
        placing["accelerators"] = kinds
    if fields.get("priority", "").strip():
        placing["priority"] = _whole(fields, "priority", 100, least=0)
    return placing


def _kinds(fields: Fields) -> list[str]:
    return fields.get("accelerators", "").replace(",", " ").split()


def _moment(fields: Fields, name: str) -> str:
    """A moment of a form, which has no time zone, as UTC."""
    text = fields[name].strip()
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{name}: {text!r} is no moment; write it as 2030-01-31T18:00", field=name) from None
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return found.strftime("%Y-%m-%dT%H:%M:%SZ")


def _whole(fields: Fields, name: str, default: int, least: int = 1) -> int:
    text = fields.get(name, "").strip()
    try:
        value = int(text) if text else default
    except ValueError:
        raise Invalid(f"{name.replace('_', ' ')}: {text!r} is not a whole number", field=name) from None
    if value < least:
        raise Invalid(f"{name.replace('_', ' ')} must be at least {least}", field=name)
    return value


def _decimal(fields: Fields, name: str, default: float) -> float:
    text = fields.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Invalid(f"{name.replace('_', ' ')}: {text!r} is not a number", field=name)
    return value
