"""Who of the gang is still there: every rank says so, and looks at the others, in a thread beside the training loop.

A rank that leaves says why, and the others leave with its exit code. One that falls silent (killed, frozen, cut off) is
named after `lost_after_s`; sooner where a collective has failed already. A rank that is stuck but alive is named by
where it is when the collectives of the others time out. The verdict ends this process, also when its training thread
waits in a collective that will never end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from busbar.kube.contracts.workload import ExitCode
from busbar.workloads.training.world import Patience

DONE, FAILED = int(ExitCode.DONE), int(ExitCode.FAILED)


@dataclass(frozen=True)
class Verdict:
    """Why the gang is over, and the exit code that says so."""

    message: str
    code: int


@dataclass
class _Seen:
    said: str = ""
    at: float = 0.0


class Watch:
    """The thread. `end` is called with the verdict where this rank does not end by itself."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        patience: Patience,
        end: Callable[[Verdict], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._patience = store, rank, patience
        self._end, self._clock = end, clock
        self._others = {other: _Seen(at=clock()) for other in range(size) if other != rank}
        self._beats = 0
        self._place = "starting"
        self._suspicious = False
        self._over, self._found = threading.Event(), threading.Event()
        self._talking = threading.Lock()  # the store answers one caller at a time
        self.verdict: Verdict | None = None
        self._thread = threading.Thread(target=self._run, name="gang-watch", daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """Where the training thread is, for the others."""
        self._place = place

    def suspect(self) -> None:
        """A collective has failed: have less patience with silence from now on."""
        self._suspicious = True

    def explain(self, problem: str) -> Verdict:
        """Why a collective failed: waits for the rank that falls silent, or says where each one is."""
        self.suspect()
        if self._found.wait(self._patience.suspected_after_s + 4 * self._patience.beat_s):
            assert self.verdict is not None
            return self.verdict
        places = "; ".join(f"rank {rank}: {_place(seen.said)}" for rank, seen in sorted(self._others.items()))
        return Verdict(f"the ranks lost each other ({problem:.200}). Where they were: {places}", FAILED)

    def leave(self, code: int, message: str) -> None:
        """Say that this rank is over. Rank 0, which serves the store, gives the others time to read it."""
        self._over.set()
        if not self._talking.acquire(timeout=self._patience.leave_s):
            return  # the store hangs
        try:
            self._store.set(f"left/{self._rank}", left(code, message))
            # At a good end a slow rank must still read that it is over; otherwise there is nothing to lose.
            patience = self._patience.lost_after_s if code == DONE else self._patience.leave_s
            deadline = self._clock() + patience
            others = [f"left/{other}" for other in self._others]
            while self._rank == 0 and self._clock() < deadline and not self._store.check(others):
                time.sleep(0.05)
        except RuntimeError:  # rank 0 is gone
            return
        finally:
            self._talking.release()

    def _run(self) -> None:
        while not self._over.wait(self._patience.beat_s):
            verdict = self._look()
            if verdict is None:
                continue
            self.verdict = verdict
            self._found.set()
            if not self._over.wait(self._patience.leave_s):
                self.leave(verdict.code, verdict.message)
                self._end(verdict)
            return

    def _look(self) -> Verdict | None:
        self._beats += 1
        try:
            with self._talking:
                self._store.set(f"alive/{self._rank}", f"{self._beats} {self._place}")
                return next(filter(None, map(self._judge, list(self._others))), None)
        except RuntimeError as problem:
            if self._over.is_set():
                return None
            return Verdict(f"rank 0 is gone: its store does not answer ({problem!s:.120})", FAILED)

    def _judge(self, other: int) -> Verdict | None:
        seen, now = self._others[other], self._clock()
        if self._store.check([f"left/{other}"]):
            return self._judge_leaver(other, json.loads(self._store.get(f"left/{other}")))
        if self._store.check([f"alive/{other}"]):
            said = self._store.get(f"alive/{other}").decode()
            if said != seen.said:
                seen.said, seen.at = said, now
        limit = self._patience.suspected_after_s if self._suspicious else self._patience.lost_after_s
        if now - seen.at <= limit:
            return None
        return Verdict(
            f"rank {other} is lost: it has said nothing for {now - seen.at:.0f} s, and was {_place(seen.said)}",
            FAILED,
        )

    def _judge_leaver(self, other: int, left: Mapping[str, object]) -> Verdict | None:
        code = left.get("code")
        if code == DONE:
            del self._others[other]
            return None
        return Verdict(
            f"rank {other} has left: {left.get('message')}", code if isinstance(code, int) else FAILED
        )


def left(code: int, message: str) -> str:
    """What a rank that is over leaves in the store."""
    return json.dumps({"code": code, "message": message})


def _place(said: str) -> str:
    return said.partition(" ")[2] or "not heard of"
