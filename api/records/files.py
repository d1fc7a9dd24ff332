"""Files that people upload for batches, in parts, and those of batches' answers, which are their lines.

A file is its owner's alone: a person's, within a tenant. Both a file and all files of a tenant have a limit in bytes, and
files are deleted after `KEPT`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.database.types import storable
from busbar.api.errors import Conflict, Invalid, NotFound, TooLarge
from busbar.kube.contracts.batches import (
    FILE_BYTES,
    CompleteFile,
    FileInfo,
    FileRef,
    Files,
    Holder,
    ListWanted,
    NewFile,
)

KEPT = timedelta(days=30)
ABANDONED = timedelta(hours=1)
"""An upload that did not end by then is deleted."""
TENANT_BYTES = 1 << 30
"""Of all files of one tenant."""
PIECE_LINES = 16
"""Lines of a batch in one piece of its file."""
PURPOSE = "batch"
OUTPUT, ERRORS = "batch_output", "batch_errors"
STATES = {OUTPUT: "done", ERRORS: "failed"}
"""Which lines of a batch its files hold."""


class FileStore:
    """Writes and reads files."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._now = clock

    async def create(self, wanted: NewFile) -> FileInfo:
        """A file without bytes, invisible until it is complete."""
        row = new_file(wanted, self._now(), name=storable(wanted.name, 255), purpose=PURPOSE, complete=False)
        async with self._db.write() as tx:
            await tx.execute(tables.files.insert().values(row))
        return info_of(row)

    async def add(self, file_id: str, number: int, data: bytes) -> None:
        """The next part of an upload. Raises NotFound, Conflict or TooLarge; then the upload is gone."""
        files = tables.files
        async with self._db.write() as tx:
            row = (
                (await tx.execute(select(files).where(files.c.id == file_id).with_for_update()))
                .mappings()
                .first()
            )
            if row is None or row["complete"]:
                raise NotFound("there is no such upload")
            if row["parts"] != number:
                raise Conflict(f"part {number} came where part {row['parts']} was due; upload the file again")
            held = await held_bytes(tx, row["tenant"]) + len(data)
            size = row["bytes"] + len(data)
            refusal = _refusal(size, held)
            if refusal is None:
                await tx.execute(tables.file_parts.insert().values(file_id=file_id, number=number, data=data))
                await tx.execute(
                    update(files).where(files.c.id == file_id).values(bytes=size, parts=number + 1)
                )
            else:
                await tx.execute(delete(files).where(files.c.id == file_id))
        if refusal is not None:
            raise TooLarge(refusal)

    async def complete(self, wanted: CompleteFile) -> FileInfo:
        """From now on the file exists. Raises NotFound, or Invalid for a purpose that is not served."""
        if wanted.purpose != PURPOSE:
            raise Invalid(f"files are for batches: purpose must be {PURPOSE!r}", field="purpose")
        files = tables.files
        async with self._db.write() as tx:
            made = update(files).where(_mine(wanted), files.c.id == wanted.id).values(complete=True)
            row = (await tx.execute(made.returning(files))).mappings().first()
        return info_of(_found(row))

    async def page(self, wanted: ListWanted) -> Files:
        files = tables.files
        query = select(files).where(_mine(wanted), files.c.complete)
        async with self._db.read() as db:
            if wanted.after:
                last = select(files.c.created_at).where(_mine(wanted), files.c.id == wanted.after)
                since = (await db.execute(last)).scalar_one_or_none()
                if since is None:
                    raise NotFound(f"there is no file {wanted.after}")
                query = query.where(
                    (files.c.created_at < since)
                    | ((files.c.created_at == since) & (files.c.id < wanted.after))
                )
            order = query.order_by(files.c.created_at.desc(), files.c.id.desc()).limit(wanted.limit + 1)
            rows = (await db.execute(order)).mappings().all()
        return Files(files=[info_of(row) for row in rows[: wanted.limit]], more=len(rows) > wanted.limit)

    async def get(self, wanted: FileRef) -> FileInfo:
        async with self._db.read() as db:
            return info_of(await self._row(db, wanted))

    async def delete(self, wanted: FileRef) -> None:
        """A batch that was made of it goes on: it has its lines. Answers that it held go with it."""
        lines = tables.batch_lines
        async with self._db.write() as tx:
            row = await self._row(tx, wanted)
            if row["batch_id"] is not None:
                held = (lines.c.batch_id == row["batch_id"]) & (lines.c.state == STATES[row["purpose"]])
                await tx.execute(update(lines).where(held).values(answer=None))
            await tx.execute(delete(tables.files).where(tables.files.c.id == wanted.id))

    async def content(self, wanted: FileRef, after: int) -> tuple[bytes, int | None]:
        """A piece of a file, and where the next one begins; None behind the last."""
        lines, parts = tables.batch_lines, tables.file_parts
        async with self._db.read() as db:
            row = await self._row(db, wanted)
            if row["batch_id"] is None:
                query = select(parts.c.data).where(parts.c.file_id == wanted.id, parts.c.number == after)
                data = (await db.execute(query)).scalar_one_or_none() or b""
                return data, after + 1 if after + 1 < row["parts"] else None
            answered = (
                select(lines.c.number, lines.c.answer)
                .where(
                    lines.c.batch_id == row["batch_id"],
                    lines.c.state == STATES[row["purpose"]],
                    lines.c.number >= after,
                )
                .order_by(lines.c.number)
                .limit(PIECE_LINES + 1)
            )
            found = (await db.execute(answered)).all()
        data = "".join(f"{answer}\n" for _, answer in found[:PIECE_LINES]).encode()
        return data, found[PIECE_LINES][0] if len(found) > PIECE_LINES else None

    async def prune(self) -> None:
        """Delete what is too old."""
        files, now = tables.files, self._now()
        abandoned = ~files.c.complete & (files.c.created_at < now - ABANDONED)
        async with self._db.write() as tx:
            await tx.execute(delete(files).where(abandoned | (files.c.created_at < now - KEPT)))

    async def _row(self, db: AsyncConnection, wanted: FileRef) -> Mapping[Any, Any]:
        files = tables.files
        query = select(files).where(_mine(wanted), files.c.id == wanted.id, files.c.complete)
        return _found((await db.execute(query)).mappings().first())


def new_file(of: Holder, now: datetime, **fields: Any) -> dict[str, Any]:
    """The row of a file."""
    return {
        "id": f"file-{uuid.uuid4().hex}",
        "tenant": of.tenant,
        "subject": of.subject,
        "bytes": 0,
        "parts": 0,
        "batch_id": None,
        "created_at": now,
        **fields,
    }


def info_of(row: Mapping[Any, Any]) -> FileInfo:
    """What is told of a file."""
    return FileInfo(
        id=row["id"],
        bytes=row["bytes"],
        created_at=int(row["created_at"].timestamp()),
        expires_at=int((row["created_at"] + KEPT).timestamp()),
        filename=row["name"],
        purpose=row["purpose"],
    )


def _refusal(size: int, held: int) -> str | None:
    if size > FILE_BYTES:
        return f"the file is larger than {FILE_BYTES >> 20} MiB; cut it into several"
    if held > TENANT_BYTES:
        return f"your tenant's files would be larger than {TENANT_BYTES >> 20} MiB together; delete some"
    return None


async def held_bytes(tx: AsyncConnection, tenant: str) -> int:
    """Of all files of a tenant, answers included."""
    files = tables.files
    used = select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.tenant == tenant)
    return int((await tx.execute(used)).scalar_one())


async def check_room(tx: AsyncConnection, tenant: str) -> None:
    """Raise Conflict where answers would make a tenant's files still larger than they may be."""
    if await held_bytes(tx, tenant) >= TENANT_BYTES:
        raise Conflict(
            f"your tenant's files, answers included, have {TENANT_BYTES >> 20} MiB already; delete some"
        )


def _mine(of: Holder) -> ColumnElement[bool]:
    return (tables.files.c.tenant == of.tenant) & (tables.files.c.subject == of.subject)


def _found(row: Mapping[Any, Any] | None) -> Mapping[Any, Any]:
    if row is None:
        raise NotFound("there is no such file")
    return row
