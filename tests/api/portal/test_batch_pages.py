"""The page of batches: one's own, their progress and their files, and nobody else's."""

from __future__ import annotations

import json

import httpx2
import pytest
from tests.api.conftest import World, client, settings, sqlite_template, sqlite_url, world

from busbar.api.access.identity import Scope
from busbar.kube.contracts.batches import BatchInfo, Claim, CompleteFile, NewBatch, NewFile, Settled

__all__ = ["settings", "sqlite_template", "sqlite_url", "world"]


async def made(world: World, subject: str, tenant: str, *names: str) -> BatchInfo:
    """A batch of somebody, as the gateway makes it."""
    files, batches = world.services.files, world.services.batches
    _, token = await world.services.tokens.create(
        subject, created_by="test", scopes=(Scope.INFERENCE,), tenant=tenant
    )
    owner = {"tenant": tenant, "subject": subject}
    file = await files.create(NewFile(**owner, name="in.jsonl"))
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": "m"}})
        for name in names
    ]
    await files.add(file.id, 0, "\n".join(lines).encode())
    await files.complete(CompleteFile(**owner, id=file.id, purpose="batch"))
    return await batches.create(
        NewBatch(
            **owner,
            key_id=token.id,
            sha256="0" * 64,
            endpoint="/v1/completions",
            input_file_id=file.id,
            metadata={"run": "7"},
        )
    )


async def answered(world: World, batch: BatchInfo, **statuses: int) -> None:
    """The gateway runs its lines, which end with these statuses in the order of the file."""
    claim = Claim(gateway="g", process="1", most=len(statuses))
    lent = (await world.services.batches.claim(claim)).lines
    for line, status in zip(lent, statuses.values(), strict=True):
        told = Settled(
            gateway="g",
            process="1",
            batch=batch.id,
            number=line.number,
            status=status,
            body='{"text": "<b>"}',
        )
        assert await world.services.batches.settle(told)


async def page(world: World, subject: str) -> httpx2.AsyncClient:
    return await world.as_(subject)


async def test_the_page_shows_progress_errors_and_files_of_ones_own_batches(world: World) -> None:
    batch = await made(world, "alice", "ada", "x", "y")
    alice = await page(world, "alice")
    shown = (await alice.get("/batches")).text
    assert batch.id in shown
    assert "run=7" in shown
    assert "at most" in shown
    assert "/cancel" in shown
    await answered(world, batch, x=200, y=400)
    shown = (await alice.get("/batches", headers={"HX-Request": "true"})).text
    assert "<h1>" not in shown
    assert "2 of 2" in shown
    assert "Completed" in shown
    assert "/cancel" not in shown
    for kind, name in (("answers", "x"), ("errors", "y"), ("requests", "x")):
        link = f"/batches/ada/{batch.id}/{kind}"
        assert link in shown
        got = await alice.get(link)
        assert got.status_code == 200
        assert got.headers["content-disposition"] == f'attachment; filename="{batch.id}-{kind}.jsonl"'
        assert json.loads(got.text.splitlines()[0])["custom_id"] == name


async def test_nobody_else_sees_cancels_or_downloads_a_batch(world: World) -> None:
    batch = await made(world, "alice", "ada", "x")
    for subject in ("adam", "bob"):
        other = await page(world, subject)
        assert batch.id not in (await other.get("/batches")).text
        for kind in ("answers", "errors", "requests"):
            assert (await other.get(f"/batches/ada/{batch.id}/{kind}")).status_code == 404
        assert (await other.post(f"/batches/ada/{batch.id}/cancel")).status_code == 404
    alice = await page(world, "alice")
    assert (await alice.get(f"/batches/bob-corp/{batch.id}/requests")).status_code == 404
    assert (await alice.get("/batches/ada/nonsense/requests")).status_code == 404
    assert (await alice.get(f"/batches/ada/{batch.id}/answers")).status_code == 404  # none yet


async def test_a_batch_is_cancelled_from_the_page_and_its_state_is_told(world: World) -> None:
    batch = await made(world, "alice", "ada", "x")
    alice = await page(world, "alice")
    done = await alice.post(f"/batches/ada/{batch.id}/cancel")
    assert (done.status_code, done.headers["location"]) == (303, "/batches")
    assert "Cancelled" in (await alice.get("/batches")).text
    assert (await alice.post(f"/batches/ada/{batch.id}/cancel")).status_code == 409


@pytest.mark.parametrize("subject", ["alice", "vera"])
async def test_without_batches_the_page_says_so(world: World, subject: str) -> None:
    assert "You have no batches yet" in (await (await page(world, subject)).get("/batches")).text


async def test_a_token_for_inference_alone_cannot_read_the_page(world: World) -> None:
    token = await world.token("alice", scopes=(Scope.INFERENCE,), tenant="ada")
    asking = client(world.public, {"Authorization": f"Bearer {token}"})
    assert (await asking.get("/batches")).status_code == 403
