"""Entry point in a pod: `python -m busbar.workloads.training`, configured by `BUSBAR_*` variables."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from busbar.kube.contracts.workload import TERMINATION_LOG
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import fix_threads, run_from_pod
from busbar.workloads.training.errors import TrainingError
from busbar.workloads.training.port import Port
from busbar.workloads.training.report import Lines
from busbar.workloads.training.session import INVALID, run
from busbar.workloads.training.status import Status


def main() -> int:
    status, control = Status(), Control()
    signal.signal(signal.SIGTERM, lambda *_: control.stop())
    signal.signal(signal.SIGINT, lambda *_: control.stop())
    try:
        job = run_from_pod(os.environ)
    except TrainingError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        status.update(phase="Failed", message=str(problem))
        status.write_termination_message(Path(TERMINATION_LOG))
        return INVALID
    fix_threads(job.spec)
    port = Port(
        status, control, os.environ.get("BUSBAR_TOKEN", ""), "", int(os.environ.get("BUSBAR_PORT", "9400"))
    )
    try:
        return run(job, status, control, Lines(job.name))
    finally:
        port.close()


if __name__ == "__main__":
    sys.exit(main())
