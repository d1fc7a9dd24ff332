"""`busbar batch` through a real gateway and the real API, and its progress on a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.api.conftest import GATEWAY
from tests.cli.conftest import Done, Site, home, settings, site, sqlite_template, sqlite_url, world
from tests.cli.loopback import app_of, listening
from tests.gateway.conftest import house
from tests.gateway.parts import House, route

from busbar.cli.batches import Batch, BatchClient
from busbar.cli.commands import batch as command
from busbar.cli.errors import Unreachable

__all__ = ["home", "house", "settings", "site", "sqlite_template", "sqlite_url", "world"]


@dataclass
class Desk:
    """A person at a terminal, and the gateway."""

    site: Site
    house: House

    async def batch(self, *words: str) -> Done:
        return await self.site.busbar("batch", *words, "--gateway", f"{self.house.public}/v1")

    def file(self, *prompts: Any, model: str = "m") -> str:
        path = self.site.folder / "requests.jsonl"
        rows = [
            {
                "custom_id": f"a-{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": model, "prompt": p},
            }
            for n, p in enumerate(prompts)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)


@pytest.fixture
async def desk(site: Site, house: House, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(command, "PAUSE_S", 0.02)
    site.world.kube.users["to-api"] = {"username": GATEWAY, "groups": ["system:serviceaccounts"]}
    await house.stop_gateway()
    house.overrides.update(batch_lines=4, batch_poll_s=0.02)
    async with listening(app_of(site.world.internal)) as url:
        house.overrides["api_url"] = url
        await house.start_gateway()
        await house.publish(route("m", await house.engine("one", " two"), tenant="ada", namespace="ada-lab"))
        yield Desk(site, house)
        await house.stop_gateway()


async def test_a_file_becomes_a_batch_whose_answers_are_written_to_a_file(desk: Desk) -> None:
    made = await desk.batch("create", desk.file("x", "y", "z"), "--wait", "--metadata", "run=7", "-o", "name")
    assert made.code == 0, made.err
    (batch_id,) = made.lines
    assert f"{batch_id}: completed" in made.err
    shown = await desk.batch("show", batch_id)
    assert [line.split(":")[0] for line in shown.lines][:3] == ["batch", "status", "requests"]
    assert "3/3" in shown.out
    assert "run=7" in shown.out
    listed = await desk.batch("list")
    assert listed.lines[1].split()[:4] == [batch_id, "completed", "3/3", "/v1/completions"]
    target = desk.site.folder / "answers.jsonl"
    got = await desk.batch("results", batch_id, "-f", str(target))
    assert (got.code, got.err) == (0, f"3 lines in {target}\n")
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert {each["custom_id"] for each in answers} == {"a-0", "a-1", "a-2"}
    assert {each["response"]["body"]["choices"][0]["text"] for each in answers} == {"one two"}
    printed = await desk.batch("results", batch_id)
    assert printed.out == target.read_text()
    assert (await desk.batch("results", batch_id, "--errors")).code == 3


async def test_results_that_are_stopped_half_way_leave_no_file_and_keep_the_old_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await desk.batch("create", desk.file("x", "y"), "--wait", "-o", "name")
    folder = desk.site.folder / "answers"
    folder.mkdir()
    target = folder / "answers.jsonl"
    content = BatchClient.content

    def stopped(client: BatchClient, file_id: str) -> Iterator[bytes]:
        yield next(content(client, file_id))
        assert len(list(folder.iterdir())) == 1 + target.exists(), "nothing was being written"
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchClient, "content", stopped)
    words = ("results", made.out.strip(), "-f", str(target))
    assert (await desk.batch(*words)).code == 130
    assert list(folder.iterdir()) == []
    target.write_text("those of before")
    assert (await desk.batch(*words)).code == 130
    assert [(each.name, each.read_text()) for each in folder.iterdir()] == [(target.name, "those of before")]
    missing = await desk.batch("results", made.out.strip(), "-f", str(folder / "no" / "answers.jsonl"))
    assert (missing.code, "cannot be written" in missing.err) == (2, True)


async def test_failed_requests_and_a_file_without_requests_are_told(desk: Desk) -> None:
    made = await desk.batch("create", desk.file("x", model="unknown"), "--wait", "-o", "json")
    document = json.loads(made.out)
    assert document["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    errors = await desk.batch("results", document["id"], "--errors")
    assert "model_not_found" in errors.out
    empty = desk.site.folder / "empty.jsonl"
    empty.write_text("\n")
    assert (await desk.batch("create", str(empty))).code == 2
    failed = await desk.batch("create", str(empty), "--endpoint", "/v1/completions", "--wait")
    assert failed.code == 6
    assert (await desk.batch("create", "missing.jsonl")).code == 2
    assert (await desk.batch("create", desk.file("x"), "--metadata", "run")).code == 2
    wrong = await desk.batch("create", desk.file("x"), "--endpoint", "/v1/images")
    assert (wrong.code, "endpoint must be one of" in wrong.err) == (1, True)


async def test_a_batch_that_runs_can_be_cancelled_once(desk: Desk) -> None:
    engine = desk.house.engines[0]
    engine.pause_at = 0
    made = await desk.batch("create", desk.file("x", "y"), "-o", "name")
    batch_id = made.out.strip()
    cancelled = await desk.batch("cancel", batch_id)
    assert cancelled.code == 0
    assert cancelled.out.split()[0] == batch_id
    engine.go.set()
    ended = await desk.batch("show", batch_id, "--wait", "-o", "json")
    assert json.loads(ended.out)["status"] == "cancelled"
    assert (await desk.batch("cancel", batch_id)).code == 1
    assert (await desk.batch("show", "batch-" + "0" * 20)).code == 3


async def test_the_server_says_where_the_gateway_is_and_a_wrong_place_is_told(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(desk.site.world.services.settings)
    monkeypatch.setattr(kind, "shown_gateway_url", property(lambda _: desk.house.public))
    told = await desk.site.busbar("batch", "list")
    assert (told.code, "You have no batches" in told.out) == (0, True)
    away = await desk.site.busbar("batch", "list", "--gateway", "http://127.0.0.1:9/v1")
    assert (away.code, "--gateway" in away.err) == (5, True)


FOUND = Batch.model_validate(
    {
        "id": "batch-1",
        "endpoint": "/v1/completions",
        "status": "in_progress",
        "input_file_id": "f",
        "created_at": 1,
        "expires_at": 2,
        "request_counts": {"total": 9, "completed": 3, "failed": 1},
    }
)


class Flaky(BatchClient):
    """A gateway that is away now and then: each answer is a state, or None."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)

    def batch(self, batch_id: str) -> Batch:
        status = self.answers.pop(0)
        if status is None:
            raise Unreachable("away")
        return FOUND.model_copy(update={"status": status})


def test_waiting_goes_on_over_a_gateway_that_is_restarted_and_ends_where_it_stays_away() -> None:
    now = [0.0]

    def wait(client: BatchClient, step_s: float) -> Batch:
        def sleep(_: float) -> None:
            now[0] += step_s

        return command.until_ended(client, FOUND, sleep, lambda: now[0])

    client = Flaky(None, None, "in_progress", None, None, "completed")
    assert wait(client, command.AWAY_S / 2).status == "completed"
    with pytest.raises(Unreachable):
        wait(Flaky(*[None] * 9), command.AWAY_S / 2)


def test_progress_counts_what_failed_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=text, force_terminal=True, width=80))
    with command.counting() as shown:
        shown(FOUND)
    assert "in_progress" in text.getvalue()
    assert "4/9, 1 failed" in text.getvalue()
    with command.bar("uploading", 10) as told:
        told(10)
    assert "100%" in text.getvalue()


def test_an_upload_tells_how_far_it_is(tmp_path: Path) -> None:
    from busbar.cli.batches import _Counted

    path = tmp_path / "f"
    told: list[int] = []
    path.write_bytes(b"12345")
    with _Counted(path, told.append) as file:
        assert file.read(3) + file.read() == b"12345"
    assert told == [3, 2]
