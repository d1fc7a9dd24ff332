"""Usage of lines of batches: a line is charged once, however often it ran.

A gateway may die between an answer and the moment in which the API has kept it; then the line runs again, and both runs
are reported. The first report with tokens is charged, in the transaction that stores it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.database import tables
from busbar.api.records.batch_lines import by_batch
from busbar.kube.contracts.batches import LINE_REQUEST
from busbar.kube.contracts.usage import UsageRecord


def line_of(record: UsageRecord) -> tuple[str, int] | None:
    """(batch, number) of the line whose run this is; None: it is no line's."""
    found = re.fullmatch(LINE_REQUEST, record.request_id)
    return (found[1], int(found[2])) if found is not None else None


async def chargeable(tx: AsyncConnection, records: Sequence[UsageRecord]) -> list[UsageRecord]:
    """The records to store: of a line the first with tokens, unless one is stored already."""
    of = {record.seq: line for record in records if (line := line_of(record)) is not None}
    if not of:
        return list(records)
    lines = tables.batch_lines
    charged: dict[tuple[str, int], bool] = {}
    for batch, numbers in by_batch(set(of.values())).items():
        query = select(lines.c.number, lines.c.charged).where(_these(batch, numbers)).with_for_update()
        charged |= {(batch, row.number): row.charged for row in await tx.execute(query)}
    kept: list[UsageRecord] = []
    fresh: list[tuple[str, int]] = []
    for record in records:
        line = of.get(record.seq)
        if line is not None:
            if charged.get(line) or not record.prompt_tokens + record.completion_tokens:
                continue
            charged[line] = True
            fresh.append(line)
        kept.append(record)
    for batch, numbers in by_batch(fresh).items():
        await tx.execute(update(lines).where(_these(batch, numbers)).values(charged=True))
    return kept


def _these(batch: str, numbers: list[int]) -> ColumnElement[bool]:
    lines = tables.batch_lines
    return and_(lines.c.batch_id == batch, lines.c.number.in_(numbers))
