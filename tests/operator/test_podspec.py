"""What our pods look like: what a user may choose, and everything a user may not."""

from __future__ import annotations

import json
from typing import Any

from tests.operator.builders import ENGINE, RENDERING, gang, job, placement, pool, service

from busbar.kube.contracts.workload import bearer_for
from busbar.operator import podspec
from busbar.scheduler import Resources


def rendered(of: Any, rank: int = 0, pods: int = 1, **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "attempt": 2,
        "rank": rank,
        "admission_id": "id-2",
        "placement": placement(pods),
        "pool": pool(),
    }
    return podspec.training_pod(of, rendering=RENDERING, **{**values, **fields})


def env(body: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in body["spec"]["containers"][0]["env"]}


def test_every_pod_is_restricted_gated_and_pinned() -> None:
    for body in (rendered(job()), rendered(gang(2), pods=2), _replica()):
        spec, container = body["spec"], body["spec"]["containers"][0]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["schedulingGates"] == [{"name": "busbar.dev/admission"}]
        fields = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert fields["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["node-0"]
        assert body["metadata"]["ownerReferences"][0]["controller"] is True
        assert "hostNetwork" not in spec


def test_the_engine_is_told_its_spec_its_folders_and_its_bearer() -> None:
    of = job(checkpoint={"everySteps": 50, "keep": 3})
    body = rendered(of)
    said = env(body)
    assert json.loads(said["BUSBAR_SPEC"])["data"] == {
        **ENGINE["data"],
        "holdoutFraction": 0.05,
        "sequenceLength": 256,
    }
    assert said["BUSBAR_OUTPUT_DIR"] == "/artifacts/claim/model"
    assert said["BUSBAR_CHECKPOINT_DIR"] == "/artifacts/claim/model/checkpoints"
    assert json.loads(said["BUSBAR_CHECKPOINT"]) == {"everySteps": 50, "keep": 3}
    assert said["BUSBAR_TOKEN"] == bearer_for(RENDERING.workload_key, of.metadata.uid)
    assert body["spec"]["containers"][0]["command"][:2] == ["/usr/bin/tini", "--"]
    claims = [v["persistentVolumeClaim"] for v in body["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [{"claimName": "claim"}]


def test_a_gang_gets_its_rendezvous() -> None:
    said = env(rendered(gang(3), rank=2, pods=3))
    assert (said["RANK"], said["WORLD_SIZE"], said["PET_NNODES"], said["MASTER_ADDR"]) == (
        "2",
        "3",
        "3",
        "job-2-0.job",
    )


def test_an_own_image_cannot_override_what_the_platform_sets() -> None:
    template = {"image": "own", "env": [{"name": "A", "value": "1"}], "volumes": [
        {"name": "data", "claim": "mine", "mountPath": "/data", "readOnly": True}]}  # fmt: skip
    body = rendered(job(template=template, output=None))
    names = [e["name"] for e in body["spec"]["containers"][0]["env"]]
    assert names.index("A") < names.index("RANK")
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in body["spec"]["containers"][0][
        "volumeMounts"
    ]
    assert "ports" not in body["spec"]["containers"][0]


def test_devices_are_requests_and_limits_and_cpu_is_a_request_only() -> None:
    gpus = pool(
        "h100",
        accelerator="H100",
        resourceName="nvidia.com/gpu",
        tolerations=[{"key": "gpu", "operator": "Exists"}],
    )
    where = placement(per_pod=Resources(4000, 8000, 1024))
    body = rendered(job(), pool=gpus, placement=where)
    resources = body["spec"]["containers"][0]["resources"]
    assert resources["requests"] == {"nvidia.com/gpu": "4", "cpu": "8000m", "memory": "1024Mi"}
    assert resources["limits"] == {"nvidia.com/gpu": "4", "memory": "1024Mi"}
    assert body["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]


def _replica() -> dict[str, Any]:
    return podspec.service_pod(
        service(),
        index=0,
        model_uri="pvc://claim/model",
        placement=placement(),
        pool=pool(),
        rendering=RENDERING,
    )


def test_a_replica_reads_its_model_and_may_not_write_it() -> None:
    body = _replica()
    assert env(body)["BUSBAR_MODEL_DIR"] == "/artifacts/claim/model"
    mounts = body["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "busbar-claim-claim", "mountPath": "/artifacts/claim", "readOnly": True} in mounts
    assert body["spec"]["restartPolicy"] == "Always"


def test_vllm_gets_the_bearer_and_the_model_by_its_own_flags() -> None:
    of = service(engine="vllm", image="vllm/vllm-openai", args=["--max-num-seqs", "8"])
    body = podspec.service_pod(
        of, index=0, model_uri="pvc://claim/model", placement=placement(), pool=pool(), rendering=RENDERING
    )
    args = body["spec"]["containers"][0]["args"]
    assert args[:4] == ["--model", "/artifacts/claim/model", "--served-model-name", "web"]
    assert args[-2:] == ["--max-num-seqs", "8"]
