"""A gang of training processes on this machine, for the benchmarks: gloo, one thread for each rank."""

from __future__ import annotations

import json
import multiprocessing
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.training.meeting import connect
from busbar.workloads.training.ranks import Gang
from busbar.workloads.training.world import World

PATIENCE = timedelta(minutes=10)
Work = Callable[..., Any]  # of a Gang and arguments that can be pickled: something that JSON can hold


def run_gang(size: int, work: Work, *arguments: Any) -> list[Any]:
    """What `work(gang, *arguments)` returns on each rank. Raises RuntimeError where a process fails."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        processes = [
            context.Process(
                target=_rank, args=(World(rank, size, "127.0.0.1", port), work, arguments, output)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if codes := [process.exitcode for process in processes if process.exitcode]:
            raise RuntimeError(f"ranks of a gang ended with exit codes {codes}; they say above why")
        found: list[Any] = json.loads(output.read_text())
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _rank(world: World, work: Work, arguments: tuple[Any, ...], output: Path) -> None:
    torch.set_num_threads(1)
    gang = Gang(world, torch.device("cpu"), connect(world, PATIENCE, serve=True), PATIENCE)
    every = gang.gather(work(gang, *arguments))
    if world.rank == 0:
        output.write_text(json.dumps(every))
    gang.gather("done")
    gang.close()
