"""The operator as a process of its own that is measured, and the writes that the API server has answered."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.apiserver import ApiServer
from tests.cluster.operator_process import COMMAND, environment

LOOK_S = 0.5
BACKOFF_S = 10.0
WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")
COUNTED = {"trainingjobs", "pods", "services", "endpoints", "endpointslices", "secrets", "events", "tenants",
           "acceleratorpools", "performanceprofiles", "leases", "jobs", "resourcequotas"}  # fmt: skip
_REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Process:
    """The operator, started again when it ends; counts its ends and its CPU time."""

    def __init__(
        self,
        kubeconfig: Path,
        folder: Path,
        source: Path,
        *,
        namespace: str = "default",
        command: Sequence[str] = COMMAND,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`command`: of another queue's process, which is told the kubeconfig by the variable KUBECONFIG."""
        self._env = {**environment(kubeconfig, folder, str(source), namespace), **(more or {})}
        self._command = command
        self._log = (folder / "operator.log").open("wb")
        self.ends = 0
        self.cpu_s = 0.0
        self.peak_mib = 0.0
        self._start()

    def _start(self) -> None:
        self._child = subprocess.Popen(self._command, env=self._env, stdout=self._log, stderr=self._log)
        self._seen_s = 0.0

    async def keep(self) -> None:
        """Runs until cancelled: counts, and starts the process again after back-offs as the kubelet's."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.count()
            if self._child.poll() is not None:
                self.ends += 1
                await asyncio.sleep(BACKOFF_S * 2 ** (self.ends - 1))
                self._start()

    def count(self) -> None:
        """Adds the CPU time since the last count; its children's are counted when they have ended."""
        try:
            fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{self._child.pid}/status").read_text()
        except OSError:
            return
        used = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
        self.cpu_s += max(0.0, used - self._seen_s)
        self._seen_s = used
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        self.peak_mib = max(self.peak_mib, int(peak.group(1)) / 1024 if peak is not None else 0.0)

    def restart(self) -> None:
        """As after a crash of the machine: no last words."""
        self.count()
        self.stop()
        self._start()

    def stop(self) -> None:
        """Kills it."""
        self._child.kill()
        self._child.wait()


def writes(server: ApiServer) -> Counter[str]:
    """Writes that the server has answered, by resource; of one that does not tell, none.

    Of a cluster with several API servers these are those of the one that answers.
    """
    text = server.admin.request("GET", "/metrics").message
    found: Counter[str] = Counter()
    for labels, value in _REQUESTS.findall(text):
        label = dict(_LABEL.findall(labels))
        if label["verb"] in WRITES and label["resource"] in COUNTED:
            resource = "/".join(part for part in (label["resource"], label["subresource"]) if part)
            found[resource] += int(float(value))
    return found
