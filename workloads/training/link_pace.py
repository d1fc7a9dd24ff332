"""How fast the link between device and host is beside what it was before (see `usual_rate`): a card that has lost lanes, or
shares them with another one, is said.

A rate is that of a step's bytes in one direction over the seconds in which its queue copied them, whatever they waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from busbar.workloads.machine.streams import CudaStream, Event, Stream, Streams
from busbar.workloads.training.step_clock import Mark, Marks, is_done, seconds_between
from busbar.workloads.training.usual_rate import UsualRate

LEAST_BYTES = 16 * 2**20
"""Of a step and direction: the time of less is that of a few calls."""
SLOW = 0.5
"""Of the usual rate."""
SLOW_ENOUGH = 20
"""Steps in a row."""
LOAD, STORE = "load", "store"
WORDS = {LOAD: "to the device", STORE: "from the device"}


def has_link(device: torch.device) -> bool:
    """Whether `device` has memory of its own, behind a link."""
    return device.type == "cuda"


class TimedStream:
    """A queue whose copies are timed. On a GPU they are events of it, which the host does not wait for."""

    def __init__(
        self, inner: Stream, device: torch.device, clock: Callable[[], float] = time.monotonic
    ) -> None:
        on_stream = isinstance(inner, CudaStream)
        self._inner, self._marks = inner, Marks(device if on_stream else torch.device("cpu"), clock)
        self._copies: deque[tuple[int, list[Mark]]] = deque()
        """Of which bytes, and when each began and ended; in the order of the queue."""
        self.bytes, self.seconds = 0, 0.0
        """Of those that are over, as far as they were counted."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        marks: list[Mark] = []
        self._inner.submit(lambda: marks.append(self._marks.mark()))
        self._inner.copy(target, source)
        self._inner.submit(lambda: marks.append(self._marks.mark()))
        self._copies.append((source.nbytes, marks))

    def count(self) -> None:
        """Count the copies that are over."""
        while self._copies and len(marks := self._copies[0][1]) == 2 and is_done(marks[1]):
            self.bytes += self._copies.popleft()[0]
            self.seconds += seconds_between(*marks)

    def submit(self, work: Callable[[], object]) -> None:
        self._inner.submit(work)

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event) -> None:
        self._inner.wait(event)

    def synchronize(self) -> None:
        self._inner.synchronize()

    def close(self) -> None:
        self._inner.close()


class LinkPace:
    """Of both directions of a run's link."""

    def __init__(
        self, streams: Streams, device: torch.device, clock: Callable[[], float] = time.monotonic
    ) -> None:
        queues = {LOAD: streams.load, STORE: streams.store}
        self._queues = {direction: TimedStream(each, device, clock) for direction, each in queues.items()}
        self.streams = Streams(self._queues[LOAD], streams.compute, streams.update, self._queues[STORE])
        """The same queues, timed."""
        self.rates = {direction: UsualRate(LEAST_BYTES, SLOW, SLOW_ENOUGH) for direction in self._queues}
        self._counted = dict.fromkeys(self._queues, (0, 0.0))

    @property
    def seconds(self) -> dict[str, float]:
        """In which each direction has copied."""
        return {direction: queue.seconds for direction, queue in self._queues.items()}

    @property
    def bytes(self) -> dict[str, int]:
        """That it has copied in them."""
        return {direction: queue.bytes for direction, queue in self._queues.items()}

    def finish_step(self) -> None:
        """What has been copied since the last step is over."""
        for direction, queue in self._queues.items():
            queue.count()
            before, self._counted[direction] = self._counted[direction], (queue.bytes, queue.seconds)
            self.rates[direction].moved(queue.bytes - before[0], queue.seconds - before[1])

    def warning(self) -> str:
        """A sentence when a direction has just become slow."""
        for direction, rate in self.rates.items():
            if rate.became_slow and rate.last is not None and rate.usual is not None:
                return (
                    f"warning: in {rate.slow_in_a_row} steps in a row the link {WORDS[direction]} moved less than half of the "
                    f"usual {rate.usual / 2**20:.0f} MiB/s, in the last one {rate.last / 2**20:.0f} MiB/s: has the card lost "
                    "lanes, or does something else use them?"
                )
        return ""

    def slow(self) -> dict[str, Any] | None:
        """For the job's status: the direction that is slow now, of two the slower one; None: none is."""
        slow = [
            (rate.last / rate.usual, direction, rate)
            for direction, rate in self.rates.items()
            if rate.is_slow and rate.last is not None and rate.usual
        ]
        if not slow:
            return None
        _, direction, rate = min(slow, key=lambda each: each[:2])
        assert rate.last is not None
        assert rate.usual is not None
        return {
            "direction": direction,
            "bytesPerSecond": round(rate.last),
            "usualBytesPerSecond": round(rate.usual),
        }
