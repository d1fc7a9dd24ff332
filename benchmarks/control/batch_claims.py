"""What a gateway's claim of batch lines costs the API with few and with many lines in its database.

    python benchmarks/control/batch_claims.py [--small N] [--large N] [--claims N] [--output FILE]

On SQLite and on PostgreSQL there is one database with `small` lines and one with `large`, each in two batches. One gateway
asks both in turn: it claims 8 lines while it holds the 8 before, and then settles those. So both see the same minutes
of a shared machine, and the ratio large : small says how a claim grows with the table. Three states of the tables:

    waiting    no line was answered before
    answered   the first half of each batch was
    returned   of the lines that wait, the first 256 of each batch were given back and may not be lent yet

SQLite is a file with the API's settings; PostgreSQL is a throw-away server that does not wait for its disk. Bar: the
median claim with 100,000 lines is at most twice that with 1,000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.report import publish
from tests.api.postgres import Server

from busbar.api.clock import utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database, make_engine
from busbar.api.database.migrate import migrate
from busbar.api.records.batches import BatchStore
from busbar.kube.contracts.batches import Claim, Line, LineRef, Settled

BATCHES = 2
MOST = 8
"""Lines of one claim."""
BAR = 2.0
STATES = ("waiting", "answered", "returned")
RETURNED = 256
"""Lines of each batch that were given back."""
BODY = '{"model": "m", "messages": [{"role": "user", "content": "' + "x" * 400 + '"}]}'
OF_BATCH = {
    "tenant": "t",
    "subject": "s",
    "key_id": "k",
    "sha256": "0" * 64,
    "endpoint": "/v1/chat/completions",
    "input_file_id": "file-x",
    "status": "in_progress",
    "metadata": "{}",
    "parsed_bytes": 1,
    "parsed": True,
    "failed": 0,
}
ROWS_AT_ONCE = 2000


@dataclass
class Side:
    """One database, and the gateway that asks it."""

    database: Database
    store: BatchStore
    held: list[Line] = field(default_factory=list)
    claims_ms: list[float] = field(default_factory=list)
    settles_ms: list[float] = field(default_factory=list)


async def fill(database: Database, count: int, state: str) -> None:
    """Two batches of `count` lines in all."""
    now = utc_now()
    each = count // BATCHES
    done = each // 2 if state == "answered" else 0
    for number in range(BATCHES):
        batch = f"batch-{number:020x}"
        row = dict(
            OF_BATCH,
            id=batch,
            total=each,
            completed=done,
            created_at=now + timedelta(seconds=number),
        )
        async with database.write() as tx:
            await tx.execute(tables.batches.insert().values(row))
        for first in range(0, each, ROWS_AT_ONCE):
            rows = [_line(batch, n, done, state) for n in range(first, min(first + ROWS_AT_ONCE, each))]
            async with database.write() as tx:
                await tx.execute(tables.batch_lines.insert(), rows)
    if not database.is_sqlite:
        async with database.write() as tx:
            await tx.execute(text("ANALYZE"))


def _line(batch: str, number: int, done: int, state: str) -> dict[str, Any]:
    answered = number < done
    later = utc_now() + timedelta(hours=1) if state == "returned" and number < RETURNED else None
    return {
        "batch_id": batch,
        "number": number,
        "state": "done" if answered else "pending",
        "custom_id": f"line-{number}",
        "body": None if answered else BODY,
        "answer": BODY if answered else None,
        "charged": answered,
        "until": later,
    }


async def turn(side: Side) -> None:
    """One claim, and then the answers of the lines that were held before it."""
    holding = [LineRef(batch=line.batch, number=line.number) for line in side.held]
    began = time.perf_counter()
    lent = await side.store.claim(Claim(gateway="g", process="1", holding=holding, most=MOST))
    side.claims_ms.append((time.perf_counter() - began) * 1000)
    assert len(lent.lines) == MOST, f"{len(lent.lines)} lines were lent"
    for line in side.held:
        told = Settled(
            gateway="g", process="1", batch=line.batch, number=line.number, status=200, body='{"id": "x"}'
        )
        began = time.perf_counter()
        assert await side.store.settle(told)
        side.settles_ms.append((time.perf_counter() - began) * 1000)
    side.held = lent.lines


async def compare(urls: dict[int, str], state: str, claims: int) -> dict[str, Any]:
    """Asks the databases with so many lines in turn."""
    sides: dict[int, Side] = {}
    for count, url in urls.items():
        await migrate(url)
        database = Database(url)
        await fill(database, count, state)
        sides[count] = Side(database, BatchStore(database))
    for _ in range(claims):
        for side in sides.values():
            await turn(side)
    for side in sides.values():
        await side.database.close()
    claimed = {count: statistics.median(side.claims_ms) for count, side in sides.items()}
    settled = {count: statistics.median(side.settles_ms) for count, side in sides.items()}
    small, large = sorted(urls)
    ratio = round(claimed[large] / claimed[small], 2)
    return {
        "claim_ms": {str(count): round(value, 2) for count, value in claimed.items()},
        "ratio": ratio,
        "met": ratio <= BAR,
        "settle_ms": {str(count): round(value, 2) for count, value in settled.items()},
        "settle_ratio": round(settled[large] / settled[small], 2),
    }


async def measure(small: int, large: int, claims: int, folder: Path) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {"sqlite": {}, "postgresql": {}}
    with Server.start() as server:
        for state in STATES:
            files = {n: f"sqlite+aiosqlite:///{folder}/{state}{n}.db" for n in (small, large)}
            rows["sqlite"][state] = await compare(files, state, claims)
            names = {n: await _created(server, f"{state}{n}") for n in (small, large)}
            rows["postgresql"][state] = await compare(names, state, claims)
    met = all(row["met"] for states in rows.values() for row in states.values())
    return {"lines": [small, large], "claims": claims, "bar": BAR, "met": met, **rows}


async def _created(server: Server, name: str) -> str:
    """The URL of a new database."""
    engine = make_engine(server.url)
    async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        await connection.execute(text(f'CREATE DATABASE "{name}"'))
    await engine.dispose()
    return server.url.rsplit("/", 1)[0] + f"/{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--large", type=int, default=100_000)
    parser.add_argument("--claims", type=int, default=25)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    command = (
        f"python benchmarks/control/batch_claims.py --small {given.small} --large {given.large} "
        f"--claims {given.claims}"
    )
    with tempfile.TemporaryDirectory() as folder:
        publish(command, measure(given.small, given.large, given.claims, Path(folder)), given.output)


if __name__ == "__main__":
    main()
