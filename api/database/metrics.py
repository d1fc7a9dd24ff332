"""How long the database takes and how often it fails: the API's own numbers, which `/metrics` of the internal port
serves. They name no person, tenant or object."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from sqlalchemy.exc import SQLAlchemyError

OPERATIONS = ("read", "write")


class DatabaseMetrics:
    """The metrics of one database. Their names never change: alerts depend on them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self.seconds = Histogram(
            "busbar_api_database_seconds",
            "Time of a read or of a write transaction, with the wait for a connection and for SQLite's one writer",
            ["operation"],
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=self.registry,
        )
        self.failures = Counter(
            "busbar_api_database_failures",
            "Reads and write transactions that ended with an error of the database or of the way to it",
            ["operation"],
            registry=self.registry,
        )
        for operation in OPERATIONS:  # 0 is a value: an alert needs something to count from
            self.seconds.labels(operation)
            self.failures.labels(operation)

    @contextlib.contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Counts the block as one read or write."""
        started = self._clock()
        try:
            yield
        except SQLAlchemyError:
            self.failures.labels(operation).inc()
            raise
        finally:
            self.seconds.labels(operation).observe(self._clock() - started)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
