"""Real training processes that form a gang on this machine, forked from a server that has torch imported."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.free_port import free_port
from tests.training.crash import CONTEXT, PRELOAD

from busbar.workloads.training.meeting import StoreMeeting, connect
from busbar.workloads.training.ranks import Gang
from busbar.workloads.training.world import World

TIMEOUT = timedelta(seconds=120)


Work = Callable[[Gang, StoreMeeting, Any], Any]


def run_gang(size: int, work: Work, argument: Any, folder: Path) -> list[Any]:
    """What `work(gang, meeting, argument)` returns on each rank, every one a process of its own."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = [
        CONTEXT.Process(target=_rank, args=(World(rank, size, "127.0.0.1", port), work, argument, folder))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    assert codes == [0] * size, f"exit codes {codes}: {_errors(folder)}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _errors(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("*.error")))


def _rank(world: World, work: Work, argument: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        store = connect(world, TIMEOUT, serve=True)
        gang = Gang(world, torch.device("cpu"), store, TIMEOUT)
        result = work(gang, StoreMeeting(connect(world, TIMEOUT), TIMEOUT), argument)
        torch.save(result, folder / f"{world.rank}.pt")
        dist.barrier()
        gang.close()
    except BaseException:
        (folder / f"{world.rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)
