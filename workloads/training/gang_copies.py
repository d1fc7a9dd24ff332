"""Copies of a gang's state in the memory of its pods, with parity: what a lost pod held is computed from the others'.

Each rank copies its own part, as one process does (see `memory_copy`), and holds parities of the others' (see `parity`).
A slot of a rank is whole when its manifest is, which all ranks write once all of them have the whole copy; the manifest is
the same on all ranks, so that a pod without any gets it from another. A copy counts where no more ranks lack it than
there are parities: their parts are rebuilt before the run goes on, and compared with the checksums from the time of the
copy.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from busbar.workloads.machine.checksum import crc32
from busbar.workloads.training.checkpoint import write_document
from busbar.workloads.training.demand import PARITY_PIECE_BYTES
from busbar.workloads.training.errors import CheckpointError, NotFinite
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.loaded import Loaded, document, read_part
from busbar.workloads.training.memory_copy import MemoryCopies, Slot, passed_over
from busbar.workloads.training.parity import Stripes, multiply
from busbar.workloads.training.state_file import Blocks, write_state

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Copy = tuple[int, str]  # its step, and in which session of the gang it was made
Manifest = Mapping[str, Any]


class Peers(Protocol):
    """The ranks of the gang, for one thread."""

    rank: int

    def gather(self, thing: T) -> list[T]:
        """What each rank brings."""

    def send(self, data: torch.Tensor, to: int) -> None: ...

    def receive(self, data: torch.Tensor, source: int) -> None: ...

    def exchange(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> None:
        """Both at the same time."""


class GangCopies:
    """The slots of this rank, and what all ranks do with theirs together: each calls the same methods in the same order."""

    def __init__(self, own: MemoryCopies, stripes: Stripes, peers: Peers, session: str) -> None:
        """`session` names this start of the gang, on all ranks alike."""
        self._own, self._stripes, self._peers, self._session = own, stripes, peers, session
        rooms = 2 + stripes.parity  # `copy_bytes` counts them
        self._pieces = [np.zeros(PARITY_PIECE_BYTES, dtype=np.uint8) for _ in range(rooms)]

    @property
    def step(self) -> int | None:
        """Of the newest whole copy of this rank."""
        return self._own.step

    def write(self, step: int, layout: Layout, blocks: Blocks, facts: Mapping[str, Any]) -> int:
        """Copy the state of `step` on all ranks; returns this rank's bytes. Raises CheckpointError, and RuntimeError when a
        rank is lost."""
        slot = self._own.spare()
        said, failure = self._write_own(slot, step, layout, blocks)
        parts = self._agreed(step, said, failure)
        chunk = self._stripes.chunk_bytes(max(part["size"] for part in parts))
        checksums, failure = self._write_parities(slot, chunk)
        every = self._agreed(
            step, {"parities": checksums, "facts": facts if self._peers.rank == 0 else None}, failure
        )
        ranks = [{**part, "parities": said["parities"]} for part, said in zip(parts, every, strict=True)]
        body = {**every[0]["facts"], "step": step, "session": self._session, "chunk": chunk, "ranks": ranks}
        write_document(slot.manifest, body)
        return layout.size

    def remove_old(self, written: int) -> None:
        """Nothing: the next copy takes the slot of the older one."""

    def _write_own(
        self, slot: Slot, step: int, layout: Layout, blocks: Blocks
    ) -> tuple[dict[str, Any], Exception | None]:
        """What this rank has copied, and what failed."""
        try:
            slot.empty()  # before its state changes
            checksums = write_state(slot.state, step, layout, blocks)
        except (OSError, CheckpointError) as problem:
            return {}, problem
        extents = {name: (extent.start, extent.whole) for name, extent in layout.extents.items()}
        size = slot.state.stat().st_size
        return {"size": size, "tensors": checksums, "extents": extents}, None

    def _agreed(self, step: int, said: dict[str, Any], failure: Exception | None) -> list[dict[str, Any]]:
        """What each rank says. Raises CheckpointError on all of them where one has failed."""
        if failure is not None:
            said = {"problem": str(failure), "diverged": isinstance(failure, NotFinite)}
        every = self._peers.gather(said)
        for rank, each in enumerate(every):
            if "problem" in each:
                kind = NotFinite if each["diverged"] else CheckpointError
                raise kind(
                    f"the state after step {step} could not be copied to memory: rank {rank}: {each['problem']}"
                ) from failure
        return every

    def _write_parities(self, slot: Slot, chunk: int) -> tuple[list[int], Exception | None]:
        """Add up this rank's parities of the others' chunks; returns their checksums, and what failed.

        A rank whose memory fails still answers the others, who would wait for it.
        """
        rank, stripes = self._peers.rank, self._stripes
        sent, received, *sums = self._pieces
        checksums, failure = [0] * stripes.parity, None
        os.truncate(slot.state, stripes.chunks * chunk)
        with _Parts(slot, stripes, chunk) as parts:
            for start, size in _pieces_of(chunk):
                for row in range(stripes.parity):
                    sums[row][:size] = 0
                for offset, number, row in stripes.sent():
                    parts.read(stripes.parity + number, start, sent[:size])
                    to, source = (rank + offset) % stripes.ranks, (rank - offset) % stripes.ranks
                    self._peers.exchange(_tensor(sent[:size]), to, _tensor(received[:size]), source)
                    add_times(sums[row][:size], received[:size], stripes.generator[row][number])
                for row in range(stripes.parity):
                    checksums[row] = crc32(sums[row][:size].data, checksums[row])
                    try:
                        parts.write(row, start, sums[row][:size])
                    except OSError as problem:
                        failure = problem
        return checksums, failure

    def newest(self) -> tuple[Loaded | None, list[str]]:
        """The newest copy that can be had, on all ranks alike, verified byte by byte; and what was passed over or rebuilt.

        Raises RuntimeError when a rank is lost.
        """
        own, notes = self._whole_slots()
        while True:
            offers = Counter(offer for each in self._peers.gather(sorted(own)) for offer in each)
            enough = [offer for offer, ranks in offers.items() if ranks >= self._stripes.chunks]
            if not enough:
                for slot in own.values():
                    slot.empty()
                return None, notes
            best = max(enough)
            for other in [offer for offer in own if offer != best and offer[0] >= best[0]]:
                own.pop(other).empty()  # no rank must go on with it
            loaded = self._recover(best, own, notes)
            if loaded is not None:
                return loaded, notes

    def _whole_slots(self) -> tuple[dict[Copy, Slot], list[str]]:
        """The slots of this rank, by step and copy, that hold what their manifests say; others are emptied."""
        found, notes = {}, []
        for slot in self._own.slots:
            if slot.step is None:
                continue
            try:
                body = document(slot.manifest)
                self._verify(slot, body)
                found[int(body["step"]), str(body["session"])] = slot
            except (CheckpointError, OSError) as problem:
                notes.append(passed_over(problem))
                slot.empty()
        return found, notes

    def _verify(self, slot: Slot, body: Manifest) -> None:
        """Compare each byte of this rank's part with the manifest. Raises CheckpointError."""
        mine = body["ranks"][self._peers.rank]
        read_part(_name(body), body, slot.state, mine)
        with _Parts(slot, self._stripes, body["chunk"]) as parts:
            for row, wanted in enumerate(mine["parities"]):
                found = 0
                for start, size in _pieces_of(body["chunk"]):
                    parts.read(row, start, self._pieces[0][:size])
                    found = crc32(self._pieces[0][:size].data, found)
                if found != wanted:
                    raise CheckpointError(f"{_name(body)}: parity {row} does not match its checksum")

    def _recover(self, copy: Copy, own: dict[Copy, Slot], notes: list[str]) -> Loaded | None:
        """The copy on all ranks, after those that lack it have it again; None: what was rebuilt is wrong."""
        has = self._peers.gather(copy in own)
        lost = [rank for rank, there in enumerate(has) if not there]
        if lost:
            failures = self._replace(copy, own, has.index(True), lost)
            if failures:
                notes.append(passed_over("; ".join(failures)))
                own.pop(copy).empty()
                return None
            notes.append(
                f"the copy of step {copy[0]} in memory was rebuilt for {_ranks(lost)} from the others'"
            )
        slot, body = own[copy], document(own[copy].manifest)
        loaded = read_part(_name(body), body, slot.state, body["ranks"][self._peers.rank], verified=True)
        return replace(loaded, others=self._random_states(loaded))

    def _replace(self, copy: Copy, own: dict[Copy, Slot], source: int, lost: Sequence[int]) -> list[str]:
        """Have `lost` rebuild the copy, of which `source` has the manifest; returns what is wrong with it then."""
        rank = self._peers.rank
        body = self._peers.gather(document(own[copy].manifest) if rank == source else None)[source]
        assert body is not None
        if rank in lost:
            own[copy] = self._own.spare()
        self._rebuild(own[copy], body["chunk"], lost)
        problem = ""
        if rank in lost:
            try:
                self._verify(own[copy], body)
                write_document(own[copy].manifest, body)
            except (CheckpointError, OSError) as failure:
                problem = f"rank {rank}: {failure}"
        return [each for each in self._peers.gather(problem) if each]

    def _random_states(self, loaded: Loaded) -> dict[str, torch.Tensor]:
        """Those of rank 0, whose file alone has them."""
        return self._peers.gather(
            {name: loaded.tensor(name) for name in sorted(loaded.names) if name.startswith("rng/")}
        )[0]

    def _rebuild(self, slot: Slot, chunk: int, lost: Sequence[int]) -> None:
        """Give each rank of `lost` its parts of all stripes again; `slot` is where this rank has the copy, or will."""
        stripes = self._stripes
        if self._peers.rank in lost:
            slot.empty()
            os.truncate(slot.state, stripes.chunks * chunk)
            os.truncate(slot.parity, stripes.parity * chunk)
        helpers = [rank for rank in range(stripes.ranks) if rank not in lost]
        with _Parts(slot, stripes, chunk) as parts:
            for rank in lost:
                for stripe in range(stripes.ranks):
                    turn = stripe % len(helpers)  # so that all of them help alike
                    some = [*helpers[turn:], *helpers[:turn]][: stripes.chunks]
                    self._rebuild_part(parts, rank, stripe, some)

    def _rebuild_part(self, parts: _Parts, lost: int, stripe: int, helpers: Sequence[int]) -> None:
        stripes, rank = self._stripes, self._peers.rank
        wanted = stripes.part(lost, stripe)
        known = [stripes.part(helper, stripe) for helper in helpers]
        weights = dict(zip(helpers, stripes.weights(wanted, known), strict=True))
        helping = {helper: weight for helper, weight in weights.items() if weight}
        sent, total = self._pieces[:2]
        for start, size in _pieces_of(parts.chunk):
            if rank in helping:
                parts.read(stripes.part(rank, stripe), start, sent[:size])
                self._peers.send(_tensor(sent[:size]), lost)
            if rank == lost:
                total[:size] = 0
                for helper, weight in helping.items():
                    self._peers.receive(_tensor(sent[:size]), helper)
                    add_times(total[:size], sent[:size], weight)
                parts.write(wanted, start, total[:size])


class _Parts:
    """A rank's parts of the stripes, in the two files of a slot: parities, then chunks of its state."""

    def __init__(self, slot: Slot, stripes: Stripes, chunk: int) -> None:
        self.chunk, self._parity = chunk, stripes.parity
        self._files = [os.open(path, os.O_RDWR) for path in (slot.parity, slot.state)]

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def read(self, part: int, start: int, data: Bytes) -> None:
        """Bytes of a part from `start` on. Raises CheckpointError if there are fewer."""
        file, offset = self._place(part)
        if os.preadv(file, [data.data], offset + start) < data.size:
            raise CheckpointError("a copy in memory ends early")

    def write(self, part: int, start: int, data: Bytes) -> None:
        file, offset = self._place(part)
        os.pwritev(file, [data.data], offset + start)

    def _place(self, part: int) -> tuple[int, int]:
        if part < self._parity:
            return self._files[0], part * self.chunk
        return self._files[1], (part - self._parity) * self.chunk


def _pieces_of(chunk: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of each piece."""
    for start in range(0, chunk, PARITY_PIECE_BYTES):
        yield start, min(PARITY_PIECE_BYTES, chunk - start)


def add_times(target: Bytes, source: Bytes, factor: int) -> None:
    """`target` += `factor` * `source` in the field of `parity`; both have an even number of bytes."""
    pairs = source.view(np.uint16)
    if factor != 1:
        pairs = np.take(_products(factor), pairs, mode="clip")
    np.bitwise_xor(target.view(np.uint16), pairs, out=target.view(np.uint16))


@cache
def _products(factor: int) -> npt.NDArray[np.uint16]:
    """`factor` times each pair of bytes: a table of pairs is twice as fast as one of bytes."""
    single = np.array([multiply(factor, element) for element in range(256)], dtype=np.uint16)
    products: npt.NDArray[np.uint16] = np.add.outer(single * np.uint16(256), single).reshape(-1)
    return products


def _name(body: Manifest) -> str:
    return f"the copy of step {body['step']} in memory"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _tensor(data: Bytes) -> torch.Tensor:
    return torch.from_numpy(data)
