"""Credentials of exec plug-ins (client.authentication.k8s.io): a program prints a token or a client certificate.

The plug-in runs when there is no credential yet, when the last one has expired, and after the API server has refused
it. It gets no terminal: the processes that log in here are servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from busbar.kube.errors import ConfigError

TIMEOUT_S = 60.0
EARLY_S = 5.0
"""A credential counts as expired this long before its time, because a request takes a moment."""
AGAIN_S = 10.0
"""A credential younger than this is not renewed when it is refused: the plug-in would print the same."""


@dataclass(frozen=True)
class Credential:
    """What proves who we are: a bearer token, a client certificate with its key (PEM), or both."""

    token: str | None = field(default=None, repr=False)
    client_cert_pem: str | None = field(default=None, repr=False)
    client_key_pem: str | None = field(default=None, repr=False)
    expires_at: datetime | None = None


class ExecPlugin:
    """One user's plug-in. Safe for several threads; ``current`` blocks while the program runs.

    Args:
        spec: the user's ``exec`` entry.
        cluster: what the plug-in is told about the cluster where ``provideClusterInfo`` asks for it.
        file: the kubeconfig it stands in; a command with a slash is relative to its folder.

    Raises:
        ConfigError: the entry cannot work without a terminal, or has no command.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        cluster: Mapping[str, Any],
        file: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not spec.get("command"):
            raise ConfigError(f"kubeconfig {file}: an exec plug-in has no command")
        self._name = str(spec["command"])
        if spec.get("interactiveMode") == "Always":
            raise ConfigError(
                f"kubeconfig {file}: the exec plug-in {self._name} wants a terminal (interactiveMode Always), and "
                "this process has none; use a plug-in that can run alone, or a token"
            )
        path = str(file.parent / self._name) if "/" in self._name else self._name
        self._command = [path, *map(str, spec.get("args") or [])]
        self._spec, self._cluster, self._file, self._clock = spec, cluster, file, clock
        self._lock = threading.Lock()
        self._credential: Credential | None = None
        self._made_at = 0.0

    def is_due(self) -> bool:
        """Whether ``current`` would run the program."""
        made = self._credential
        expires = made.expires_at if made is not None else None
        return made is None or (expires is not None and self._clock() >= expires.timestamp() - EARLY_S)

    def current(self) -> Credential:
        """A credential that has not expired. Raises ConfigError when the program gives none."""
        with self._lock:
            if self.is_due() or self._credential is None:
                self._credential, self._made_at = self._run(), self._clock()
            return self._credential

    def refuse(self, credential: Credential) -> bool:
        """The API server did not accept this credential. True: ``current`` gives another one now."""
        if self._credential is not credential:
            return True  # somebody else has reported it
        if self._clock() - self._made_at < AGAIN_S:
            return False
        self._credential = None
        return True

    def _run(self) -> Credential:
        version = self._spec.get("apiVersion") or "client.authentication.k8s.io/v1"
        asked: dict[str, Any] = {"interactive": False}
        if self._spec.get("provideClusterInfo"):
            asked["cluster"] = dict(self._cluster)
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": asked}
        given = {str(e["name"]): str(e["value"]) for e in self._spec.get("env") or []}
        env = {**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(info)}
        try:
            done = subprocess.run(
                self._command,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=True,
            )
            return _credential(json.loads(done.stdout), version)
        except FileNotFoundError as error:
            raise self._failed(
                f"it is not installed; {self._spec.get('installHint') or 'install it'}"
            ) from error
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip()[-300:]
            raise self._failed(f"it ended with code {error.returncode}: {said}") from error
        except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
            raise self._failed(str(error)) from error

    def _failed(self, why: str) -> ConfigError:
        return ConfigError(
            f"kubeconfig {self._file}: the exec plug-in {self._name} gave no credential: {why}"
        )


def _credential(answer: Any, version: str) -> Credential:
    """The credential that a plug-in printed. Raises ValueError."""
    status = answer.get("status") if isinstance(answer, dict) else None
    if not isinstance(status, dict):
        raise ValueError("its answer has no status")
    if answer.get("apiVersion", version) != version:
        raise ValueError(f"it answered as {answer['apiVersion']}, and was asked as {version}")
    cert, key = status.get("clientCertificateData"), status.get("clientKeyData")
    if bool(cert) != bool(key):
        raise ValueError("a client certificate and its key come together, and it gave one of them")
    if not status.get("token") and not cert:
        raise ValueError("its answer has neither token nor client certificate")
    expires = status.get("expirationTimestamp")
    at = datetime.fromisoformat(str(expires)) if expires else None
    if at is not None and at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return Credential(status.get("token") or None, cert or None, key or None, at)
