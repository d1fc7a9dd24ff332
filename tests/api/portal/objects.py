"""Jobs and services as the portal reads them from Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from busbar.api.kubernetes.typed import read
from busbar.kube.types import ModelService, TrainingJob

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


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
