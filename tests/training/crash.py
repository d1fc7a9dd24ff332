"""A real training process that kills itself with SIGKILL at a chosen point, and a fork server to start it quickly.

The processes are forked from a server that has torch and transformers imported already, so that a dozen of them
cost seconds. SIGKILL runs no handler, no `finally` and no flush, as in a node failure.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["tests.training.crash", "torch", "transformers.models.llama.modeling_llama", "peft"]


@dataclass(frozen=True)
class Point:
    """Kill the process at the `count`-th call of an attribute of a module or class."""

    owner: str  # dotted path below busbar.workloads.training
    name: str
    count: int


def _kill_at(point: Point) -> None:
    import importlib

    module_name, _, class_name = point.owner.partition(":")
    owner: Any = importlib.import_module(f"busbar.workloads.training.{module_name}")
    if class_name:
        owner = getattr(owner, class_name)
    original: Callable[..., Any] = getattr(owner, point.name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == point.count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, point.name, counted)


def _train(manifest: dict[str, Any], claims: Path, point: Point | None, status_file: Path) -> None:
    import json
    import sys

    from busbar.workloads.training.control import Control
    from busbar.workloads.training.environment import run_from_manifest
    from busbar.workloads.training.report import Lines
    from busbar.workloads.training.run import run
    from busbar.workloads.training.status import Status

    if point is not None:
        _kill_at(point)
    status = Status()
    with (status_file.parent / "log.txt").open("a") as log:
        code = run(run_from_manifest(manifest, claims, None, {}), status, Control(), Lines("crash", log))
    status_file.write_text(json.dumps(status.to_json()))
    sys.stdout.flush()
    os._exit(code)


def train_in_a_process(
    manifest: dict[str, Any], claims: Path, point: Point | None = None, status_file: Path | None = None
) -> int:
    """Exit code of a training process; minus the signal's number when it was killed."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    process = CONTEXT.Process(
        target=_train, args=(manifest, claims, point, status_file or claims / "status.json")
    )
    process.start()
    process.join(120)
    code = process.exitcode
    assert code is not None, "the training process hangs"
    process.close()
    return code
