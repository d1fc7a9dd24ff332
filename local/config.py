"""The configuration file of every part, rendered from an instance: pure functions, text out.

Paths are those the supervisor binds under ``/run/busbar``, so a file means the same in every instance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from busbar.local.instance import Instance
from busbar.local.simulated import stages

RUN = "/run/busbar"
REGISTRY_PORT = 5000
REGISTRY = f"localhost:{REGISTRY_PORT}"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CNI_BIN = "/usr/lib/cni"
MIB = 1024 * 1024


@dataclass(frozen=True)
class Machine:
    """The facts of the machine that the configuration depends on."""

    may_lower_oom_score: bool  # CAP_SYS_RESOURCE
    pause_image: str
    base_image: str  # has a shell; makes the folders of volumes
    reserved_memory_mib: int = 1024  # for the control plane, which is no pod of the kubelet
    internet: bool = False


def render(instance: Instance, machine: Machine) -> dict[str, str]:
    """File name (below ``/run/busbar/config``) → content."""
    return {
        "kubelet.json": _json(kubelet(instance, machine)),
        "kube-proxy.json": _json(kube_proxy(instance)),
        "containerd.toml": containerd(machine),
        "certs.d/localhost_5000/hosts.toml": registry_hosts(),
        "cni/10-busbar.conflist": _json(cni(instance)),
        "Corefile": corefile(instance, machine),
        "stages.yaml": stages(),
        "resolv.conf": f"nameserver {instance.addresses.node}\n",
        "machine-resolv.conf": machine_resolv_conf(instance, machine),
        "registry.yml": registry(),
        "local-path/config.json": _json(local_path(instance)),
        "local-path/helperPod.yaml": _json(local_path_helper(machine)),
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def kubelet(instance: Instance, machine: Machine) -> dict[str, object]:
    """Kubelet: no anonymous access, authorisation asked of the API server, cgroups below the instance's."""
    addresses = instance.addresses
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": addresses.node,
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{RUN}/pki/cluster.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{RUN}/pki/kubelet.crt",
        "tlsPrivateKeyFile": f"{RUN}/pki/kubelet.key",
        "clusterDNS": [addresses.dns],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{RUN}/config/resolv.conf",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{instance.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "oomScoreAdj": 0,
        "systemReserved": {"memory": f"{machine.reserved_memory_mib}Mi"},
        "podLogsDir": f"{RUN}/podlogs",
        "maxPods": 110,
        # Other programs use the disk too: never evict pods or collect images because it is full.
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "volumeStatsAggPeriod": "5m",
        "containerLogMaxSize": "10Mi",
    }


def kube_proxy(instance: Instance) -> dict[str, object]:
    """kube-proxy with nft tables; it changes no machine-wide connection-tracking setting."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": instance.node_name,
        "bindAddress": instance.addresses.node,
        "clientConnection": {"kubeconfig": f"{RUN}/config/kube-proxy.kubeconfig"},
        "clusterCIDR": instance.addresses.pods,
        "detectLocalMode": "ClusterCIDR",
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def containerd(machine: Machine) -> str:
    """containerd 2 with the registry on loopback and every folder below ``/run``."""
    restrict = "false" if machine.may_lower_oom_score else "true"
    disabled = ("aufs", "blockfile", "btrfs", "devmapper", "erofs", "zfs")
    plugins = ", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in disabled)
    return f"""\
version = 3
root = "{RUN}/containerd"
state = "/run/containerd"
disabled_plugins = [{plugins}]

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{RUN}/opt"

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{machine.pause_image}"

[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{RUN}/config/certs.d"

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = {restrict}
  enable_unprivileged_ports = true
  enable_unprivileged_icmp = true

[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{CNI_BIN}"]
  conf_dir = "{RUN}/config/cni"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "/usr/sbin/runc"
  SystemdCgroup = false
"""


def registry_hosts() -> str:
    """The address of the registry for images named ``localhost:5000/…``."""
    return f"""\
server = "http://127.0.0.1:{REGISTRY_PORT}"

[host."http://127.0.0.1:{REGISTRY_PORT}"]
  capabilities = ["pull", "resolve"]
"""


def cni(instance: Instance) -> dict[str, object]:
    """Point-to-point pod links: routed, so no bridge and no bridge netfilter module is needed."""
    return {
        "cniVersion": "1.0.0",
        "name": "busbar",
        "plugins": [
            {
                "type": "ptp",
                "mtu": 1500,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": instance.addresses.pods}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def corefile(instance: Instance, machine: Machine) -> str:
    """Cluster names, and the machine's own name servers for all other names, with ``--internet``."""
    forward = f"    forward . {instance.addresses.way_out_dns}\n" if machine.internet else ""
    return f"""\
.:53 {{
    reload
    errors
    health 127.0.0.1:8053
    ready 127.0.0.1:8054
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {RUN}/config/coredns.kubeconfig
        endpoint_pod_names
    }}
    cache 5
{forward}}}
"""


def machine_resolv_conf(instance: Instance, machine: Machine) -> str:
    """Name servers of the node's own programs (containerd pulling an image)."""
    return f"nameserver {instance.addresses.way_out_dns}\n" if machine.internet else "# no way out\n"


def registry() -> str:
    """The image registry, reachable only from inside the instance."""
    return f"""\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {RUN}/registry}}
  delete: {{enabled: true}}
http:
  addr: 127.0.0.1:{REGISTRY_PORT}
"""


def local_path(instance: Instance) -> dict[str, object]:
    """Volumes are folders below the instance's data folder."""
    return {"nodePathMap": [{"node": instance.node_name, "paths": [f"{RUN}/volumes"]}]}


def local_path_helper(machine: Machine) -> dict[str, object]:
    """The pod that makes and removes a volume's folder."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "helper-pod"},
        "spec": {
            "priorityClassName": "system-node-critical",
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "helper-pod",
                    "image": machine.base_image,
                    "imagePullPolicy": "IfNotPresent",
                    "resources": {"requests": {"cpu": "5m", "memory": "8Mi"}},
                }
            ],
        },
    }
