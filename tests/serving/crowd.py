"""Requests that come, and are cancelled, while an engine computes others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.delta import Delta


class Asked(Protocol):
    @property
    def delay(self) -> int:
        """Steps before it comes; sooner if nothing else is left to do."""

    @property
    def cancelled_at(self) -> int | None:
        """The step before which it is cancelled."""


A = TypeVar("A", bound=Asked)


def answer(
    core: EngineCore, asks: Sequence[A], submit: Callable[[str, A], object]
) -> tuple[list[list[Delta]], set[int]]:
    """What each one got until all were over, and which were cancelled; `submit` is called with a request's id."""
    found: list[list[Delta]] = [[] for _ in asks]
    starts = sorted((ask.delay, i) for i, ask in enumerate(asks))
    cancelled: set[int] = set()
    tick = 0
    while starts or not core.idle:
        while starts and (starts[0][0] <= tick or core.idle):
            index = starts.pop(0)[1]
            submit(str(index), asks[index])
        for index, ask in enumerate(asks):
            if ask.cancelled_at == tick and core.cancel(str(index)):
                cancelled.add(index)
        for delta in core.step():
            found[int(delta.request_id)].append(delta)
        tick += 1
    return found, cancelled
