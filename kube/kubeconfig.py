"""Kubeconfig files as kubectl reads them: several files are one, and the first that says something is right.

``KUBECONFIG`` lists files. Entries of the same name and the current context count where they come first; listed files
that do not exist are passed over. A path inside an entry is relative to the folder of the file that the entry is in.
What this process cannot do is refused with a sentence, never ignored.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from busbar.kube.errors import ConfigError

_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
_REFUSED_USERS = {
    "auth-provider": "is not supported here; use an exec plug-in (for OpenID Connect: kubelogin) or a token",
    "username": "is basic authentication, which API servers ended with Kubernetes 1.19; use a token",
    "as": "is impersonation, which is not supported here; log in as the user itself",
    "as-uid": "is impersonation, which is not supported here; log in as the user itself",
    "as-groups": "is impersonation, which is not supported here; log in as the user itself",
    "as-user-extra": "is impersonation, which is not supported here; log in as the user itself",
}


@dataclass(frozen=True)
class Entry:
    """One named cluster, user or context, and the file that it stands in."""

    kind: str
    name: str
    fields: Mapping[str, Any]
    file: Path

    def text(self, key: str) -> str | None:
        """A field as text; None where it is absent or empty."""
        value = self.fields.get(key)
        return str(value) if value not in (None, "") else None

    def path(self, key: str) -> Path | None:
        """A field that names a file."""
        value = self.text(key)
        return self.file.parent / value if value is not None else None

    def pem(self, key: str) -> str | None:
        """PEM text from ``KEY-data`` (base64), else from the file that ``KEY`` names. Raises ConfigError."""
        try:
            if data := self.text(f"{key}-data"):
                return base64.b64decode(data, validate=True).decode()
            path = self.path(key)
            return path.read_text() if path is not None else None
        except (OSError, binascii.Error, UnicodeDecodeError) as error:
            raise self.wrong(f"{key} cannot be read: {error}") from error

    def wrong(self, why: str) -> ConfigError:
        """The error that names this entry."""
        return ConfigError(f"kubeconfig {self.file}: {self.kind} {self.name!r}: {why}")


@dataclass(frozen=True)
class Context:
    """What a context refers to."""

    cluster: Entry
    user: Entry
    namespace: str


def listed(environ: Mapping[str, str]) -> list[Path]:
    """The files of ``KUBECONFIG``, or ``~/.kube/config``."""
    names = [name for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    return [Path(name) for name in names] or [Path.home() / ".kube" / "config"]


def choose(files: Sequence[Path], name: str | None = None) -> Context:
    """The cluster and the user of a context, by default the current one. Raises ConfigError."""
    read = [(file, _read(file)) for file in files if file.exists()]
    where = os.pathsep.join(map(str, files))
    if not read:
        raise ConfigError(f"kubeconfig {where} does not exist")
    wanted = name or next((c["current-context"] for _, c in read if c.get("current-context")), None)
    if wanted is None:
        raise ConfigError(
            f"kubeconfig {where} has no current-context; choose one with kubectl config use-context"
        )
    context = _entry(read, "context", wanted)
    cluster = _entry(read, "cluster", context.text("cluster"))
    given = context.text("user")
    user = _entry(read, "user", given) if given is not None else Entry("user", "", {}, context.file)
    for key, why in _REFUSED_USERS.items():
        if user.fields.get(key):
            raise user.wrong(f"{key} {why}")
    if cluster.text("server") is None:
        raise cluster.wrong("it names no server")
    proxy = cluster.text("proxy-url")
    if proxy is not None and not proxy.startswith(("http://", "https://")):
        raise cluster.wrong(f"proxy-url {proxy} is not supported; only http:// and https:// proxies are")
    return Context(cluster, user, context.text("namespace") or "default")


def told_to_plugins(cluster: Entry) -> dict[str, Any]:
    """What an exec plug-in learns of the cluster where its entry asks for it."""
    keys = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
    told: dict[str, Any] = {key: cluster.fields[key] for key in keys if cluster.fields.get(key)}
    if pem := cluster.pem("certificate-authority"):
        told["certificate-authority-data"] = base64.b64encode(pem.encode()).decode()
    for extension in cluster.fields.get("extensions") or []:
        if extension.get("name") == _EXEC_EXTENSION:
            told["config"] = extension.get("extension")
    return told


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"kubeconfig {file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"kubeconfig {file} is empty or not a mapping")
    return config


def _entry(read: Sequence[tuple[Path, Mapping[str, Any]]], kind: str, name: str | None) -> Entry:
    for file, config in read:
        for entry in config.get(f"{kind}s") or []:
            if isinstance(entry, dict) and entry.get("name") == name:
                return Entry(kind, str(name), dict(entry.get(kind) or {}), file)
    where = os.pathsep.join(str(file) for file, _ in read)
    raise ConfigError(f"kubeconfig {where}: no {kind} named {name!r}")
