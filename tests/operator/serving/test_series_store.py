"""The services' load over time in its objects: how often they are written, how large they become, what another process reads."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.operator.builders import SETTINGS, service
from tests.operator.serving.test_history import Server
from tests.operator.serving.test_load_series import DAY, NOON, taken, told

from busbar.kube.client import KubeClient
from busbar.kube.contracts.service_series import SeriesSpan
from busbar.kube.errors import AlreadyExists
from busbar.kube.informer import Key
from busbar.operator.serving import kept_services
from busbar.operator.serving.load_series import KeptColumns, KeptSeries, LoadSeries
from busbar.operator.serving.series_keeper import SeriesKeeper
from busbar.operator.serving.series_store import NAMES, SeriesStore, name_of
from busbar.operator.watch.caches import Caches

PERIOD_S = 0.08


def keeper(count: int, **series: LoadSeries) -> SeriesKeeper:
    """Of so many services without gateway or replicas, and of some with a load that was counted."""
    names = [*(f"svc-{number}" for number in range(count)), *series]
    services = {Key("team", name): service(name) for name in names}
    caches: Any = SimpleNamespace(
        services=SimpleNamespace(items=services),
        pools=SimpleNamespace(items={}),
        owned_pods=lambda kind, owner: (),
    )
    found = SeriesKeeper(cast("Caches", caches), lambda key: None, lambda uid: None, lambda: NOON + 660)
    uids = {key.name: each.metadata.uid for key, each in services.items()}
    found.go_on({uids[name]: kept for name, each in series.items() if (kept := each.kept()) is not None})
    return found


def store(server: Server, of: SeriesKeeper, period_s: float = PERIOD_S) -> SeriesStore:
    client = cast(KubeClient, server)
    return SeriesStore(client, client, of, replace(SETTINGS, series_period_s=period_s))


async def until(of: SeriesStore, holds: Callable[[], bool], and_s: float = 0.0) -> None:
    """Runs until it holds, however long that takes here, and some seconds more."""
    running = asyncio.create_task(of.run())
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - the server is a dictionary
            await asyncio.sleep(0.002)
    await asyncio.sleep(and_s)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def known(of: SeriesKeeper, *names: str) -> set[str]:
    """Those with a number in their last day."""
    return {name for name in names if any(of.of(Key("team", name), DAY).requests_per_second)}


async def test_a_service_goes_on_after_a_restart_and_is_written_once_where_nothing_was_counted() -> None:
    server, load = Server(), taken(NOON, 660)
    await until(store(server, keeper(40, web=load)), lambda: server.writes > 0, 2 * PERIOD_S)
    assert server.writes == 1, "one service was counted, and that once"
    assert set(server.objects) == {name_of(service("web").metadata.uid)}
    second = keeper(40, web=LoadSeries())
    await until(store(server, second), lambda: bool(known(second, "web")), 2 * PERIOD_S)
    found, before = second.of(Key("team", "web"), DAY), told(load, DAY, NOON + 660)
    assert found.requests_per_second == before.requests_per_second
    assert server.writes == 1


async def test_what_cannot_be_read_begins_anew_and_the_other_services_go_on() -> None:
    server = Server()
    loads = {f"web{number}": taken(NOON, 120) for number in range(6)}
    parts = {name_of(service(name).metadata.uid) for name in loads}
    await until(store(server, keeper(0, **loads)), lambda: set(server.objects) == parts)
    broken = min(parts)
    server.objects[broken]["binaryData"]["checkpoint"] = base64.b64encode(b"x").decode()
    others = {name for name in loads if name_of(service(name).metadata.uid) != broken}
    second = keeper(0, **dict.fromkeys(loads, LoadSeries()))
    await until(store(server, second), lambda: bool(known(second, *loads)))
    assert known(second, *loads) == others < set(loads)


async def test_what_was_counted_since_the_last_write_is_written_at_the_end_and_only_that() -> None:
    server, first = Server(), keeper(40, web=taken(NOON, 660))
    stopped = store(server, first, period_s=600.0)
    await until(stopped, lambda: True, 2 * PERIOD_S)
    assert server.writes == 0
    await stopped.save()
    await stopped.save()
    assert (server.writes, set(server.objects)) == (1, {name_of(service("web").metadata.uid)})
    second = keeper(40, web=LoadSeries())
    await until(store(server, second), lambda: bool(known(second, "web")))


async def test_who_never_read_what_was_kept_does_not_replace_it_at_the_end() -> None:
    server = Server()
    early = store(server, keeper(0, web=taken(NOON, 660)))
    await early.save()
    assert server.writes == 0


class Lost(Server):
    """The first write is done, and its answer never comes; a write that names another version is refused."""

    async def create(self, resource: Any, body: dict[str, Any], namespace: str) -> dict[str, Any]:
        if body["metadata"]["name"] in self.objects:
            raise AlreadyExists(409, "AlreadyExists", "there is one", "POST")
        await super().create(resource, body, namespace)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def test_a_write_that_was_interrupted_by_the_stop_does_not_keep_the_last_one_from_being_written() -> (
    None
):
    server, first = Lost(), keeper(0, web=taken(NOON, 300))
    stopped = store(server, first)
    await until(stopped, lambda: server.writes > 0)
    uid = service("web").metadata.uid
    first.go_on({uid: kept} if (kept := taken(NOON, 660).kept()) is not None else {})
    await stopped.save()
    assert server.writes == 2
    second = keeper(0, web=LoadSeries())
    await until(store(server, second), lambda: bool(known(second, "web")))
    found = second.of(Key("team", "web"), DAY)
    assert found.requests_per_second == told(taken(NOON, 660), DAY, NOON + 660).requests_per_second


def full(rng: random.Random, rate: float, pools: int = 2) -> KeptSeries:
    """A service whose every number of a day differs."""
    names = ["demand", "tokens", "attainment", "ttft", "ttft/median", "tpot", "tpot/median", "capacity/"]
    names += [f"{kind}/pool-{number}" for number in range(pools) for kind in ("ready", "capacity")]

    def columns(span: SeriesSpan) -> KeptColumns:
        made = {
            name: [float(f"{rate * rng.lognormvariate(0, 1):.4g}") for _ in range(span.periods)]
            for name in names
        }
        return KeptColumns(first=1, columns=made)

    return KeptSeries(spans={span: columns(span) for span in SeriesSpan})


async def test_a_service_takes_at_most_12_kb_and_the_quietest_are_left_out_of_a_full_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, server = random.Random(0), Server()
    uids = [uid for uid in (f"uid-{number}" for number in range(100)) if name_of(uid) == NAMES[0]][:3]
    monkeypatch.setattr(kept_services, "MOST_BYTES", 12_000)
    first, second = keeper(0), keeper(0)
    for each in (first, second):
        each.now_s = lambda: 300.0 * 288
        monkeypatch.setattr(each, "sample", lambda: asyncio.sleep(0))  # it would forget them: there are none
    first.go_on({uid: full(rng, 1.0 + number) for number, uid in enumerate(uids)})
    await until(store(server, first), lambda: server.writes > 0)
    await until(store(server, second), lambda: bool(second.copies(bool)))
    assert list(second.copies(bool)) == uids[-1:], "the object holds one"
