"""Words between the ranks that need no collective: threads wait for them while training goes on.

Rank 0 serves the store (torch's TCPStore). A connection answers one caller at a time, and waits, so every thread that
talks has one of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError

from busbar.workloads.training.errors import RankLost
from busbar.workloads.training.world import World


class Meeting(Protocol):
    def tell(self, name: str, text: str) -> None:
        """Say `text` under a name that all ranks know."""

    def hear(self, name: str) -> str:
        """Wait for what was said under `name`. Raises RankLost."""


class StoreMeeting:
    """A meeting in rank 0's store."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        self.store, self._timeout = store, timeout

    def tell(self, name: str, text: str) -> None:
        try:
            self.store.set(name, text)
        except RuntimeError as problem:
            raise RankLost(f"rank 0 is gone: its store does not answer ({problem!s:.200})") from problem

    def hear(self, name: str) -> str:
        try:
            self.store.wait([name], self._timeout)
            return self.store.get(name).decode()
        except RuntimeError as problem:
            late = isinstance(problem, DistStoreError)  # the store answers, and the word has not come in time
            why = f"nothing came of {name}" if late else "rank 0 is gone: its store does not answer"
            raise RankLost(f"{why} ({problem!s:.200})") from problem


def connect(world: World, timeout: timedelta, *, serve: bool = False) -> TCPStore:
    """A connection to rank 0's store; with `serve`, on rank 0, the store itself. Raises RankLost."""
    try:
        return TCPStore(
            world.address, world.port, world.size, serve and world.rank == 0, timeout, wait_for_workers=False
        )
    except RuntimeError as problem:
        raise RankLost(
            f"rank {world.rank} reaches no rank 0 at {world.address}:{world.port}: {problem!s:.200}"
        ) from problem
