"""The manifests of our pods: the fields that a user may choose, and those that a user may not."""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.operator.builders import ENGINE, RENDERING, gang, job, placement, pool, service

from busbar.kube.contracts import bearers, workload
from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.workload import Env
from busbar.kube.types import engines
from busbar.operator.pods import manifests, replica_pods, training_pods
from busbar.operator.pods.model_server import ModelServer
from busbar.operator.watch.projections import project_pod
from busbar.scheduler import Resources

ROOT = Path(__file__).parents[3]


def rendered(of: Any, rank: int = 0, pods: int = 1, **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "attempt": 2,
        "rank": rank,
        "admission_id": "id-2",
        "placement": placement(pods),
        "pool": pool(),
    }
    return training_pods.training_pod(of, rendering=RENDERING, **{**values, **fields})


def env(body: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in body["spec"]["containers"][0]["env"]}


def test_every_pod_is_restricted_and_pinned_and_but_for_a_jobs_only_one_gated() -> None:
    gate = [{"name": "busbar.dev/admission"}]
    gpus = pool(resourceName="nvidia.com/gpu")
    tainted = pool(tolerations=[{"key": "batch", "operator": "Exists"}])
    for body, gates in (
        (rendered(job()), None),
        (rendered(job(), pool=gpus), None),
        (rendered(job(), pool=tainted), None),
        (rendered(gang(2), pods=2), gate),
        (_replica(), gate),
    ):
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
        assert spec.get("schedulingGates") == gates
        fields = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert fields["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["node-0"]
        assert body["metadata"]["ownerReferences"][0]["controller"] is True
        assert "hostNetwork" not in spec


def test_the_operator_sets_the_variables_of_the_contract_and_no_others() -> None:
    engine = {
        **ENGINE,
        "model": {"uri": "pvc://base/model"},
        "tokenizer": {"uri": "pvc://words/tokenizer"},
        "data": {"uri": "pvc://corpus/text"},
    }
    training = rendered(job(engine=engine))
    names = env(training).keys() | env(_replica()).keys()
    assert names - {"HOME"} == {name.value for name in Env} - {Env.REPLACEMENT.value}
    assert env(rendered(job(engine=engine), replacement=2))[Env.REPLACEMENT] == "2"
    volumes = {v["name"] for v in training["spec"]["volumes"]}
    assert "busbar-claim-words" in volumes  # the engine finds the tokenizer by its URI


def test_pods_of_the_engine_start_as_many_processes_as_the_job_says() -> None:
    several = {**ENGINE, "parallelism": {"processesPerPod": 4}}
    shape = {"minPods": 2, "maxPods": 2, "acceleratorsPerPod": 4}
    given = env(rendered(job(engine=several, shape=shape), pods=2, rank=1))
    assert {name: given.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")} == {
        "RANK": "4",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
    }
    assert "LOCAL_RANK" not in given, "it is the pod's, which gives one to each"
    own = env(rendered(job(template={"image": "own"}, shape=shape), pods=2, rank=1))
    assert (own["RANK"], own["WORLD_SIZE"], own["LOCAL_RANK"]) == ("1", "2", "0")


def test_every_pod_has_room_for_what_its_processes_exchange() -> None:
    for body in (rendered(job()), rendered(gang(2), pods=2), _replica()):
        [mount] = [m for m in body["spec"]["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        [volume] = [v for v in body["spec"]["volumes"] if v["name"] == mount["name"]]
        assert volume["emptyDir"] == {"medium": "Memory"}


def test_what_an_engine_keeps_in_memory_outlives_its_container_and_counts_in_its_pods_memory() -> None:
    """A volume in memory is the pod's, so a container that is started again finds it; its pages count in the limit of the pod's
    containers, of which there is one, so what is kept needs no request of its own."""
    spec = _replica()["spec"]
    in_memory = {v["name"] for v in spec["volumes"] if v.get("emptyDir") == {"medium": "Memory"}}
    folders = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] in in_memory]
    assert any(workload.KEPT_WEIGHTS.startswith(f"{folder}/") for folder in folders)
    assert spec["restartPolicy"] == "Always"
    [container] = spec["containers"]
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_a_pool_says_which_runtime_gives_its_pods_the_driver() -> None:
    nvidia = pool(resourceName="nvidia.com/gpu", runtimeClassName="nvidia")
    assert rendered(job(), pool=nvidia)["spec"]["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in rendered(job())["spec"]


FABRIC = {
    "resources": {"rdma/hca": 2},
    "annotations": {"k8s.v1.cni.cncf.io/networks": "roce", "team.example/kept": "pool"},
    "env": {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN"},
}


def test_pods_of_a_gang_get_the_devices_annotations_and_variables_of_their_pools_fabric() -> None:
    gpus = pool(resourceName="nvidia.com/gpu", interconnect={"fabric": FABRIC})
    shape = {"minPods": 2, "maxPods": 2, "acceleratorsPerPod": 4}
    where = placement(2, per_pod=Resources(4000, 6000, 1024))
    body = rendered(job(shape=shape), pool=gpus, placement=where, pods=2)
    asked = body["spec"]["containers"][0]["resources"]
    for amounts in (asked["requests"], asked["limits"]):
        assert (amounts["nvidia.com/gpu"], amounts["rdma/hca"]) == ("4", "8")
    assert body["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "roce"
    assert env(body)["NCCL_IB_HCA"] == "mlx5"
    alone = rendered(job(), pool=gpus, placement=placement(per_pod=Resources(4000, 6000, 1024)))
    assert "rdma/hca" not in alone["spec"]["containers"][0]["resources"]["requests"]
    assert "k8s.v1.cni.cncf.io/networks" not in alone["metadata"]["annotations"]
    assert "NCCL_IB_HCA" not in env(alone)


def test_what_a_template_says_goes_before_the_fabric_of_the_pool() -> None:
    template = {
        "image": "own",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "metadata": {"annotations": {"team.example/kept": "job"}},
    }
    gpus = pool(resourceName="nvidia.com/gpu", interconnect={"fabric": FABRIC})
    body = rendered(job(template=template, shape={"minPods": 2, "maxPods": 2}), pool=gpus, pods=2)
    names = [each["name"] for each in body["spec"]["containers"][0]["env"]]
    assert names.index("NCCL_DEBUG") < len(names) - 1 - names[::-1].index("NCCL_DEBUG"), (
        "the later one counts"
    )
    assert (env(body)["NCCL_DEBUG"], env(body)["NCCL_IB_HCA"]) == ("INFO", "mlx5")
    assert body["metadata"]["annotations"]["team.example/kept"] == "job"


@pytest.mark.parametrize(
    ("kind", "cpu", "told"),
    [("nvidia.com/gpu", None, None), ("nvidia.com/gpu", "6", "6000"), ("cpu", None, "6000")],
)
def test_the_engine_is_bound_to_the_cores_that_somebody_asked_for(
    kind: str, cpu: str | None, told: str | None
) -> None:
    """What a pod on GPUs requests of itself keeps it from being starved; its engine may use what is free."""
    of = job(shape={} if cpu is None else {"cpu": cpu})
    where = placement(per_pod=Resources(1000, 6000, 1024))
    body = rendered(of, pool=pool(resourceName=kind), placement=where)
    assert env(body).get("BUSBAR_CPU_MILLICORES") == told
    assert body["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "6000m"


def test_no_two_claims_share_a_volume_name() -> None:
    """Claims are DNS subdomains of up to 253 characters, volumes are DNS labels."""
    long = "c" * 60
    for one, other in (("a.b", "a-b"), (f"{long}1", f"{long}2")):
        engine = {**ENGINE, "model": {"uri": f"pvc://{one}/model"}, "data": {"uri": f"pvc://{other}/text"}}
        spec = rendered(job(engine=engine))["spec"]
        claims = {
            v["name"]: v["persistentVolumeClaim"]["claimName"]
            for v in spec["volumes"]
            if "persistentVolumeClaim" in v
        }
        assert {one, other} <= set(claims.values())
        assert len({v["name"] for v in spec["volumes"]}) == len(spec["volumes"])
        assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in claims)
        mounted = {m["mountPath"]: m["name"] for m in spec["containers"][0]["volumeMounts"]}
        assert claims[mounted[f"/artifacts/{one}"]] == one


def test_every_variable_of_the_contract_is_read_by_an_engine_or_told_to_people() -> None:
    code = [path.read_text(encoding="utf-8") for path in (ROOT / "workloads").rglob("*.py")]
    told = (ROOT / "docs" / "ml-engineer.md").read_text(encoding="utf-8")
    unread = [
        e.value for e in Env if not any(f"Env.{e.name}" in text for text in code) and e.value not in told
    ]
    assert unread == []


def test_no_engine_spells_a_variable_of_the_contract_itself() -> None:
    names = {name.value for name in Env if name.value.startswith("BUSBAR_")}
    spelt = [
        f"{path.relative_to(ROOT)}: {node.value}"
        for part in ("workloads", "operator")
        for path in (ROOT / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert spelt == []


def test_the_engine_is_told_its_spec_and_its_folders() -> None:
    of = job(checkpoint={"everySteps": 50, "keep": 3})
    body = rendered(of)
    said = env(body)
    assert json.loads(said["BUSBAR_SPEC"])["data"] == {
        **ENGINE["data"],
        "packing": "across-documents",
        "onBadRow": "fail",
        "holdoutFraction": 0.05,
        "sequenceLength": 256,
    }
    assert said["BUSBAR_OUTPUT_DIR"] == "/artifacts/claim/model"
    assert said["BUSBAR_CHECKPOINT_DIR"] == "/artifacts/claim/model/checkpoints"
    assert json.loads(said["BUSBAR_CHECKPOINT"]) == {"everySteps": 50, "keep": 3, "adopt": False}
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
    return replica_pods.service_pod(
        service(),
        index=0,
        model_uri="pvc://claim/model",
        placement=placement(),
        pool=pool(),
        rendering=RENDERING,
    )


def test_the_number_of_a_replica_says_its_role() -> None:
    of = service(replicas=3, prefillReplicas=2)
    told = [
        env(
            replica_pods.service_pod(
                of,
                index=index,
                model_uri="pvc://claim/model",
                placement=placement(),
                pool=pool(),
                rendering=RENDERING,
            )
        )["BUSBAR_ROLE"]
        for index in (0, 1, 256)
    ]
    assert told == ["prefill", "prefill", "decode"]
    assert env(_replica())["BUSBAR_ROLE"] == "both"


def test_a_replica_reads_its_model_and_may_not_write_it() -> None:
    body = _replica()
    assert env(body)["BUSBAR_MODEL_DIR"] == "/artifacts/claim/model"
    mounts = body["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "busbar-claim-claim", "mountPath": "/artifacts/claim", "readOnly": True} in mounts
    assert body["spec"]["restartPolicy"] == "Always"


VLLM = service(engine="vllm", image="vllm/vllm-openai", args=["--max-num-seqs", "8"])


def _vllm() -> dict[str, Any]:
    return replica_pods.service_pod(
        VLLM, index=0, model_uri="pvc://claim/model", placement=placement(), pool=pool(), rendering=RENDERING
    )


def test_vllm_gets_the_model_by_its_own_flags_and_its_key_in_a_file() -> None:
    args = _vllm()["spec"]["containers"][0]["args"]
    assert args[:4] == ["--model", "/artifacts/claim/model", "--served-model-name", "web"]
    assert args[args.index("--config") + 1] == "/var/run/secrets/busbar/vllm.yaml"
    assert args[-2:] == ["--max-num-seqs", "8"]
    assert "--max-model-len" not in args
    key = bearers.bearer_for(RENDERING.workload_key, VLLM.metadata.uid, Role.INFER)
    assert stored(VLLM)["vllm.yaml"] == f'api-key: "{key}"\n'


@pytest.mark.parametrize(
    ("changes", "uri", "same"),
    [
        ({}, "pvc://claim/model", True),
        ({"image": "vllm:2"}, "pvc://claim/model", False),
        ({"args": ["--quantization", "fp8"]}, "pvc://claim/model", False),
        ({}, "pvc://claim/other", False),
    ],
)
def test_the_speed_of_a_vllm_is_that_of_its_image_model_and_arguments(
    changes: dict[str, Any], uri: str, same: bool
) -> None:
    def workload_class(body: dict[str, Any]) -> str:
        pod = project_pod(body)
        report = (
            ModelServer(engines.VLLM, pod.owner_uid, pod.served)
            .take(b"vllm:num_requests_running 0\n", 0.0)
            .report
        )
        assert report is not None
        return report.workload_class

    other = VLLM.model_copy(update={"spec": VLLM.spec.model_copy(update=changes)})
    body = replica_pods.service_pod(
        other, index=1, model_uri=uri, placement=placement(), pool=pool(), rendering=RENDERING
    )
    assert (workload_class(body) == workload_class(_vllm())) is same


def stored(of: Any) -> dict[str, str]:
    """The data of an object's Secret."""
    secret = manifests.bearers_secret(of, RENDERING)
    assert secret is not None
    return {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}


WITH_PORT = job(template={"image": "own", "port": True})
WITHOUT_PORT = job(template={"image": "own"})


def bodies() -> list[tuple[Any, dict[str, Any]]]:
    """Every kind of pod that the operator makes, with its owner."""
    return [
        (job(), rendered(job())),
        (gang(2), rendered(gang(2), pods=2)),
        (WITH_PORT, rendered(WITH_PORT)),
        (WITHOUT_PORT, rendered(WITHOUT_PORT)),
        (service(), _replica()),
        (VLLM, _vllm()),
    ]


def test_no_pod_shows_a_bearer_anywhere() -> None:
    key = RENDERING.workload_key
    for of, body in bodies():
        text = json.dumps(body)
        uid = of.metadata.uid
        for bearer in (*(bearers.bearer_for(key, uid, r) for r in Role), bearers.former_bearer_for(key, uid)):
            assert bearer not in text
        assert key.decode() not in text


def test_the_mounted_files_are_the_ones_that_the_secret_holds_and_only_the_group_may_read() -> None:
    for of, body in bodies():
        volume = next((v for v in body["spec"]["volumes"] if v["name"] == bearers.VOLUME), None)
        secret = manifests.bearers_secret(of, RENDERING)
        if secret is None:
            assert (volume, of.spec.template.port) == (None, False)
            assert "BUSBAR_BEARERS_DIR" not in env(body)
            continue
        assert volume is not None
        source = volume["secret"]
        assert (source["secretName"], source["defaultMode"]) == (secret["metadata"]["name"], 0o440)
        assert {i["key"] for i in source["items"]} <= set(secret["data"])
        mounts = body["spec"]["containers"][0]["volumeMounts"]
        folder = env(body)["BUSBAR_BEARERS_DIR"]
        assert {"name": bearers.VOLUME, "mountPath": folder, "readOnly": True} in mounts
        found = project_pod({**body, "metadata": {**body["metadata"], "uid": "u"}})
        assert (found.bearers, found.engine) == (source["secretName"], engines.VLLM if of is VLLM else None)


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        (rendered(WITH_PORT), {"read", "command"}),
        (_replica(), {"read", "infer", "command"}),
        (_vllm(), {"vllm.yaml"}),
    ],
    ids=["training", "serving", "vllm"],
)
def test_a_pod_gets_the_bearers_of_the_paths_that_it_serves(body: dict[str, Any], keys: set[str]) -> None:
    [volume] = [v for v in body["spec"]["volumes"] if v["name"] == bearers.VOLUME]
    assert {item["key"] for item in volume["secret"]["items"]} == keys


def test_the_secret_is_the_objects_own_and_cannot_be_changed() -> None:
    secret = manifests.bearers_secret(service(), RENDERING)
    assert secret is not None
    assert (secret["type"], secret["immutable"]) == ("busbar.dev/bearers", True)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-web"


def test_only_a_vllm_is_stopped_by_a_hook_for_as_long_as_its_drain_may_take() -> None:
    assert all(("lifecycle" in body["spec"]["containers"][0]) == (of is VLLM) for of, body in bodies())
    command = _vllm()["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (command[0], command[3:]) == ("python3", ["http://127.0.0.1:9400/metrics", "2", "30"])
    assert _vllm()["spec"]["terminationGracePeriodSeconds"] > 30 + 2


def test_vllm_gets_the_limits_of_the_spec_before_its_own_arguments() -> None:
    of = service(
        engine="vllm", image="vllm/vllm-openai", maxModelLen=4096, kvCacheMemory="2Gi", args=["--seed", "1"]
    )
    body = replica_pods.service_pod(
        of, index=0, model_uri="pvc://claim/model", placement=placement(), pool=pool(), rendering=RENDERING
    )
    args = body["spec"]["containers"][0]["args"]
    assert args[-6:-2] == ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(2 * 2**30)]
    assert args[-2:] == ["--seed", "1"]


@pytest.mark.parametrize(
    ("count", "kind", "args", "flags"),
    [
        (1, "nvidia.com/gpu", [], []),
        (4, "nvidia.com/gpu", [], ["--tensor-parallel-size", "4"]),
        (
            4,
            "nvidia.com/gpu",
            ["--max-num-seqs", "8"],
            ["--tensor-parallel-size", "4", "--max-num-seqs", "8"],
        ),
        (4, "nvidia.com/gpu", ["--pipeline-parallel-size=4"], ["--pipeline-parallel-size=4"]),
        (4, "nvidia.com/gpu", ["-tp", "2"], ["-tp", "2"]),
        (4, "cpu", [], []),  # cores
    ],
)
def test_vllm_uses_all_accelerators_of_its_pod(
    count: int, kind: str, args: list[str], flags: list[str]
) -> None:
    of = service(
        engine="vllm", image="vllm/vllm-openai", shape={"acceleratorsPerPod": count}, args=args or None
    )
    body = replica_pods.service_pod(
        of,
        index=0,
        model_uri="pvc://claim/model",
        placement=placement(),
        pool=pool(resourceName=kind),
        rendering=RENDERING,
    )
    found = body["spec"]["containers"][0]["args"]
    assert found[found.index("--config") + 2 :] == flags


ADAPTERS = [
    {"name": "a", "uri": "pvc://claim/a"},
    {"name": "b", "uri": "pvc://other/b", "tenants": ["research"]},
]


@pytest.mark.parametrize("engine", [{}, {"engine": "vllm", "image": "vllm", "modelId": "m", "args": ["--x"]}])
def test_adapters_are_mounted_for_reading_and_named_to_the_engine(engine: dict[str, Any]) -> None:
    body = replica_pods.service_pod(
        service(adapters=ADAPTERS, **engine),
        index=0,
        model_uri="pvc://claim/model",
        placement=placement(),
        pool=pool(),
        rendering=RENDERING,
    )
    container = body["spec"]["containers"][0]
    for claim in ("claim", "other"):
        mount = {"name": f"busbar-claim-{claim}", "mountPath": f"/artifacts/{claim}", "readOnly": True}
        assert mount in container["volumeMounts"]
    assert json.loads(env(body)["BUSBAR_SPEC"])["adapters"] == ADAPTERS
    if engine:
        assert container["args"][-5:] == [
            *("--enable-lora", "--lora-modules", "m:a=/artifacts/claim/a", "m:b=/artifacts/other/b", "--x")
        ]


def test_vllm_without_adapters_gets_no_flag_for_them() -> None:
    assert "--enable-lora" not in _vllm()["spec"]["containers"][0]["args"]


def test_the_own_texts_of_several_adapters_are_mounted() -> None:
    engine = {
        **ENGINE,
        "model": {"uri": "pvc://base/model"},
        "adapters": [
            {"name": "a", "data": {"uri": "pvc://questions/rows.jsonl"}},
            {"name": "b", "data": {"uri": "builtin://python-stdlib"}},
            {"name": "c"},
        ],
    }
    del engine["tokenizer"]
    mounts = rendered(job(engine=engine))["spec"]["containers"][0]["volumeMounts"]
    assert {"/artifacts/base", "/artifacts/questions"} <= {mount["mountPath"] for mount in mounts}
