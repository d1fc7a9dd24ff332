"""How we log in to a cluster: the service account of the pod, or a kubeconfig file.

``find_login()`` tries, in this order: the service account that Kubernetes mounts into a pod, the files that
``KUBECONFIG`` names, ``~/.kube/config``. Credentials that change are followed: tokens in files (the kubelet renews them
every hour), and what exec plug-ins print.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from busbar.kube.errors import ConfigError
from busbar.kube.exec_plugin import Credential, ExecPlugin
from busbar.kube.kubeconfig import Entry, choose, listed, told_to_plugins
from busbar.kube.token_file import TokenFile

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Login:
    """Where the API server is and how we prove who we are."""

    server: str  # https://host:port, no trailing slash
    ca_pem: str | None = None
    insecure: bool = False
    client_cert_pem: str | None = field(default=None, repr=False)
    client_key_pem: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    token_file: TokenFile | None = None  # goes before token
    plugin: ExecPlugin | None = None  # goes before token, certificate and key
    tls_server_name: str | None = None  # the name that the server's certificate must carry, if not its host's
    proxy_url: str | None = None  # http:// or https://
    namespace: str = "default"

    def credential(self) -> Credential:
        """What to send now. It may run an exec plug-in, which blocks: see ``ExecPlugin.is_due``.

        Raises:
            OSError: the token's file could never be read.
            ConfigError: the exec plug-in gives no credential.
        """
        if self.plugin is not None:
            return self.plugin.current()
        token = self.token_file.read() if self.token_file is not None else self.token
        return Credential(token, self.client_cert_pem, self.client_key_pem)

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS settings for this login; None for plain http (a proxy on loopback). Raises as ``credential`` does."""
        if self.server.startswith("http://"):
            return None
        if self.tls_server_name is None:
            context = ssl.create_default_context(cadata=self.ca_pem)
        else:
            context = _ContextForName(self.tls_server_name, self.ca_pem)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        proof = self.credential()
        if proof.client_cert_pem and proof.client_key_pem:
            # OpenSSL loads a chain from files only.
            with tempfile.TemporaryDirectory(prefix="busbar-login-") as folder:
                cert, key = Path(folder, "cert"), Path(folder, "key")
                cert.write_text(proof.client_cert_pem)
                key.touch(mode=0o600)
                key.write_text(proof.client_key_pem)
                context.load_cert_chain(cert, key)
        return context


class _ContextForName(ssl.SSLContext):
    """Asks for, and checks, one name whatever host is connected to: every HTTP library takes it as it is."""

    _name: str

    def __new__(cls, name: str, ca_pem: str | None) -> _ContextForName:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._name = name
        if ca_pem is not None:
            made.load_verify_locations(cadata=ca_pem)
        else:
            made.load_default_certs()
        return made

    def __init__(self, name: str, ca_pem: str | None) -> None:
        super().__init__()

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        """As the base class, under the name of this context."""
        return super().wrap_bio(*given, **{**named, "server_hostname": self._name})


def find_login(environ: Mapping[str, str] | None = None, context: str | None = None) -> Login:
    """The login of this process; ConfigError says what was tried."""
    env = os.environ if environ is None else environ
    if not context and env.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster(env)
    files = listed(env)
    if not any(file.exists() for file in files):
        raise ConfigError(
            f"no cluster to talk to: not in a pod, and {os.pathsep.join(map(str, files))} does not exist; "
            "set KUBECONFIG to your cluster's file"
        )
    return from_kubeconfig(files, context)


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


def from_kubeconfig(files: Path | Sequence[Path], context: str | None = None) -> Login:
    """The login that a context describes, by default the current one.

    An exec plug-in runs at once, so that one that does not work is reported at the start. As with kubectl it counts
    only where the entry has no token.

    Raises:
        ConfigError: no such context, an unreadable file, or something that is not supported.
    """
    chosen = choose([files] if isinstance(files, Path) else files, context)
    cluster, user = chosen.cluster, chosen.user
    token_file, token = user.path("tokenFile"), user.text("token")
    cert, key = user.pem("client-certificate"), user.pem("client-key")
    if (cert is None) != (key is None):
        raise user.wrong("client-certificate and client-key come together, and one of them is missing")
    login = Login(
        server=str(cluster.fields["server"]).rstrip("/"),
        ca_pem=cluster.pem("certificate-authority"),
        insecure=bool(cluster.fields.get("insecure-skip-tls-verify")),
        client_cert_pem=cert,
        client_key_pem=key,
        token=token,
        token_file=TokenFile(token_file) if token_file is not None else None,
        plugin=_plugin(user, cluster) if token is None and token_file is None else None,
        tls_server_name=cluster.text("tls-server-name"),
        proxy_url=cluster.text("proxy-url"),
        namespace=chosen.namespace,
    )
    if login.plugin is not None:
        login.plugin.current()
    return login


def _plugin(user: Entry, cluster: Entry) -> ExecPlugin | None:
    spec = user.fields.get("exec")
    return ExecPlugin(spec, told_to_plugins(cluster), user.file) if spec else None
