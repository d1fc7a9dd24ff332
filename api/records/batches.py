"""Batches: cut into lines, lent to gateways, and answered once each.

    validating ─► in_progress ─► completed
        │             ├────────► expired      after WINDOW; what is answered by then stays
        │             └► cancelling ─► cancelled
        └► failed                             a file without a line, or with too many

    line:  pending ─► done      answered with 200
               ├────► failed    answered otherwise, not a request, or out of time
               └────► cancelled

Nothing runs here by itself: a gateway's `claim` cuts the next piece of a file, ends what is out of time, and lends lines.
All of it is in the database, so the API and any gateway may die at any moment. A line is lent until LEASE_S after its
gateway asked last. The first answer of a line counts, and a line that ran twice is charged once (`batch_charges`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, delete, exists, false, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.database.types import storable
from busbar.api.errors import Conflict, Invalid, NotFound
from busbar.api.records import batch_lines
from busbar.api.records.files import ERRORS, KEPT, OUTPUT, PURPOSE, STATES, check_room, new_file
from busbar.kube.contracts.batches import (
    ENDPOINTS,
    LEASE_S,
    LINE_BYTES,
    PART_BYTES,
    Batches,
    BatchInfo,
    Claim,
    FileRef,
    Holder,
    Lent,
    Line,
    ListWanted,
    NewBatch,
    Settled,
)

WINDOW = timedelta(hours=24)
MOST_LINES = 50_000
"""Of one batch."""
MOST_OPEN = 16
"""Batches of one person that have not ended."""
PIECE_BYTES = 2 * LINE_BYTES
"""Of a file that is cut into lines within one transaction."""
NAMES_AT_ONCE = 1000
"""Values in one statement; PostgreSQL takes 32,767, and a piece may have more lines."""
LENT_BYTES = 8 << 20
"""Bodies in one answer to a gateway."""
OPEN = ("validating", "in_progress", "cancelling")
lines, batches = tables.batch_lines, tables.batches


class BatchStore:
    """Writes and reads batches."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._now = clock

    # -- what people ask for ------------------------------------------------------------------------

    async def create(self, wanted: NewBatch) -> BatchInfo:
        """Raises Invalid, NotFound for the file, or Conflict where too many are open or files fill the tenant's room."""
        if wanted.endpoint not in ENDPOINTS:
            raise Invalid(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")
        files = tables.files
        row = {
            "id": f"batch-{secrets.token_hex(10)}",
            **wanted.model_dump(
                include={"tenant", "subject", "key_id", "sha256", "endpoint", "input_file_id"}
            ),
            "status": "validating",
            "problem": None,
            "metadata": storable(json.dumps(wanted.metadata), 65_536),
            "parsed_bytes": 0,
            "parsed": False,
            "total": 0,
            "completed": 0,
            "failed": 0,
            "output_file_id": None,
            "error_file_id": None,
            "ended_at": None,
            "created_at": self._now(),
        }
        async with self._db.write() as tx:
            file = select(files.c.purpose).where(
                files.c.id == wanted.input_file_id,
                files.c.tenant == wanted.tenant,
                files.c.subject == wanted.subject,
                files.c.complete,
            )
            purpose = (await tx.execute(file)).scalar_one_or_none()
            if purpose is None:
                raise NotFound("there is no such file")
            if purpose != PURPOSE:
                raise Invalid(
                    f"the file's purpose must be {PURPOSE!r}, not {purpose!r}", field="input_file_id"
                )
            open_now = select(func.count()).where(_mine(wanted), batches.c.status.in_(OPEN))
            if (await tx.execute(open_now)).scalar_one() >= MOST_OPEN:
                raise Conflict(f"{MOST_OPEN} of your batches have not ended yet; wait for one, or cancel one")
            await check_room(tx, wanted.tenant)
            await tx.execute(batches.insert().values(row))
        return info_of(row)

    async def page(self, wanted: ListWanted) -> Batches:
        query = select(batches).where(_mine(wanted))
        async with self._db.read() as db:
            if wanted.after:
                last = select(batches.c.created_at).where(_mine(wanted), batches.c.id == wanted.after)
                since = (await db.execute(last)).scalar_one_or_none()
                if since is None:
                    raise NotFound("there is no such batch")
                older = and_(batches.c.created_at == since, batches.c.id < wanted.after)
                query = query.where(or_(batches.c.created_at < since, older))
            order = query.order_by(batches.c.created_at.desc(), batches.c.id.desc()).limit(wanted.limit + 1)
            rows = (await db.execute(order)).mappings().all()
        return Batches(batches=[info_of(row) for row in rows[: wanted.limit]], more=len(rows) > wanted.limit)

    async def get(self, wanted: FileRef) -> BatchInfo:
        async with self._db.read() as db:
            return info_of(await _row(db, wanted))

    async def cancel(self, wanted: FileRef) -> BatchInfo:
        """What is not lent does not begin any more; gateways hear of it with their next claim."""
        async with self._db.write() as tx:
            row = await _row(tx, wanted, lock=True)
            if row["status"] not in OPEN:
                raise Conflict(f"the batch has ended: it is {row['status']}")
            await tx.execute(
                update(batches).where(batches.c.id == wanted.id).values(status="cancelling", parsed=True)
            )
            await self._sweep(tx, wanted.id)
            return info_of(await _row(tx, wanted))

    # -- what gateways ask for ----------------------------------------------------------------------

    async def claim(self, wanted: Claim) -> Lent:
        """Keep what the gateway holds, and lend it up to `most` more lines."""
        now = self._now()
        until = now + timedelta(seconds=LEASE_S)
        held = batch_lines.by_batch((each.batch, each.number) for each in wanted.holding)
        async with self._db.write() as tx:
            mine, known = (
                lines.c.holder == wanted.gateway,
                or_(false(), *(_these(*each) for each in held.items())),
            )
            current = and_(lines.c.process == wanted.process, known)
            free = update(lines).where(mine, lines.c.state == "pending", ~current)
            await tx.execute(free.values(holder=None, until=None))
            await tx.execute(update(lines).where(mine, current).values(until=until))
            await self._advance(tx)
            lent = await self._lend(tx, wanted) if wanted.most else []
            stopping = select(batches.c.id).where(batches.c.id.in_(held), batches.c.status != "in_progress")
            cancelled = list((await tx.execute(stopping)).scalars())
        return Lent(lines=lent, cancelled=cancelled)

    async def settle(self, told: Settled) -> bool:
        """Whether the line's answer was kept: it had none, and was this gateway's. Raises Invalid for one that is not JSON."""
        mine = and_(lines.c.holder == told.gateway, lines.c.process == told.process)
        this = and_(lines.c.batch_id == told.batch, lines.c.number == told.number)
        body = "" if told.again_in_s is not None else batch_lines.plain(told.body)
        async with self._db.write() as tx:
            found = select(lines.c.custom_id).where(this, lines.c.state == "pending", mine)
            row = (await tx.execute(found.with_for_update())).one_or_none()
            if row is None:
                return False
            if told.again_in_s is not None:
                later = self._now() + timedelta(seconds=told.again_in_s)
                await tx.execute(update(lines).where(this).values(holder=None, until=later))
            else:
                answer = batch_lines.answer_line(
                    told.batch, told.number, row[0], told.status, told.request_id, body
                )
                state = "done" if told.status == 200 else "failed"
                ended = {"state": state, "answer": answer, "body": None, "holder": None, "until": None}
                await tx.execute(update(lines).where(this).values(ended))
                count = batches.c.completed if state == "done" else batches.c.failed
                more = update(batches).where(batches.c.id == told.batch).values({count: count + 1})
                await tx.execute(more)
            await self._sweep(tx, told.batch)
        return told.again_in_s is None

    async def prune(self) -> None:
        """Delete batches that ended long ago."""
        async with self._db.write() as tx:
            await tx.execute(delete(batches).where(batches.c.ended_at < self._now() - KEPT))

    # -- inside -------------------------------------------------------------------------------------

    async def _advance(self, tx: AsyncConnection) -> None:
        """Cut a piece of the oldest file that is not cut yet, and end what is out of time or was left by its gateway."""
        waiting = select(batches).where(~batches.c.parsed).order_by(batches.c.created_at).limit(1)
        row = (await tx.execute(waiting.with_for_update(skip_locked=True))).mappings().first()
        if row is not None:
            await self._cut(tx, row)
        late = batches.c.created_at < self._now() - WINDOW
        ending = select(batches.c.id, batches.c.status).where(
            or_(batches.c.status == "cancelling", and_(batches.c.status.in_(OPEN), late))
        )
        for batch, status in (await tx.execute(ending.with_for_update(skip_locked=True))).all():
            if status != "cancelling":
                await self._expire(tx, batch)
            await self._sweep(tx, batch)

    async def _cut(self, tx: AsyncConnection, row: Mapping[Any, Any]) -> None:
        parts, files = tables.file_parts, tables.files
        at = row["parsed_bytes"]
        size = (
            await tx.execute(select(files.c.bytes).where(files.c.id == row["input_file_id"]))
        ).scalar_one_or_none()
        if size is None:
            await self._fail(tx, row["id"], "its file was deleted before it was read")
            return
        # Parts are of one size but the last, as gateways send them.
        first = at // PART_BYTES
        query = select(parts.c.data).where(
            parts.c.file_id == row["input_file_id"],
            parts.c.number >= first,
            parts.c.number <= (at + PIECE_BYTES) // PART_BYTES,
        )
        data = b"".join((await tx.execute(query.order_by(parts.c.number))).scalars())[
            at - first * PART_BYTES :
        ]
        piece = batch_lines.cut(data, last=at + len(data) >= size)
        number = row["total"]
        if number + len(piece.lines) > MOST_LINES:
            await self._fail(
                tx, row["id"], f"a batch has at most {MOST_LINES:,} lines; cut the file into several"
            )
            return
        made, failed = await self._read(tx, row, piece.lines)
        if made:
            await tx.execute(lines.insert(), made)
        done = at + piece.bytes >= size
        changed: dict[str, Any] = {
            "parsed_bytes": at + piece.bytes,
            "parsed": done,
            "total": number + len(made),
            "failed": row["failed"] + failed,
            "status": "in_progress",
        }
        await tx.execute(update(batches).where(batches.c.id == row["id"]).values(changed))
        if done and not changed["total"]:
            await self._fail(tx, row["id"], "the file has no line")
        elif done:
            await self._sweep(tx, row["id"])

    async def _read(
        self, tx: AsyncConnection, row: Mapping[Any, Any], found: Iterable[bytes]
    ) -> tuple[list[dict[str, Any]], int]:
        """Rows of these lines, and how many of them are no requests."""
        asked = [batch_lines.read(line, row["endpoint"]) for line in found]
        names = [each.custom_id for each in asked if each.custom_id is not None]
        taken: set[str | None] = set()
        for at in range(0, len(names), NAMES_AT_ONCE):
            some = lines.c.custom_id.in_(names[at : at + NAMES_AT_ONCE])
            known = select(lines.c.custom_id).where(lines.c.batch_id == row["id"], some)
            taken.update((await tx.execute(known)).scalars())
        turns = await self._turns(tx, row["id"], {each.head for each in asked if each.head is not None})
        made, failed = [], 0
        for number, each in enumerate(asked, row["total"]):
            problem = each.problem
            if problem is None and each.custom_id in taken:
                problem = "custom_id was used by an earlier line"
            taken.add(each.custom_id)
            answer = problem and batch_lines.problem_line(
                row["id"], number, each.custom_id, "invalid_request", problem
            )
            failed += problem is not None
            made.append(
                {
                    "batch_id": row["id"],
                    "number": number,
                    "state": "pending" if problem is None else "failed",
                    "custom_id": each.custom_id,
                    "head": each.head,
                    "turn": number if each.head is None else turns.setdefault(each.head, number),
                    "body": each.body if problem is None else None,
                    "answer": answer,
                    "charged": False,
                }
            )
        return made, failed

    async def _turns(self, tx: AsyncConnection, batch: str, heads: set[str]) -> dict[str, int]:
        """The turns of those of these heads that earlier lines have."""
        turns: dict[str, int] = {}
        wanted = sorted(heads)
        for at in range(0, len(wanted), NAMES_AT_ONCE):
            some = and_(lines.c.batch_id == batch, lines.c.head.in_(wanted[at : at + NAMES_AT_ONCE]))
            known = select(lines.c.head, func.min(lines.c.turn)).where(some).group_by(lines.c.head)
            turns.update({str(head): turn for head, turn in (await tx.execute(known)).all()})
        return turns

    async def _lend(self, tx: AsyncConnection, wanted: Claim) -> list[Line]:
        """Lines of all batches in turn, first of those that have the fewest lent; of one batch in the order of its file, but
        those that begin alike one after another.

        No query here reads more lines than are lent or were given back: how many wait does not matter.
        """
        now = self._now()
        lent_of = (
            select(lines.c.batch_id, func.count().label("count"))
            .where(lines.c.holder.is_not(None))
            .group_by(lines.c.batch_id)
            .subquery()
        )
        busy = func.coalesce(lent_of.c.count, 0)
        ready = (
            select(batches.c.id, batches.c.endpoint, batches.c.sha256)
            .outerjoin(lent_of, lent_of.c.batch_id == batches.c.id)
            .where(
                batches.c.status == "in_progress",
                exists().where(lines.c.batch_id == batches.c.id, lines.c.state == "pending"),
            )
            .order_by(busy, batches.c.created_at)
        )
        found = (await tx.execute(ready)).all()
        lent: list[Line] = []
        left, size = wanted.most, 0
        for place, (batch, endpoint, sha256) in enumerate(found):
            share = -(-left // (len(found) - place))
            free = and_(lines.c.batch_id == batch, lines.c.state == "pending")
            free = and_(free, or_(lines.c.until.is_(None), lines.c.until <= now))
            order = lines.c.turn, lines.c.number
            query = select(lines.c.number, lines.c.body).where(free).order_by(*order).limit(share)
            for number, body in (await tx.execute(query.with_for_update(skip_locked=True))).all():
                size += len(body)
                if lent and size > LENT_BYTES:
                    left = 0
                    break
                lent.append(Line(batch=batch, number=number, endpoint=endpoint, sha256=sha256, body=body))
                left -= 1
            if left < 1:
                break
        until = now + timedelta(seconds=LEASE_S)
        held = {"holder": wanted.gateway, "process": wanted.process, "until": until}
        for batch, numbers in batch_lines.by_batch((each.batch, each.number) for each in lent).items():
            await tx.execute(update(lines).where(_these(batch, numbers)).values(held))
        return lent

    async def _expire(self, tx: AsyncConnection, batch: str) -> None:
        """Lines that are not answered yet fail."""
        query = select(lines.c.number, lines.c.custom_id).where(
            lines.c.batch_id == batch, lines.c.state == "pending"
        )
        late = (await tx.execute(query)).all()
        said = "it was not answered within 24 h"
        rows = [
            {
                "late": number,
                "said": batch_lines.problem_line(batch, number, custom_id, "batch_expired", said),
            }
            for number, custom_id in late
        ]
        this = and_(lines.c.batch_id == batch, lines.c.number == bindparam("late"))
        ended: dict[str, Any] = {"state": "failed", "answer": bindparam("said"), "body": None, "holder": None}
        if rows:
            await tx.execute(update(lines).where(this).values(ended), rows)
        changed = {"status": "expired", "parsed": True, "failed": batches.c.failed + len(late)}
        await tx.execute(update(batches).where(batches.c.id == batch).values(changed))

    async def _fail(self, tx: AsyncConnection, batch: str, problem: str) -> None:
        """As a whole: no line of it is run any more."""
        await tx.execute(
            update(lines)
            .where(lines.c.batch_id == batch, lines.c.state == "pending")
            .values(state="cancelled", body=None, holder=None)
        )
        ended = {"status": "failed", "problem": problem, "parsed": True, "ended_at": self._now()}
        await tx.execute(update(batches).where(batches.c.id == batch).values(ended))

    async def _sweep(self, tx: AsyncConnection, batch: str) -> None:
        """End a batch that has nothing left to do, and make the files of its answers."""
        row = (await tx.execute(select(batches).where(batches.c.id == batch))).mappings().one()
        pending = and_(lines.c.batch_id == batch, lines.c.state == "pending")
        if row["status"] == "cancelling":
            idle = or_(lines.c.holder.is_(None), lines.c.until <= self._now())
            await tx.execute(
                update(lines).where(pending, idle).values(state="cancelled", body=None, holder=None)
            )
        if row["ended_at"] is not None or not row["parsed"]:
            return
        if (await tx.execute(select(lines.c.number).where(pending).limit(1))).first() is not None:
            return
        names = {"in_progress": "completed", "cancelling": "cancelled"}
        changed: dict[str, Any] = {
            "status": names.get(row["status"], row["status"]),
            "ended_at": self._now(),
        }
        owner = Holder(tenant=row["tenant"], subject=row["subject"])
        for purpose, field in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
            of = and_(lines.c.batch_id == batch, lines.c.state == STATES[purpose])
            size = select(func.coalesce(func.sum(func.length(lines.c.answer) + 1), 0)).where(of)
            total = int((await tx.execute(size)).scalar_one())
            if total:
                file = new_file(
                    owner, self._now(), name=f"{batch}_{purpose}.jsonl", purpose=purpose, complete=True
                )
                file |= {"batch_id": batch, "bytes": total}
                await tx.execute(tables.files.insert().values(file))
                changed[field] = file["id"]
        await tx.execute(update(batches).where(batches.c.id == batch).values(changed))


def info_of(row: Mapping[Any, Any]) -> BatchInfo:
    """What is told of a batch."""
    copied = {name: row[name] for name in BatchInfo.model_fields if name in row}
    return BatchInfo.model_validate(
        copied
        | {
            "created_at": int(row["created_at"].timestamp()),
            "expires_at": int((row["created_at"] + WINDOW).timestamp()),
            "ended_at": None if row["ended_at"] is None else int(row["ended_at"].timestamp()),
            "metadata": json.loads(row["metadata"]),
        }
    )


def _mine(of: Holder) -> ColumnElement[bool]:
    return (batches.c.tenant == of.tenant) & (batches.c.subject == of.subject)


def _these(batch: str, numbers: list[int]) -> ColumnElement[bool]:
    return and_(lines.c.batch_id == batch, lines.c.number.in_(numbers))


async def _row(db: AsyncConnection, wanted: FileRef, *, lock: bool = False) -> Mapping[Any, Any]:
    query = select(batches).where(_mine(wanted), batches.c.id == wanted.id)
    row = (await db.execute(query.with_for_update() if lock else query)).mappings().first()
    if row is None:
        raise NotFound("there is no such batch")
    return row
