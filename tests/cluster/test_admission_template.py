"""Users may set an allow-list of pod fields: a TrainingJob's template and a ModelService accept no other."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.admission_rows import TENANT_NAMESPACE
from tests.cluster.apiserver import ApiServer, Client
from tests.cluster.manifests import JSON, model_service, template_job
from tests.cluster.rule_row import edited

ALLOWED_IN_TEMPLATE = {
    "image", "imagePullPolicy", "imagePullSecrets", "command", "args", "env", "envFrom", "workingDir", "volumes",
    "metadata",
}  # fmt: skip
"""Field names that our flat template shares with PodSpec and Container. Its own field `port` is not in this set."""
ALLOWED_VOLUMES = {"name", "configMap", "secret", "emptyDir"}
ALLOWED_SOURCES = {"secretKeyRef", "configMapKeyRef", "fieldRef"}


@pytest.fixture(scope="module")
def core_schemas(platform: ApiServer) -> JSON:
    """The API server's own description of pods, so that a field of a newer Kubernetes is tried too."""
    found: JSON = platform.admin.get("/openapi/v3/api/v1").expect()["components"]["schemas"]
    return found


def properties(schemas: JSON, name: str) -> set[str]:
    return set(schemas[f"io.k8s.api.core.v1.{name}"]["properties"])


def attempt_field(client: Client, place: str, field: str, value: Any = True) -> None:
    """Setting this field is refused by its name, and a lenient client's attempt is dropped."""
    document = template_job()
    document["metadata"]["namespace"] = TENANT_NAMESPACE
    bad = edited(document, {f"{place}/{field}": value})
    answer = client.create(bad, dryRun="All")
    assert answer.status in (400, 422), f"{place}/{field} was accepted"
    dotted = place.replace("/0", "[0]").replace("/1", "[1]").replace("/", ".")
    assert f'unknown field "{dotted}.{field}"' in answer.message
    lenient = client.create(bad, dryRun="All", fieldValidation="Ignore")
    node: Any = lenient.expect()
    for step in place.split("/"):
        node = node[int(step)] if step.isdigit() else node[step]
    assert field not in node


def test_no_field_of_a_pod_or_container_passes_through_the_template(
    alice: Client, core_schemas: JSON
) -> None:
    fields = properties(core_schemas, "PodSpec") | properties(core_schemas, "Container")
    assert {
        "hostNetwork",
        "hostPID",
        "nodeName",
        "serviceAccountName",
        "securityContext",
        "tolerations",
    } <= fields
    assert fields & ALLOWED_IN_TEMPLATE == ALLOWED_IN_TEMPLATE - {"metadata"}
    for name in sorted(fields - ALLOWED_IN_TEMPLATE):
        attempt_field(alice, "spec/template", name)
    assert len(fields - ALLOWED_IN_TEMPLATE) > 50


def test_no_other_kind_of_volume_passes_through_the_template(alice: Client, core_schemas: JSON) -> None:
    fields = properties(core_schemas, "Volume")
    assert {"hostPath", "projected", "csi", "nfs", "image"} <= fields
    for name in sorted(fields - ALLOWED_VOLUMES):
        attempt_field(alice, "spec/template/volumes/0", name, {})


def test_no_other_field_of_a_mount_variable_or_metadata_passes_through(
    alice: Client, core_schemas: JSON
) -> None:
    for name in sorted(properties(core_schemas, "VolumeMount") - {"name", "mountPath", "readOnly"}):
        attempt_field(alice, "spec/template/volumes/0", name)
    for name in sorted(properties(core_schemas, "EnvVarSource") - ALLOWED_SOURCES):
        attempt_field(alice, "spec/template/env/1/valueFrom", name)
    for name in ("namespace", "name", "ownerReferences", "finalizers", "generateName"):
        attempt_field(alice, "spec/template/metadata", name)


def test_no_field_of_a_pod_or_container_passes_through_a_service(alice: Client, core_schemas: JSON) -> None:
    document = model_service()
    document["metadata"]["namespace"] = TENANT_NAMESPACE
    fields = properties(core_schemas, "PodSpec") | properties(core_schemas, "Container")
    for name in sorted(fields - {"image", "args", "priority"}):
        answer = alice.create(edited(document, {f"spec/{name}": True}), dryRun="All")
        assert f'unknown field "spec.{name}"' in answer.message


def test_own_pods_are_the_operators_to_make_from_the_template_alone(alice: Client) -> None:
    """`shape` says how many resources, never where: it accepts no selector, affinity or toleration."""
    for name in ("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "priorityClassName"):
        attempt_field(alice, "spec/shape", name)
        attempt_field(alice, "spec", name)
