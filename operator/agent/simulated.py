"""Boards and hosts that do not exist: their watts are invented, and every report says so.

Each board goes through phases of a minute, drawn from a seed: idle, decode, prefill or training. What it draws depends
on the seed, its name and the time alone, not on the pods of the node. Shares of the nameplate are those of an A100 of
400 W: idle 63 W, decode 210 W, prefill and training 400 W.

A board takes limits and draws no more than its limit. Limits are kept in memory, or in a folder: then they stay when the
process ends, as they stay in a real board, and its guard reaches them too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from busbar.kube.contracts.power import Backend

from .limits import BoardLimit
from .meters import HOST, Sample

PHASE_S = 60.0
SHARES = {"idle": 0.1575, "decode": 0.525, "prefill": 1.0, "training": 1.0}
NOISE = 0.02
UUID_PREFIX = "SIMULATED-"


@dataclass(frozen=True)
class SimulatedBoards:
    """The boards of one node."""

    node: str
    boards: int = 8
    nameplate_w: float = 400.0
    floor_w: float = 100.0
    seed: int = 0
    backend: Backend = Backend.SIMULATED
    written: MutableMapping[str, float] = field(default_factory=dict)
    """The limits that were set, by uuid."""

    def sample(self, clock_s: float) -> Sequence[Sample]:
        return [self._board(i, clock_s) for i in range(self.boards)]

    def limits(self) -> Sequence[BoardLimit]:
        return [self._limit(self._uuid(i)) for i in range(self.boards)]

    def set_limit(self, uuid: str, watts: float) -> None:
        self.written[uuid] = watts

    def _limit(self, uuid: str) -> BoardLimit:
        limit_w = self.written.get(uuid, self.nameplate_w)
        return BoardLimit(uuid, self.floor_w, self.nameplate_w, self.nameplate_w, limit_w, limit_w)

    def _uuid(self, index: int) -> str:
        return f"{UUID_PREFIX}{self.node}-{index}"

    def _board(self, index: int, clock_s: float) -> Sample:
        name = self._uuid(index)
        # All boards of a node are in one phase: a gang's are.
        phase = list(SHARES)[int(_random(self.seed, self.node, int(clock_s // PHASE_S)) * len(SHARES))]
        noise = 1 + NOISE * (2 * _random(self.seed, name, int(clock_s)) - 1)
        most_w = min(self.nameplate_w, self.written.get(name, self.nameplate_w))
        watts = min(most_w, SHARES[phase] * self.nameplate_w * noise)
        return Sample(name, self.floor_w, self.nameplate_w, watts)


class FolderLimits(MutableMapping[str, float]):
    """Limits in files of a folder, one for each board."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, uuid: str) -> float:
        try:
            return float((self._folder / uuid).read_text())
        except FileNotFoundError as error:
            raise KeyError(uuid) from error

    def __setitem__(self, uuid: str, watts: float) -> None:
        new = self._folder / f".{uuid}"
        new.write_text(str(watts))
        new.replace(self._folder / uuid)

    def __delitem__(self, uuid: str) -> None:
        (self._folder / uuid).unlink()

    def __iter__(self) -> Iterator[str]:
        return (file.name for file in self._folder.iterdir() if not file.name.startswith("."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class SimulatedHost:
    """Everything of a node but its boards, with a constant draw."""

    watts: float = 1750.0
    backend: Backend = Backend.SIMULATED

    def sample(self, clock_s: float) -> Sequence[Sample]:
        return [Sample(HOST, self.watts, self.watts, self.watts)]


def _random(seed: int, name: str, step: int) -> float:
    """0 to 1 (exclusive), the same for the same arguments in every process."""
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest) / 2**56
