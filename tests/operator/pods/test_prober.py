"""Reading workload ports: which addresses are called, and the limits on a hostile answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from tests.operator.builders import SETTINGS, replica, running
from tests.operator.pods.test_model_server import exposition

from busbar.kube.contracts.bearers import Role, bearer_for, former_bearer_for
from busbar.kube.types.engines import VLLM
from busbar.operator.errors import ProbeRefused
from busbar.operator.metrics import Metrics
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.pods.prober import Prober, address_of
from busbar.operator.watch.projections import Node, Pod
from busbar.operator.write.actions import PostToPod
from busbar.scheduler.autoscale.reach import PortSeen

LOOPBACK = Node("node-0", (), (), 0, 0, 0, (), True, ("127.0.0.0/8",))


def talking(**fields: Any) -> Pod:
    return running(0, port=9400, ip="10.1.0.7", **fields)


@pytest.mark.parametrize(
    ("pod", "node", "why"),
    [
        (running(0, ip="10.1.0.7"), replace(LOOPBACK, cidrs=("10.1.0.0/24",)), "no port"),
        (talking(host_network=True), replace(LOOPBACK, cidrs=("10.1.0.0/24",)), "host network"),
        (talking(), replace(LOOPBACK, cidrs=("10.2.0.0/24",)), "not in the pod range"),
        (talking(), replace(LOOPBACK, cidrs=()), "not in the pod range"),
        (talking(), None, "not in the pod range"),
    ],
)
def test_a_pod_that_breaks_a_rule_is_not_dialled(pod: Pod, node: Node | None, why: str) -> None:
    with pytest.raises(ProbeRefused, match=why):
        address_of(pod, node)


def test_a_pod_that_keeps_the_rules_is_dialled_at_its_declared_port() -> None:
    assert address_of(talking(), replace(LOOPBACK, cidrs=("10.1.0.0/24",))) == "http://10.1.0.7:9400"


@asynccontextmanager
async def workload(handler: Any, timeout_s: float = 60.0) -> AsyncIterator[tuple[Prober, Pod, list[str]]]:
    """A pod whose port is answered by ``handler``, and the prober that reads it."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(f"{request.method} {request.path} {request.headers.get('Authorization', '')}")
        made: web.StreamResponse = await handler(request)
        return made

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pod = running(0, port=runner.addresses[0][1], ip="127.0.0.1")
    settings = replace(SETTINGS, poll_timeout_s=timeout_s)
    prober = Prober(settings, Metrics(), lambda: [pod], lambda name: LOOPBACK, lambda pod: None)
    try:
        yield prober, pod, seen
    finally:
        await prober.close()
        await runner.cleanup()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Pod, web.AppRunner]]:
    """A replica that is ready, until its port is closed."""

    async def say(request: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    app = web.Application()
    app.router.add_get("/status", say)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield replica(0, port=runner.addresses[0][1], ip="127.0.0.1"), runner
    finally:
        await runner.cleanup()


async def test_a_valid_answer_is_kept_and_the_bearer_is_the_objects_own() -> None:
    async def ok(request: web.Request) -> web.Response:
        return web.json_response({"kind": "training", "phase": "Training", "step": 3, "totalSteps": 9})

    async with workload(ok) as (prober, pod, seen):
        await prober.poll_once()
        assert prober.training[pod.uid].step == 3
        assert seen == [f"GET /status Bearer {bearer_for(SETTINGS.workload_key, pod.owner_uid, Role.READ)}"]


def test_a_replica_that_tells_another_context_length_is_looked_at_again() -> None:
    seen: list[Pod] = []
    of = replica(0)
    prober = Prober(SETTINGS, Metrics(), lambda: [of], lambda name: LOOPBACK, seen.append)
    report = {"class": "c", "accelerator": "l4", "maxModelLen": 512}
    for raw, changes in (
        ({"ready": True}, 1),
        ({"ready": True, "running": 3}, 1),
        ({"ready": True, "report": report}, 2),
        ({"ready": True, "report": report | {"preemptions": 1}}, 2),
        ({"ready": True, "report": report | {"maxModelLen": 256}}, 3),
    ):
        prober.take(of, raw)
        assert len(seen) == changes


async def test_it_is_known_since_which_ask_a_port_answers_or_not_and_a_change_is_looked_at() -> None:
    now, changed = [10.0], list[Pod]()
    async with serving() as (of, port):
        prober = Prober(
            replace(SETTINGS, poll_timeout_s=1.0), Metrics(), lambda: [of], lambda name: LOOPBACK,
            changed.append, clock=lambda: now[0],
        )  # fmt: skip
        await prober.poll_once()
        changed.clear()
        assert prober.url_of(of) == f"http://127.0.0.1:{of.port}"
        now[0] = 12.0
        await prober.poll_once()
        assert (prober.ports, changed) == ({of.uid: PortSeen(True, 10.0)}, [])
        await port.cleanup()
        for at in (14.0, 16.0):
            now[0] = at
            prober.ask(of)
            prober.ask(of)
            assert len(prober._tasks) == 1, "it is asked once at a time"
            await asyncio.gather(*prober._tasks)
        assert (prober.ports, changed) == ({of.uid: PortSeen(False, 14.0)}, [of])
        await prober.close()


async def test_a_command_carries_the_bearer_for_commands() -> None:
    async def ok(request: web.Request) -> web.Response:
        return web.json_response({"draining": True})

    async with workload(ok) as (prober, pod, seen):
        prober.post(PostToPod(pod.key, pod.uid, "/drain", 60.0), pod)
        await asyncio.gather(*prober._tasks)
        key = SETTINGS.workload_key
        assert seen == [f"POST /drain Bearer {bearer_for(key, pod.owner_uid, Role.COMMAND)}"]


async def test_a_drain_tells_the_addresses_of_peers_that_may_be_called() -> None:
    told: list[object] = []

    async def ok(request: web.Request) -> web.Response:
        told.append(await request.json())
        return web.json_response({"draining": True})

    async with workload(ok) as (prober, pod, _):
        peers = [running(1, port=9400, ip="127.0.0.7"), running(2, port=9400, ip="10.9.9.9")]
        prober.post(PostToPod(pod.key, pod.uid, "/drain", 60.0), pod, peers)
        await asyncio.gather(*prober._tasks)
        assert told == [{"peers": ["http://127.0.0.7:9400"]}]


async def test_what_may_be_asked_again_is_not_asked_twice_at_a_time_and_read_after_its_answer() -> None:
    level = 0

    async def engine(request: web.Request) -> web.Response:
        nonlocal level
        if request.method == "POST":
            level = 1 if request.path == "/sleep" else 0
        return web.json_response({"kind": "serving", "ready": level == 0, "sleepLevel": level})

    async with workload(engine) as (prober, pod, seen):
        pod = replace(pod, kind=KIND_SERVICE)
        command = bearer_for(SETTINGS.workload_key, pod.owner_uid, Role.COMMAND)
        for path, expected in (("/sleep", 1), ("/wake_up", 0), ("/sleep", 1)):
            seen.clear()
            asked = PostToPod(pod.key, pod.uid, path, 60.0, repeats=True)
            prober.post(asked, pod)
            prober.post(asked, pod)
            assert prober.asked[path] == {pod.uid: False}
            await asyncio.gather(*prober._tasks)
            assert prober.asked[path] == {pod.uid: True}
            assert [line.split(" Bearer ")[0] for line in seen] == [f"POST {path}", "GET /status"]
            assert seen[0].endswith(command)
            assert prober.serving[pod.uid].sleep_level == expected


def test_a_replica_whose_engine_falls_asleep_is_looked_at_again() -> None:
    seen: list[Pod] = []
    of = replica(0)
    prober = Prober(SETTINGS, Metrics(), lambda: [of], lambda name: LOOPBACK, seen.append)
    for raw, changes in (({"sleepLevel": 0}, 1), ({"sleepLevel": 1}, 2), ({"sleepLevel": 1}, 2)):
        prober.take(of, {"ready": False, **raw})
        assert len(seen) == changes


def test_a_replica_whose_server_was_started_again_is_looked_at_again() -> None:
    seen: list[Pod] = []
    of = replica(0)
    prober = Prober(SETTINGS, Metrics(), lambda: [of], lambda name: LOOPBACK, seen.append)
    report = {"cause": "killed", "at": "2026-01-01T00:00:00Z"}
    for restarted, changes in ((None, 1), ({**report, "count": 1}, 2), ({**report, "count": 1}, 2)):
        prober.take(of, {"ready": True, "restarted": restarted})
        assert len(seen) == changes


def test_a_replica_that_serves_other_adapters_is_looked_at_again() -> None:
    seen: list[Pod] = []
    of = talking(kind=KIND_SERVICE)
    prober = Prober(SETTINGS, Metrics(), lambda: [of], lambda name: LOOPBACK, seen.append)
    for told, changes in (
        ([], 1),
        ([{"name": "a"}], 2),
        ([{"name": "a", "inMemory": True}], 2),
        ([{"name": "a", "message": "rank 4096"}], 3),
    ):
        prober.take(of, {"ready": True, "adapters": told})
        assert len(seen) == changes


async def test_a_pod_of_the_former_key_is_called_with_it_and_one_of_an_unknown_key_is_not() -> None:
    async def ok(request: web.Request) -> web.Response:
        return web.json_response({"kind": "training", "phase": "Training", "step": 3, "totalSteps": 9})

    async with workload(ok) as (prober, pod, seen):
        prober._settings = replace(prober._settings, workload_key=b"n" * 16)
        await prober.poll_once()
        assert seen == []
        assert "made under another workload key" in prober.refusals[pod.uid]
        prober._settings = replace(prober._settings, former_workload_key=SETTINGS.workload_key)
        await prober.poll_once()
        assert prober.training[pod.uid].step == 3
        assert seen == [f"GET /status Bearer {bearer_for(SETTINGS.workload_key, pod.owner_uid, Role.READ)}"]


async def test_a_pod_of_a_release_before_the_roles_is_called_with_its_one_bearer() -> None:
    async def ok(request: web.Request) -> web.Response:
        return web.json_response({"kind": "training", "phase": "Training", "step": 3, "totalSteps": 9})

    async with workload(ok) as (prober, pod, seen):
        old = replace(pod, bearers="")
        prober._pods = lambda: [old]
        await prober.poll_once()
        assert prober.training[pod.uid].step == 3
        assert seen == [f"GET /status Bearer {former_bearer_for(SETTINGS.workload_key, pod.owner_uid)}"]


async def _redirect(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": "/elsewhere"})


async def _large(request: web.Request) -> web.Response:
    return web.Response(body=b"x" * 70_000)


async def _slow(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def _words(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def _wrong(request: web.Request) -> web.Response:
    return web.json_response({"kind": "training", "step": "many", "totalSteps": []})


@pytest.mark.parametrize("handler", [_redirect, _large, _slow, _words, _wrong])
async def test_a_hostile_answer_is_dropped_and_followed_nowhere(handler: Any) -> None:
    async with workload(handler, 1.0 if handler is _slow else 60.0) as (prober, _, seen):
        await prober.poll_once()
        assert prober.training == {}
        assert len(seen) == 1


async def test_a_refusal_is_said_once_and_forgotten_when_it_ends() -> None:
    said: list[str] = []
    pod = talking()
    prober = Prober(
        SETTINGS, Metrics(), lambda: [pod], lambda name: None, lambda p: None, lambda p, why: said.append(why)
    )
    await prober.poll_once()
    await prober.poll_once()
    assert len(said) == 1
    assert pod.uid in prober.refusals


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_pod_whose_answers_differ_each_time_gets_an_event_now_and_then() -> None:
    answers = iter(range(400, 500))

    async def each_time_another(request: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    said: list[str] = []
    clock = FakeClock()
    async with workload(each_time_another) as (reader, pod, _):
        prober = Prober(
            reader._settings, Metrics(), lambda: [pod], lambda name: LOOPBACK, lambda p: None,
            lambda p, why: said.append(why), clock=clock,
        )  # fmt: skip
        for clock.now in (0.0, 2.0, 59.0, 60.0, 61.0):
            await prober.poll_once()
        await prober.close()
        assert [text[-3:] for text in said] == ["400", "403"]
        assert prober.refusals[pod.uid].endswith("404")  # the status keeps the last one, as before


async def test_a_pod_that_cannot_be_asked_is_not_waited_for() -> None:
    pod = talking(host_network=True)
    prober = Prober(SETTINGS, Metrics(), lambda: [pod], lambda name: None, lambda p: None)
    prober.post(PostToPod(pod.key, pod.uid, "/checkpoint", 30.0), pod)
    await asyncio.gather(*prober._tasks)
    assert prober.asked["/checkpoint"] == {pod.uid: True}


async def test_a_vllm_is_read_by_its_metrics_and_counts_as_busy_while_nothing_is_heard_of_it() -> None:
    answers = [exposition(running=0), None, b"busy", exposition(running=0)]

    async def metrics(request: web.Request) -> web.Response:
        answer = answers.pop(0)
        return web.Response(body=answer) if answer is not None else web.Response(status=503)

    async with workload(metrics) as (prober, of, seen):
        pod = replica(0, port=of.port, ip=of.ip, engine=VLLM)
        prober._pods = lambda: [pod]
        running = []
        while answers:
            await prober.poll_once()
            running.append(prober.serving[pod.uid].running)
        assert running == [0, 1, 1, 0]
        assert {line.split()[1] for line in seen} == {"/metrics"}
        assert prober.refusals == {}


async def test_an_exposition_may_be_longer_than_a_status_but_not_without_end() -> None:
    lengths = [200_000, 2_000_000]

    async def metrics(request: web.Request) -> web.Response:
        filler = b"vllm:other_bucket 1.0\n" * (lengths.pop(0) // 22)
        return web.Response(body=filler + exposition(running=3))

    async with workload(metrics) as (prober, of, _):
        pod = replica(0, port=of.port, ip=of.ip, engine=VLLM)
        prober._pods = lambda: [pod]
        await prober.poll_once()
        assert (prober.serving[pod.uid].running, prober.refusals) == (3, {})
        await prober.poll_once()
        assert "longer than 1048576 bytes" in prober.refusals[pod.uid]
