"""A real kube-apiserver on a real etcd for tests: TLS, RBAC, loopback ports, a folder of its own.

There is no kubelet and no controller: objects stay as they are written, which tests of admission, of schemas and of
a controller's writes need. `ApiServer.start()` takes about four seconds, nearly all of it the
API server's own start; one server serves a whole test session. Users are impersonated, as a cluster's
administrator may, so any user, group and service account can be tried without making credentials.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import ipaddress
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.free_port import free_port

from busbar.local.build import binary

READY_TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
JSON = dict[str, Any]

PLURALS = {
    "Pod": ("api/v1", "pods", True),
    "Node": ("api/v1", "nodes", False),
    "Namespace": ("api/v1", "namespaces", False),
    "PersistentVolume": ("api/v1", "persistentvolumes", False),
    "ServiceAccount": ("api/v1", "serviceaccounts", True),
    "Service": ("api/v1", "services", True),
    "Secret": ("api/v1", "secrets", True),
    "ConfigMap": ("api/v1", "configmaps", True),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims", True),
    "Job": ("apis/batch/v1", "jobs", True),
    "CronJob": ("apis/batch/v1", "cronjobs", True),
    "Deployment": ("apis/apps/v1", "deployments", True),
    "DaemonSet": ("apis/apps/v1", "daemonsets", True),
    "StatefulSet": ("apis/apps/v1", "statefulsets", True),
    "ReplicaSet": ("apis/apps/v1", "replicasets", True),
    "ReplicationController": ("api/v1", "replicationcontrollers", True),
    "PodTemplate": ("api/v1", "podtemplates", True),
    "Role": ("apis/rbac.authorization.k8s.io/v1", "roles", True),
    "RoleBinding": ("apis/rbac.authorization.k8s.io/v1", "rolebindings", True),
    "ClusterRole": ("apis/rbac.authorization.k8s.io/v1", "clusterroles", False),
    "ClusterRoleBinding": ("apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", False),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies", True),
    "ResourceQuota": ("api/v1", "resourcequotas", True),
    "PriorityClass": ("apis/scheduling.k8s.io/v1", "priorityclasses", False),
    "FlowSchema": ("apis/flowcontrol.apiserver.k8s.io/v1", "flowschemas", False),
    "PriorityLevelConfiguration": (
        "apis/flowcontrol.apiserver.k8s.io/v1",
        "prioritylevelconfigurations",
        False,
    ),
    "CustomResourceDefinition": ("apis/apiextensions.k8s.io/v1", "customresourcedefinitions", False),
    "ValidatingAdmissionPolicy": (
        "apis/admissionregistration.k8s.io/v1",
        "validatingadmissionpolicies",
        False,
    ),
    "ValidatingAdmissionPolicyBinding": (
        "apis/admissionregistration.k8s.io/v1",
        "validatingadmissionpolicybindings",
        False,
    ),
    "MutatingAdmissionPolicy": ("apis/admissionregistration.k8s.io/v1", "mutatingadmissionpolicies", False),
    "MutatingAdmissionPolicyBinding": (
        "apis/admissionregistration.k8s.io/v1",
        "mutatingadmissionpolicybindings",
        False,
    ),
    "ResourceClaim": ("apis/resource.k8s.io/v1", "resourceclaims", True),
    "ResourceClaimTemplate": ("apis/resource.k8s.io/v1", "resourceclaimtemplates", True),
    "TrainingJob": ("apis/busbar.dev/v1alpha1", "trainingjobs", True),
    "ModelService": ("apis/busbar.dev/v1alpha1", "modelservices", True),
    "AcceleratorPool": ("apis/busbar.dev/v1alpha1", "acceleratorpools", False),
    "Tenant": ("apis/busbar.dev/v1alpha1", "tenants", False),
    "PerformanceProfile": ("apis/busbar.dev/v1alpha1", "performanceprofiles", False),
    "PowerDomain": ("apis/busbar.dev/v1alpha1", "powerdomains", False),
}
"""Kind to (path of its API, plural, namespaced)."""


def collection(kind: str, namespace: str | None = None) -> str:
    """Path of a kind's collection."""
    api, plural, namespaced = PLURALS[kind]
    return f"/{api}/namespaces/{namespace}/{plural}" if namespaced and namespace else f"/{api}/{plural}"


def home_of(document: Mapping[str, Any]) -> str:
    """Path of the collection that an object belongs to; its own apiVersion takes precedence over the table's."""
    api, plural, namespaced = PLURALS[document["kind"]]
    version = document.get("apiVersion")
    if version is not None:
        api = f"apis/{version}" if "/" in version else f"api/{version}"
    namespace = document["metadata"].get("namespace", "default")
    return f"/{api}/namespaces/{namespace}/{plural}" if namespaced else f"/{api}/{plural}"


def address(document: Mapping[str, Any]) -> str:
    """Path of one object."""
    return f"{home_of(document)}/{document['metadata']['name']}"


@dataclass(frozen=True)
class Answer:
    """An answer of the API server."""

    status: int
    body: JSON
    warnings: tuple[str, ...] = ()
    flow: str = ""
    """Uid of the FlowSchema that the call met."""

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def message(self) -> str:
        """The message of a refusal."""
        return str(self.body.get("message", ""))

    def expect(self) -> JSON:
        """The body of a success; AssertionError with the refusal otherwise."""
        assert self.ok, f"{self.status}: {self.message or self.body}"
        return self.body


class Client:
    """One user's view of the API server."""

    def __init__(self, http: httpx2.Client, headers: Sequence[tuple[str, str]]) -> None:
        self._http = http
        self._headers = list(headers)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        **parameters: str,
    ) -> Answer:
        """One call; query parameters by keyword."""
        response = self._http.request(
            method,
            path,
            params=parameters,
            content=None if body is None else json.dumps(body),
            headers=[*self._headers, ("Content-Type", content_type)],
        )
        try:
            parsed = response.json()
        except ValueError:
            parsed = {"message": response.text}
        headers = response.headers
        flow = headers.get("x-kubernetes-pf-flowschema-uid", "")
        return Answer(response.status_code, parsed, tuple(headers.get_list("warning")), flow)

    def get(self, path: str, **parameters: str) -> Answer:
        return self.request("GET", path, **parameters)

    def create(self, document: JSON, **parameters: str) -> Answer:
        """POST; unknown fields are refused, as kubectl asks for."""
        parameters = {"fieldValidation": "Strict", **parameters}
        return self.request("POST", home_of(document), document, **parameters)

    def replace(self, document: JSON, *, subresource: str = "", **parameters: str) -> Answer:
        parameters = {"fieldValidation": "Strict", **parameters}
        return self.request("PUT", address(document) + subresource, document, **parameters)

    def merge(self, document: JSON, patch: Any, *, subresource: str = "", **parameters: str) -> Answer:
        """PATCH by JSON merge."""
        parameters = {"fieldValidation": "Strict", **parameters}
        return self.request(
            "PATCH",
            address(document) + subresource,
            patch,
            content_type="application/merge-patch+json",
            **parameters,
        )

    def apply(self, document: JSON) -> Answer:
        """Server-side apply as field manager `tests`."""
        return self.request(
            "PATCH",
            address(document),
            document,
            content_type="application/apply-patch+yaml",
            fieldManager="tests",
            force="true",
        )

    def delete(self, document: JSON, **parameters: str) -> Answer:
        return self.request("DELETE", address(document), **parameters)


@dataclass
class ApiServer:
    """A running pair of etcd and kube-apiserver."""

    directory: Path
    port: int
    etcd_url: str
    admin_token: str = field(repr=False)
    scheduler_token: str = field(repr=False)
    """Token of system:kube-scheduler, with every right, for the simulated scheduler and kubelet."""
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)
    _http: httpx2.Client | None = field(default=None, repr=False)

    @classmethod
    def start(cls, *flags: str) -> Self:
        """Start both and wait until the API server is ready. Raises AssertionError with the logs' ends.

        Args:
            flags: further ones of kube-apiserver.
        """
        directory = Path(tempfile.mkdtemp(prefix="busbar-apiserver-"))
        port, etcd_port, peer_port = free_port(), free_port(), free_port()
        etcd_url = f"http://127.0.0.1:{etcd_port}"
        server = cls(directory, port, etcd_url, secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        try:
            _write_credentials(directory, server.admin_token, server.scheduler_token)
            server._spawn(_etcd_command(directory, etcd_port, peer_port), "etcd.log")
            server._spawn([*_apiserver_command(directory, port, etcd_port), *flags], "kube-apiserver.log")
            server._wait_ready()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.crt"

    @cached_property
    def admin(self) -> Client:
        """The cluster's administrator (group system:masters)."""
        return self.client()

    def client(self, user: str | None = None, groups: Sequence[str] = ()) -> Client:
        """The administrator, or an impersonated user."""
        headers = [("Authorization", f"Bearer {self.admin_token}")]
        if user is not None:
            headers.append(("Impersonate-User", user))
            headers += [("Impersonate-Group", group) for group in (*groups, "system:authenticated")]
        return Client(self._session, headers)

    def bearer(self, token: str, headers: Sequence[tuple[str, str]] = ()) -> Client:
        """A client with this bearer token and any further headers."""
        return Client(self._session, [("Authorization", f"Bearer {token}"), *headers])

    @property
    def _session(self) -> httpx2.Client:
        """One connection pool for all users."""
        if self._http is None:
            tls = ssl.create_default_context(cafile=str(self.ca_file))
            self._http = httpx2.Client(base_url=self.url, verify=tls, timeout=30.0, trust_env=False)
        return self._http

    def service_account(self, namespace: str, name: str) -> Client:
        """An impersonated service account."""
        return self.client(
            f"system:serviceaccount:{namespace}:{name}",
            ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"],
        )

    def service_account_token(self, namespace: str, name: str, audience: str | None = None) -> str:
        """A real token of a service account, as the kubelet would project it; for one audience or the API."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request: JSON = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        if audience is not None:
            request["spec"]["audiences"] = [audience]
        return str(self.admin.request("POST", path, request).expect()["status"]["token"])

    def kubeconfig(self, user: str | None = None, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig file for the administrator or an impersonated user."""
        credentials: JSON = {"token": self.admin_token}
        if user is not None:
            credentials |= {"as": user, "as-groups": [*groups, "system:authenticated"]}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca_file)}}
            ],
            "users": [{"name": "test", "user": credentials}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        safe = "".join(c if c.isalnum() else "-" for c in user or "admin")
        path = self.directory / f"kubeconfig-{safe}"
        fresh = Path(tempfile.mkstemp(dir=self.directory)[1])  # another thread may be reading the old file
        fresh.write_text(yaml.safe_dump(document), encoding="utf-8")
        return fresh.replace(path)

    def kubectl(self, *arguments: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the real kubectl against this server."""
        return subprocess.run(
            [str(binary("kubectl")), "--kubeconfig", str(self.kubeconfig(user)), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "HOME": str(self.directory)},
        )

    def make_namespace(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        """A namespace with the `default` service account that a controller would have made."""
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels or {}},
        }
        self.admin.create(namespace).expect()
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": name},
        }
        self.admin.create(account).expect()

    def make_claim(self, namespace: str, name: str = "claim") -> None:
        """A volume claim, which nobody binds here."""
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        claim = {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
        self.admin.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}).expect()

    def install_crds(self) -> None:
        """Install the chart of the CRDs and wait until the kinds are served."""
        documents = render_chart("busbar-crds")
        for document in documents:
            self.admin.apply(document).expect()
        for document in documents:
            if document["kind"] == "CustomResourceDefinition":
                self.wait_established(document["metadata"]["name"])

    def wait_established(self, name: str) -> None:
        """Wait until a CRD's kind is served."""
        path = f"{collection('CustomResourceDefinition')}/{name}"
        for _ in _until(READY_TIMEOUT_S):
            body = self.admin.get(path).expect()
            conditions = body.get("status", {}).get("conditions", ())
            if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                version = body["spec"]["versions"][0]["name"]
                served = f"/apis/{body['spec']['group']}/{version}/{body['spec']['names']['plural']}"
                if self.admin.get(served).ok:
                    return
            refused = [c["message"] for c in conditions if c["status"] == "False"]
            assert not any("NonStructural" in c["type"] and c["status"] == "True" for c in conditions), (
                refused
            )
        raise AssertionError(f"CRD {name} was not served within {READY_TIMEOUT_S} s")

    def pause(self) -> None:
        """Stops the API server's process where it is: connections stay open, and nothing is answered."""
        self._processes[-1].send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._processes[-1].send_signal(signal.SIGCONT)

    def compact(self) -> int:
        """Makes etcd forget everything older than now; gives the revision. A watch cache may still know more."""
        with httpx2.Client(base_url=self.etcd_url, timeout=30.0, trust_env=False) as etcd:
            status = etcd.post("/v3/maintenance/status", json={}).raise_for_status().json()
            revision = int(status["header"]["revision"])
            etcd.post("/v3/kv/compaction", json={"revision": revision, "physical": True}).raise_for_status()
        return revision

    def stop(self) -> None:
        """End both processes and remove the folder."""
        if self._http is not None:
            self._http.close()
            self._http = None
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, command: list[str], log: str) -> None:
        with (self.directory / log).open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    preexec_fn=_end_with_parent,
                )
            )

    def _wait_ready(self) -> None:
        for _ in _until(READY_TIMEOUT_S):
            for process, log in zip(self._processes, ("etcd.log", "kube-apiserver.log"), strict=True):
                if process.poll() is not None:
                    text = (self.directory / log).read_text(errors="replace")
                    raise AssertionError(f"{log[:-4]} ended with {process.returncode}:\n{text[-3000:]}")
            with contextlib.suppress(httpx2.TransportError):
                if self.admin.get("/readyz").status == 200:
                    return
        text = (self.directory / "kube-apiserver.log").read_text(errors="replace")
        raise AssertionError(f"kube-apiserver was not ready within {READY_TIMEOUT_S} s:\n{text[-3000:]}")


def render_chart(name: str, *arguments: str, namespace: str = "busbar-system") -> list[JSON]:
    """The documents of one of our charts, by the real helm."""
    command = [str(binary("helm")), "template", "busbar", str(ROOT / "charts" / name)]
    result = subprocess.run(
        [*command, "--namespace", namespace, "--kube-version", "1.36.3", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [document for document in yaml.safe_load_all(result.stdout) if document]


def _end_with_parent() -> None:
    """The kernel kills this process when the test run ends, however it ends (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _until(timeout_s: float, step_s: float = 0.05) -> Iterator[None]:
    """Yields once per poll; ends after the timeout."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        yield
        time.sleep(step_s)


def _etcd_command(directory: Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(binary("etcd")),
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]


def _apiserver_command(directory: Path, port: int, etcd_port: int) -> list[str]:
    return [
        str(binary("kube-apiserver")),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        # No pod connects to this address; without it the server looks for a network that a test machine may not have.
        "--advertise-address=192.0.2.1",
        "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.254.0.0/24",
        f"--tls-cert-file={directory / 'server.crt'}",
        f"--tls-private-key-file={directory / 'server.key'}",
        f"--token-auth-file={directory / 'tokens.csv'}",
        f"--service-account-key-file={directory / 'accounts.key'}",
        f"--service-account-signing-key-file={directory / 'accounts.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=RBAC",
        "--anonymous-auth=false",
        # As on most clusters: Pod Security refuses privileged pods, not the server's own switch.
        "--allow-privileged=true",
        "--profiling=false",
        "--v=0",
    ]


def _write_credentials(directory: Path, admin_token: str, scheduler_token: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    ca_key, server_key, accounts_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "busbar-test-ca")])

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    ca = (
        certificate(ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    alternatives = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    server = (
        certificate(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")]), server_key)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (directory / "ca.crt").write_bytes(ca.public_bytes(pem))
    (directory / "server.crt").write_bytes(server.public_bytes(pem))
    for name, key in (("server.key", server_key), ("accounts.key", accounts_key)):
        (directory / name).write_bytes(
            key.private_bytes(
                pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )
    users = (
        f'{admin_token},admin,admin,"system:masters"\n'
        f'{scheduler_token},system:kube-scheduler,scheduler,"system:masters"\n'
    )
    (directory / "tokens.csv").write_text(users, encoding="utf-8")
