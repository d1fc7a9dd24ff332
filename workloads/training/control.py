"""Requests that the training loop serves at the end of a step: stop, and save now."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class SaveRequest:
    """One `POST /checkpoint`. `answer` is set once the outcome is known."""

    answered: threading.Event = field(default_factory=threading.Event)
    step: int | None = None
    problem: str | None = None


class Control:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[SaveRequest] = []
        self._closed: str | None = "the run is still preparing: there is nothing to save yet"
        self._stopped_at: float | None = None

    def stop(self) -> None:
        """Ask for save and exit. Takes no lock: a second signal may interrupt the handler of the first."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    @property
    def stopping(self) -> bool:
        return self._stopped_at is not None

    @property
    def stopping_for_s(self) -> float:
        """Seconds since the first request to stop; 0 when there was none."""
        return 0.0 if self._stopped_at is None else time.monotonic() - self._stopped_at

    def open(self) -> None:
        """From now on the loop answers save requests."""
        with self._lock:
            self._closed = None

    def close(self, reason: str) -> None:
        """The loop is over: refuse new requests, and those it has not taken."""
        with self._lock:
            self._closed = reason
            waiting, self._requests = self._requests, []
        for request in waiting:
            request.problem = reason
            request.answered.set()

    def request_save(self) -> SaveRequest:
        request = SaveRequest()
        with self._lock:
            if self._closed is None:
                self._requests.append(request)
                return request
            request.problem = self._closed
        request.answered.set()
        return request

    def take_requests(self) -> list[SaveRequest]:
        with self._lock:
            taken, self._requests = self._requests, []
        return taken


def stop_on_signals(control: Control) -> None:
    """Have SIGTERM and SIGINT ask `control` to stop. They may have been blocked until now."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: control.stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
