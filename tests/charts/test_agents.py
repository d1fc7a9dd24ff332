"""The power agents and the player of simulated power, as the chart makes them: rights, keys, limits and addresses."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest
from tests.charts.rendering import (
    CHARTS,
    POWER,
    documents,
    environment,
    find,
    helm,
    refusal,
    render,
    workloads,
)

from busbar.kube.contracts.power import PORT
from busbar.operator import settings as operator_settings
from busbar.operator.agent import settings as agent_settings
from busbar.operator.agent.signing import Signer, Verifier
from busbar.operator.energy import keeper
from busbar.operator.power.gatherer import AGENT_OWNER
from busbar.operator.serving import history_keeper, series_store

pytestmark = pytest.mark.apiserver
"""These need helm, which is built together with the API server."""


def test_agents_have_no_rights_and_no_token_and_are_reached_by_the_operator_alone() -> None:
    found = documents(render("busbar", *POWER))
    for kind, name in (("DaemonSet", "busbar-agent"), ("Deployment", "busbar-power-simulator")):
        pod = find(found, kind, name)["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == name
        assert pod["automountServiceAccountToken"] is False
        assert [volume["name"] for volume in pod["volumes"]] == ["power-key"]
        ingress = find(found, "NetworkPolicy", name)["spec"]["ingress"]
        (source,) = ingress[0]["from"]
        assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
        assert (len(ingress), ingress[0]["ports"]) == (1, [{"port": "telemetry"}])
    bound = {
        subject["name"]
        for document in found
        if document["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in document["subjects"]
    }
    assert bound & {"busbar-agent", "busbar-power-simulator"} == set()


def test_only_the_operator_has_the_key_that_signs_leases(tmp_path_factory: pytest.TempPathFactory) -> None:
    command = helm.__wrapped__(
        "template", "busbar", str(CHARTS / "busbar"), "-n", "busbar-system", "--set", "power.agent.enabled=true",
        "--set", "power.agent.setLimits=true", "--set", "power.simulatedNodes={a}",
    )  # fmt: skip
    assert isinstance(command, subprocess.CompletedProcess)
    found = documents(command.stdout)
    key = base64.b64decode(find(found, "Secret", "busbar-power-lease-key")["data"]["key"])
    certificate = find(found, "ConfigMap", "busbar-power-lease-certificate")["binaryData"]["key"]
    signature = Signer(key).sign(b"a lease")
    verifier = Verifier(base64.b64decode(certificate))
    assert verifier.is_signed(b"a lease", signature)
    assert not verifier.is_signed(b"another", signature)
    holders = {
        document["metadata"]["name"]
        for document in workloads(found)
        if "busbar-power-lease-key" in str(document["spec"]["template"]["spec"]["volumes"])
    }
    assert holders == {"busbar-operator"}
    folder = tmp_path_factory.mktemp("keys")
    given = environment(found, "busbar-operator")
    for name in ("BUSBAR_WORKLOAD_KEY_FILE", "BUSBAR_POWER_KEY_FILE", "BUSBAR_POWER_LEASE_KEY_FILE"):
        assert name in given
        (folder / name).write_bytes(key)
        given[name] = str(folder / name)
    assert operator_settings.load(given).power_lease_key.startswith(b"-----BEGIN PRIVATE KEY-----")


@pytest.mark.parametrize("value", ["power.agent.enabled=true", "power.simulatedNodes={a}", ""])
def test_the_operator_may_keep_the_services_numbers_and_its_checkpoint_of_energy_where_there_are_agents_and_no_more(
    value: str,
) -> None:
    chart = ("template", "busbar", str(CHARTS / "busbar"), "-n", "busbar-system")
    command = helm.__wrapped__(*chart, *(("--set", value) if value else ()))
    rules = find(documents(command.stdout), "Role", "busbar-operator")["rules"]
    given = [(r.get("resourceNames"), r["verbs"]) for r in rules if "configmaps" in r["resources"]]
    names = [history_keeper.NAME, *series_store.NAMES, *([keeper.NAME] if value else [])]
    assert given == [(names, ["get", "update"]), (None, ["create"])]


def test_the_operator_may_patch_nodes_only_with_the_policy_that_confines_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 64)

    def of(*settings: str) -> tuple[bool, bool, bool]:
        """Its right, the policy, and whether it uses the right."""
        found = documents(render("busbar", *settings))
        rules = find(found, "ClusterRole", "busbar-operator")["rules"]
        [nodes] = [rule for rule in rules if rule["resources"] == ["nodes"]]
        policies = [d["metadata"]["name"] for d in found if d["kind"] == "ValidatingAdmissionPolicy"]
        name = "BUSBAR_OPERATOR_POWER_TAINT_NODES"
        given = environment(found, "busbar-operator").get(name, "false")
        key = {"BUSBAR_WORKLOAD_KEY_FILE": str(tmp_path / "key")}
        used = operator_settings.load({**key, name: given}).power_taint_nodes
        return "patch" in nodes["verbs"], "busbar-node-taint" in policies, used

    limits = "power.agent.setLimits=true"
    assert (
        of("power.agent.enabled=true", limits) == of("power.simulatedNodes={a}", limits) == (True, True, True)
    )
    for settings in (
        ("power.agent.enabled=true",),
        (limits,),
        ("power.agent.enabled=true", limits, "admission.enabled=false"),
    ):
        assert of(*settings) == (False, False, False)


def test_agents_that_may_set_limits_are_root_with_a_guard_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("k" * 64)
    kubelet = "power.agent.kubeletDir=/var/lib/kubelet"
    found = documents(render("busbar", *POWER, "power.agent.setLimits=true", kubelet))
    pod = find(found, "DaemonSet", "busbar-agent")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert [volume["name"] for volume in pod["volumes"] if "hostPath" in volume] == ["pod-resources"]
    assert (pod["automountServiceAccountToken"], pod.get("hostPID"), pod.get("hostNetwork")) == (
        False,
        None,
        None,
    )
    agent, guard = pod["containers"]
    assert (agent["command"], guard["command"]) == (["busbar-agent"], ["busbar-agent", "guard"])
    for container in (agent, guard):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        given = {variable["name"]: variable.get("value", "") for variable in container["env"]}
        files = {"BUSBAR_POWER_KEY_FILE": str(key), "BUSBAR_POWER_LEASE_CERT_FILE": str(key)}
        assert given.keys() >= files.keys()
        read = agent_settings.load({**given, **files, "NODE_NAME": "n"})
        assert (read.set_limits, read.heartbeat_file) == (True, "/run/busbar/heartbeat")
        assert {"name": "heartbeat", "mountPath": "/run/busbar"}.items() <= (
            next(mount for mount in container["volumeMounts"] if mount["name"] == "heartbeat").items()
        )
    assert "ports" not in guard
    assert "pod-resources" not in [mount["name"] for mount in guard["volumeMounts"]]
    simulator = find(found, "Deployment", "busbar-power-simulator")["spec"]["template"]["spec"]
    assert simulator["securityContext"]["runAsNonRoot"] is True, "there is no driver to ask"
    given = environment(found, "busbar-power-simulator")
    assert given["BUSBAR_AGENT_SET_LIMITS"] == "true"
    assert len(simulator["containers"]) == 1
    for kind, name in (("DaemonSet", "busbar-agent"), ("Deployment", "busbar-power-simulator")):
        off = environment(documents(render("busbar", *POWER)), name, kind)
        assert not {"BUSBAR_AGENT_SET_LIMITS", "BUSBAR_AGENT_HEARTBEAT_FILE"} & off.keys()


@pytest.mark.parametrize("directory", ["/var/lib/kubelet", "/var/lib/k0s/kubelet", ""])
def test_agents_mount_the_kubelets_socket_for_reading_and_without_it_are_not_root(
    tmp_path: Path, directory: str
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64)
    found = documents(render("busbar", *POWER, f"power.agent.kubeletDir={directory}"))
    pod = find(found, "DaemonSet", "busbar-agent")["spec"]["template"]["spec"]
    given = environment(found, "busbar-agent", "DaemonSet")
    read = agent_settings.load({**given, "BUSBAR_POWER_KEY_FILE": str(key), "NODE_NAME": "n"})
    of_host = [volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume]
    assert (pod["securityContext"]["runAsUser"] == 0) is bool(directory)
    if not directory:
        assert (of_host, read.pod_resources_socket) == ([], "")
        return
    assert of_host == [{"path": f"{directory}/pod-resources", "type": "DirectoryOrCreate"}]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "pod-resources"]
    assert mount["readOnly"] is True
    assert read.pod_resources_socket == f"{mount['mountPath']}/kubelet.sock"
    assert pod["securityContext"].keys() == {"runAsUser", "runAsGroup", "seccompProfile"}


def test_a_kubelets_directory_is_a_path_from_the_root() -> None:
    for wrong in ("var/lib/kubelet", "/var/lib/kubelet/", "/var lib"):
        assert "kubeletDir" in refusal("power.agent.enabled=true", f"power.agent.kubeletDir={wrong}")


def test_agent_and_operator_read_the_environment_and_agree_on_address_and_owner(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("k" * 64)
    found = documents(render("busbar", *POWER))
    read = {}
    for kind, name in (("DaemonSet", "busbar-agent"), ("Deployment", "busbar-power-simulator")):
        given = environment(found, name, kind)
        read[name] = agent_settings.load({**given, "BUSBAR_POWER_KEY_FILE": str(key), "NODE_NAME": "n"})
        (port,) = find(found, kind, name)["spec"]["template"]["spec"]["containers"][0]["ports"]
        assert port["containerPort"] == read[name].port == PORT
    assert read["busbar-agent"].backend == "probe"
    assert read["busbar-power-simulator"].simulated_nodes == ("sim-0", "sim-1")
    assert AGENT_OWNER == "DaemonSet busbar-agent"
    given = environment(found, "busbar-operator")
    files = {"BUSBAR_WORKLOAD_KEY_FILE": str(key), "BUSBAR_POWER_KEY_FILE": str(key)}
    assert given.keys() >= files.keys()
    operator = operator_settings.load({**given, **files})
    assert operator.power_simulator_url == f"http://busbar-power-simulator.busbar-system:{PORT}"
    assert "BUSBAR_POWER_KEY_FILE" not in environment(documents(render("busbar")), "busbar-operator")
