"""Entry point in a pod: `python -m busbar.workloads.training`, configured by `BUSBAR_*` variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from busbar.kube.contracts.bearers import FOLDER, bearers_in
from busbar.kube.contracts.workload import PORT, TERMINATION_LOG, Env
from busbar.workloads.machine.processes import end_with_parent
from busbar.workloads.training.control import Control, stop_on_signals
from busbar.workloads.training.environment import fix_threads, run_from_pod
from busbar.workloads.training.errors import TrainingError
from busbar.workloads.training.processes import end_at_once, launch, of_ranks, same_command, starts_others
from busbar.workloads.training.report import lines_of
from busbar.workloads.training.run import INVALID, Run, run
from busbar.workloads.training.several import status_of
from busbar.workloads.training.status import Status
from busbar.workloads.training.status_server import Port
from busbar.workloads.training.supervisor import supervise


def main() -> int:
    status, control = Status(), Control()
    try:
        if starts_others(os.environ):
            return launch(same_command(), of_ranks(os.environ))
        stop_on_signals(control)
        job = run_from_pod(os.environ)
    except TrainingError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        status.update(phase="Failed", message=str(problem), errorCode=problem.code)
        status.write_termination_message(Path(TERMINATION_LOG))
        return INVALID
    fix_threads(job.threads)
    if job.world.per_pod > 1:
        end_with_parent()
    status = status_of(job)
    if job.checkpoint.memory is None:
        return train(job, status, control)
    return supervise(job, lambda described: train(described, status, control), lines_of(job).error)


def train(job: Run, status: Status, control: Control) -> int:
    """Run it, and answer on the port meanwhile; returns the exit code."""
    stop_on_signals(control)
    port = None
    if job.world.speaks_for_pod:
        bearers = bearers_in(os.environ.get(Env.BEARERS_DIR, FOLDER))
        port = Port(status, control, bearers, "", int(os.environ.get(Env.PORT, PORT)))
    try:
        code = run(job, status, control, lines_of(job))
    finally:
        if port is not None:
            port.close()
    if job.world.size > 1:
        end_at_once(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
