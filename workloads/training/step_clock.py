"""What the seconds of a step are spent on.

The training thread says what it has just ended, and the time since the mark before is that phase's. On a GPU the marks
are events of the stream in which forward and backward run, so they tell when the device got there; they are read once the
step is over there, which the host does not wait for.

    forward     with gathering weights that the ranks divide
    backward    with recomputation, and the exchanges that run inside it where gradients or weights are divided
    exchange    of gradients, after the micro-batches: what has not run beside them
    load        weights on the host that were not there in time
    wait        updates of the step before that a forward pass waited for
    update      of this step, and telling its norm
    other       the batch, and what is done between steps
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, get_args

import torch

Phase = Literal["forward", "backward", "exchange", "load", "wait", "update", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Mark = float | torch.cuda.Event


class Stopwatch:
    """Seconds inside `with` blocks of one thread; of those on a GPU that are over there, so far."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._marks = Marks(device, clock)
        self._begun: Mark = 0.0
        self._over: deque[tuple[Mark, Mark]] = deque()  # pairs that are not counted yet
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._begun = self._marks.mark()

    def __exit__(self, *_: object) -> None:
        self._over.append((self._begun, self._marks.mark()))
        self._count()

    @property
    def seconds(self) -> float:
        self._count()
        return self._seconds

    def _count(self) -> None:
        while self._over and is_done(self._over[0][1]):
            self._seconds += seconds_between(*self._over.popleft())


class StepClock:
    """Of one run; what is said outside of a step is not counted."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._marks = Marks(device, clock)
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._step: list[tuple[Phase, Mark]] | None = None  # the first mark has no phase before it
        self._over: deque[list[tuple[Phase, Mark]]] = deque()  # steps that are not counted yet

    def begin(self) -> None:
        """A step begins."""
        self._step = [("other", self._marks.mark())]

    def ended(self, phase: Phase) -> None:
        """What was done since the last mark is of this phase."""
        if self._step is not None:
            self._step.append((phase, self._marks.mark()))

    def finish(self) -> None:
        """The step is over, as far as the host is concerned."""
        if self._step is not None:
            self._over.append(self._step)
            self._step = None
        while self._over and is_done(self._over[0][-1][1]):
            self._count(self._over.popleft())

    def _count(self, marks: list[tuple[Phase, Mark]]) -> None:
        for (_, before), (phase, after) in pairwise(marks):
            self.seconds[phase] += seconds_between(before, after)


class Marks:
    """Moments of the host, or on a GPU of the stream in which the thread works."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock

    def mark(self) -> Mark:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def is_done(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]


def seconds_between(before: Mark, after: Mark) -> float:
    if isinstance(before, float):
        assert isinstance(after, float)
        return after - before
    assert not isinstance(after, float)
    return float(before.elapsed_time(after)) / 1000
