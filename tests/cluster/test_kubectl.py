"""Our kinds with the real kubectl: explain, get, scale, and refusals that say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from tests.cluster.apiserver import JSON, ApiServer
from tests.cluster.manifests import engine_job, model_service
from tests.cluster.rule_row import edited

from busbar.kube.types import KINDS


@pytest.fixture
def job(apiserver: ApiServer, namespace: str) -> Iterator[JSON]:
    """A stored job in mid-run."""
    document = edited(engine_job(), {"metadata/namespace": namespace})
    stored = apiserver.admin.create(document).expect()
    saved = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=42)
    status = {
        "phase": "Running",
        "reason": "Running",
        "message": "Runs in pool cpu-local.",
        "progress": {"step": 120, "totalSteps": 265, "loss": 3.21, "tokensPerSecond": 810, "eta": "4m10s"},
        "checkpoint": {"step": 100, "savedAt": saved.strftime("%Y-%m-%dT%H:%M:%SZ")},
        "admission": {
            "id": "a",
            "pool": "cpu-local",
            "accelerator": "cpu",
            "mode": "optimizer-offload",
            "pods": 1,
        },
    }
    yield apiserver.admin.merge(stored, {"status": status}, subresource="/status").expect()
    apiserver.admin.delete(document)


def test_get_shows_the_progress_of_a_job(apiserver: ApiServer, job: JSON) -> None:
    shown = apiserver.kubectl("-n", job["metadata"]["namespace"], "get", "bbtj")
    head, line = shown.stdout.splitlines()
    assert head.split() == [
        "NAME",
        "PHASE",
        "REASON",
        "STEP",
        "OF",
        "LOSS",
        "TOK/S",
        "ETA",
        "CHECKPOINT",
        "AGE",
    ]
    values = line.split()
    assert values[:8] == ["sample", "Running", "Running", "120", "265", "3.21", "810", "4m10s"]
    assert values[8].endswith("s")
    saved = datetime.fromisoformat(job["status"]["checkpoint"]["savedAt"])
    assert 42 <= int(values[8].removesuffix("s")) <= (datetime.now(UTC) - saved).total_seconds()
    wide = apiserver.kubectl("-n", job["metadata"]["namespace"], "get", "busbar", "-o", "wide").stdout
    assert "Runs in pool cpu-local." in wide
    assert "optimizer-offload" in wide


@pytest.mark.parametrize("kind", KINDS)
def test_explain_describes_every_field_of_a_spec(apiserver: ApiServer, kind: str) -> None:
    plural = KINDS[kind].info.plural
    text = apiserver.kubectl("explain", f"{plural}.spec").stdout
    assert "DESCRIPTION" in text
    assert "<no description>" not in text
    recursive = apiserver.kubectl("explain", plural, "--recursive").stdout
    assert "status" in recursive


def test_explain_of_a_field_gives_its_sentence_and_its_values(apiserver: ApiServer) -> None:
    text = " ".join(apiserver.kubectl("explain", "trainingjob.spec.engine.mode").stdout.split())
    assert "auto, resident, optimizer-offload" in text or "auto resident optimizer-offload" in text
    assert "auto lets the scheduler choose" in text


def test_scale_sets_replicas_and_reads_them_from_status(apiserver: ApiServer, namespace: str) -> None:
    document = edited(model_service(), {"metadata/namespace": namespace})
    stored = apiserver.admin.create(document).expect()
    apiserver.admin.merge(
        stored, {"status": {"replicas": 2, "selector": "busbar.dev/job=sample"}}, subresource="/status"
    ).expect()
    scaled = apiserver.kubectl("-n", namespace, "scale", "bbms/sample", "--replicas=0")
    assert scaled.returncode == 0, scaled.stderr
    path = f"/apis/busbar.dev/v1alpha1/namespaces/{namespace}/modelservices/sample/scale"
    scale = apiserver.admin.get(path).expect()
    assert scale["spec"].get("replicas", 0) == 0
    assert scale["status"] == {"replicas": 2, "selector": "busbar.dev/job=sample"}
    refused = apiserver.kubectl("-n", namespace, "scale", "bbms/sample", "--replicas=257")
    assert "should be less than or equal to 256" in refused.stderr


def test_a_misspelt_field_is_refused_by_apply(apiserver: ApiServer, namespace: str, tmp_path: Path) -> None:
    document = edited(engine_job(), {"metadata/namespace": namespace, "spec/engine/stepps": 5})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    answer = apiserver.kubectl("apply", "-f", str(file))
    assert answer.returncode != 0
    assert 'unknown field "spec.engine.stepps"' in answer.stderr


def test_applying_the_same_file_again_changes_nothing(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Also with a whole float, which YAML readers and the API server write differently."""
    config = {"model_type": "llama", "rope_theta": 10000.0}
    document = edited(engine_job(), {"metadata/namespace": namespace, "spec/engine/model/config": config})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    assert "created" in apiserver.kubectl("apply", "-f", str(file)).stdout
    again = apiserver.kubectl("apply", "-f", str(file))
    assert "unchanged" in again.stdout, again.stderr
    server_side = apiserver.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file))
    assert server_side.returncode == 0, server_side.stderr
    stored = json.loads(apiserver.kubectl("-n", namespace, "get", "bbtj", "sample", "-o", "json").stdout)
    assert stored["metadata"]["generation"] == 1
