"""The edges: the queue, settings, merge patches, pods, events, and the gateway's demand."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import NOW, SETTINGS, running

from busbar.kube.errors import AlreadyExists
from busbar.kube.informer import Key
from busbar.operator.demand import DemandReader
from busbar.operator.errors import SettingsError
from busbar.operator.events import EventQueue, Notice
from busbar.operator.metrics import Metrics
from busbar.operator.modelservice import place_of
from busbar.operator.pods import Node, Pod, project_pod
from busbar.operator.rounds import policy_of
from busbar.operator.settings import Settings, from_environ
from busbar.operator.workqueue import KeyQueue
from busbar.operator.writer import merge_difference
from busbar.scheduler import Objective, Policy

LOOPBACK = Node("node-0", (), (), 0, 0, 0, (), True, ("127.0.0.0/8",))


# -- the queue -----------------------------------------------------------------------------------------


async def test_a_key_added_while_it_is_worked_on_runs_once_more() -> None:
    queue: KeyQueue[str] = KeyQueue()
    queue.add("a")
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert queue.idle


async def test_failures_in_a_row_wait_longer_and_a_success_forgets_them() -> None:
    queue: KeyQueue[str] = KeyQueue(backoff_s=(1.0, 5.0))
    waits = [queue.failed("a") for _ in range(5)]
    assert all(0.5 * 2**i <= w <= 2**i for i, w in enumerate(waits[:3]))
    assert waits[-1] <= 5.0
    queue.succeeded("a")
    assert queue.failed("a") <= 1.0
    queue.close()


# -- settings ------------------------------------------------------------------------------------------


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "key").write_text("0123456789abcdef\n")
    return {
        "BUSBAR_WORKLOAD_KEY_FILE": str(tmp_path / "key"),
        "POD_NAMESPACE": "ns",
        "POD_NAME": "p",
        "POD_UID": "u",
        **more,
    }


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    made = from_environ(
        environment(tmp_path, BUSBAR_OPERATOR_LEASE_DURATION_S="5", BUSBAR_OPERATOR_PORT_8090_TCP="x")
    )
    assert (made.namespace, made.identity, made.lease_duration_s) == ("ns", "p_u", 5.0)
    assert made.workload_key == b"0123456789abcdef"
    assert made.shielded_by == "ns"
    off = from_environ(environment(tmp_path, BUSBAR_OPERATOR_NETWORK_POLICIES="false"))
    assert off.shielded_by == ""


@pytest.mark.parametrize("objective", list(Objective))
def test_an_admin_chooses_what_the_scheduler_wants(tmp_path: Path, objective: Objective) -> None:
    chosen = {"BUSBAR_OPERATOR_OBJECTIVE": objective.value, "BUSBAR_OPERATOR_USAGE_HALF_LIFE_S": "3600"}
    chosen["BUSBAR_OPERATOR_GUARANTEE_RECLAIM_S"] = "60"
    policy = policy_of(from_environ(environment(tmp_path, **chosen)))
    assert policy == Policy(objective=objective, usage_half_life_s=3600.0, guarantee_reclaim_s=60.0)
    assert policy_of(from_environ(environment(tmp_path))) == Policy()


@pytest.mark.parametrize(
    "more",
    [
        {"BUSBAR_OPERATOR_LEASE": "5"},
        {"BUSBAR_OPERATOR_WRITERS": "many"},
        {"BUSBAR_OPERATOR_NETWORK_POLICIES": "yes"},
        {"BUSBAR_OPERATOR_OBJECTIVE": "speed"},
        {"BUSBAR_OPERATOR_USAGE_HALF_LIFE_S": "0"},
        {"BUSBAR_OPERATOR_GUARANTEE_RECLAIM_S": "-1"},
    ],
)
def test_an_unknown_or_wrong_setting_is_refused_by_name(tmp_path: Path, more: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=next(iter(more))):
        from_environ(environment(tmp_path, **more))


def test_a_missing_or_short_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="BUSBAR_WORKLOAD_KEY_FILE"):
        from_environ({})
    env = environment(tmp_path)
    (tmp_path / "key").write_text("short")
    with pytest.raises(SettingsError, match="16 bytes"):
        from_environ(env)


# -- merge patches -------------------------------------------------------------------------------------

values = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, as written there."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@given(objects, objects)
def test_the_difference_turns_one_status_into_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    patch = merge_difference(old, new)
    assert merged(old, patch) == new
    assert bool(patch) == (old != new)


# -- pods ----------------------------------------------------------------------------------------------


def test_a_pods_requests_are_what_the_scheduler_counts() -> None:
    spec = {
        "containers": [
            {"name": "a", "resources": {"requests": {"cpu": "500m", "nvidia.com/gpu": "2"}}},
            {"name": "b", "resources": {"requests": {"cpu": "1"}}},
        ],
        "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}],
        "overhead": {"cpu": "100m"},
    }
    pod = project_pod({"metadata": {"name": "p", "namespace": "n"}, "spec": spec})
    assert (pod.requests.cpu_m, pod.requests.memory_mib, pod.requests.device("nvidia.com/gpu")) == (
        3100,
        1024,
        2,
    )


OWN_LIMITS = (
    "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    'Container main exceeded its local ephemeral storage limit "1Gi". ',
    'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ',
)
OF_NODE = (
    "The node was low on resource: memory. Container main was using 9Gi, which exceeds its request of 1Gi. "
)


def failed(reason: str, message: str, *conditions: str) -> Pod:
    status = {
        "phase": "Failed",
        "reason": reason,
        "message": message,
        "conditions": [{"type": kind, "status": "True"} for kind in conditions],
    }
    return project_pod({"metadata": {"name": "p", "namespace": "n"}, "spec": {}, "status": status})


@pytest.mark.parametrize("message", OWN_LIMITS)
def test_a_pod_that_exceeds_its_own_limit_ends_by_its_own_fault(message: str) -> None:
    assert not failed("Evicted", message).evicted
    assert failed("Evicted", message, "DisruptionTarget").evicted


@pytest.mark.parametrize(
    ("reason", "message", "conditions"),
    [
        ("Evicted", OF_NODE, ("DisruptionTarget",)),
        ("Evicted", OF_NODE, ()),  # kubelets without the condition
        ("Evicted", "The node had condition: [DiskPressure]. ", ()),  # refused at its start
        ("Evicted", "", ()),
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", ()),
        ("", "", ("DisruptionTarget",)),
    ],
)
def test_a_pod_that_the_cluster_stops_ends_by_no_fault(
    reason: str, message: str, conditions: tuple[str, ...]
) -> None:
    assert failed(reason, message, *conditions).evicted
    assert not failed("", "", "Ready").evicted


def test_a_pod_with_odd_annotations_is_read_like_any_other() -> None:
    notes = {"busbar.dev/draining-since": "soon", "busbar.dev/placement": "[]"}
    odd = project_pod({"metadata": {"name": "p", "namespace": "n", "annotations": notes}})
    assert odd.draining_since is None
    notes = {"busbar.dev/draining-since": "2026-11-21T12:00:00"}
    naive = project_pod({"metadata": {"name": "p", "namespace": "n", "annotations": notes}})
    assert naive.draining_since == NOW


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '"x"',
        "[" * 5000,
        '{"pool": "p", "accelerator": "a", "mode": "m", "node": "n", "perPod": []}',
        '{"pool": "p", "accelerator": "a", "mode": "m", "node": "n", "perPod": {"cpu_m": 1e999}}',
    ],
)
def test_a_placement_that_is_none_is_no_placement(text: str) -> None:
    assert place_of(replace(running(0), placement=text)) is None


# -- events --------------------------------------------------------------------------------------------


class Recorder:
    """Takes the writes of the event queue."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.wrote = asyncio.Event()

    async def create(self, resource: Any, body: dict[str, Any], namespace: str) -> dict[str, Any]:
        self.bodies.append(body)
        self.wrote.set()
        return body


async def test_equal_notices_become_one_event_with_a_count() -> None:
    recorder = Recorder()
    queue = EventQueue(recorder, Metrics(), instance="i")  # type: ignore[arg-type]
    notice = Notice("v1", "Pod", "ns", "p", "uid", "Waiting", "because")
    for _ in range(3):
        queue.put(notice)
    task = asyncio.create_task(queue.run())
    await recorder.wrote.wait()
    task.cancel()
    assert [b["count"] for b in recorder.bodies] == [3]


class Told(Recorder):
    """A server that has the event already and lets nobody read events, as the chart's role does."""

    def __init__(self) -> None:
        super().__init__()
        self.event: dict[str, Any] = {"count": 4, "lastTimestamp": ""}

    async def create(self, resource: Any, body: dict[str, Any], namespace: str) -> dict[str, Any]:
        raise AlreadyExists(409, "AlreadyExists", "", "")

    async def patch(self, resource: Any, name: str, patch: dict[str, Any], namespace: str) -> dict[str, Any]:
        self.event |= patch
        if "count" in patch:
            self.wrote.set()
        return dict(self.event)


async def test_an_event_that_was_told_before_is_counted_without_reading_events() -> None:
    told = Told()
    queue = EventQueue(told, Metrics(), instance="i")  # type: ignore[arg-type]
    for _ in range(2):
        queue.put(Notice("v1", "Pod", "ns", "p", "uid", "Waiting", "because"))
    task = asyncio.create_task(queue.run())
    async with asyncio.timeout(60):
        await told.wrote.wait()
    task.cancel()
    assert told.event["count"] == 6
    assert told.event["lastTimestamp"]


# -- the gateway's demand ------------------------------------------------------------------------------


async def test_a_demand_that_comes_in_pieces_is_read_whole() -> None:
    services = [{"namespace": "team", "name": f"web-{i}", "inFlight": i} for i in range(50)]
    text = json.dumps({"services": services, "asOf": "2026-11-21T12:00:00Z"}).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(text), 1000):
            await response.write(text[start : start + 1000])
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_get("/demand", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = replace(SETTINGS, gateway_url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    reader = DemandReader(settings, lambda key: None)
    async with aiohttp.ClientSession() as session:
        await reader._ask(session)
    await runner.cleanup()
    found = reader.of(Key("team", "web-49"))
    assert found is not None
    assert found.in_flight == 49


def test_settings_keep_the_key_out_of_their_text() -> None:
    assert "0123456789abcdef" not in repr(Settings(workload_key=b"0123456789abcdef"))
