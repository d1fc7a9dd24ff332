"""The tokens of a run in a file that grows while the run trains on its beginning.

    making     a thread packs documents and appends their tokens; every few seconds they are made durable, and with them the
               place at which the stream stands (`facts.json`)
    reading    training asks for the sequences of a step, and waits until they are there

A run that was killed goes on from the last durable place: what the file has behind it is cut off. Rank 0 of a gang makes
the tokens, and tells the others how many of them it has seen at each place at which they ask, so that all of them see the same.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from busbar.workloads.training.durable import fsync, replace_text
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.packing import START, Place, Tokens

TOKENS, FACTS = "tokens.bin", "facts.json"  # uint32, little-endian
DURABLE_EVERY_S = 5.0  # what a kill loses of the work, at most
POLL_S = 0.1
STOP_S = 30.0  # for the piece that is being tokenized, and the disk


@dataclass
class BadRows:
    """The rows that were left out of what was read for training."""

    count: int = 0
    first: str = ""  # of them: why

    def add(self, refusal: InvalidJob) -> None:
        self.count += 1
        self.first = self.first or refusal.problem


@dataclass(frozen=True)
class Facts:
    """What is durable of a stream."""

    key: str  # of all that decides its tokens
    tokenizer_crc32: int
    place: Place = START
    crc32: int = 0  # of the tokens up to `place`
    over: bool = False  # nothing follows
    bad: BadRows = field(default_factory=BadRows)

    @property
    def tokens(self) -> int:
        return self.place.kept

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        replace_text(folder / FACTS, json.dumps(asdict(self)))


def read_facts(folder: Path) -> Facts:
    """Raises OSError, and ValueError where they, or the tokens, are not whole."""
    try:
        found: dict[str, Any] = json.loads((folder / FACTS).read_text())
        place = Place(**{**found["place"], "rest": tuple(found["place"]["rest"])})
        facts = Facts(**{**found, "place": place, "bad": BadRows(**found["bad"])})
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{folder / FACTS} is of another version") from problem
    if _crc32(folder / TOKENS, facts.tokens * 4) != facts.crc32:
        raise ValueError(f"{folder / TOKENS} is damaged")
    return facts


class Source(Protocol):
    """Where tokens come from."""

    def until(self, tokens: int) -> tuple[int, bool]:
        """Wait until so many are in the file, or all there will ever be; returns how many are, and whether these are all."""

    def close(self) -> None:
        """Nothing is asked any more."""


class Maker:
    """Makes what is missing of a stream, in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        bad: BadRows,
        parts: Iterator[tuple[Tokens, Place | None]],
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            facts: what is there already; it may be all.
            bad: counts the rows that `parts` leaves out.
            parts: the tokens behind that.
            confirm: raises where this process may no longer write to `folder`.
        """
        self._confirm = confirm
        self._folder, self._facts, self._bad, self._parts = folder, facts, bad, parts
        self._changed = threading.Condition()
        self._there, self._over = facts.tokens, facts.over
        self._problem: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokens", daemon=True)
        if not facts.over:
            self._thread.start()

    def until(self, tokens: int, waiting: Callable[[int], object] = lambda there: None) -> tuple[int, bool]:
        """As of `Source`; `waiting` is told how many are there, and may raise. Raises what has kept them from being made."""
        with self._changed:
            while self._there < tokens and not self._over and self._problem is None:
                waiting(self._there)
                self._changed.wait(POLL_S)
            if self._problem is not None:
                raise self._problem
            return self._there, self._over

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            self._make()
        except BaseException as problem:
            with self._changed:
                self._problem = problem
                self._changed.notify_all()

    def _make(self) -> None:
        facts, last = self._facts, time.monotonic()
        crc, there = facts.crc32, facts.tokens
        with (self._folder / TOKENS).open("r+b") as file:
            file.truncate(there * 4)
            file.seek(there * 4)
            for tokens, place in self._parts:
                file.write(tokens.data)
                file.flush()
                crc, there = zlib.crc32(tokens.data, crc), there + tokens.size
                self._tell(there)
                stops = self._stopping.is_set()
                if place is not None and (stops or time.monotonic() - last > DURABLE_EVERY_S):
                    facts = replace(facts, place=place, crc32=crc, bad=replace(self._bad))
                    self._keep(facts)
                    last = time.monotonic()
                if stops:
                    return
        whole = replace(facts.place, kept=there, rest=())
        self._keep(replace(facts, place=whole, crc32=crc, over=True, bad=replace(self._bad)))
        self._tell(there, over=True)

    def _keep(self, facts: Facts) -> None:
        self._confirm()
        fsync(self._folder / TOKENS)
        facts.write(self._folder)

    def _tell(self, there: int, *, over: bool = False) -> None:
        with self._changed:
            self._there, self._over = there, over
            self._changed.notify_all()


class Peers(Protocol):
    """The other ranks of a gang."""

    def tell(self, name: str, value: str = "") -> None:
        """Rank 0 says something to the others."""

    def hear(self, *names: str) -> tuple[str, str]:
        """The others: under which of these names rank 0 says something first, and what."""


_ALL = "tokens/all"


class Announced:
    """The tokens of rank 0, of which the other ranks are told."""

    def __init__(self, folder: Path, own: Source, peers: Peers) -> None:
        self._folder, self._own, self._peers = folder, own, peers

    def until(self, tokens: int) -> tuple[int, bool]:
        there, over = self._own.until(tokens)
        fsync(self._folder / TOKENS)  # before which another node need not see them
        self._peers.tell(_ALL if over else f"tokens/{tokens}", str(there))
        return there, over

    def close(self) -> None:
        self._own.close()


class Followed:
    """The same on another rank."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def until(self, tokens: int) -> tuple[int, bool]:
        name, there = self._peers.hear(_ALL, f"tokens/{tokens}")
        return int(there), name == _ALL

    def close(self) -> None:
        return


class Rows:
    """The sequences that a source has, as a view of the file: pages that are not in use cost no memory."""

    def __init__(self, path: Path, source: Source, length: int) -> None:
        self._path, self._source, self._length = path, source, length
        self._rows: Tokens = np.empty((0, length), np.uint32)
        self.over = False

    def __call__(self, count: int) -> Tokens:
        if len(self._rows) < count and not self.over:
            there, self.over = self._source.until(count * self._length)
            if whole := there // self._length:
                size = whole * self._length
                mapped = np.memmap(self._path, dtype=np.uint32, mode="r", shape=(size,))
                self._rows = mapped.reshape(whole, self._length)
        return self._rows


def _crc32(path: Path, size: int) -> int:
    """Of the first `size` bytes. Raises ValueError where there are fewer."""
    crc = 0
    with path.open("rb") as file:
        while size and (data := file.read(min(size, 2**20))):
            crc, size = zlib.crc32(data, crc), size - len(data)
    if size:
        raise ValueError(f"{path} is cut off")
    return crc
