"""The programs of one instance: the arguments of each, and the parts it waits for.  Pure, except for paths.

Everything listens on the instance's own loopback or on its node address; only ``forward`` runs in the
machine's network, and only on 127.0.0.1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from busbar.local import paths
from busbar.local.build import location
from busbar.local.config import CONTAINERD_SOCKET, REGISTRY, RUN
from busbar.local.instance import Instance
from busbar.local.pki import Authority, Certificate
from busbar.local.supervisor import WAY_OUT_DEVICE, Part, Spec

CONFIG = f"{RUN}/config"
PKI = f"{RUN}/pki"
PROVISIONER = "busbar.dev/local-path"
PORTAL_NODE_PORT = 30080
GATEWAY_NODE_PORT = 30081
# Clients of the API server: kubeconfig name → (user, group).
CLIENTS = {
    "admin": ("busbar-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kube-proxy": ("system:kube-proxy", ""),
    "coredns": ("busbar:coredns", ""),
    "local-path": ("busbar:local-path", ""),
    "kwok": ("busbar:kwok", ""),
    "traffic": ("busbar:traffic", ""),
}


def certificates(instance: Instance) -> list[Certificate]:
    """Every certificate, authorities first."""
    at = instance.addresses
    server = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
    api_names = (*server, "kubernetes.default.svc.cluster.local", "127.0.0.1", at.node, at.api_service)
    node = f"system:node:{instance.node_name}"
    return [
        Certificate("cluster", "", f"busbar {instance.name}"),
        Certificate("etcd-ca", "", f"busbar {instance.name} etcd"),
        Certificate("front-proxy-ca", "", f"busbar {instance.name} front proxy"),
        Certificate("apiserver", "cluster", "kube-apiserver", names=api_names),
        Certificate("apiserver-kubelet", "cluster", "kube-apiserver-kubelet-client", "system:masters"),
        Certificate("kubelet", "cluster", node, "system:nodes", (instance.node_name, at.node)),
        Certificate("etcd", "etcd-ca", "etcd", names=("localhost", "127.0.0.1")),
        Certificate("etcd-client", "etcd-ca", "kube-apiserver"),
        Certificate("front-proxy", "front-proxy-ca", "front-proxy"),
        *(Certificate(file, "cluster", user, group) for file, (user, group) in CLIENTS.items()),
    ]


def write_credentials(instance: Instance) -> None:
    """Make the keys, certificates and kubeconfigs that are missing."""
    authority = Authority(instance.folder / "pki")
    authority.key_pair("service-account")
    for certificate in certificates(instance):
        authority.ensure(certificate)
    folder = instance.folder / "config"
    folder.mkdir(exist_ok=True, mode=0o700)
    url = instance.addresses.api_url
    for file in [*CLIENTS, "kubelet"]:
        authority.kubeconfig(file, url, folder / f"{file}.kubeconfig", instance.name)
    authority.kubeconfig("admin", url, instance.kubeconfig, instance.name)


def _etcd() -> Part:
    url, peer = "https://127.0.0.1:2379", "https://127.0.0.1:2380"
    argv = [
        str(location("etcd")),
        "--name=busbar",
        f"--data-dir={RUN}/etcd",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=busbar={peer}",
        f"--cert-file={PKI}/etcd.crt",
        f"--key-file={PKI}/etcd.key",
        f"--trusted-ca-file={PKI}/etcd-ca.crt",
        "--client-cert-auth=true",
        f"--peer-cert-file={PKI}/etcd.crt",
        f"--peer-key-file={PKI}/etcd.key",
        f"--peer-trusted-ca-file={PKI}/etcd-ca.crt",
        "--peer-client-cert-auth=true",
        "--auto-compaction-retention=30m",
        "--log-level=warn",
    ]
    return Part("etcd", argv, ready="tcp:127.0.0.1:2379")


def _api_server(instance: Instance) -> Part:
    at = instance.addresses
    argv = [
        str(location("kube-apiserver")),
        f"--advertise-address={at.node}",
        f"--bind-address={at.node}",
        "--secure-port=6443",
        "--etcd-servers=https://127.0.0.1:2379",
        f"--etcd-cafile={PKI}/etcd-ca.crt",
        f"--etcd-certfile={PKI}/etcd-client.crt",
        f"--etcd-keyfile={PKI}/etcd-client.key",
        f"--service-cluster-ip-range={at.services}",
        f"--tls-cert-file={PKI}/apiserver.crt",
        f"--tls-private-key-file={PKI}/apiserver.key",
        f"--client-ca-file={PKI}/cluster.crt",
        "--anonymous-auth=false",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-client-certificate={PKI}/apiserver-kubelet.crt",
        f"--kubelet-client-key={PKI}/apiserver-kubelet.key",
        f"--kubelet-certificate-authority={PKI}/cluster.crt",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={PKI}/service-account.pub",
        f"--service-account-signing-key-file={PKI}/service-account.key",
        f"--requestheader-client-ca-file={PKI}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={PKI}/front-proxy.crt",
        f"--proxy-client-key-file={PKI}/front-proxy.key",
        "--profiling=false",
    ]
    return Part("kube-apiserver", argv, after=["etcd"], ready=f"tcp:{at.node}:6443")


def _controllers() -> list[Part]:
    manager = [
        str(location("kube-controller-manager")),
        f"--kubeconfig={CONFIG}/controller-manager.kubeconfig",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--allocate-node-cidrs=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={PKI}/service-account.key",
        f"--root-ca-file={PKI}/cluster.crt",
        f"--cluster-signing-cert-file={PKI}/cluster.crt",
        f"--cluster-signing-key-file={PKI}/cluster.key",
        "--node-monitor-grace-period=30s",
        "--profiling=false",
    ]
    scheduler = [
        str(location("kube-scheduler")),
        f"--kubeconfig={CONFIG}/scheduler.kubeconfig",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    ]
    return [
        Part("kube-controller-manager", manager, after=["kube-apiserver"], ready="tcp:127.0.0.1:10257"),
        Part("kube-scheduler", scheduler, after=["kube-apiserver"], ready="tcp:127.0.0.1:10259"),
    ]


def _node(instance: Instance) -> list[Part]:
    at = instance.addresses
    search = f"{location('containerd').parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    containerd = [str(location("containerd")), "--config", f"{CONFIG}/containerd.toml", "--log-level", "warn"]
    kubelet = [
        str(location("kubelet")),
        f"--config={CONFIG}/kubelet.json",
        f"--kubeconfig={CONFIG}/kubelet.kubeconfig",
        f"--root-dir={RUN}/kubelet",
        f"--cert-dir={PKI}",
        f"--hostname-override={instance.node_name}",
        f"--node-ip={at.node}",
    ]
    proxy = [str(location("kube-proxy")), f"--config={CONFIG}/kube-proxy.json"]
    registry = [str(registry_program()), "serve", f"{CONFIG}/registry.yml"]
    coredns = [str(location("coredns")), "-conf", f"{CONFIG}/Corefile"]
    volumes = [
        str(location("local-path-provisioner")),
        "start",
        f"--config={CONFIG}/local-path/config.json",
        f"--helper-pod-file={CONFIG}/local-path/helperPod.yaml",
        f"--kubeconfig={CONFIG}/local-path.kubeconfig",
        f"--provisioner-name={PROVISIONER}",
        "--namespace=kube-system",
        "--service-account-name=default",
        "--configmap-name=local-path",
        "--worker-threads=2",
    ]
    small = {"GOGC": "50"}
    return [
        Part("registry", registry, ready="tcp:127.0.0.1:5000", env=small),
        Part("containerd", containerd, {"PATH": search}, [], f"unix:{CONTAINERD_SOCKET}"),
        Part("kubelet", kubelet, {"PATH": search}, ["containerd", "kube-apiserver"], f"tcp:{at.node}:10250"),
        Part("kube-proxy", proxy, small, ["kube-apiserver"], "tcp:127.0.0.1:10249"),
        Part("coredns", coredns, small, ["kube-apiserver"], "tcp:127.0.0.1:8053"),
        Part("local-path-provisioner", volumes, small, ["kube-apiserver"]),
    ]


def _simulation(instance: Instance) -> list[Part]:
    kwok = [
        str(location("kwok")),
        f"--kubeconfig={CONFIG}/kwok.kubeconfig",
        f"--config={CONFIG}/stages.yaml",
        "--manage-nodes-with-label-selector=type=kwok",
        f"--cidr={instance.addresses.simulated}",
        f"--node-ip={instance.addresses.node}",
        "--node-lease-duration-seconds=40",
        "--server-address=127.0.0.1:10247",
    ]
    return [Part("kwok", kwok, after=["kube-apiserver"])]


def _forward(instance: Instance) -> Part:
    node = instance.addresses.node
    rules = [
        f"{instance.portal_port}={node}:{PORTAL_NODE_PORT}",
        f"{instance.gateway_port}={node}:{GATEWAY_NODE_PORT}",
    ]
    return Part("forward", [sys.executable, "-m", "busbar.local.forward", *rules], host_network=True)


def _way_out(instance: Instance) -> Part:
    """A link to the internet that changes nothing on the machine: a user-space process forwards the instance's
    traffic."""
    link = f"slirp4netns --configure --mtu=1500 --disable-host-loopback --cidr={instance.addresses.way_out}"
    # It sees the machine's own resolv.conf; its target, process 1, is the supervisor.
    script = f"mount --bind {RUN}/machine-resolv.conf /etc/resolv.conf && exec {link} 1 {WAY_OUT_DEVICE}"
    argv = ["unshare", "--mount", "sh", "-c", script]
    return Part("way-out", argv, host_network=True)


def traffic(instance: Instance) -> Part:
    """The simulated tenants' jobs; added once the platform's kinds exist."""
    image = f"{REGISTRY}/busbar-workloads:simulated"  # never pulled
    argv = [sys.executable, "-m", "busbar.local.traffic", instance.addresses.api_url, PKI, image]
    return Part("traffic", argv, after=["kube-apiserver", "kwok"])


def spec(instance: Instance, *, simulate: bool, with_traffic: bool, internet: bool = False) -> Spec:
    """All programs that the supervisor runs for this instance."""
    at, folder = instance.addresses, instance.folder
    parts = [_etcd(), _api_server(instance), *_controllers(), *_node(instance), _forward(instance)]
    if internet:
        parts.append(_way_out(instance))
    if simulate:
        parts += _simulation(instance)
        parts += [traffic(instance)] if with_traffic else []
    inside = ("config", "pki", "etcd", "containerd", "kubelet", "volumes", "podlogs")
    return Spec(
        name=instance.name,
        folder=str(folder),
        cgroup=instance.cgroup,
        host_device=at.host_device,
        host_address=at.host,
        node_address=at.node,
        network=str(at.network),
        binds={**{str(folder / name): name for name in inside}, str(registry_storage()): "registry"},
        parts=parts,
    )


def registry_storage() -> Path:
    """Image layers, shared by all instances. They can be built again, so they are in the cache."""
    return paths.cache() / "images" / "registry"


def registry_program() -> Path:
    """Debian's docker-registry, unpacked without installing it (installing would start a service)."""
    return paths.cache() / "bin" / "debian" / "usr" / "bin" / "docker-registry"
