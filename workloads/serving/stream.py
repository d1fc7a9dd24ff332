"""Layers that are read into slots while others compute, because the memory does not hold all of them.

    source (file, or host memory) ── reading thread ──► slot 0 ─┐
                                                        slot 1 ─┴─► the decoder's pass over the layers

The decoder asks for one layer after the other. When it asks for the next one, the slot of the one before is free, and the
layer whose turn it is is read into it; behind the last layer comes the first one of the next step. Reads are in order, in
a thread of their own. On a GPU a slot is device memory: a layer goes from pinned host memory to it on a stream of its own,
read from a file first where host memory does not hold the layers either. With one slot nothing is read ahead.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

import torch

from busbar.workloads.machine.direct_file import page_memory
from busbar.workloads.machine.streams import CallerStream, CudaStream, Event, Stream, WorkerStream
from busbar.workloads.serving.layer_file import LayerFile, LayerLayout
from busbar.workloads.serving.linear import Move
from busbar.workloads.serving.weights import Layer

log = logging.getLogger(__name__)
SLOW = 0.5
"""Part of the rate at the start under which reading is reported as slow."""
PROBES = 4
"""Reads of each slot's layer, from which the rate at the start is taken."""
WINDOW_S = 2.0
"""Seconds of reading over which the rate is taken: single reads vary."""


def host_record(size: int, pin: bool) -> torch.Tensor:
    """uint8 [size] that begins at a page; pinned, so that a GPU reads it without a detour, where asked for."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True) if pin else page_memory(size)


def records(memory: torch.Tensor, size: int) -> list[torch.Tensor]:
    """uint8 [n * size] as n records on the same memory."""
    return list(memory.view(-1, size))


class Source(Protocol):
    """Where layers come from."""

    name: str
    """`disk` or `host memory`."""

    needs_staging: bool
    """Whether it has to be given host memory, which begins at a page."""

    def fetch(self, index: int, staging: torch.Tensor | None) -> torch.Tensor:
        """The layer's record on the host: in `staging`, or where it lies already."""
        ...

    def close(self) -> None: ...


class FileSource:
    """Direct reads from a `LayerFile`."""

    name, needs_staging = "disk", True

    def __init__(self, file: LayerFile) -> None:
        self._file = file

    def fetch(self, index: int, staging: torch.Tensor | None) -> torch.Tensor:
        assert staging is not None
        self._file.read(index, staging)
        return staging

    def close(self) -> None:
        self._file.close()


class HostSource:
    """Records in host memory, which is pinned for a GPU."""

    name, needs_staging = "host memory", False

    def __init__(self, records: Mapping[int, torch.Tensor]) -> None:
        self._records = records

    def fetch(self, index: int, staging: torch.Tensor | None) -> torch.Tensor:
        return self._records[index]

    def close(self) -> None:
        self._records = {}


@dataclass
class _Slot:
    memory: torch.Tensor
    """uint8 on the device that computes."""
    staging: torch.Tensor | None
    """uint8 on the host, where a file is read into; on a CPU `memory` itself."""
    layer: Layer
    fetched: Event | None = None


@dataclass
class Rate:
    """How fast layers are read."""

    probed: float = 0.0
    """Bytes per second, at the start."""
    lately: float = 0.0
    """In the last passes, together of WINDOW_S at least."""
    waited_s: float = 0.0
    """The decoder, for layers, since the start."""
    slow: bool = False
    _reads: deque[tuple[int, float]] = field(default_factory=deque)
    """(bytes, seconds) of each read in the present window; the reading thread appends."""

    def add(self, size: int, seconds: float) -> None:
        self._reads.append((size, seconds))

    def take(self, least_s: float) -> float | None:
        """Bytes per second of the window, which ends with that; None where it is shorter than so many seconds."""
        reads = list(self._reads)
        seconds = sum(spent for _, spent in reads)
        if not seconds or seconds < least_s:
            return None
        for _ in reads:
            self._reads.popleft()
        return sum(size for size, _ in reads) / seconds

    def end_pass(self, name: str) -> None:
        """Logs once when reading becomes slow, and once when it is as fast as before."""
        rate = self.take(WINDOW_S)
        if rate is None:
            return
        self.lately = rate
        slow = self.lately < SLOW * self.probed
        if slow is not self.slow:
            self.slow = slow
            tell = log.warning if slow else log.info
            tell(
                "layers come from %s at %.0f MB/s, %s %.0f %% of the %.0f MB/s at the start",
                name,
                self.lately / 1e6,
                "under" if slow else "again above",
                100 * SLOW,
                self.probed / 1e6,
            )


@dataclass
class Link:
    """Queues of work beside the decoder: `reading` on the host, `loading` to the device (None where the device is the host)."""

    reading: Stream
    loading: Stream | None
    computing: Callable[[], Stream]

    @classmethod
    def of(cls, device: torch.device) -> Link:
        if device.type != "cuda":
            return cls(WorkerStream("layers"), None, CallerStream)
        loading = CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return cls(WorkerStream("layers"), loading, lambda: CudaStream(torch.cuda.current_stream(device)))

    def close(self) -> None:
        self.reading.close()
        if self.loading is not None:
            self.loading.close()


class StreamedLayers:
    """`weights.Layers` of which some stay in memory. Its methods are for the engine's thread."""

    def __init__(
        self,
        resident: Mapping[int, Layer],
        streamed: Sequence[int],
        source: Source,
        layout: LayerLayout,
        slots: int,
        device: torch.device,
        link: Callable[[torch.device], Link] = Link.of,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`streamed` are the layers that do not stay, not empty, in order."""
        self.rate = Rate()
        self._resident, self._streamed = resident, tuple(streamed)
        self.source = source
        self._layout, self._count, self._device = layout, min(slots, len(streamed)), device
        self._open, self._clock = link, clock
        self._link: Link | None = None
        self._pending: deque[tuple[int, _Slot]] = deque()
        """Layers that are in their slots, or on their way there, in order."""
        self._next = cycle(self._streamed)
        self.bytes = len(self) * layout.matrix_bytes

    def __len__(self) -> int:
        return len(self._resident) + len(self._streamed)

    def __iter__(self) -> Iterator[Layer]:
        self._begin()
        for index in range(len(self)):
            if index in self._resident:
                yield self._resident[index]
                continue
            self._wait(index)
            _, slot = self._pending.popleft()
            yield slot.layer
            self._order(slot)
        self.rate.end_pass(self.source.name)

    def moved(self, move: Move) -> StreamedLayers:
        self._resident = {index: layer.moved(move) for index, layer in self._resident.items()}
        return self

    @property
    def is_open(self) -> bool:
        """Whether slots are held."""
        return self._link is not None

    def rest(self) -> None:
        """Ends the thread behind its reads, and drops the slots."""
        if self._link is not None:
            self._link.close()
        self._link = None
        self._pending.clear()

    def close(self) -> None:
        self.rest()
        self.source.close()

    def probe(self) -> Layer:
        """Measures the rate before anything depends on it. The first layer that is streamed, until the next pass."""
        self._begin()
        self._wait_for_all()  # the first time, checksums are compared and the slots' pages are made
        self.rate.take(0.0)
        for _ in range(PROBES):
            for index, slot in self._pending:
                self._submit(slot, index)
        self._wait_for_all()
        self.rate.probed = self.rate.lately = self.rate.take(0.0) or 0.0
        return self._pending[0][1].layer

    @torch.inference_mode(False)  # another thread writes to what is made here
    def _begin(self) -> None:
        """Takes slots, and starts to read, where that has not been done, or a pass has ended by an error."""
        whole = self._link is not None and len(self._pending) == self._count
        if whole and self._pending[0][0] == self._streamed[0]:
            return
        self.rest()
        self._link, self._next = self._open(self._device), cycle(self._streamed)
        for _ in range(self._count):
            self._order(self._slot(self._link))

    def _slot(self, link: Link) -> _Slot:
        size, pin = self._layout.size, self._device.type == "cuda"
        staging = None
        if self.source.needs_staging:
            staging = host_record(size, pin)
        if link.loading is None and staging is not None:
            memory = staging
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return _Slot(memory, staging, self._layout.layer(memory))

    def _order(self, slot: _Slot) -> None:
        """Reads the next layer in turn into a slot, behind what the device computes now."""
        index = next(self._next)
        self._submit(slot, index)
        self._pending.append((index, slot))

    def _submit(self, slot: _Slot, index: int) -> None:
        link = self._link
        assert link is not None
        free = link.computing().record()

        def fetch() -> None:
            free.wait()  # not part of the time that reading takes
            began = self._clock()
            record = self.source.fetch(index, slot.staging)
            if record is not slot.memory:
                if link.loading is None:
                    slot.memory.copy_(record)
                else:
                    link.loading.copy(slot.memory, record)
                    link.loading.synchronize()
            self.rate.add(self._layout.size, self._clock() - began)

        link.reading.submit(fetch)
        slot.fetched = link.reading.record()

    def _wait_for_all(self) -> None:
        for index, _ in self._pending:
            self._wait(index)

    def _wait(self, index: int) -> None:
        """Until the layer is there. Raises what its reading raised."""
        slot = next(slot for found, slot in self._pending if found == index)
        assert slot.fetched is not None
        began = self._clock()
        slot.fetched.wait()
        self.rate.waited_s += self._clock() - began
