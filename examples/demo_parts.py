"""What the demo's chapters share: where the platform runs, and how progress is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

NAMESPACE = "demo"


class DemoError(Exception):
    """A claim of the demo did not hold; the message says which."""


@dataclass
class Cluster:
    """Where the platform runs: how to call kubectl, and the two addresses people use."""

    kubectl: str
    kubeconfig: str | None
    portal_url: str
    gateway_url: str
    forwards: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def kube(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """Run kubectl and return its output; raises ``DemoError`` with kubectl's own words."""
        env = {**os.environ, **({"KUBECONFIG": self.kubeconfig} if self.kubeconfig else {})}
        try:
            done = subprocess.run(
                [self.kubectl, *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                env=env,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise DemoError(
                f"kubectl {' '.join(arguments[:6])} gave no answer in {timeout_s:g} s; is the machine overloaded?"
            ) from error
        if done.returncode:
            raise DemoError(
                f"kubectl {' '.join(arguments[:6])}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def status(self, kind: str, name: str) -> dict[str, Any]:
        """The status of one of our objects; empty while there is none."""
        text = self.kube("-n", NAMESPACE, "get", kind, name, "-o", "json")
        status: dict[str, Any] = json.loads(text).get("status") or {}
        return status

    def close(self) -> None:
        """End the port-forwards."""
        for process in self.forwards:
            process.terminate()


class Teller:
    """Prints progress so that a person can read it: one changing line on a terminal, few lines elsewhere."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.live = sys.stdout.isatty()
        self._last = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        clear = "\r\033[K" if self.live else ""
        print(f"{clear}[{self.elapsed():>6}] {text}", flush=True)

    def tick(self, text: str) -> None:
        """A line that the next one replaces; off a terminal, at most one every 15 s."""
        if self.live:
            print(f"\r\033[K[{self.elapsed():>6}] {text[:150]}", end="", flush=True)
        elif time.monotonic() - self._last > 15:
            self._last = time.monotonic()
            print(f"[{self.elapsed():>6}] {text}", flush=True)

    def elapsed(self) -> str:
        """Time since the start as m:ss."""
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d}"
