"""Entry point in a pod: `python -m busbar.workloads.training`, configured by `BUSBAR_*` variables."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from busbar.kube.contracts.bearers import FOLDER, bearers_in
from busbar.kube.contracts.workload import PORT, TERMINATION_LOG, Env
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import fix_threads, run_from_pod
from busbar.workloads.training.errors import TrainingError
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import INVALID, run
from busbar.workloads.training.status import Status
from busbar.workloads.training.status_server import Port


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
    fix_threads(job.threads)
    bearers = bearers_in(os.environ.get(Env.BEARERS_DIR, FOLDER))
    port = Port(status, control, bearers, "", int(os.environ.get(Env.PORT, PORT)))
    try:
        code = run(job, status, control, Lines(job.name))
    finally:
        port.close()
    if job.world.size > 1:  # what is left of broken collectives may wait, or abort, at an ordinary end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
