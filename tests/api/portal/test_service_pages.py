"""A service's page: its adapters are listed, loaded and unloaded."""

from __future__ import annotations

from typing import Any

from tests.api.conftest import World, settings, sqlite_template, sqlite_url, world

from busbar.kube.resources import MODEL_SERVICES

__all__ = ["settings", "sqlite_template", "sqlite_url", "world"]

PAGE = "/services/ada-lab/ada-chat"


def adapters(world: World) -> Any:
    return world.kube.objects["modelservices", "ada-lab", "ada-chat"]["spec"].get("adapters")


async def test_adapters_are_loaded_and_unloaded_on_the_services_page(world: World) -> None:
    alice = await world.as_("alice")
    assert f"{PAGE}/adapters/" not in (await alice.get(PAGE)).text
    given = {"adapter": "sql", "uri": "pvc://stdlib/sql", "tenants": "research, sales"}
    answer = await alice.post(f"{PAGE}/adapters", data=given)
    assert (answer.status_code, answer.headers["location"]) == (303, PAGE)
    await alice.post(f"{PAGE}/adapters", data={"adapter": "support", "uri": "pvc://stdlib/support"})
    sql = {"name": "sql", "uri": "pvc://stdlib/sql", "tenants": ["research", "sales"]}
    assert adapters(world) == [sql, {"name": "support", "uri": "pvc://stdlib/support"}]
    shown = (await alice.get(PAGE)).text
    for text in ("ada-lab/ada-chat:sql", "pvc://stdlib/support", "research, sales", "everybody"):
        assert text in shown
    await alice.post(f"{PAGE}/adapters", data={"adapter": "sql", "uri": "pvc://stdlib/newer"})
    assert adapters(world)[1] == {"name": "sql", "uri": "pvc://stdlib/newer"}
    for name in ("sql", "support"):
        assert (await alice.post(f"{PAGE}/adapters/{name}/unload")).status_code == 303
    assert adapters(world) is None


async def test_the_page_says_which_streams_moved(world: World) -> None:
    alice = await world.as_("alice")
    assert "Streams that moved" not in (await alice.get(PAGE)).text
    row = {"time": "2026-03-01T11:00:00Z", "replica": "ada-chat-2", "uid": "u2"}
    departures = [{**row, "requests": 3, "copied": 3, "recomputed": 0}]
    world.kube.status(MODEL_SERVICES, "ada-lab", "ada-chat", departures=departures)
    await world.settle()
    shown = (await alice.get(PAGE)).text
    for text in (
        "Streams that moved",
        "ada-chat-2",
        "3 of 3 requests went on at other replicas, 3 with their",
    ):
        assert text in shown


async def test_the_page_says_which_replicas_crashed_and_serve_again(world: World) -> None:
    alice = await world.as_("alice")
    assert "Crashes" not in (await alice.get(PAGE)).text
    row = {"time": "2026-03-01T11:00:00Z", "replica": "ada-chat-2", "uid": "u2", "restarts": 2}
    crashes = [{**row, "cause": "the server was killed by SIGSEGV"}]
    world.kube.status(MODEL_SERVICES, "ada-lab", "ada-chat", crashes=crashes)
    await world.settle()
    shown = (await alice.get(PAGE)).text
    for text in ("Crashes", "ada-chat-2", "the server was killed by SIGSEGV (2 restarts of its server"):
        assert text in shown


async def test_a_bad_adapter_and_somebody_else_change_nothing(world: World) -> None:
    alice = await world.as_("alice")
    refused = await alice.post(f"{PAGE}/adapters", data={"adapter": "sql", "uri": "/models/sql"})
    assert (refused.status_code, "adapters" in refused.text) == (422, True)
    bob = await world.as_("bob")
    assert (await bob.post(f"{PAGE}/adapters/sql/unload")).status_code == 404
    assert adapters(world) is None
