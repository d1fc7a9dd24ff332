"""Two replicas of the API on one PostgreSQL: how long nobody writes the history after one is lost, or stops.

    python benchmarks/control/api_take_over.py [--times 5] [--output FILE]

A real API server with the whole chart, a PostgreSQL server, and two `busbar-api` processes with production settings.
Every quarter of a second a job's status says its next step. The replica that writes is killed (SIGKILL), held
(SIGSTOP), or stopped (SIGTERM), and started or continued again after the other one has taken over. A gap is the time
from the signal to the first write by the other; the floor is what is left of the lease then, 4 to 6 s. At the end each
step that was said is in the curve once, whatever happened between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.report import publish
from sqlalchemy import select
from tests.api.conftest import JOB
from tests.api.postgres import Server
from tests.api.process import ApiProcess
from tests.cluster.apiserver import ApiServer, render_chart

from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.records.leadership import LEASE_S

HOME = "curve"
WATCHED: dict[str, Any] = {**JOB, "metadata": {"name": "watched", "namespace": HOME}}
HOW = {"kill": signal.SIGKILL, "hold": signal.SIGSTOP, "stop": signal.SIGTERM}
BARS = {"kill": 10.0, "hold": 10.0, "stop": 3.0, "points_lost": 0, "points_twice": 0}
"""Longest gaps in seconds, and points of the curve."""


class Steps:
    """The job's status, by the operator's hand."""

    def __init__(self, server: ApiServer) -> None:
        self.said = 0
        self._operator = server.service_account("busbar-system", "busbar-operator")

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        stopping = asyncio.Event()

        async def work() -> None:
            while not stopping.is_set():
                self.said += 1
                status = {"attempt": 1, "phase": "Running", "progress": {"step": self.said, "loss": 1.0}}
                merged = await asyncio.to_thread(
                    self._operator.merge, WATCHED, {"status": status}, subresource="/status"
                )
                merged.expect()
                await asyncio.sleep(0.25)

        task = asyncio.create_task(work())
        try:
            yield
        finally:
            stopping.set()
            await task


async def gap(leads: ApiProcess, other: ApiProcess, how: str) -> float:
    """Ends the one that leads; seconds until the other one has begun to write."""
    before, since = other.terms, time.monotonic()
    leads.process.send_signal(HOW[how])
    while other.terms == before:  # noqa: ASYNC110 - there is no event for a line in a log
        await asyncio.sleep(0.02)
    found = time.monotonic() - since
    if how == "hold":
        leads.process.send_signal(signal.SIGCONT)
    else:
        await leads.process.wait()
        await leads.start()
    return found


async def points(database: Database) -> list[int]:
    async with database.read() as db:
        return list((await db.execute(select(tables.samples.c.step))).scalars())


async def measure(times: int, folder: Path) -> dict[str, Any]:
    with ApiServer.start() as server, Server.start() as postgres:
        server.install_crds()
        server.make_namespace("busbar-system")
        for document in render_chart("busbar"):
            server.admin.apply(document).expect()
        server.make_namespace(HOME, {"busbar.dev/tenant": HOME})
        tenant = {"apiVersion": "busbar.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": HOME}}
        server.admin.create({**tenant, "spec": {"namespaces": [HOME]}}).expect()
        gaps: dict[str, list[float]] = {how: [] for how in HOW}
        async with (
            ApiProcess(server, folder / "first", postgres.url) as first,
            ApiProcess(server, folder / "second", postgres.url) as second,
        ):
            server.admin.create(WATCHED).expect()
            steps, leads, other = Steps(server), first, second
            async with steps.going_on():
                for how in [how for how in HOW for _ in range(times)]:
                    await asyncio.sleep(3.0)  # the other one is up, and has seen some steps
                    gaps[how].append(await gap(leads, other, how))
                    print(f"{how}: {gaps[how][-1]:.1f} s", file=sys.stderr, flush=True)
                    leads, other = other, leads
            await asyncio.sleep(3.0)
            database = Database(postgres.url)
            curve = await points(database)
            await database.close()
    found: dict[str, float] = {how: round(max(seconds), 1) for how, seconds in gaps.items()}
    found |= {"points_lost": len(set(range(1, steps.said + 1)) - set(curve))}
    found |= {"points_twice": len(curve) - len(set(curve))}
    return {
        "times_each": times,
        "lease_s": LEASE_S,
        "steps_said": steps.said,
        "median_s": {how: round(statistics.median(seconds), 1) for how, seconds in gaps.items()},
        **{name: {"found": found[name], "bar": bar, "met": found[name] <= bar} for name, bar in BARS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    command = f"python benchmarks/control/api_take_over.py --times {given.times}"
    with tempfile.TemporaryDirectory() as folder:
        publish(command, measure(given.times, Path(folder)), given.output)


if __name__ == "__main__":
    main()
