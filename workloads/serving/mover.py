"""Copies KV blocks between the device and host memory, in a thread and on a stream of their own, in order.

The host's slots have the layout of the pool's blocks, so that a block is one copy, and neighbours that go to neighbouring
slots are one copy together. On a GPU the slots are pinned. The engine's thread waits only where a step writes to a block
that is still being copied (`hosttier.py`). How long a block takes is measured with every copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from busbar.workloads.serving.hosttier import Move
from busbar.workloads.serving.kvcache import KvCache

REMEMBERED = 0.95
"""Weight of what was measured before, against a copy of one block."""
PROBED_BLOCKS = 8


class BlockMover:
    """The host's slots, and the thread that copies. Its methods are for the engine's thread."""

    def __init__(self, cache: KvCache, slots: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.slots = slots
        self.block_s = 0.0
        """Seconds to copy a block one way, as measured lately."""
        self._cache = cache
        self._clock = clock
        self._ready = threading.Condition()
        self._queue: deque[tuple[Sequence[Move], object]] = deque()
        self._done = 0
        self._failure: BaseException | None = None
        self._stop = False
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._host: tuple[torch.Tensor, ...] = ()
        self.allocate()
        self._probe()

    @property
    def done(self) -> int:
        """All copies up to this number are done."""
        with self._ready:
            self._check()
            return self._done

    @property
    def bytes(self) -> int:
        """Of host memory."""
        return sum(each.numel() * each.element_size() for each in self._host)

    def submit(self, moves: Sequence[Move]) -> None:
        """Starts copies, behind all earlier ones and behind what the device computes now."""
        if not moves:
            return
        event = None
        if self._cache.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._cache.device))
        with self._ready:
            self._check()
            self._queue.append((moves, event))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
                self._thread.start()
            self._ready.notify_all()

    def wait(self, number: int) -> None:
        """Returns when the copy with this number is done."""
        with self._ready:
            self._ready.wait_for(lambda: self._done >= number or self._failure is not None)
            self._check()

    def release(self) -> None:
        """Ends the thread behind its copies, and gives the memory back. What was copied is lost."""
        with self._ready:
            self._stop = True
            self._ready.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._host = None, ()

    def allocate(self) -> None:
        """The slots, at the start and after a `release`; numbers begin anew."""
        self._stop, self._done = False, 0
        pinned = self._cache.device.type == "cuda"
        self._host = tuple(
            torch.zeros((self.slots, *plane.shape[1:]), dtype=plane.dtype, pin_memory=pinned)
            for plane in self._cache.stored
        )

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("KV blocks could not be copied") from self._failure

    def _probe(self) -> None:
        """Copies zeros out and in, to know the rate before anything depends on it: the better of two goes."""
        count = min(PROBED_BLOCKS, self.slots, self._cache.blocks)
        there = [Move(0, 1 + i, i, out=True) for i in range(count)]
        took = []
        for _ in range(2):
            began = self._clock()
            self._copy(there, None)
            self._copy([Move(0, m.block, m.slot, out=False) for m in there], None)
            took.append(self._clock() - began)
        self.block_s = min(took) / (2 * count)

    # -- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._ready:
                    self._ready.wait_for(lambda: bool(self._queue) or self._stop)
                    if not self._queue:
                        return
                    moves, event = self._queue.popleft()
                for part in _runs(moves):
                    began = self._clock()
                    self._copy(part, event)
                    self._learn((self._clock() - began) / len(part), len(part))
                    with self._ready:
                        self._done = part[-1].number
                        self._ready.notify_all()
        except BaseException as error:
            with self._ready:
                self._failure = error
                self._ready.notify_all()

    def _copy(self, part: Sequence[Move], event: object) -> None:
        """A run of blocks: one copy for each plane."""
        block, slot, count = part[0].block, part[0].slot, len(part)
        if self._cache.device.type == "cuda":
            self._copy_on_gpu(part, event)
            return
        for plane, host in zip(self._cache.stored, self._host, strict=True):
            there, here = host[slot : slot + count], plane[block : block + count]
            target, source = (there, here) if part[0].out else (here, there)
            # numpy copies in this thread alone and without the interpreter's lock; torch would start threads of its own.
            target.view(torch.uint8).numpy()[...] = source.view(torch.uint8).numpy()

    def _copy_on_gpu(self, part: Sequence[Move], event: object) -> None:
        block, slot, count = part[0].block, part[0].slot, len(part)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._cache.device)  # type: ignore[no-untyped-call]
        stream = self._stream
        if isinstance(event, torch.cuda.Event):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for plane, host in zip(self._cache.stored, self._host, strict=True):
                there, here = host[slot : slot + count], plane[block : block + count]
                target, source = (there, here) if part[0].out else (here, there)
                target.copy_(source, non_blocking=True)
        stream.synchronize()

    def _learn(self, block_s: float, count: int) -> None:
        weight = 1 - REMEMBERED**count
        self.block_s += weight * (block_s - self.block_s)


def _runs(moves: Sequence[Move]) -> list[list[Move]]:
    """Moves in order, those together that are one copy: block and slot each the next one."""
    runs: list[list[Move]] = []
    for move in moves:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.out, last.block + 1, last.slot + 1) == (
            move.out,
            move.block,
            move.slot,
        ):
            runs[-1].append(move)
        else:
            runs.append([move])
    return runs
