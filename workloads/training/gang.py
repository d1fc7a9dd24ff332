"""The gang of a run: joining, agreeing, waiting for each other, leaving. Alone, all of it is nothing.

Every rank runs the same session. Rank 0 speaks for all: it moves checkpoint folders, prepares the data, keeps the
journal, evaluates and exports, while the others wait for its word. What all must have alike is compared before the
first step, and again when a checkpoint is restored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import TCPStore

from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.errors import InvalidJob, RankLost, RanksDiffer
from busbar.workloads.training.gang_folder import GangFolder
from busbar.workloads.training.meeting import StoreMeeting, connect
from busbar.workloads.training.parity import Stripes
from busbar.workloads.training.ranks import Alone, Gang, Ranks
from busbar.workloads.training.watch import FAILED, Verdict, Watch, left
from busbar.workloads.training.world import Patience, World

if TYPE_CHECKING:
    from busbar.workloads.training.groups import FlatGroup
    from busbar.workloads.training.memory_copy import Copies, MemoryCopies

SEEN_WITHIN_S = 20.0  # a file that another pod has written, on file systems that cache
POLL_S = 0.1
HEAR_S = 0.01  # within a step
CONNECT_S = 5.0  # of one try, between which a request to stop is looked at


class Together:
    """What the session of one rank needs of the others."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        patience: Patience,
        session: str,
        end: Callable[[Verdict], object],
        stop_point: Callable[[], None],
    ) -> None:
        """Join; returns when all ranks have. Raises RankLost, and what `stop_point` raises."""
        self.rank, self.size, self._stop_point = world.rank, world.size, stop_point
        self.ranks: Ranks = Alone()
        self.session = session  # of rank 0, on all ranks
        self._watch: Watch | None = None
        if world.size == 1:
            return
        self._store = self._meet(world, patience)
        self._wait_for_all(patience)
        talk = timedelta(seconds=patience.lost_after_s)
        self._watch = Watch(connect(world, talk), world.rank, world.size, patience, end)
        timeout = timedelta(seconds=patience.collective_s)
        self.meeting = StoreMeeting(connect(world, timeout), timeout)
        try:
            self._gang = Gang(world, device, self._store, timeout, self._watch.at)
        except RuntimeError as problem:
            raise RankLost(f"rank {world.rank} joins no gang: {problem!s:.300}") from problem
        self.ranks = self._gang
        self.session = self.ranks.gather(session)[0]

    @property
    def first(self) -> bool:
        return self.rank == 0

    def _meet(self, world: World, patience: Patience) -> TCPStore:
        """The store of a gang that this rank has not been in. Raises RankLost.

        A rank that comes back may find the others where they were when it was lost: it tells them, and waits until they
        have left, and rank 0 serves another store.
        """
        deadline = time.monotonic() + patience.join_s
        while True:
            try:
                store = connect(world, timedelta(seconds=CONNECT_S), serve=True)
                if store.add(f"here/{self.rank}", 1) == 1:
                    store.set_timeout(timedelta(seconds=patience.join_s))
                    return store
                store.set(
                    f"left/{self.rank}", left(FAILED, "it was lost, and another one has taken its place")
                )
                while time.monotonic() < deadline:
                    store.check(["here/0"])  # fails when rank 0 is gone
                    self._stop_point()
                    time.sleep(POLL_S)
                raise RankLost("the one that it was lost from goes on without it")
            except (RankLost, RuntimeError) as problem:
                if time.monotonic() > deadline:
                    raise RankLost(f"rank {self.rank} found no gang: {problem!s:.300}") from problem
                self._stop_point()
                time.sleep(POLL_S)

    def _wait_for_all(self, patience: Patience) -> None:
        """Until every rank is there; the ones that are missing are named."""
        deadline = time.monotonic() + patience.join_s
        while True:
            missing = [rank for rank in range(self.size) if not self._store.check([f"here/{rank}"])]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise RankLost(
                    f"after {patience.join_s:.0f} s there is nothing of rank {', '.join(map(str, missing))}"
                )
            self._stop_point()
            time.sleep(POLL_S)

    def tell(self, name: str, value: str = "") -> None:
        """Rank 0: let the others go on."""
        if self.size > 1:
            self._store.set(f"told/{name}", value)

    def hear(self, *names: str) -> tuple[str, str]:
        """The others, within a step: under which of these names rank 0 says something first, and what."""
        while True:
            for name in names:
                if self._store.check([f"told/{name}"]):
                    return name, self._store.get(f"told/{name}").decode()
            time.sleep(HEAR_S)

    def wait(self, name: str) -> None:
        """The others: until rank 0 has said so, however long it takes; `stop_point` may end it."""
        while not self._store.check([f"told/{name}"]):
            self._stop_point()
            time.sleep(POLL_S)

    def share_folder(self, folder: Path, field: str) -> None:
        """Make sure that all ranks see the same `folder`. Raises InvalidJob."""
        if self.size == 1:
            return
        token = folder / "gang.json"
        if self.first:
            token.write_text(json.dumps({"session": self.session}))
            self.tell("folder")
            return
        self.wait("folder")
        deadline = time.monotonic() + SEEN_WITHIN_S
        while _session_in(token) != self.session:
            if time.monotonic() > deadline:
                raise InvalidJob(
                    field,
                    f"rank {self.rank} does not see in {folder} what rank 0 has written there",
                    "use a claim that several pods can mount (accessMode ReadWriteMany)",
                )
            time.sleep(POLL_S)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts` with those of rank 0. Raises RanksDiffer, alike on all ranks."""
        said = self.ranks.gather(dict(facts))
        different = [
            f"rank {rank} differs from rank 0 in {name}: {_shown(theirs.get(name))} and not {_shown(said[0].get(name))}"
            for rank, theirs in enumerate(said)
            for name in sorted({*said[0], *theirs})
            if theirs.get(name) != said[0].get(name)
        ]
        if different:
            more = f" (and {len(different) - 3} more differences)" if len(different) > 3 else ""
            raise RanksDiffer("; ".join(different[:3]) + more)

    def least(self, room: int | None) -> int | None:
        """The smallest of the ranks' rooms, so that all make the same plan; None: no rank knows a limit."""
        known = [each for each in self.ranks.gather((room,)) if each[0] is not None]
        return min(known)[0] if known else None

    def any(self, *wishes: bool) -> list[bool]:
        """Whether any rank wants each of these things."""
        return [bool(each) for each in self.ranks.most([int(wish) for wish in wishes])]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what talks to other ranks, within what waits for its end: a checkpoint may wait for the lost rank, too."""
        try:
            yield
        except (RuntimeError, RankLost):
            if self._watch is not None:
                self._watch.suspect()
            raise

    def explain(self, problem: BaseException) -> Verdict | None:
        """Which rank is behind an unexpected failure; None: the failure is this rank's own."""
        if self._watch is None or not isinstance(problem, RuntimeError | RankLost):
            return None
        if isinstance(problem, torch.OutOfMemoryError):
            return None
        return self._watch.explain(f"{problem}")

    def leave(self, code: int, message: str) -> None:
        """Tell the others that this rank is over, and why."""
        if self._watch is not None:
            self._watch.leave(code, message)

    @property
    def waited_s(self) -> float:
        """Seconds that the steps of this rank spent in exchanges, waiting for other ranks included."""
        return 0.0 if self.size == 1 else self._gang.waits.seconds

    def copies(self, own: MemoryCopies | None, parity: int) -> Copies | None:
        """Those in the memory of this pod, or of all of them; every rank calls it."""
        if own is None or self.size == 1:
            return own
        from busbar.workloads.training.gang_copies import GangCopies

        return GangCopies(own, Stripes(self.size, parity), self._gang.beside(), self.session)

    def folder(
        self, path: Path, keep: int, note: Callable[[str], object], confirm: Callable[[], object]
    ) -> CheckpointFolder:
        if self.size == 1:
            return CheckpointFolder(path, keep, note, confirm)
        return GangFolder(path, keep, self.ranks, self.meeting, self.session, note, confirm)


def weights_sum(groups: Sequence[FlatGroup]) -> list[int]:
    """A number per group that changes with its weights: cheaper than a digest, and enough to see ranks apart.

    Of divided weights no two ranks have the same, and there is nothing to compare.
    """
    whole = [flat.weights for flat in groups if flat.has_whole_weights]
    return [int(weights.view(torch.int16).sum(dtype=torch.int64)) for weights in whole]


def _session_in(token: Path) -> str | None:
    try:
        return str(json.loads(token.read_text())["session"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else f"{text[:117]}..."
