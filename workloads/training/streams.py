"""Ordered queues of copies and updates, and events between them: one interface, two implementations.

The optimizer is written once against `Stream` and `Event`. On a GPU they are CUDA streams and events. On a
CPU a stream that copies is a thread working through its queue, so that order, waiting and reuse of staging
slots are exercised by the same call sites; the stream that computes is the caller itself.

Rule that both sides share: an event is recorded on its stream *before* any other stream waits for it
(CUDA ignores a wait for an event that was never recorded).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Event(Protocol):
    def wait(self) -> object:
        """Block the host until the work before the event is done."""


class Stream(Protocol):
    def submit(self, work: Callable[[], object]) -> None:
        """Append `work` to the queue."""

    def record(self) -> Event:
        """An event that happens when everything submitted so far is done."""

    def wait(self, event: Event) -> None:
        """Let everything submitted from now on start only after `event`."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty; raises what any work raised."""

    def close(self) -> None:
        """Finish and release."""


class CallerStream:
    """The calling thread as a stream: work runs at once."""

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> Event:
        event = threading.Event()
        event.set()
        return event

    def wait(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        return


class WorkerStream:
    """A thread that works through its queue in order. The first failure is kept and raised to the caller."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def record(self) -> Event:
        event = threading.Event()
        self._queue.put(event.set)
        return event

    def wait(self, event: Event) -> None:
        self._queue.put(event.wait)

    def synchronize(self) -> None:
        self.record().wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        # After a failure later work is skipped, but events still fire, so that no thread waits for ever.
        while (work := self._queue.get()) is not None:
            if self._failure is not None and not _is_signal(work):
                continue
            try:
                work()
            except BaseException as failure:
                self._failure = failure


def _is_signal(work: Callable[[], object]) -> bool:
    return isinstance(getattr(work, "__self__", None), threading.Event)


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A CUDA stream; `work` is launched on it and returns at once."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True)
class Streams:
    """The three queues of an offloaded update. `compute` is where forward and backward run."""

    load: Stream  # host to device
    compute: Stream
    store: Stream  # device to host

    def close(self) -> None:
        for stream in (self.load, self.compute, self.store):
            stream.close()


def open_streams(device: torch.device) -> Streams:
    """Streams for `device`; they live for the whole run (fresh streams would grow allocator pools)."""
    if device.type == "cuda":
        return Streams(
            CudaStream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
            CudaStream(torch.cuda.current_stream(device)),
            CudaStream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        )
    return Streams(WorkerStream("load"), CallerStream(), WorkerStream("store"))


def enforce_device_limit(
    limit: int | None, total: int, set_fraction: Callable[[float], object] | None = None
) -> None:
    """Have torch refuse more device memory than `limit` of `total` bytes; None: no limit.

    What the driver itself takes (its context, cuBLAS workspaces of other libraries) is not counted by torch.
    """
    if limit is None or total <= 0:
        return
    setter = set_fraction or torch.cuda.set_per_process_memory_fraction
    setter(min(1.0, limit / total))


def make_repeatable(device: torch.device) -> None:
    """Have a GPU repeat its results bit for bit; a CPU does with a fixed number of threads.

    Strict, not `warn_only`: torch's attention kernels take their repeatable backward pass only then.
    """
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        filling: Any = torch.utils.deterministic
        filling.fill_uninitialized_memory = False  # nothing here reads what it did not write
