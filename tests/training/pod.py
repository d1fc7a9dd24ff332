"""A training pod as the operator starts it: `python -m busbar.workloads.training`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
from tests.free_port import free_port
from tests.training.small import engine
from tests.training.test_status_server import BEARERS, TOKEN

ROOT = Path(__file__).parents[2]


class Pod:
    """A process with the variables that the operator sets."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        port: int,
        copies: dict[str, int] | None = None,
        processes: int = 1,
        **changes: Any,
    ) -> None:
        """`copies` is what the job says of those in memory."""
        for role, bearer in BEARERS.items():
            (folder / role).write_text(bearer)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / ".src"),
            "BUSBAR_SPEC": json.dumps(engine(**changes)),
            "BUSBAR_CHECKPOINT": json.dumps({"everySteps": 100_000, "memory": copies}),
            "BUSBAR_OUTPUT_DIR": str(folder / "model"),
            "BUSBAR_CHECKPOINT_DIR": str(folder / "checkpoints"),
            "BUSBAR_DATA_DIR": str(folder / "text"),
            "BUSBAR_BEARERS_DIR": str(folder),
            "BUSBAR_PORT": str(port),
            "BUSBAR_JOB_NAME": "small",
            "BUSBAR_NAMESPACE": "demo",
            "BUSBAR_JOB_UID": "uid-1",
            "BUSBAR_ATTEMPT": str(attempt),
        }
        if processes > 1:
            environment |= {
                "RANK": "0",
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "busbar.workloads.training"],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
        )

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.client.get("/status").json()
        return document

    def crash(self, *ranks: int) -> None:
        """Kill a process that is the child of others: the trainer below the supervisor, which is the pod's first process; of
        several processes a pod starts, the one of the rank, or the trainer below that."""
        process = self.process.pid
        for child in ranks or (0,):
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            process = int(children[child])
        os.kill(process, signal.SIGKILL)

    def wait_for_step(self, step: int, limit_s: float = 120) -> dict[str, Any]:
        """Until `step` steps are done."""
        return self.wait_until(lambda status: bool(status["step"] >= step), limit_s)

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], limit_s: float = 120) -> dict[str, Any]:
        """Poll as the operator does."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if holds(status := self.status()):
                    return status
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"it did not come: {self.process.stdout.read() if self.process.stdout else ''}")

    def end(self, limit_s: float = 120) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=limit_s)
        self.client.close()
        return self.process.returncode, output
