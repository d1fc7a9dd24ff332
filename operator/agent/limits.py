"""Limits of a node's boards: what it holds (`leases.py`), split (`split.py`), written, and read back.

Lower first: a board is raised only after the others were read back at or below what they should have. A limit that is
not the one written last is a conflict: somebody else writes limits, or the driver was loaded again. It is lowered where
it is too high, and for a minute not raised. A board counts with its nameplate, and the others share what is left, while
it takes no limit or draws clearly more than its limit.

A lease may say that no board, or that single boards, get more than a part of their nameplates: those who hold them have
power caps. What a board may not have goes to the others, as far as the lease and their own parts let them.

A lease with a bucket (`bucket.py`) bounds the mean: the fuller the bucket, the nearer are the limits to the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from busbar.kube.contracts.power import LeaseMessage, LeaseState, LimitsReport

from .bucket import Bucket
from .leases import Held, LeaseRefused, at, standing, taken
from .split import Board, BoardWant, split, wanted

NEAR_W = 1.0
"""Limits that differ by less are the same: drivers round."""
RAISE_W, RAISE_PART = 5.0, 0.02
"""A limit is not raised by less than either."""
CONFLICT_S = 60.0
RETRY_S = 10.0
"""After so long a board that refused a limit is asked again."""
OVER_S, OVER_PART, OVER_W = 2.0, 1.05, 10.0
"""A board that draws so much more than its limit for so long ignores it."""


class LimitFailed(Exception):
    """The board has not taken the limit; the text says why."""


@dataclass(frozen=True, slots=True)
class BoardLimit:
    """One board's limits in watts."""

    uuid: str
    floor_w: float
    nameplate_w: float
    default_w: float
    set_w: float
    """Written last, by whomever."""
    enforced_w: float
    """In force: at most `set_w`, and less where something else limits the board too."""


class LimitedBoards(Protocol):
    """A back end whose boards take limits. It raises OSError or BackendAbsent when it cannot read."""

    def limits(self) -> Sequence[BoardLimit]: ...

    def set_limit(self, uuid: str, watts: float) -> None:
        """Raises LimitFailed."""


class Limiter:
    """Holds the boards of one node to what it may draw. Not safe for threads."""

    def __init__(self, epoch: str, boards: LimitedBoards, clock: Callable[[], float], lapse_s: float) -> None:
        """
        Args:
            lapse_s: an agent that stood still for longer holds its standing cap; its guard has set it meanwhile.
        """
        self.held = Held()
        self._epoch, self._boards, self._clock, self._lapse_s = epoch, boards, clock, lapse_s
        self._found: dict[str, BoardLimit] = {}
        self._wrote: dict[str, float] = {}
        self._wants: dict[str, BoardWant] = {}
        self._over: dict[str, float] = {}  # since when a board draws more than its limit
        self._refusing: dict[str, float] = {}  # until when
        self._conflicts: dict[str, float] = {}  # until when
        self._bucket = Bucket()
        self._split: tuple[object, Mapping[str, float]] | None = None  # of what, and the limits
        self._confirmed = 0
        self._arrived_s: float | None = None
        self._actuation_s: float | None = None
        self._looked_s = -math.inf

    def take(self, message: LeaseMessage) -> None:
        """Holds what the message says, at once. Raises LeaseRefused, and what the back end raises."""
        now_s = self._clock()
        self._lapse(now_s)
        self.held = taken(at(self.held, now_s), self._epoch, message, now_s)
        self._bucket = self._bucket.within(self.held)
        self._arrived_s = now_s
        self.enforce()

    def look(self, drawn_w: Mapping[str, float]) -> None:
        """To be called some times a second with what each board draws."""
        now_s = self._clock()
        self._lapse(now_s)
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        self._bucket = self._bucket.after(self.held, sum(drawn_w.values()), passed_s)
        for uuid, watts in drawn_w.items():
            board = self._found.get(uuid)
            if board is None:
                continue
            limit_w = board.enforced_w
            self._wants[uuid] = wanted(self._wants.get(uuid), watts, limit_w, board.nameplate_w, now_s)
            if watts <= OVER_PART * limit_w + OVER_W:
                self._over.pop(uuid, None)
            elif now_s - self._over.setdefault(uuid, now_s) >= OVER_S:
                self._refusing[uuid] = now_s + CONFLICT_S
        self.enforce()

    def stand(self) -> None:
        """Falls to the standing cap, unless the boards were released: for the agent's end."""
        if self.held.state is not LeaseState.RELEASED:
            self.held = standing(self.held)
            self.enforce()

    def enforce(self) -> None:
        """Writes and reads back what is held now."""
        now_s = self._clock()
        self.held = at(self.held, now_s)
        self._read(now_s)
        if self.held.state is LeaseState.RELEASED:
            self._release()
            return
        targets = self._targets(now_s)
        self._write({u: w for u, w in targets.items() if self._found[u].set_w > w + NEAR_W / 2}, now_s)
        if all(self._found[uuid].set_w <= watts + NEAR_W for uuid, watts in targets.items()):
            self._write({u: w for u, w in targets.items() if self._may_rise(u, w)}, now_s)
            self._confirm()

    def report(self) -> LimitsReport:
        """What the agent says of it."""
        now_s = self._clock()
        held = at(self.held, now_s)
        leased = held.state is LeaseState.LEASED
        return LimitsReport(
            state=held.state,
            sequence=self._confirmed,
            lease_watts=held.watts if leased else None,
            remaining_s=round(held.until_clock_s - now_s, 3) if leased else None,
            actuation_s=self._actuation_s,
            free=leased and self._is_free,
            bucket_j=round(self._bucket.joules, 1) if leased and self.bursts else None,
            conflicts=tuple(sorted(uuid for uuid, until_s in self._conflicts.items() if until_s > now_s)),
        )

    @property
    def bursts(self) -> bool:
        """Whether the boards are to be looked at often, because a bucket can be empty soon."""
        return self.held.state is LeaseState.LEASED and self.held.burst_j > 0

    @property
    def _is_free(self) -> bool:
        return self.bursts and self._bucket.passes > 0

    def limit_w(self, uuid: str) -> float | None:
        """In force on the board, as last read back."""
        board = self._found.get(uuid)
        return board.enforced_w if board is not None else None

    def refuses(self, uuid: str) -> bool:
        """Whether the board takes no limit, or ignores it."""
        return uuid not in self._found or self._refusing.get(uuid, -math.inf) > self._clock()

    def _lapse(self, now_s: float) -> None:
        stood_s = now_s - self._looked_s
        if self.held.state is LeaseState.LEASED and stood_s > self._lapse_s:
            self.held = standing(self.held)
            self._wrote.clear()  # the guard may have written

    def _read(self, now_s: float) -> None:
        self._found = {board.uuid: board for board in self._boards.limits()}
        for uuid, board in self._found.items():
            wrote = self._wrote.get(uuid)
            if wrote is not None and abs(board.set_w - wrote) > NEAR_W:
                self._conflicts[uuid] = now_s + CONFLICT_S
                self._wrote[uuid] = board.set_w

    def _targets(self, now_s: float) -> dict[str, float]:
        """The limit of each board that takes one."""
        targets = {board.uuid: board.floor_w for board in self._found.values()}
        if self.held.state is LeaseState.LEASED:
            refusing = {u for u, until_s in self._refusing.items() if until_s > now_s and u in targets}
            left_w = self.held.boards_w - sum(self._found[uuid].nameplate_w for uuid in refusing)
            sharing = [self._board(board) for board in self._found.values() if board.uuid not in refusing]
            if self._split is None or self._split[0] != (left_w, sharing):
                self._split = (left_w, sharing), split(left_w, sharing)
            passes = self._bucket.passes if self._is_free else 0.0
            for uuid, watts in self._split[1].items():
                watts += passes * max(self._most_w(self._found[uuid]) - watts, 0.0)
                targets[uuid] = max(math.floor(watts + 1e-6), self._found[uuid].floor_w)
        return {u: w for u, w in targets.items() if not self._waits(u, now_s)}

    def _board(self, board: BoardLimit) -> Board:
        want = self._wants.get(board.uuid)
        want_w = want.watts if want is not None else board.nameplate_w
        return Board(board.uuid, board.floor_w, self._most_w(board), want_w)

    def _most_w(self, board: BoardLimit) -> float:
        """No lease raises above the default, nor above the cap of who holds the board."""
        return max(board.floor_w, min(self.held.part(board.uuid) * board.nameplate_w, board.default_w))

    def _waits(self, uuid: str, now_s: float) -> bool:
        """Whether the board has just refused a limit, and is not asked again yet."""
        return self._refusing.get(uuid, -math.inf) > now_s and uuid not in self._over

    def _may_rise(self, uuid: str, watts: float) -> bool:
        set_w = self._found[uuid].set_w
        calm = self._conflicts.get(uuid, -math.inf) <= self._clock()
        return calm and watts - set_w >= max(RAISE_W, RAISE_PART * set_w)

    def _write(self, limits: Mapping[str, float], now_s: float) -> None:
        """Writes these limits and reads all back."""
        if not limits:
            return
        for uuid, watts in limits.items():
            if watts > self._found[uuid].set_w and self._clock() - now_s > self._lapse_s:
                break  # this process stood still in between, and what it holds may have ended
            try:
                self._boards.set_limit(uuid, watts)
                self._wrote[uuid] = watts
            except LimitFailed:
                self._refusing[uuid] = now_s + RETRY_S
        self._found = {board.uuid: board for board in self._boards.limits()}
        for uuid, watts in limits.items():
            if uuid in self._found and self._found[uuid].set_w > watts + NEAR_W:
                self._refusing[uuid] = now_s + RETRY_S
                self._wrote.pop(uuid, None)

    def _release(self) -> None:
        """Puts the defaults back, except where somebody else has written a limit; then touches nothing."""
        if self._confirmed == self.held.sequence:
            return
        now_s = self._clock()
        defaults = {
            board.uuid: board.default_w
            for board in self._found.values()
            if self._conflicts.get(board.uuid, -math.inf) <= now_s
        }
        low = {u: watts for u, watts in defaults.items() if self._found[u].set_w < watts - NEAR_W}
        self._write({u: watts for u, watts in low.items() if not self._waits(u, now_s)}, now_s)
        if all(self._found[u].set_w >= watts - NEAR_W for u, watts in low.items()):
            self._wrote.clear()
            self._conflicts.clear()
            self._confirm()

    def _confirm(self) -> None:
        if self._confirmed != self.held.sequence and self._arrived_s is not None:
            self._actuation_s = round(self._clock() - self._arrived_s, 4)
        self._confirmed = self.held.sequence


__all__ = ["BoardLimit", "LeaseRefused", "LimitFailed", "LimitedBoards", "Limiter"]
