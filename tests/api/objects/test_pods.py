"""Logs as a stream, and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from tests.api.conftest import BASE, World

from busbar.api.errors import Unavailable
from busbar.api.objects import pods
from busbar.kube.resources import EVENTS, PODS, TRAINING_JOBS

AT = f"{BASE}/namespaces/ada-lab/trainingjobs/ada-run"


def put_pod(
    world: World,
    name: str,
    *,
    attempt: int,
    rank: int,
    phase: str = "Running",
    replacement: str | None = None,
    owner: str | None = None,
) -> None:
    labels = {
        "busbar.dev/job": "ada-run",
        "busbar.dev/kind": "trainingjob",
        "busbar.dev/attempt": str(attempt),
        "busbar.dev/rank": str(rank),
        **({} if replacement is None else {"busbar.dev/replacement": replacement}),
    }
    metadata: dict[str, Any] = {"name": name, "namespace": "ada-lab", "labels": labels}
    if owner is not None:
        metadata["ownerReferences"] = [{"kind": "TrainingJob", "name": "ada-run", "uid": owner}]
    world.kube.put(PODS, {"metadata": metadata, "status": {"phase": phase}})
    world.kube.logs["ada-lab", name] = [f"log of {name}\n".encode()]


def put_event(world: World, name: str, about: dict[str, str], at: str) -> None:
    """Its reason is its name."""
    event = {"reason": name, "message": f"event {name}", "lastTimestamp": at, "involvedObject": about}
    world.kube.put(EVENTS, {"metadata": {"name": name, "namespace": "ada-lab"}, **event})


async def test_the_newest_attempts_log_is_read_unless_another_is_asked_for(world: World) -> None:
    put_pod(world, "ada-run-2-0", attempt=2, rank=0)
    put_pod(world, "ada-run-2-1", attempt=2, rank=1)
    alice = await world.as_("alice")
    assert (await alice.get(f"{AT}/logs")).text == "log of ada-run-2-0\n"
    assert (await alice.get(f"{AT}/logs?rank=1")).text == "log of ada-run-2-1\n"
    assert (await alice.get(f"{AT}/logs?attempt=1")).text == "ada step 1\nada step 2\n"
    missing = await alice.get(f"{AT}/logs?rank=7")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "NotFound")
    assert (await alice.get(f"{AT}/logs?rank=-1")).status_code == 422


async def test_of_a_rank_whose_pod_was_replaced_the_newest_pods_log_is_read(world: World) -> None:
    put_pod(world, "ada-run-2-0", attempt=2, rank=0, phase="Failed")
    put_pod(world, "ada-run-2-0-r1", attempt=2, rank=0, phase="Failed", replacement="1")
    put_pod(world, "ada-run-2-0-r2", attempt=2, rank=0, replacement="2")
    alice = await world.as_("alice")
    assert (await alice.get(f"{AT}/logs")).text == "log of ada-run-2-0-r2\n"


async def test_pods_and_events_of_a_deleted_object_of_the_same_name_are_not_this_ones(world: World) -> None:
    uid = world.kube.objects["trainingjobs", "ada-lab", "ada-run"]["metadata"]["uid"]
    put_pod(world, "ada-run-2-0", attempt=2, rank=0, owner=uid)
    put_pod(world, "ada-run-9-0", attempt=9, rank=0, owner="former")
    pod = world.kube.objects["pods", "ada-lab", "ada-run-2-0"]["metadata"]["uid"]
    for name, kind, of, about in (
        ("job", "TrainingJob", "ada-run", uid),
        ("former-job", "TrainingJob", "ada-run", "former"),
        ("pod", "Pod", "ada-run-2-0", pod),
        ("former-pod", "Pod", "ada-run-2-0", "former"),
    ):
        put_event(world, name, {"kind": kind, "name": of, "uid": about}, "2026-03-01T10:00:00Z")
    alice = await world.as_("alice")
    assert (await alice.get(f"{AT}/logs")).text == "log of ada-run-2-0\n"
    assert "ada-run-9-0" not in (await alice.get(f"{AT}/pods")).text
    assert {e["reason"] for e in (await alice.get(f"{AT}/events")).json()["items"]} == {"job", "pod"}


async def test_who_follows_a_log_with_a_token_that_is_revoked_reads_no_further(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "LOOK_AGAIN_S", 0.0)
    world.kube.open_logs["ada-lab", "ada-run-1-0"] = asyncio.Event()
    asked: list[str] = []
    log = world.kube.log

    async def watched(namespace: str, name: str, *, params: Mapping[str, str]) -> AsyncGenerator[bytes]:
        async for chunk in log(namespace, name, params=params):
            asked.append(name)
            yield chunk

    monkeypatch.setattr(world.kube, "log", watched)
    alice = await world.as_("alice")
    async with asyncio.timeout(30):
        following = asyncio.create_task(alice.get(f"{AT}/logs?follow=true"))
        while len(asked) < 2:  # noqa: ASYNC110 - there is no event for what a stream has sent
            await asyncio.sleep(0)
        await world.services.tokens.revoke_many("alice")
        world.kube.logs["ada-lab", "ada-run-1-0"].append(b"a secret of later\n")
        text = (await following).text
    assert text.startswith("ada step 1\nada step 2\n")
    assert "you may not read on" in text
    assert "a secret of later" not in text


async def test_a_log_goes_on_while_nobody_knows_whether_its_reader_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pods, "LOOK_AGAIN_S", 0.0)

    async def log() -> AsyncGenerator[bytes]:
        yield b"1"
        yield b"2"

    async def away() -> None:
        raise Unavailable("the database does not answer")

    assert [chunk async for chunk in pods.while_allowed(log(), away)] == [b"1", b"2"]


async def test_a_followed_log_arrives_as_it_is_written(world: World) -> None:
    ended = world.kube.open_logs["ada-lab", "ada-run-1-0"] = asyncio.Event()
    stream = await world.services.pods.logs(
        await _caller(world), TRAINING_JOBS, "ada-lab", "ada-run", follow=True
    )
    assert await anext(stream) == b"ada step 1\n"
    assert await anext(stream) == b"ada step 2\n"
    world.kube.logs["ada-lab", "ada-run-1-0"].append(b"ada step 3\n")
    assert await anext(stream) == b"ada step 3\n"
    ended.set()
    assert [chunk async for chunk in stream] == []


async def _caller(world: World) -> Any:
    from busbar.api.access.tokens import caller_of
    from busbar.kube.contracts.keys import digest_of

    token = await world.services.tokens.find(digest_of(await world.token("alice")))
    assert token is not None
    return caller_of(token)


async def test_a_silent_pod_is_followed_at_once_and_let_go_when_the_caller_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "FIRST_WORD_S", 0.01)
    world.kube.logs["ada-lab", "ada-run-1-0"] = []
    world.kube.open_logs["ada-lab", "ada-run-1-0"] = asyncio.Event()
    ended: list[str] = []
    log = world.kube.log

    async def watched(namespace: str, name: str, *, params: Mapping[str, str]) -> AsyncGenerator[bytes]:
        try:
            async for chunk in log(namespace, name, params=params):
                yield chunk
        finally:
            ended.append(name)

    monkeypatch.setattr(world.kube, "log", watched)
    caller = await _caller(world)
    async with asyncio.timeout(30):
        stream = await world.services.pods.logs(caller, TRAINING_JOBS, "ada-lab", "ada-run", follow=True)
        world.kube.logs["ada-lab", "ada-run-1-0"].append(b"at last\n")
        assert await anext(stream) == b"at last\n"
        assert ended == []
        await stream.aclose()
        assert ended == ["ada-run-1-0"]
        world.kube.logs["ada-lab", "ada-run-1-0"] = []
        unheard = await world.services.pods.logs(caller, TRAINING_JOBS, "ada-lab", "ada-run", follow=True)
        await unheard.aclose()
        assert len(ended) == 2


async def test_a_log_that_is_refused_says_why_and_holds_nothing(world: World) -> None:
    del world.kube.logs["ada-lab", "ada-run-1-0"]
    answer = await (await world.as_("alice")).get(f"{AT}/logs?follow=true")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NotFound")


async def test_a_pod_that_has_not_started_is_a_conflict_with_a_sentence(world: World) -> None:
    put_pod(world, "ada-run-3-0", attempt=3, rank=0, phase="Pending")
    alice = await world.as_("alice")
    answer = await alice.get(f"{AT}/logs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "Conflict")
    assert "has not started yet" in answer.json()["error"]["message"]


async def test_pods_of_another_object_with_a_similar_name_are_not_this_ones(world: World) -> None:
    put_pod(world, "other", attempt=9, rank=0)
    world.kube.objects["pods", "ada-lab", "other"]["metadata"]["labels"]["busbar.dev/kind"] = "modelservice"
    alice = await world.as_("alice")
    assert [p["name"] for p in (await alice.get(f"{AT}/pods")).json()["items"]] == ["ada-run-1-0"]


async def test_pods_of_an_object_that_does_not_exist_are_not_found(world: World) -> None:
    answer = await (await world.as_("alice")).get(f"{AT.replace('ada-run', 'nobody')}/pods")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NotFound")


async def test_events_of_the_object_and_its_pods_come_newest_first(world: World) -> None:
    for name, kind, of, at in (
        ("a", "TrainingJob", "ada-run", "2026-03-01T10:00:00Z"),
        ("b", "Pod", "ada-run-1-0", "2026-03-01T11:00:00Z"),
        ("c", "TrainingJob", "another", "2026-03-01T12:00:00Z"),
        ("d", "ModelService", "ada-run", "2026-03-01T12:00:00Z"),
    ):
        put_event(world, name, {"kind": kind, "name": of}, at)
    alice = await world.as_("alice")
    found = (await alice.get(f"{AT}/events")).json()["items"]
    assert [(e["reason"], e["object"]) for e in found] == [
        ("b", "Pod/ada-run-1-0"),
        ("a", "TrainingJob/ada-run"),
    ]
