"""Our charts, by the real helm: lint, golden renders, values that are refused, and rules for every pod.

When a golden file differs on purpose, `python -m tests.charts.test_charts` writes them anew.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml
from tests.charts.rendering import (
    CHARTS,
    GOLDEN,
    JSON,
    POWER,
    documents,
    environment,
    find,
    helm,
    refusal,
    render,
    workloads,
)
from tools.chart_values import Values

from busbar.api import settings as api_settings
from busbar.gateway import settings as gateway_settings
from busbar.kube.contracts.auth import TOKEN_ROOT
from busbar.kube.errors import SettingsError
from busbar.kube.types.meta import LABEL_LEADER
from busbar.operator import settings as operator_settings
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.write.leader_label import YES

pytestmark = pytest.mark.apiserver
"""These need helm, which is built together with the API server."""

POSTGRES = ("api.databaseUrl.name=database", "api.databaseUrl.key=url", "api.replicas=2")
OIDC = (
    "api.oidc.issuer=https://login.example.com",
    "api.oidc.clientId=busbar",
    "api.oidc.clientSecret.name=oidc",
    "api.oidc.clientSecret.key=secret",
    "api.oidc.adminGroup=admins",
)
ONE_MACHINE = ("image.registry=127.0.0.1:5000", "image.tag=abc", "service.type=NodePort")
BARE = (
    "admission.enabled=false",
    "networkPolicies.enabled=false",
    "api.persistence.enabled=false",
    "gateway.persistence.enabled=false",
    "pools.discover=false",
)
PLACED = (
    "placement.nodeSelector.role=system",
    "placement.tolerations[0].key=system",
    "placement.tolerations[0].operator=Exists",
    "placement.priorityClassName=system-cluster-critical",
    "image.pullSecrets[0]=registry",
    "gateway.metricsSubjects[0]=system:serviceaccount:monitoring:prometheus",
    "api.publicUrl=https://busbar.example.com",
    "api.publicGatewayUrl=https://models.example.com",
)
MONITORED = (
    "monitoring.rules.enabled=true",
    "monitoring.rules.labels.release=prometheus",
    "monitoring.rules.runbooks=https://wiki.example.com/runbooks",
    "monitoring.podMonitors.enabled=true",
    "monitoring.podMonitors.labels.release=prometheus",
    "monitoring.podMonitors.prometheusNamespace=monitoring",
    "monitoring.dashboards.enabled=true",
    "monitoring.dashboards.labels.folder=gpus",
)
STANDBY = ("operator.replicas=2",)
GATEWAYS = ("gateway.replicas=3", "gateway.persistence.storageClass=fast")
RENDERS = {
    "default": ("busbar", ()),
    "one-machine": ("busbar", ONE_MACHINE),
    "postgres-oidc": ("busbar", POSTGRES + OIDC + PLACED),
    "bare": ("busbar", BARE),
    "monitored": ("busbar", MONITORED),
    "power": ("busbar", POWER),
    "standby": ("busbar", STANDBY),
    "gateways": ("busbar", GATEWAYS),
}


@pytest.mark.parametrize("chart", ["busbar", "busbar-crds"])
def test_chart_passes_strict_lint(chart: str) -> None:
    result = helm("lint", "--strict", str(CHARTS / chart))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", RENDERS)
def test_render_equals_its_golden_file(name: str) -> None:
    chart, settings = RENDERS[name]
    golden = (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")
    assert render(chart, *settings) == golden, "run `python -m tests.charts.test_charts` if you meant it"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("image.tagg=1", "tagg"),
        ("nonsense=1", "nonsense"),
        ("service.type=Anycast", "service/type"),
        ("service.portalNodePort=70000", "service/portalNodePort"),
        ("api.replicas=0", "api/replicas"),
        ("operator.replicas=0", "operator/replicas"),
        ("image.digests.platform=sha256:ab", "image/digests/platform"),
        ("operator.leaseSeconds=4", "operator/leaseSeconds"),
        ("scheduling.objective=speed", "scheduling/objective"),
        ("gateway.replicas=0", "gateway/replicas"),
        ("gateway.holdTimeoutSeconds=0", "gateway/holdTimeoutSeconds"),
        ("api.persistence.size=big", "api/persistence/size"),
        ("api.replicas=2", "api.replicas is greater than 1, but the database is SQLite"),
        ("api.oidc.issuer=https://login.example.com", "login needs api.oidc.clientId"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, says: str) -> None:
    assert says in refusal(setting)


def test_every_value_is_used_and_every_used_value_exists() -> None:
    text = "\n".join(file.read_text() for file in (CHARTS / "busbar" / "templates").rglob("*.*"))
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", text))
    sections = set(Values().model_dump(by_alias=True))
    assert {path.partition(".")[0] for path in used} == sections
    values = Values().model_dump(by_alias=True)
    for path in used:
        node = values
        for step in path.split("."):
            assert step in node, f"a template reads .Values.{path}, which is no setting"
            node = node[step]


@pytest.mark.parametrize(
    "name", ["default", "one-machine", "postgres-oidc", "bare", "power", "standby", "gateways"]
)
def test_every_pod_is_as_restricted_as_pod_security_asks(name: str) -> None:
    chart, settings = RENDERS[name]
    found = workloads(documents(render(chart, *settings)))
    assert len(found) == (5 if name == "power" else 3)
    for deployment in found:
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"livenessProbe", "readinessProbe"} <= container.keys()
            assert set(container["resources"]) == {"requests", "limits"}
            assert "cpu" not in container["resources"]["limits"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claims = {c["metadata"]["name"] for c in deployment["spec"].get("volumeClaimTemplates", ())}
            assert mounted == {volume["name"] for volume in pod["volumes"]} | claims


def test_sqlite_and_an_operator_without_standby_never_run_twice() -> None:
    found = documents(render("busbar"))
    for name in ("busbar-operator", "busbar-api", "busbar-gateway"):
        spec = find(found, "Deployment", name)["spec"]
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    with_postgres = documents(render("busbar", *POSTGRES))
    assert find(with_postgres, "Deployment", "busbar-api")["spec"]["replicas"] == 2
    claims = [d["metadata"]["name"] for d in with_postgres if d["kind"] == "PersistentVolumeClaim"]
    assert claims == ["busbar-gateway"]


def test_several_gateways_have_a_folder_and_an_address_each_and_are_replaced_one_by_one() -> None:
    found = documents(render("busbar", *GATEWAYS))
    several = find(found, "StatefulSet", "busbar-gateway")["spec"]
    assert not [d for d in found if d["kind"] == "Deployment" and d["metadata"]["name"] == "busbar-gateway"]
    assert (several["replicas"], several["podManagementPolicy"]) == (3, "Parallel")
    (claim,) = several["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert several["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }
    labels = several["template"]["metadata"]["labels"].items()
    (service,) = [
        d for d in found if d["kind"] == "Service" and d["metadata"]["name"] == several["serviceName"]
    ]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    budget = find(found, "PodDisruptionBudget", "busbar-gateway")["spec"]
    assert budget["maxUnavailable"] == 1
    for selector in (
        service["spec"]["selector"],
        budget["selector"]["matchLabels"],
        several["selector"]["matchLabels"],
        find(found, "Service", "busbar-openai")["spec"]["selector"],
        find(found, "NetworkPolicy", "busbar-gateway")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    assert several["template"]["spec"]["affinity"]["podAntiAffinity"]
    assert gateway_settings.load(environment(found, "busbar-gateway", "StatefulSet")).replicas == 3
    urls = environment(found, "busbar-operator")["BUSBAR_GATEWAY_URL"].split(",")
    assert urls == [f"http://busbar-gateway-{n}.busbar-gateways.busbar-system:8091" for n in range(3)]


def test_several_gateways_without_claims_of_their_own_are_refused() -> None:
    text = refusal("gateway.replicas=2", "gateway.persistence.existingClaim=mine")
    assert "each gateway needs a claim of its own" in text
    emptied = documents(render("busbar", "gateway.replicas=2", "gateway.persistence.enabled=false"))
    spec = find(emptied, "StatefulSet", "busbar-gateway")["spec"]
    assert "volumeClaimTemplates" not in spec
    assert {"name": "state", "emptyDir": {}} in spec["template"]["spec"]["volumes"]


def test_two_operators_share_one_address_and_are_replaced_one_after_the_other() -> None:
    alone, both = documents(render("busbar")), documents(render("busbar", *STANDBY))
    for found in (alone, both):
        selector = find(found, "Service", "busbar-operator")["spec"]["selector"]
        assert selector.pop(LABEL_LEADER) == YES
        deployment = find(found, "Deployment", "busbar-operator")["spec"]
        assert deployment["selector"]["matchLabels"] == selector
        labels = deployment["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
        assert LABEL_LEADER not in labels, "only the operator sets it"
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    [apart] = deployment["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"] == selector
    budget = find(both, "PodDisruptionBudget", "busbar-operator")["spec"]
    assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": selector}}
    assert not [d for d in alone if d["kind"] == "PodDisruptionBudget"]


@pytest.mark.parametrize(
    ("given", "lease_s"),
    [
        ((), 30.0),
        (STANDBY, 12.0),
        ((*STANDBY, "operator.leaseSeconds=20"), 20.0),
        (("operator.leaseSeconds=9",), 9.0),
    ],
)
def test_a_lease_ends_sooner_where_somebody_stands_by(given: tuple[str, ...], lease_s: float) -> None:
    env = environment(documents(render("busbar", *given)), "busbar-operator")
    key = "BUSBAR_OPERATOR_LEASE_DURATION_S"
    assert float(env[key]) == lease_s
    # Renewed every third; the successor looks once a second, and needs seconds to list the objects.
    assert lease_s + 3 < 20 or given != STANDBY


def test_operator_keeps_its_place_and_its_share_of_a_full_api_server() -> None:
    found = documents(render("busbar"))
    pod = find(found, "Deployment", "busbar-operator")["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "250m"
    assert find(found, "PriorityClass", pod["priorityClassName"])["value"] > 0
    flows = [d for d in found if d["kind"] == "FlowSchema"]
    assert {flow["metadata"]["name"] for flow in flows} == {"busbar-lease", "busbar-admissions"}
    for flow in flows:
        level = flow["spec"]["priorityLevelConfiguration"]["name"]
        assert find(found, "PriorityLevelConfiguration", level)["spec"]["type"] == "Limited"
        accounts = [s["serviceAccount"] for rule in flow["spec"]["rules"] for s in rule["subjects"]]
        assert accounts == [{"name": "busbar-operator", "namespace": "busbar-system"}]
    placed = find(documents(render("busbar", *PLACED)), "Deployment", "busbar-operator")
    assert placed["spec"]["template"]["spec"]["priorityClassName"] == "system-cluster-critical"


def test_processes_accept_the_environment_that_the_chart_gives_them() -> None:
    """Unknown names are refused by each process, so a misspelt variable would stop it at its start."""
    for settings in ((), POSTGRES + OIDC + PLACED):
        found = documents(render("busbar", *settings))
        read = gateway_settings.load(environment(found, "busbar-gateway"))
        assert read.operator_subject == "system:serviceaccount:busbar-system:busbar-operator"
        assert read.operator_token_file == TOKEN_ROOT / "operator" / "token"
        api = {
            key: value for key, value in environment(found, "busbar-api").items() if not key.endswith("_FILE")
        }
        wanted = api_settings.load(
            {key: value for key, value in api.items() if "OIDC" not in key}, needs_secret=False
        )
        assert wanted.gateway_subject == "system:serviceaccount:busbar-system:busbar-gateway"


def test_images_are_named_by_digest_where_digests_are_given() -> None:
    platform, engines = (f"sha256:{letter * 64}" for letter in "ab")
    given = (f"image.digests.platform={platform}", f"image.digests.workloads={engines}")
    found = documents(render("busbar", *ONE_MACHINE, *POWER, *given))
    images = {c["image"] for d in workloads(found) for c in d["spec"]["template"]["spec"]["containers"]}
    assert images == {f"127.0.0.1:5000/busbar-platform:abc@{platform}"}
    reference = environment(found, "busbar-operator")["BUSBAR_WORKLOADS_IMAGE"]
    assert reference == f"127.0.0.1:5000/busbar-workloads:abc@{engines}"
    assert EngineImage(reference).digests == {engines}, "no other digest's speeds are shared"
    own = documents(render("busbar", *given, "workloads.image=registry.example.com/own:1"))
    assert environment(own, "busbar-operator")["BUSBAR_WORKLOADS_IMAGE"] == "registry.example.com/own:1"


def test_operator_reads_the_environment_that_the_chart_gives_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("k" * 64)
    given = environment(documents(render("busbar", *ONE_MACHINE)), "busbar-operator")
    read = operator_settings.load(
        {**given, "BUSBAR_WORKLOAD_KEY_FILE": str(key), "POD_NAMESPACE": "busbar-system"}
    )
    assert read.workloads_image == "127.0.0.1:5000/busbar-workloads:abc"
    assert read.workloads_digests == ()
    digests = tuple(f"sha256:{letter * 64}" for letter in "ab")
    named = documents(
        render(
            "busbar", *ONE_MACHINE, *(f"workloads.acceptedDigests[{i}]={d}" for i, d in enumerate(digests))
        )
    )
    given = {**environment(named, "busbar-operator"), "BUSBAR_WORKLOAD_KEY_FILE": str(key)}
    assert operator_settings.load(given).workloads_digests == digests
    with pytest.raises(SettingsError, match="BUSBAR_WORKLOADS_ACCEPTED_DIGESTS='sha256:ab'"):
        operator_settings.load({**given, "BUSBAR_WORKLOADS_ACCEPTED_DIGESTS": "sha256:ab"})
    assert read.shielded_by == "busbar-system"
    assert read.gateway_url == "http://busbar-gateway.busbar-system:8091"
    assert read.allowed_callers == (
        "system:serviceaccount:busbar-system:busbar-api",
        "system:serviceaccount:busbar-system:busbar-gateway",
    )


def test_services_are_told_at_the_address_where_people_reach_the_gateway() -> None:
    def told(*settings: str) -> str:
        return environment(documents(render("busbar", *settings)), "busbar-operator")[
            "BUSBAR_GATEWAY_PUBLIC_URL"
        ]

    assert told() == "http://busbar-gateway.busbar-system:8080/v1"
    assert told("api.publicGatewayUrl=https://models.example.com/") == "https://models.example.com/v1"


def test_what_people_own_is_kept_on_uninstall() -> None:
    kept = {
        (d["kind"], d["metadata"]["name"])
        for d in documents(render("busbar")) + documents(render("busbar-crds"))
        if d["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {
        ("Secret", "busbar-workload-key"),
        ("Secret", "busbar-api-session"),
        ("PersistentVolumeClaim", "busbar-api"),
        ("PersistentVolumeClaim", "busbar-gateway"),
        ("CustomResourceDefinition", "trainingjobs.busbar.dev"),
        ("CustomResourceDefinition", "modelservices.busbar.dev"),
        ("CustomResourceDefinition", "acceleratorpools.busbar.dev"),
        ("CustomResourceDefinition", "tenants.busbar.dev"),
        ("CustomResourceDefinition", "performanceprofiles.busbar.dev"),
        ("CustomResourceDefinition", "powerdomains.busbar.dev"),
    }


def test_keys_are_random_at_each_first_install() -> None:
    def key() -> str:
        command = helm.__wrapped__("template", "busbar", str(CHARTS / "busbar"), "-n", "busbar-system")
        assert isinstance(command, subprocess.CompletedProcess)
        return str(find(documents(command.stdout), "Secret", "busbar-workload-key")["data"]["key"])

    assert key() != key()


def test_older_kubernetes_gets_no_mutating_policies() -> None:
    kinds = {d["kind"] for d in documents(render("busbar", kubernetes="1.34.0"))}
    assert "ValidatingAdmissionPolicy" in kinds
    assert "MutatingAdmissionPolicy" not in kinds
    assert (
        "chart requires kubeVersion"
        in helm("template", "busbar", str(CHARTS / "busbar"), "--kube-version", "1.33.0").stderr
    )


def test_people_are_refused_at_internal_ports_only_by_their_callers() -> None:
    """NetworkPolicies list the callers of internal ports, and leave the public ports open."""
    found = documents(render("busbar"))
    callers = {}
    for name in ("operator", "api", "gateway"):
        ingress = find(found, "NetworkPolicy", f"busbar-{name}")["spec"]["ingress"]
        assert "from" not in ingress[0]
        callers[name] = [
            source["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for source in ingress[1]["from"]
        ]
    assert callers == {"operator": ["api", "gateway"], "api": ["gateway"], "gateway": ["operator"]}


def test_alerts_and_monitors_are_made_where_they_are_wanted() -> None:
    def named(*settings: str) -> set[tuple[str, str]]:
        return {
            (d["kind"], d["metadata"]["name"])
            for d in documents(render("busbar", *settings))
            if d["apiVersion"].startswith("monitoring.coreos.com/")
        }

    assert named() == set()
    monitors = {("PodMonitor", f"busbar-{part}") for part in ("operator", "api", "gateway")}
    assert named(*MONITORED) == {("PrometheusRule", "busbar"), *monitors}
    found = documents(render("busbar", *MONITORED))
    written = yaml.safe_load((CHARTS / "busbar" / "alerts.yaml").read_text())
    (group,) = find(found, "PrometheusRule", "busbar")["spec"]["groups"]
    for rule, alert in zip(group["rules"], written, strict=True):
        url = rule["annotations"].pop("runbook_url")
        assert url == f"https://wiki.example.com/runbooks#{alert['alert'].lower()}"
        assert rule == alert


def test_dashboards_are_made_where_they_are_wanted_with_the_label_that_grafana_looks_for() -> None:
    plain = [d["metadata"]["name"] for d in documents(render("busbar")) if d["kind"] == "ConfigMap"]
    assert "busbar-dashboards" not in plain
    made = find(documents(render("busbar", *MONITORED)), "ConfigMap", "busbar-dashboards")
    assert {"grafana_dashboard": "1", "folder": "gpus"}.items() <= made["metadata"]["labels"].items()
    written = {f"busbar-{file.name}": file for file in (CHARTS / "busbar" / "dashboards").glob("*.json")}
    assert made["data"].keys() == written.keys()
    for name, file in written.items():
        assert json.loads(made["data"][name]) == json.loads(file.read_text())


def test_monitors_read_ports_that_the_pods_have_and_network_policies_let_them() -> None:
    found = documents(render("busbar", *MONITORED))
    for name in ("operator", "api", "gateway"):
        monitor = find(found, "PodMonitor", f"busbar-{name}")
        pod = find(found, "Deployment", f"busbar-{name}")["spec"]["template"]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports
        assert endpoint["honorLabels"] is True, "series of services have a label namespace of their own"
        open_, closed = find(found, "NetworkPolicy", f"busbar-{name}")["spec"]["ingress"]
        from_ = [source["namespaceSelector"] for source in closed["from"] if "namespaceSelector" in source]
        if endpoint["port"] in [port["port"] for port in open_["ports"]]:
            assert from_ == []
        else:
            assert from_ == [{"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}]


def rights(found: list[JSON], kind: str, name: str) -> dict[str, str]:
    """Each resource of a role with its verbs."""
    return {
        "/".join(filter(None, (group, resource))): " ".join(sorted(rule["verbs"]))
        for rule in find(found, kind, name)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_our_processes_have_the_rights_that_they_use_and_no_others() -> None:
    """One line per call that the code makes. A change that adds or removes a call adds or removes its verb here."""
    found = documents(render("busbar"))
    assert rights(found, "ClusterRole", "busbar-operator") == {
        # watches (informers and Kopf: list, watch), ttlSecondsAfterFinished, discovered pools
        "busbar.dev/trainingjobs": "delete get list watch",
        "busbar.dev/modelservices": "get list watch",
        "busbar.dev/tenants": "list watch",
        "busbar.dev/acceleratorpools": "create list watch",
        # profiles: made when a class first runs, the least used deleted when there are too many
        "busbar.dev/performanceprofiles": "create delete list watch",
        "busbar.dev/powerdomains": "list watch",
        # the status writer
        "busbar.dev/trainingjobs/status": "patch",
        "busbar.dev/modelservices/status": "patch",
        "busbar.dev/acceleratorpools/status": "patch",
        "busbar.dev/tenants/status": "patch",
        "busbar.dev/performanceprofiles/status": "patch",
        "busbar.dev/powerdomains/status": "patch",
        # gangs and replicas: create, lift the gate (patch), read again after a failed precondition, delete
        "pods": "create delete get list patch watch",
        "services": "create",
        # bearers by server-side apply; the policy busbar-bearers refuses every other Secret
        "secrets": "create patch",
        "nodes": "list watch",
        # tenants: labels and rights by server-side apply
        "namespaces": "list patch watch",
        "rbac.authorization.k8s.io/rolebindings": "create delete list patch watch",
        "rbac.authorization.k8s.io/clusterroles": "bind",
        "networking.k8s.io/networkpolicies": "create delete list patch watch",
        "resourcequotas": "create delete list patch watch",
        # whether the claims of jobs and services exist
        "persistentvolumeclaims": "list watch",
        "batch/jobs": "list patch watch",
        "events": "create patch",
        "authentication.k8s.io/tokenreviews": "create",
    }
    assert rights(found, "ClusterRole", "busbar-api") == {
        "busbar.dev/trainingjobs": "create delete get list patch watch",
        "busbar.dev/modelservices": "create delete get list patch watch",
        # asked for by the policy busbar-access, after the API has asked for its caller
        "busbar.dev/modelservices/access": "update",
        "busbar.dev/acceleratorpools": "list watch",
        "busbar.dev/tenants": "list watch",
        "busbar.dev/performanceprofiles": "list watch",
        "pods": "list",
        "events": "list",
        "pods/log": "get",
        "authentication.k8s.io/tokenreviews": "create",
        "authorization.k8s.io/subjectaccessreviews": "create",
    }
    off = rights(
        documents(render("busbar", "networkPolicies.enabled=false")), "ClusterRole", "busbar-operator"
    )
    assert off["networking.k8s.io/networkpolicies"] == "delete list watch"
    assert rights(found, "ClusterRole", "busbar-gateway") == {"authentication.k8s.io/tokenreviews": "create"}


def test_the_operator_reads_the_secrets_of_meters_that_are_named_and_no_others() -> None:
    def reads(*settings: str) -> list[JSON]:
        rules = [
            (one["metadata"], rule)
            for one in documents(render("busbar", *settings))
            if one["kind"] in ("Role", "ClusterRole") and one["metadata"]["name"] == "busbar-operator"
            for rule in one["rules"]
        ]
        found = [
            (at, rule) for at, rule in rules if "secrets" in rule["resources"] and "get" in rule["verbs"]
        ]
        assert all("namespace" in at for at, _ in found)
        return [rule for _, rule in found]

    assert reads() == []
    assert reads("power.meterSecrets={meter-a,meter-b}") == [
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": ["meter-a", "meter-b"],
            "verbs": ["get"],
        }
    ]


def test_values_file_is_its_own_documentation() -> None:
    text = (CHARTS / "busbar" / "values.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == Values().model_dump(by_alias=True, mode="json")
    for line in text.splitlines():
        assert len(line) < 160


def main() -> None:
    """Write the golden files."""
    GOLDEN.mkdir(exist_ok=True)
    for name, (chart, settings) in RENDERS.items():
        (GOLDEN / f"{name}.yaml").write_text(render(chart, *settings), encoding="utf-8")
        print(f"wrote {GOLDEN / name}.yaml")


if __name__ == "__main__":
    main()
