"""Files and batches in the database: whose they are, their limits, and that each line is answered once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, select
from tests.api.conftest import Clock

from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.errors import Conflict, Invalid, NotFound, TooLarge
from busbar.api.records import batch_lines, batches, files
from busbar.api.records.batch_lines import HEAD_CHARS, head_of
from busbar.api.records.batches import BatchStore
from busbar.api.records.files import FileStore
from busbar.api.records.usage_ledger import By, UsageLedger
from busbar.kube.contracts.batches import (
    LINE_BYTES,
    PART_BYTES,
    BatchInfo,
    Claim,
    CompleteFile,
    FileRef,
    Lent,
    Line,
    LineRef,
    ListWanted,
    NewBatch,
    NewFile,
    Settled,
)
from busbar.kube.contracts.usage import UsageRecord

ALICE = {"tenant": "ada", "subject": "alice"}
CHAT = "/v1/chat/completions"


class Desk:
    """Both stores on one database, as one person and one gateway use them."""

    def __init__(self, database: Database) -> None:
        self.clock = Clock()
        self.database = database
        self.files = FileStore(database, self.clock)
        self.batches = BatchStore(database, self.clock)

    async def upload(self, data: bytes, purpose: str = "batch", **owner: str) -> str:
        whose = ALICE | owner
        made = await self.files.create(NewFile(name="in.jsonl", **whose))
        for number, at in enumerate(range(0, len(data), PART_BYTES)):
            await self.files.add(made.id, number, data[at : at + PART_BYTES])
        await self.files.complete(CompleteFile(id=made.id, purpose=purpose, **whose))
        return made.id

    async def create(self, file: str, **more: Any) -> BatchInfo:
        wanted = {**ALICE, "key_id": "k", "sha256": "0" * 64, "endpoint": CHAT, "input_file_id": file, **more}
        return await self.batches.create(NewBatch(**wanted))

    async def claim(self, most: int = 0, *holding: LineRef, gateway: str = "g", process: str = "1") -> Lent:
        return await self.batches.claim(
            Claim(gateway=gateway, process=process, holding=list(holding), most=most)
        )

    async def settle(self, line: LineRef, status: int = 200, process: str = "1", **more: Any) -> bool:
        fields = {"gateway": "g", "process": process, "status": status, "body": '{"id": "x"}'} | more
        return await self.batches.settle(Settled(batch=line.batch, number=line.number, **fields))

    async def see(self, batch: BatchInfo) -> BatchInfo:
        return await self.batches.get(FileRef(id=batch.id, **ALICE))

    async def read(self, file: str | None) -> list[dict[str, Any]]:
        assert file is not None
        data, after = b"", 0
        while True:
            piece, following = await self.files.content(FileRef(id=file, **ALICE), after)
            data += piece
            if following is None:
                break
            after = following
        assert len(data) == (await self.files.get(FileRef(id=file, **ALICE))).bytes
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
async def desk(database_url: str) -> AsyncIterator[Desk]:
    opened = Database(database_url)
    yield Desk(opened)
    await opened.close()


def request(name: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body} | changes


def jsonl(*rows: dict[str, Any] | str) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def usage(seq: int, request_id: str, tokens: int, at: datetime) -> UsageRecord:
    whose = {"key_id": "k", "tenant": "ada", "namespace": "ada-lab", "service": "m", "model": "m"}
    amounts = {"prompt_tokens": tokens, "completion_tokens": tokens, "cost_nano": tokens}
    return UsageRecord(seq=seq, request_id=request_id, finished_at=at, **whose, **amounts)


def refs(lines: list[Line]) -> list[LineRef]:
    return [LineRef(batch=line.batch, number=line.number) for line in lines]


async def test_each_line_is_lent_and_answered_once_and_a_bad_one_fails_alone(desk: Desk) -> None:
    rows: list[dict[str, Any] | str] = [
        request("a"),
        "{not json",
        request("b"),
        request("a"),
        request("ü", url="/v1/completions"),
    ]
    batch = await desk.create(await desk.upload(jsonl(*rows)), metadata={"run": "7"})
    assert (batch.status, batch.metadata) == ("validating", {"run": "7"})
    lent = (await desk.claim(9)).lines
    assert [json.loads(line.body)["messages"][0]["content"] for line in lent] == ["a", "b"]
    assert (await desk.claim(9, *refs(lent))).lines == []
    assert await desk.settle(lent[0])
    assert not await desk.settle(lent[0])
    now = await desk.see(batch)
    assert (now.status, now.total, now.completed, now.failed) == ("in_progress", 5, 1, 3)
    assert await desk.settle(lent[1], 400, body='{"error": {"message": "nö"}}')
    now = await desk.see(batch)
    assert (now.status, now.completed, now.failed) == ("completed", 1, 4)
    assert now.ended_at is not None
    (good,) = await desk.read(now.output_file_id)
    assert (good["custom_id"], good["response"]["status_code"], good["error"]) == ("a", 200, None)
    assert good["response"]["body"] == {"id": "x"}
    bad = await desk.read(now.error_file_id)
    assert [row["custom_id"] for row in bad] == [None, "b", "a", "ü"]
    assert [row["error"] and row["error"]["message"] for row in bad] == [
        "line 2: the line is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        None,
        "line 4: custom_id was used by an earlier line",
        f"line 5: url must be {CHAT}, the endpoint of the batch",
    ]
    assert bad[1]["response"]["body"]["error"]["message"] == "nö"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "must be a JSON object"),
        (request("a", custom_id=""), "custom_id must be"),
        (request("a", custom_id=5), "custom_id must be"),
        (request("a", custom_id="\ud800"), "custom_id must be"),
        (request("a", method="GET"), "method must be POST"),
        (request("a", body=[]), "body must be a request"),
        (request("a", body={"messages": []}), "names a model"),
        (request("a", body={"model": "m", "stream": True}), "no streams"),
        (request("a" * 513), "custom_id must be"),
        (request("a", body={"model": "m", "prompt": "x" * LINE_BYTES}), "at most 524,288 are taken"),
        ("[" * 100_000, "not JSON"),
        ('{"custom_id": "a", "custom_id": "b"}', "'custom_id' is there twice in one object"),
        ('{"custom_id": NaN}', "NaN is no number"),
    ],
)
def test_a_line_that_is_no_request_says_why(line: dict[str, Any] | str, problem: str) -> None:
    found = batch_lines.read(jsonl(line).rstrip(b"\n"), CHAT)
    assert problem in (found.problem or "")
    assert batch_lines.read(json.dumps(request("a")).encode(), CHAT).problem is None
    marked = b"\xef\xbb\xbf" + json.dumps(request("a")).encode() + b"\r"
    assert batch_lines.read(marked, CHAT).problem is None


@pytest.mark.parametrize("depth", range(940, 1000, 3))
def test_a_line_that_is_nested_too_deeply_fails_alone(depth: int) -> None:
    body = f'{{"model": "m", "messages": {"[" * depth}{"]" * depth}}}'
    line = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {body}}}'
    found = batch_lines.read(line.encode(), CHAT)
    assert found.problem is None or "nested too deeply" in found.problem


async def test_a_long_file_is_cut_piece_by_piece_wherever_its_parts_end(desk: Desk) -> None:
    rows = [request(f"n{n}", body={"model": "m", "prompt": "ü" * 1500}) for n in range(300)]
    data = jsonl(*rows).rstrip(b"\n")
    assert len(data) > 4 * PART_BYTES
    batch = await desk.create(await desk.upload(data))
    seen: list[str] = []
    held: list[LineRef] = []
    for _ in range(40):
        lent = (await desk.claim(20, *held)).lines
        seen += [json.loads(line.body)["prompt"] for line in lent]
        for line in lent:
            assert await desk.settle(line)
        if (await desk.see(batch)).status == "completed":
            break
    now = await desk.see(batch)
    assert (now.status, now.total, now.completed, len(seen)) == ("completed", 300, 300, 300)
    found = await desk.read(now.output_file_id)
    assert [row["custom_id"] for row in found] == [f"n{n}" for n in range(300)]


async def test_a_file_of_the_shortest_lines_is_cut_like_any_other(desk: Desk) -> None:
    # PostgreSQL takes 32,767 values in one statement.
    rows = [f'{{"custom_id":"{n:05}"}}' for n in range(33_000)]
    batch = await desk.create(await desk.upload(jsonl(*rows, request("32999"))))
    assert (await desk.claim(4)).lines == []
    seen = await desk.see(batch)
    assert (seen.status, seen.total, seen.failed) == ("completed", 33_001, 33_001)
    assert seen.error_file_id is not None
    last, _ = await desk.files.content(FileRef(id=seen.error_file_id, **ALICE), 33_000)
    assert json.loads(last)["error"]["message"] == "line 33001: custom_id was used by an earlier line"


async def test_lines_of_a_gateway_that_is_gone_are_lent_again_and_its_late_answer_is_not_kept(
    desk: Desk,
) -> None:
    await desk.create(await desk.upload(jsonl(request("a"), request("b"))))
    first = (await desk.claim(9)).lines
    assert (await desk.claim(9, gateway="other")).lines == []
    desk.clock.forward(seconds=61)
    again = (await desk.claim(9, gateway="other")).lines
    assert refs(again) == refs(first)
    assert not await desk.settle(first[0])
    assert await desk.settle(again[0], gateway="other")


async def test_a_gateway_that_started_anew_gets_its_lines_back_at_once(desk: Desk) -> None:
    await desk.create(await desk.upload(jsonl(request("a"), request("b"))))
    first = (await desk.claim(9)).lines
    again = (await desk.claim(9, process="2")).lines
    assert refs(again) == refs(first)
    assert not await desk.settle(first[0])
    assert await desk.settle(again[0], process="2")


async def test_lines_that_a_gateway_never_heard_of_are_free_again(desk: Desk) -> None:
    await desk.create(await desk.upload(jsonl(request("a"), request("b"))))
    lent = (await desk.claim(9)).lines
    again = (await desk.claim(9, *refs(lent[:1]))).lines
    assert refs(again) == refs(lent[1:])


async def test_a_line_may_be_tried_again_later(desk: Desk) -> None:
    batch = await desk.create(await desk.upload(jsonl(request("a"))))
    (line,) = (await desk.claim(9)).lines
    assert not await desk.settle(line, again_in_s=30)
    assert (await desk.claim(9)).lines == []
    desk.clock.forward(seconds=31)
    (line,) = (await desk.claim(9)).lines
    assert await desk.settle(line)
    assert (await desk.see(batch)).status == "completed"


async def test_batches_take_turns(desk: Desk) -> None:
    long = await desk.create(await desk.upload(jsonl(*(request(f"n{n}") for n in range(30)))))
    await desk.claim(0)
    first = (await desk.claim(10)).lines
    short = await desk.create(await desk.upload(jsonl(request("a"), request("b"))))
    lent = (await desk.claim(4, *refs(first))).lines
    assert {line.batch for line in first} == {long.id}
    assert [line.batch for line in lent] == [short.id, short.id, long.id, long.id]


def alike(name: str, head: str, model: str = "m", **body: Any) -> dict[str, Any]:
    """A line whose system prompt is `head`, repeated until it is long."""
    system = {"role": "system", "content": head * HEAD_CHARS}
    messages = [system, {"role": "user", "content": name}]
    return request(name, body={"model": model, "messages": messages, **body})


async def claimed(desk: Desk, *rows: dict[str, Any]) -> list[str]:
    """The names of the lines, in the order in which they are lent."""
    batch = await desk.create(await desk.upload(jsonl(*rows)))
    names: list[str] = []
    while len(names) < len(rows):
        lent = (await desk.claim(2)).lines
        names += [rows[line.number]["custom_id"] for line in lent]
        for line in lent:
            await desk.settle(line)
    assert (await desk.see(batch)).status == "completed"
    return names


async def test_lines_that_begin_alike_are_lent_one_after_another(desk: Desk) -> None:
    rows = [alike(f"{head}{n}", head) for n in range(3) for head in "xyz"]
    assert await claimed(desk, *rows) == [f"{head}{n}" for head in "xyz" for n in range(3)]
    short = [request(f"{n}") for n in range(4)]
    assert await claimed(desk, *short) == ["0", "1", "2", "3"], "else the file's order stays"
    tools = [{"type": "function", "function": {"name": "f"}}]
    other = [alike("a", "x"), alike("b", "x", "another"), alike("c", "x", tools=tools), alike("d", "x")]
    assert await claimed(desk, *other) == ["a", "d", "b", "c"]


async def test_they_are_known_again_in_the_next_piece_of_the_file(desk: Desk) -> None:
    long = [request(f"{n}", body={"model": "m", "prompt": f"{n}" * (LINE_BYTES - 1000)}) for n in range(4)]
    batch = await desk.create(await desk.upload(jsonl(alike("a", "x"), *long, alike("b", "x"))))
    await desk.claim(0)
    assert (await desk.see(batch)).total < 6
    await desk.claim(0)
    assert (await desk.see(batch)).total == 6
    assert [line.number for line in (await desk.claim(6)).lines] == [0, 5, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "has"),
    [
        ({"model": "m", "prompt": "p" * HEAD_CHARS}, True),
        ({"model": "m", "prompt": "p" * (HEAD_CHARS - 1)}, False),
        ({"model": "m", "prompt": list(range(HEAD_CHARS))}, True),
        ({"model": "m", "input": "p" * HEAD_CHARS, "instructions": "i"}, True),
        ({"model": "m", "messages": [{"role": "user", "content": "\ud800" * HEAD_CHARS}]}, True),
        ({"model": "m"}, False),
        ({"model": "m", "messages": 7}, False),
    ],
)
def test_any_long_beginning_has_a_digest(body: dict[str, Any], has: bool) -> None:
    found = head_of(body)
    assert (found is not None) is has
    if found is not None:
        assert len(found) == 16
        assert head_of({**body, "model": "other"}) != found
        assert head_of({**body, "temperature": 0.5}) == found


async def test_a_cancelled_batch_ends_with_what_it_has(desk: Desk) -> None:
    batch = await desk.create(await desk.upload(jsonl(*(request(name) for name in "abc"))))
    lent = (await desk.claim(2)).lines
    assert await desk.settle(lent[0])
    now = await desk.batches.cancel(FileRef(id=batch.id, **ALICE))
    assert now.status == "cancelling"
    told = await desk.claim(9, *refs(lent[1:]))
    assert (told.lines, told.cancelled) == ([], [batch.id])
    assert not await desk.settle(lent[1], again_in_s=1)
    now = await desk.see(batch)
    assert (now.status, now.completed, now.error_file_id) == ("cancelled", 1, None)
    assert len(await desk.read(now.output_file_id)) == 1
    with pytest.raises(Conflict, match="it is cancelled"):
        await desk.batches.cancel(FileRef(id=batch.id, **ALICE))


async def test_a_cancelled_batch_whose_gateway_is_gone_ends(desk: Desk) -> None:
    batch = await desk.create(await desk.upload(jsonl(request("a"))))
    await desk.claim(2)
    await desk.batches.cancel(FileRef(id=batch.id, **ALICE))
    desk.clock.forward(seconds=61)
    await desk.claim(0, gateway="other")
    assert (await desk.see(batch)).status == "cancelled"


async def test_after_a_day_what_is_not_answered_fails(desk: Desk) -> None:
    batch = await desk.create(await desk.upload(jsonl(request("a"), request("b"))))
    lent = (await desk.claim(1)).lines
    assert await desk.settle(lent[0])
    desk.clock.forward(hours=25)
    assert (await desk.claim(5)).lines == []
    now = await desk.see(batch)
    assert (now.status, now.completed, now.failed) == ("expired", 1, 1)
    (late,) = await desk.read(now.error_file_id)
    assert late["error"]["code"] == "batch_expired"


async def test_no_query_of_a_gateway_reads_more_lines_than_it_names_or_are_lent(sqlite_url: str) -> None:
    desk = Desk(Database(sqlite_url))
    for _ in range(2):
        await desk.create(await desk.upload(jsonl(*(request(f"{n}") for n in range(9)))))
    lent = (await desk.claim(2)).lines
    lent += (await desk.claim(2, *refs(lent))).lines
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        asked.append((statement, values))

    event.listen(desk.database.engine.sync_engine, "before_cursor_execute", note)
    lent += (await desk.claim(2, *refs(lent))).lines
    for line in lent[:2]:
        assert await desk.settle(line)
        run = usage(line.number + 1, f"{line.batch}-{line.number}-abcdef", 3, desk.clock())
        await UsageLedger(desk.database, desk.clock).accept("g", [run])
    event.remove(desk.database.engine.sync_engine, "before_cursor_execute", note)
    of_lines = [each for each in asked if "batch_lines" in each[0]]
    assert len(of_lines) > 8
    async with desk.database.read() as db:
        for statement, values in of_lines:
            rows = (await db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)).all()
            plan = [row[-1] for row in rows if " batch_lines" in row[-1]]
            assert plan, statement
            for step in plan:
                assert step.startswith("SEARCH ") or step.endswith("ix_batch_lines_lent"), (statement, step)
    await desk.database.close()


async def test_a_batch_of_any_length_expires_in_a_few_statements(desk: Desk) -> None:
    counts = []
    for length in (1, 200):
        await desk.create(await desk.upload(jsonl(*(request(f"{n}") for n in range(length)))))
        await desk.claim()
        desk.clock.forward(hours=25)
        statements: list[str] = []

        def note(
            _connection: Any, _cursor: Any, statement: str, *_: Any, seen: list[str] = statements
        ) -> None:
            seen.append(statement)

        event.listen(desk.database.engine.sync_engine, "before_cursor_execute", note)
        await desk.claim()
        event.remove(desk.database.engine.sync_engine, "before_cursor_execute", note)
        counts.append(len(statements))
    assert counts[0] == counts[1]


async def test_a_file_that_is_deleted_while_its_batch_runs_changes_nothing(desk: Desk) -> None:
    file = await desk.upload(jsonl(request("a")))
    unread = await desk.create(await desk.upload(jsonl(request("a"))))
    await desk.files.delete(FileRef(id=unread.input_file_id, **ALICE))
    batch = await desk.create(file)
    await desk.claim(0)
    await desk.claim(0)
    await desk.files.delete(FileRef(id=file, **ALICE))
    (line,) = (await desk.claim(9)).lines
    assert await desk.settle(line)
    assert (await desk.see(batch)).status == "completed"
    failed = await desk.see(unread)
    assert (failed.status, failed.problem) == ("failed", "its file was deleted before it was read")


@pytest.mark.parametrize("data", [b"", b"\n \n"])
async def test_a_file_without_a_line_fails_as_a_whole(desk: Desk, data: bytes) -> None:
    batch = await desk.create(await desk.upload(data))
    await desk.claim(0)
    now = await desk.see(batch)
    assert (now.status, now.problem) == ("failed", "the file has no line")


async def test_answers_are_gone_with_the_file_that_held_them(desk: Desk) -> None:
    batch = await desk.create(await desk.upload(jsonl(request("a"), "{bad")))
    (line,) = (await desk.claim(1)).lines
    assert await desk.settle(line)
    seen = await desk.see(batch)
    assert seen.output_file_id is not None
    await desk.files.delete(FileRef(id=seen.output_file_id, **ALICE))
    async with desk.database.read() as db:
        kept = select(tables.batch_lines.c.number).where(tables.batch_lines.c.answer.is_not(None))
        assert list((await db.execute(kept)).scalars()) == [1]
    assert len(await desk.read(seen.error_file_id)) == 1


async def test_limits_on_files_lines_and_open_batches(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(files, "TENANT_BYTES", 5 << 19)
    monkeypatch.setattr(batches, "MOST_LINES", 2)
    monkeypatch.setattr(batches, "MOST_OPEN", 2)
    with pytest.raises(TooLarge, match="larger than 1 MiB"):
        await desk.upload(b"x" * ((1 << 20) + 1))
    for _ in range(2):
        await desk.upload(b"x" * (1 << 20))
    with pytest.raises(TooLarge, match="your tenant's files"):
        await desk.upload(b"x" * (1 << 20))
    await desk.upload(b"x" * (1 << 19))
    await desk.upload(b"x" * (1 << 20), tenant="bob-corp")
    small = await desk.upload(jsonl(*(request(name) for name in "abc")), tenant="carol")
    batch = await desk.create(small, tenant="carol")
    await desk.claim(0)
    now = await desk.batches.get(FileRef(id=batch.id, tenant="carol", subject="alice"))
    assert (now.status, now.problem) == ("failed", "a batch has at most 2 lines; cut the file into several")
    for _ in range(2):
        await desk.create(small, tenant="carol")
    with pytest.raises(Conflict, match="2 of your batches have not ended"):
        await desk.create(small, tenant="carol")


async def test_a_tenant_whose_answers_fill_its_room_begins_no_more_batches(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await desk.create(await desk.upload(jsonl(request("a"))))
    (line,) = (await desk.claim(1)).lines
    assert await desk.settle(line, body=json.dumps({"text": "x" * 5000}))
    another = await desk.upload(jsonl(request("b")))
    monkeypatch.setattr(files, "TENANT_BYTES", 4096)
    with pytest.raises(Conflict, match="delete some"):
        await desk.create(another)
    await desk.files.delete(FileRef(id=(await desk.see(first)).output_file_id or "", **ALICE))
    assert (await desk.create(another)).status == "validating"


async def test_files_and_batches_are_their_owners_alone(desk: Desk) -> None:
    file = await desk.upload(jsonl(request("a")))
    batch = await desk.create(file)
    for other in ({"tenant": "ada", "subject": "bob"}, {"tenant": "bob-corp", "subject": "alice"}):
        with pytest.raises(NotFound):
            await desk.files.get(FileRef(id=file, **other))
        with pytest.raises(NotFound):
            await desk.files.content(FileRef(id=file, **other), 0)
        with pytest.raises(NotFound):
            await desk.files.delete(FileRef(id=file, **other))
        with pytest.raises(NotFound):
            await desk.batches.get(FileRef(id=batch.id, **other))
        with pytest.raises(NotFound):
            await desk.batches.cancel(FileRef(id=batch.id, **other))
        with pytest.raises(NotFound):
            await desk.create(file, **other)
        assert (await desk.files.page(ListWanted(**other))).files == []
        assert (await desk.batches.page(ListWanted(**other))).batches == []


async def test_lists_go_on_behind_what_is_known(desk: Desk) -> None:
    names = [await desk.upload(b"x") for _ in range(3)]
    made = [(await desk.create(names[0])).id for _ in range(3)]
    first = await desk.files.page(ListWanted(limit=2, **ALICE))
    rest = await desk.files.page(ListWanted(limit=2, after=first.files[-1].id, **ALICE))
    assert (first.more, rest.more) == (True, False)
    assert sorted(f.id for f in first.files + rest.files) == sorted(names)
    page = await desk.batches.page(ListWanted(limit=2, **ALICE))
    end = await desk.batches.page(ListWanted(limit=2, after=page.batches[-1].id, **ALICE))
    assert sorted(b.id for b in page.batches + end.batches) == sorted(made)


async def test_what_cannot_be_a_batch_is_refused(desk: Desk) -> None:
    with pytest.raises(Invalid, match="purpose must be 'batch'"):
        await desk.upload(b"x", purpose="fine-tune")
    file = await desk.upload(jsonl(request("a")))
    with pytest.raises(Invalid, match="endpoint must be one of"):
        await desk.create(file, endpoint="/v1/images")
    with pytest.raises(NotFound):
        await desk.create("file-" + "0" * 32)
    await desk.create(file)
    (line,) = (await desk.claim(1)).lines
    await desk.settle(line)
    (output,) = [f for f in (await desk.files.page(ListWanted(**ALICE))).files if f.purpose == "batch_output"]
    with pytest.raises(Invalid, match="the file's purpose must be 'batch'"):
        await desk.create(output.id)
    with pytest.raises(Conflict, match="part 1 came where part 0 was due"):
        await desk.files.add((await desk.files.create(NewFile(name="x", **ALICE))).id, 1, b"x")


async def test_a_line_that_ran_twice_is_charged_once(desk: Desk, database_url: str) -> None:
    batch = await desk.create(await desk.upload(jsonl(request("a"), request("b"))))
    await desk.claim(9)
    opened = Database(database_url)
    ledger = UsageLedger(opened, desk.clock)

    def run(seq: int, number: int, run: str, tokens: int) -> UsageRecord:
        return usage(seq, f"{batch.id}-{number}-{run}", tokens, desk.clock())

    cut_off = run(1, 0, "aaaaaa", 0)
    assert await ledger.accept("g1", [cut_off, run(2, 0, "bbbbbb", 5), run(3, 0, "cccccc", 6)]) == 3
    assert await ledger.accept("g1", [run(3, 0, "cccccc", 6), run(4, 1, "dddddd", 7)]) == 4
    assert await ledger.accept("g2", [run(1, 0, "eeeeee", 8), run(2, 1, "ffffff", 9)]) == 2
    now = desk.clock()
    (total,) = await ledger.usage(
        By.KEY, since=now - timedelta(days=1), until=now + timedelta(days=1), tenants=None
    )
    assert (total.requests, total.prompt_tokens, total.completion_tokens) == (2, 12, 12)
    assert total.cost == pytest.approx(12e-9)
    await opened.close()


async def test_old_files_and_batches_go(desk: Desk) -> None:
    half = await desk.files.create(NewFile(name="x", **ALICE))
    file = await desk.upload(jsonl(request("a")))
    batch = await desk.create(file)
    (line,) = (await desk.claim(1)).lines
    await desk.settle(line)
    desk.clock.forward(hours=2)
    await desk.files.prune()
    with pytest.raises(NotFound):
        await desk.files.add(half.id, 0, b"x")
    assert len((await desk.files.page(ListWanted(**ALICE))).files) == 2
    desk.clock.forward(days=31)
    await desk.files.prune()
    await desk.batches.prune()
    assert (await desk.files.page(ListWanted(**ALICE))).files == []
    with pytest.raises(NotFound):
        await desk.see(batch)
