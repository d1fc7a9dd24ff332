"""How we log in to a cluster: the service account of the pod, or a kubeconfig file.

``find_login()`` tries, in this order: the service account that Kubernetes mounts into a pod, the file that
``KUBECONFIG`` names, ``~/.kube/config``. A Login is plain data; tokens that live in a file are read again
when the file changes (the kubelet rotates them every hour), so a long-lived process never holds a dead one.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from busbar.kube.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass
class TokenFile:
    """A bearer token in a file that somebody else rotates; looked at again every ``check_s`` seconds."""

    path: Path
    check_s: float = 10.0
    _value: str = ""
    _mtime: float = -1.0
    _checked: float = -1e9

    def read(self) -> str:
        now = time.monotonic()
        if now - self._checked >= self.check_s:
            self._checked = now
            try:
                mtime = self.path.stat().st_mtime
                if mtime != self._mtime:
                    self._value, self._mtime = self.path.read_text().strip(), mtime
            except OSError as error:
                if not self._value:
                    raise ConfigError(f"token file {self.path} cannot be read: {error}") from error
        return self._value


@dataclass(frozen=True)
class Login:
    """Where the API server is and how we prove who we are."""

    server: str  # https://host:port, no trailing slash
    ca_pem: str | None = None
    insecure: bool = False
    client_cert_pem: str | None = field(default=None, repr=False)
    client_key_pem: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    token_file: TokenFile | None = None
    namespace: str = "default"

    def bearer(self) -> str | None:
        """The token to send now, if this login uses one."""
        return self.token_file.read() if self.token_file is not None else self.token

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS settings for this login; None for plain http (a proxy on loopback)."""
        if self.server.startswith("http://"):
            return None
        context = ssl.create_default_context(cadata=self.ca_pem)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_cert_pem and self.client_key_pem:
            # OpenSSL loads a chain from files only.
            with tempfile.TemporaryDirectory(prefix="busbar-login-") as folder:
                cert, key = Path(folder, "cert"), Path(folder, "key")
                cert.write_text(self.client_cert_pem)
                key.touch(mode=0o600)
                key.write_text(self.client_key_pem)
                context.load_cert_chain(cert, key)
        return context


def find_login(environ: Mapping[str, str] | None = None, context: str | None = None) -> Login:
    """The login of this process; ConfigError says what was tried."""
    env = os.environ if environ is None else environ
    if not context and env.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster(env)
    path = Path(env["KUBECONFIG"]) if env.get("KUBECONFIG") else Path.home() / ".kube" / "config"
    if not path.exists():
        raise ConfigError(
            f"no cluster to talk to: not in a pod, and {path} does not exist; "
            "set KUBECONFIG to your cluster's file"
        )
    return from_kubeconfig(path, context)


def in_cluster(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Login:
    """The login of a pod's service account."""
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    if ":" in host:
        host = f"[{host}]"
    namespace = folder / "namespace"
    return Login(
        server=f"https://{host}:{port}",
        ca_pem=(folder / "ca.crt").read_text(),
        token_file=TokenFile(folder / "token"),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def from_kubeconfig(path: Path, context: str | None = None) -> Login:
    """The login that a kubeconfig's context describes: certificates, token, token file or exec plug-in."""
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"kubeconfig {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"kubeconfig {path} is empty or not a mapping")
    name = context or config.get("current-context")
    chosen = _named(config, "contexts", "context", name, path)
    cluster = _named(config, "clusters", "cluster", chosen.get("cluster"), path)
    user = _named(config, "users", "user", chosen.get("user"), path) if chosen.get("user") else {}
    token_file = user.get("tokenFile")
    cert, key = _pem(user, "client-certificate", path), _pem(user, "client-key", path)
    token = user.get("token")
    if user.get("exec"):
        ran = _exec_plugin(user["exec"], path)
        token = ran.get("token", token)
        cert, key = ran.get("clientCertificateData", cert), ran.get("clientKeyData", key)
    return Login(
        server=str(cluster["server"]).rstrip("/"),
        ca_pem=_pem(cluster, "certificate-authority", path),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        client_cert_pem=cert,
        client_key_pem=key,
        token=token,
        token_file=TokenFile(path.parent / token_file) if token_file else None,
        namespace=chosen.get("namespace") or "default",
    )


def _named(
    config: dict[str, Any], plural: str, singular: str, name: str | None, path: Path
) -> dict[str, Any]:
    for entry in config.get(plural) or []:
        if entry.get("name") == name:
            return dict(entry.get(singular) or {})
    raise ConfigError(f"kubeconfig {path}: no entry named {name!r} under {plural}")


def _pem(entry: dict[str, Any], key: str, path: Path) -> str | None:
    if entry.get(f"{key}-data"):
        return base64.b64decode(entry[f"{key}-data"]).decode()
    if entry.get(key):
        return (path.parent / str(entry[key])).read_text()
    return None


def _exec_plugin(spec: dict[str, Any], path: Path) -> dict[str, str]:
    env = {**os.environ, **{e["name"]: e["value"] for e in spec.get("env") or []}}
    command = [str(spec["command"]), *map(str, spec.get("args") or [])]
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=True)
        status = json.loads(done.stdout)["status"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise ConfigError(
            f"kubeconfig {path}: the exec plug-in {command[0]} gave no credential: {error}"
        ) from error
    return {str(k): str(v) for k, v in status.items()}
