"""`busbar train`: the engine alone, on this machine. Heavy modules are imported when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from busbar.kube.contracts.workload import Env

if TYPE_CHECKING:
    from busbar.workloads.training.control import Control
    from busbar.workloads.training.report import Reporter
    from busbar.workloads.training.run import Run
    from busbar.workloads.training.status import Status
    from busbar.workloads.training.status_server import Port

EPILOG = """
Examples:

\b
  busbar train examples/train-python-stdlib.yaml
  busbar train job.yaml --output ./model --steps 50
  busbar train job.yaml --mode optimizer-offload --device-memory 128Mi

The same manifest runs in a cluster with `busbar apply`. Here it is one pod, of as many processes as
parallelism.processesPerPod says, and pvc://claim/path is the folder CLAIMS/claim/path. Run it again to
resume; Ctrl-C saves first.
"""


@click.command(epilog=EPILOG, help="Train the model that JOB.YAML describes, here and now.")
@click.argument("job", metavar="JOB.YAML", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for the model.")
@click.option(
    "--claims",
    default="claims",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that stands for the cluster's claims.",
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "resident", "optimizer-offload", "parameter-offload"]),
    help="Override the mode.",
)
@click.option(
    "--activations",
    type=click.Choice(["auto", "keep", "recompute", "swap"]),
    help="Override what is kept of them.",
)
@click.option("--device-memory", metavar="QUANTITY", help="Override the device's byte limit, such as 256Mi.")
@click.option("--steps", type=click.IntRange(min=1), help="Override the number of steps.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Serve /status and /metrics on this loopback port."
)
@click.option("--plain", is_flag=True, help="Print lines even on a terminal.")
def train(
    job: Path,
    output: Path | None,
    claims: Path,
    mode: str | None,
    activations: str | None,
    device_memory: str | None,
    steps: int | None,
    port: int | None,
    plain: bool,
) -> None:
    from busbar.workloads.training.environment import fix_threads, read_manifest, run_from_manifest
    from busbar.workloads.training.errors import TrainingError
    from busbar.workloads.training.processes import launch, of_ranks, on_this_machine, same_command
    from busbar.workloads.training.report import lines_of
    from busbar.workloads.training.run import INVALID
    from busbar.workloads.training.world import ALONE, world_of

    overrides = {
        "mode": mode,
        "activations": activations,
        "deviceMemory": device_memory,
        "steps": steps,
    }
    try:
        world = world_of(os.environ) if Env.LOCAL_RANK in os.environ else ALONE
        described = run_from_manifest(read_manifest(job), claims, output, overrides, world)
    except TrainingError as problem:
        named = str(problem).startswith(str(job))
        click.echo(f"error: {problem}" if named else f"error: {job}: {problem}", err=True)
        sys.exit(INVALID)
    processes = described.spec.processes
    if processes > 1 and world == ALONE:
        sys.exit(launch(same_command(), of_ranks(on_this_machine(processes))))
    fix_threads(described.threads)
    if described.checkpoint.memory is None:
        sys.exit(_train(described, port, plain))
    from busbar.workloads.training.supervisor import supervise

    sys.exit(supervise(described, lambda run: _train(run, port, plain), lines_of(described).error))


def _train(described: Run, port: int | None, plain: bool) -> int:
    """Exit code of the whole run."""
    from busbar.workloads.training.control import Control, stop_on_signals
    from busbar.workloads.training.processes import end_at_once
    from busbar.workloads.training.report import Bar, lines_of
    from busbar.workloads.training.run import INVALID, run
    from busbar.workloads.training.several import status_of

    status, control = status_of(described), Control()
    stop_on_signals(control)
    alone = described.world.size == 1
    reporter: Reporter = Bar() if alone and sys.stdout.isatty() and not plain else lines_of(described)
    try:
        server = _serve(status, control, reporter, port if described.world.speaks_for_pod else None)
    except OSError as problem:
        reporter.close()
        click.echo(f"error: --port {port}: {problem.strerror}; choose another, or 0 for a free one", err=True)
        return INVALID
    code = run(described, status, control, reporter)
    if server is not None:
        server.close()
    if not alone:
        end_at_once(code)
    return code


def _serve(status: Status, control: Control, reporter: Reporter, number: int | None) -> Port | None:
    """The status port on loopback with a fresh token, if asked for."""
    if number is None:
        return None
    import secrets

    from busbar.kube.contracts.bearers import one_for_all
    from busbar.workloads.training.status_server import Port

    token = secrets.token_urlsafe(24)
    port = Port(status, control, one_for_all(token), "127.0.0.1", number)
    reporter.note(f"status: curl -H 'Authorization: Bearer {token}' http://127.0.0.1:{port.number}/status")
    return port
