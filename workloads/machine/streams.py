"""Ordered queues of copies and updates, and events between them: one interface, two implementations.

The optimizer is written once against `Stream` and `Event`. On a GPU they are CUDA streams and events. On a
CPU a stream is a thread working through its queue, so that order, waiting and reuse of staging slots are exercised by
the same call sites; the stream in which forward and backward run is the caller itself.

Rule that both sides share: an event is recorded on its stream *before* any other stream waits for it
(CUDA ignores a wait for an event that was never recorded). On a CPU whoever waits for an event of a stream whose work
failed gets that failure, so that nothing goes on with what was not computed.
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
        """Block the host until the work before the event is done; on a CPU raises what that work raised."""

    def is_set(self) -> bool:
        """Whether it is done."""


class Stream(Protocol):
    def submit(self, work: Callable[[], object]) -> None:
        """Append `work` to the queue."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Append a copy between host and device."""

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

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

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

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.submit(lambda: target.copy_(source))

    def record(self) -> Event:
        event = _WorkerEvent(self)
        self._queue.put(event.happen)
        return event

    def wait(self, event: Event) -> None:
        self._queue.put(event.wait)

    def synchronize(self) -> None:
        self.record().wait()

    def raise_failure(self) -> None:
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
                self._failure = self._failure or failure


class _WorkerEvent:
    """Happens when the thread of `stream` gets there; a failure of what came before is raised to who waits."""

    def __init__(self, stream: WorkerStream) -> None:
        self._stream, self._happened = stream, threading.Event()

    def happen(self) -> None:
        self._happened.set()

    def wait(self) -> None:
        self._happened.wait()
        self._stream.raise_failure()

    def is_set(self) -> bool:
        return self._happened.is_set()


def _is_signal(work: Callable[[], object]) -> bool:
    return isinstance(getattr(work, "__self__", None), _WorkerEvent)


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def is_set(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A CUDA stream; `work` is launched on it and returns at once."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.submit(lambda: target.copy_(source, non_blocking=True))

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
    """The queues of a step. `compute` is where forward and backward run."""

    load: Stream  # host to device
    compute: Stream
    update: Stream  # the same as `compute` where nothing shall run beside the next forward pass
    store: Stream  # device to host

    def close(self) -> None:
        for stream in (self.load, self.update, self.store, self.compute):
            stream.close()


class DeviceWorker(WorkerStream):
    """A thread with a CUDA stream of its own, which waits for what it has launched: for updates on the host, and for
    copies between device and host that it does something with."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        super().__init__(name)

    def submit(self, work: Callable[[], object]) -> None:
        def launched() -> None:
            with torch.cuda.stream(self._stream):
                work()
            self._stream.synchronize()

        super().submit(launched)


def open_streams(device: torch.device, *, gated: bool, on_host: bool = False) -> Streams:
    """Streams for `device`; they live for the whole run (fresh streams would grow allocator pools).

    Args:
        gated: updates run beside the next forward pass (see `pipeline`), so they have a stream of their own.
        on_host: the updates run on the host (see `block_slots`).
    """
    if device.type == "cuda" and on_host:
        compute = CudaStream(torch.cuda.current_stream(device))
        update = WorkerStream("update") if gated else CallerStream()
        return Streams(DeviceWorker("load", device), compute, update, DeviceWorker("store", device))
    if device.type == "cuda":
        compute = CudaStream(torch.cuda.current_stream(device))
        fresh = [CudaStream(torch.cuda.Stream(device)) for _ in range(3 if gated else 2)]  # type: ignore[no-untyped-call]
        return Streams(fresh[0], compute, fresh[2] if gated else compute, fresh[1])
    caller = CallerStream()
    return Streams(
        WorkerStream("load"), caller, WorkerStream("update") if gated else caller, WorkerStream("store")
    )


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
