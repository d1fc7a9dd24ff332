"""Rendered configuration: the security settings, and only the instance's own addresses and folders."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import yaml

from busbar.local import base, config, parts
from busbar.local.cluster import with_digests
from busbar.local.instance import Instance
from busbar.local.simulated import stages
from busbar.local.supervisor import Part, Spec

INSTANCE = Instance("busbar", 77, 30080, 30081)
MACHINE = config.Machine(
    may_lower_oom_score=False, pause_image="localhost:5000/p:1", base_image="localhost:5000/b:1"
)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return config.render(INSTANCE, MACHINE)


def test_the_kubelet_refuses_anonymous_requests(files: dict[str, str]) -> None:
    kubelet = json.loads(files["kubelet.json"])
    assert kubelet["authentication"]["anonymous"]["enabled"] is False
    assert kubelet["authorization"]["mode"] == "Webhook"
    assert kubelet["readOnlyPort"] == 0


def test_the_kubelet_keeps_to_the_instances_cgroup(files: dict[str, str]) -> None:
    assert json.loads(files["kubelet.json"])["cgroupRoot"] == "/busbar.busbar"


def test_containerd_reads_as_toml_and_leaves_the_oom_score_where_it_may_not_lower_it(
    files: dict[str, str],
) -> None:
    runtime = tomllib.loads(files["containerd.toml"])["plugins"]["io.containerd.cri.v1.runtime"]
    assert runtime["restrict_oom_score_adj"] is True
    assert runtime["cni"]["conf_dir"].startswith("/run/busbar/")


def test_every_yaml_and_json_file_parses(files: dict[str, str]) -> None:
    for name, text in files.items():
        if name.endswith((".json", ".yaml", ".yml", ".conflist")):
            assert list(yaml.safe_load_all(text)), name


def test_pods_get_addresses_from_the_instances_range_only(files: dict[str, str]) -> None:
    ranges = json.loads(files["cni/10-busbar.conflist"])["plugins"][0]["ipam"]["ranges"]
    assert IPv4Network(ranges[0][0]["subnet"]).subnet_of(INSTANCE.addresses.network)


def test_kube_proxy_changes_no_machine_wide_setting(files: dict[str, str]) -> None:
    conntrack = json.loads(files["kube-proxy.json"])["conntrack"]
    assert conntrack["maxPerCore"] == 0
    assert conntrack["min"] == 0


def test_etcd_serves_tls_to_clients_with_a_certificate_on_loopback_only() -> None:
    etcd = next(p for p in parts.spec(INSTANCE, simulate=False, with_traffic=False).parts if p.name == "etcd")
    assert "--client-cert-auth=true" in etcd.argv
    assert "--peer-client-cert-auth=true" in etcd.argv
    assert "--listen-client-urls=https://127.0.0.1:2379" in etcd.argv


def test_the_api_server_knows_no_anonymous_and_decides_by_rbac() -> None:
    spec = parts.spec(INSTANCE, simulate=False, with_traffic=False)
    server = next(p for p in spec.parts if p.name == "kube-apiserver")
    assert {"--anonymous-auth=false", "--authorization-mode=Node,RBAC"} <= set(server.argv)


def test_only_the_forwarder_runs_in_the_machines_network() -> None:
    spec = parts.spec(INSTANCE, simulate=True, with_traffic=True)
    assert [part.name for part in spec.parts if part.host_network] == ["forward"]


def test_simulation_adds_and_leaving_it_out_removes_its_parts() -> None:
    without = {p.name for p in parts.spec(INSTANCE, simulate=False, with_traffic=False).parts}
    full = {p.name for p in parts.spec(INSTANCE, simulate=True, with_traffic=True).parts}
    assert full - without == {"kwok", "traffic"}


def test_every_part_comes_after_parts_that_exist() -> None:
    spec = parts.spec(INSTANCE, simulate=True, with_traffic=True)
    names = {part.name for part in spec.parts}
    assert all(set(part.after) <= names for part in spec.parts)


def test_a_supervisors_specification_survives_its_file(tmp_path: Path) -> None:
    spec = parts.spec(INSTANCE, simulate=True, with_traffic=True)
    spec.write(tmp_path / "supervisor.json")
    assert Spec.read(tmp_path / "supervisor.json") == spec


def test_a_changed_configuration_file_changes_the_digest_of_the_part_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = INSTANCE.folder / "config"
    folder.mkdir(parents=True)
    reader, other = Part("a", ["a", "--config=/run/busbar/config/a.json"]), Part("b", ["b"])
    spec = Spec("n", str(INSTANCE.folder), "c", "d", "h", "n", "w", {}, [reader, other])
    digests = []
    for text in ("one", "two"):
        (folder / "a.json").write_text(text)
        digests.append([part.digest for part in with_digests(spec, INSTANCE).parts])
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] == digests[1][1]


def test_dns_and_storage_are_there_before_any_chart() -> None:
    kinds = {(o["kind"], o["metadata"]["name"]): o for o in base.objects(INSTANCE)}
    assert kinds["Service", "kube-dns"]["spec"]["clusterIP"] == INSTANCE.addresses.dns
    annotations = kinds["StorageClass", "local-path"]["metadata"]["annotations"]
    assert annotations["storageclass.kubernetes.io/is-default-class"] == "true"


def test_the_traffic_maker_may_touch_training_jobs_and_nothing_else() -> None:
    role = next(o for o in base.objects(INSTANCE) if o["metadata"]["name"] == "busbar-local-traffic")
    written = {r for rule in role["rules"] if "create" in rule["verbs"] for r in rule["resources"]}
    assert written == {"trainingjobs"}


def test_simulated_pods_end_by_the_annotation() -> None:
    found = {stage["metadata"]["name"]: stage["spec"] for stage in yaml.safe_load_all(stages())}
    assert "simulation/seconds" in found["pod-ends"]["delay"]["durationFrom"]["expressionFrom"]


def test_internet_access_exists_only_when_it_is_asked_for() -> None:
    def names(internet: bool) -> set[str]:
        return {
            p.name for p in parts.spec(INSTANCE, simulate=False, with_traffic=False, internet=internet).parts
        }

    assert names(internet=True) - names(internet=False) == {"way-out"}
    out = config.render(INSTANCE, dataclasses.replace(MACHINE, internet=True))
    assert f"forward . {INSTANCE.addresses.way_out_dns}" in out["Corefile"]
    assert "forward" not in config.render(INSTANCE, MACHINE)["Corefile"]


def test_the_range_of_internet_access_overlaps_no_other_range() -> None:
    at = INSTANCE.addresses
    out = IPv4Network(at.way_out)
    assert out.subnet_of(at.network)
    assert not any(out.overlaps(IPv4Network(text)) for text in (at.pods, at.services, at.simulated))
