"""Follows an object until it has reached its goal, and prints its progress.

On a terminal a training run is a progress bar; elsewhere (a pipeline's log) it is one line per change of
phase and per tenth of the run. It polls, because polling works through every proxy and across a restart of the
server; it waits for a server that is unavailable for some time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from busbar.cli.errors import JobFailed, Unreachable
from busbar.cli.output import duration
from busbar.cli.results import TRAINING_JOB, Object

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

PAUSE_S = 1.0
PATIENCE_S = 120.0
"""How long to wait for a server that does not answer."""

FAILED = "Failed"
_END = {"TrainingJob": {"Succeeded", FAILED}, "ModelService": {"Ready", "Idle", FAILED}}
_STOPPED = {"Suspended"}


def states(
    get: Callable[[], Object],
    *,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Object]:
    """Yields the object at each poll until it has ended, failed or been suspended.

    Raises Unreachable when the server stays unavailable, TimeoutError after `timeout_s`, JobFailed when another object
    of that name is there.
    """
    start = last_answer = clock()
    uid: object = None
    while True:
        try:
            found = get()
            last_answer = clock()
        except Unreachable:
            if clock() - last_answer > PATIENCE_S:
                raise
        else:
            uid = uid or found.metadata.get("uid")
            if found.metadata.get("uid") != uid:
                raise JobFailed(
                    f"{found.reference} was deleted, and another object of that name was created; only the first one was"
                    " waited for."
                )
            yield found
            if is_settled(found):
                return
        if timeout_s is not None and clock() - start >= timeout_s:
            raise TimeoutError
        sleep(PAUSE_S)


def is_settled(found: Object) -> bool:
    """Whether the object has reached its final state."""
    generation = found.metadata.get("generation")
    observed = found.status.get("observedGeneration")
    if generation is not None and observed is not None and observed < generation:
        return False
    return found.phase in _END[found.kind.name] | _STOPPED


def follow(get: Callable[[], Object], *, timeout_s: float | None = None) -> Object:
    """Print the object's progress until its end and return it. Raises JobFailed when it failed."""
    with display() as shown:
        last: Object | None = None
        try:
            for last in states(get, timeout_s=timeout_s):
                shown.show(last)
        except TimeoutError:
            assert timeout_s is not None
            where = f"is {last.phase}: {last.message or last.reason}" if last else "was not seen"
            raise JobFailed(
                f"After {duration(timeout_s)} the object {where}. It continues to run; only the wait has ended."
            ) from None
    assert last is not None  # the iterator ends only after it yielded
    if last.phase == FAILED:
        raise JobFailed(
            f"{last.reference} failed ({last.reason or 'no reason given'}): {last.message or 'no message'} "
            f"See `busbar logs {last.reference}`."
        )
    return last


class Display(AbstractContextManager["Display"]):
    """Lines, for logs and pipes."""

    def __init__(self) -> None:
        self._phase = ""
        self._tenth = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, found: Object) -> None:
        """Print the changes."""
        tenth = _tenth(found)
        phase = f"{found.phase}|{found.reason}|{found.message}"
        if phase != self._phase:
            self._phase = phase
            self._tenth = tenth
            click.echo(f"{found.reference}: {headline(found)}", err=True)
        elif tenth > self._tenth:
            self._tenth = tenth
            click.echo(f"{found.reference}: {_numbers(found)}", err=True)


class BarDisplay(Display):
    """A progress bar below the lines, for people."""

    def __init__(self, bar: Bar) -> None:
        super().__init__()
        self._bar = bar
        self._task = bar.add_task("", total=None, numbers="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, found: Object) -> None:
        phase = f"{found.phase}|{found.reason}|{found.message}"
        if phase != self._phase:
            self._phase = phase
            self._bar.console.print(f"{found.reference}: {headline(found)}", markup=False, highlight=False)
        progress = found.progress
        self._bar.update(
            self._task,
            description=found.phase,
            total=progress.total_steps or None,
            completed=progress.step,
            numbers=_numbers(found),
        )


def display() -> Display:
    """A bar on a terminal, lines elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    return bar_on(console) if console.is_terminal else Display()


def bar_on(console: Console) -> Display:
    """A progress bar on this console."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    return BarDisplay(
        Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
        )
    )


def headline(found: Object) -> str:
    """Phase and reason."""
    why = found.message or found.reason
    return f"{found.phase}: {why}" if why else found.phase


def _tenth(found: Object) -> int:
    progress = found.progress
    return progress.step * 10 // progress.total_steps if progress.total_steps else -1


def _numbers(found: Object) -> str:
    if found.kind is not TRAINING_JOB:
        status = found.status
        return f"{status.get('readyReplicas') or 0} of {status.get('desiredReplicas') or 0} replicas ready"
    progress = found.progress
    if not progress.total_steps:
        return ""
    parts = [f"step {progress.step}/{progress.total_steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.eta_seconds is not None:
        parts.append(f"{duration(progress.eta_seconds)} left")
    return ", ".join(parts)
