"""Calls to the cluster: the real kubectl with one instance's kubeconfig."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from busbar.local.build import binary
from busbar.local.errors import StartError

Object = dict[str, Any]
T = TypeVar("T")
LATE = ("etcdserver: request timed out", "etcdserver: leader changed", "etcdserver: no leader")
"""What the API server says where etcd did not write in its time."""
LATE_TRIES, LATE_PAUSE_S = 6, 5.0


def repeated(call: Callable[[], T]) -> T:
    """What ``call`` returns, made again where etcd was late: on a slow disk it is while images are unpacked beside it.

    The call must be safe to repeat: what it asked for may have been done.
    """
    for _ in range(LATE_TRIES - 1):
        try:
            return call()
        except StartError as error:
            if not any(words in str(error) for words in LATE):
                raise
        time.sleep(LATE_PAUSE_S)
    return call()


@dataclass(frozen=True)
class Kubectl:
    """kubectl against one kubeconfig."""

    kubeconfig: Path

    def run(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """Run kubectl, again where etcd is late; returns its output.

        Raises:
            StartError: it failed; contains its error output.
        """
        return repeated(lambda: self._run(arguments, stdin, timeout_s))

    def _run(self, arguments: tuple[str, ...], stdin: str | None, timeout_s: float) -> str:
        command = [str(binary("kubectl")), "--kubeconfig", str(self.kubeconfig), *arguments]
        try:
            done = subprocess.run(
                command, input=stdin, text=True, capture_output=True, check=False, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise StartError(
                f"kubectl {' '.join(arguments)[:120]} did not answer in {timeout_s:g} s"
            ) from error
        if done.returncode:
            raise StartError(f"kubectl {' '.join(arguments)[:120]}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    def get(self, *arguments: str) -> Object:
        """``kubectl get … -o json``."""
        found: Object = json.loads(self.run("get", *arguments, "-o", "json") or "{}")  # --ignore-not-found
        return found

    def apply(self, objects: Iterable[Object], *, owner: str = "busbar-local") -> None:
        """Server-side apply; safe to repeat."""
        items = list(objects)
        if not items:
            return
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        flags = ("--server-side", "--force-conflicts", f"--field-manager={owner}", "-f", "-")
        self.run("apply", *flags, stdin=text)

    def answers(self) -> bool:
        """Whether the API server is ready to serve."""
        try:
            return self.run("get", "--raw", "/readyz", timeout_s=5).strip() == "ok"
        except StartError:
            return False


def wait_for(
    what: str, condition: Callable[[], bool], timeout_s: float, look: str, pause_s: float = 0.25
) -> None:
    """Wait until ``condition`` is true.

    Raises:
        StartError: not in ``timeout_s``; the message names ``what`` and where to ``look``.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise StartError(f"{what} did not happen within {timeout_s:g} s; see {look}")
        time.sleep(pause_s)
