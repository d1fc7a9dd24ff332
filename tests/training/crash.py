"""A real training process that kills itself with SIGKILL at a chosen point, and a fork server to start it quickly.

The processes are forked from a server that has torch, transformers and the engine imported already, so that a dozen
of them cost seconds. SIGKILL runs no handler, no `finally` and no flush, as in a node failure.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.free_port import free_port

from busbar.workloads.training.world import ALONE, Patience, World

CONTEXT = multiprocessing.get_context("forkserver")
HURRIED = Patience(join_s=100, beat_s=0.2, lost_after_s=15, suspected_after_s=5, collective_s=100, leave_s=2)
PRELOAD = ["tests.training.preloaded"]


@dataclass(frozen=True)
class Point:
    """Kill the process at the `count`-th call of an attribute of a module or class."""

    owner: str  # dotted path below busbar.workloads.training
    name: str
    count: int
    signal: signal.Signals = signal.SIGKILL
    delay_s: float = 0.0  # instead: wait so long at each call from then on


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
        if point.delay_s and calls >= point.count:
            time.sleep(point.delay_s)
        elif calls == point.count:
            os.kill(os.getpid(), point.signal)
        return original(*args, **kwargs)

    setattr(owner, point.name, counted)


def _have_no_room_on_the_host() -> None:
    """Put all state on disk, though a small model's would fit."""
    from busbar.workloads.training import layouts, streamed_plan

    every = streamed_plan.streamed_layouts
    setattr(layouts, "streamed_layouts", lambda *given: every(*given)[-1:])  # noqa: B010


def _train(
    manifest: dict[str, Any],
    claims: Path,
    point: Point | None,
    status_file: Path,
    world: World = ALONE,
    predicts: bool | None = None,
) -> None:
    import sys

    from busbar.workloads.training.control import Control
    from busbar.workloads.training.environment import run_from_manifest
    from busbar.workloads.training.report import Lines
    from busbar.workloads.training.run import run
    from busbar.workloads.training.several import status_of

    if point is not None:
        _kill_at(point)
    if "scratchDisk" in manifest["spec"]["engine"]:
        _have_no_room_on_the_host()
    control = Control()
    log_file = status_file.with_name("log.txt" if world.size == 1 else f"log-{world.rank}.txt")
    with log_file.open("a", buffering=1) as log:
        described = replace(
            run_from_manifest(manifest, claims, None, {}), world=world, patience=HURRIED, predicts=predicts
        )
        status = status_of(described)
        signal.signal(signal.SIGTERM, lambda *_: control.stop())
        code = run(described, status, control, Lines("crash", log))
    status_file.write_text(json.dumps(status.to_json()))
    sys.stdout.flush()
    os._exit(code)


def _supervise(
    manifest: dict[str, Any],
    claims: Path,
    points: Sequence[Point | None],
    status_file: Path,
    world: World = ALONE,
) -> None:
    """Train below a supervisor; its n-th trainer is killed at the n-th of `points`, if that is not None."""
    import sys

    from busbar.workloads.training.control import Control, stop_on_signals
    from busbar.workloads.training.environment import run_from_manifest
    from busbar.workloads.training.report import Lines
    from busbar.workloads.training.run import Run, run
    from busbar.workloads.training.status import Status
    from busbar.workloads.training.supervisor import supervise

    def start(described: Run) -> int:
        assert described.copies is not None
        number = described.copies.starts - 1
        if number < len(points) and (point := points[number]) is not None:
            _kill_at(point)
        status, control = Status(), Control()
        stop_on_signals(control)
        with status_file.with_name(f"log{own}.txt").open("a", buffering=1) as log:
            code = run(described, status, control, Lines("crash", log))
        status_file.write_text(json.dumps(status.to_json()))
        if world.size > 1:  # as a pod does
            sys.stdout.flush()
            os._exit(code)
        return code

    own = "" if world.size == 1 else f"-{world.rank}"
    described = replace(run_from_manifest(manifest, claims, None, {}), world=world, patience=HURRIED)
    with status_file.with_name(f"supervisor{own}.txt").open("a", buffering=1) as log:
        code = supervise(described, start, Lines("crash", log).error)
    sys.stdout.flush()
    os._exit(code)


def start_supervised(manifest: dict[str, Any], claims: Path, points: list[Point | None]) -> Any:
    """The process of a supervisor."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    process = CONTEXT.Process(target=_supervise, args=(manifest, claims, points, claims / "status.json"))
    process.start()
    return process


@dataclass
class Gang:
    """The processes of one gang, by rank."""

    claims: Path
    processes: list[Any]
    port: int

    def exit_codes(self) -> list[int]:
        """Once all have ended, minus the signal's number for those that were killed."""
        for process in self.processes:
            process.join(300)
        return [int(process.exitcode) for process in self.processes]

    def log(self, rank: int) -> str:
        return (self.claims / f"log-{rank}.txt").read_text()

    def status(self, rank: int) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.claims / f"status-{rank}.json").read_text())
        return document


def start_gang(
    manifests: list[dict[str, Any]],
    claims: Path,
    points: Mapping[int, Point],
    predicts: bool | None = None,
) -> Gang:
    """A rank for each of `manifests`, which are alike unless a test is about that; `points` by rank."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    port, size = free_port(), len(manifests)
    processes = []
    for rank, manifest in enumerate(manifests):
        world = World(rank, size, "127.0.0.1", port)
        arguments = manifest, claims, points.get(rank), claims / f"status-{rank}.json", world, predicts
        processes.append(CONTEXT.Process(target=_train, args=arguments))
        processes[-1].start()
    return Gang(claims, processes, port)


@dataclass
class SupervisedGang(Gang):
    """Each rank has a supervisor, whose whole pod can be lost and replaced."""

    manifest: dict[str, Any]

    def start(self, rank: int, size: int, points: Sequence[Point | None] = ()) -> None:
        """The pod of a rank, or another one in its place."""
        world = World(rank, size, "127.0.0.1", self.port)
        arguments = self.manifest, self.claims, points, self.claims / f"status-{rank}.json", world
        process = CONTEXT.Process(target=_supervise, args=arguments)
        process.start()
        self.processes[rank:] = [process, *self.processes[rank + 1 :]]

    def lose(self, rank: int) -> None:
        """Kill all processes of its pod."""
        trainers = self.trainers(rank)
        self.processes[rank].kill()  # the kernel asks its trainer to stop then, which has no time to
        for trainer in trainers:
            os.kill(trainer, signal.SIGKILL)
        self.processes[rank].join(60)

    def end(self) -> None:
        """Kill what is left of it."""
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self.lose(rank)

    def stops(self, rank: int) -> bool:
        """Wait until the rank's trainer is stopped by a signal; False: the rank has ended without that."""
        while self.processes[rank].is_alive():
            for trainer in self.trainers(rank):
                with contextlib.suppress(OSError):
                    said = Path(f"/proc/{trainer}/stat").read_text()
                    if said.rpartition(")")[2].split()[0] == "T":
                        return True
            time.sleep(0.02)
        return False

    def trainers(self, rank: int) -> list[int]:
        process = self.processes[rank].pid
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]

    def told(self, rank: int) -> str:
        """By its supervisor."""
        return (self.claims / f"supervisor-{rank}.txt").read_text()


def start_supervised_gang(
    manifest: dict[str, Any], claims: Path, size: int, points: Mapping[int, Sequence[Point | None]]
) -> SupervisedGang:
    """`points` by rank: those of its trainers, one after the other."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    gang = SupervisedGang(claims, [], free_port(), manifest)
    for rank in range(size):
        gang.start(rank, size, points.get(rank, ()))
    return gang


def train_in_a_process(
    manifest: dict[str, Any], claims: Path, point: Point | None = None, status_file: Path | None = None
) -> int:
    """Exit code of a training process; minus the signal's number when it was killed."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    process = CONTEXT.Process(
        target=_train, args=(manifest, claims, point, status_file or claims / "status.json")
    )
    process.start()
    process.join(300)
    code = process.exitcode
    assert code is not None, "the training process hangs"
    process.close()
    return code
