"""`busbar adapters`: what it writes into a service's spec, and what it shows of the status."""

from __future__ import annotations

import json
from typing import Any

from tests.api.conftest import SERVICE
from tests.cli.conftest import Site

from busbar.cli.client import Client
from busbar.cli.results import Kind, Object
from busbar.kube.resources import MODEL_SERVICES

SUPPORT = {"name": "support", "uri": "pvc://stdlib/support"}
SQL = {"name": "sql", "uri": "pvc://stdlib/sql", "tenants": ["research", "sales"]}


def adapters(site: Site) -> Any:
    return site.world.kube.objects["modelservices", "ada-lab", "ada-chat"]["spec"].get("adapters")


async def test_adapters_are_loaded_replaced_and_unloaded(site: Site) -> None:
    assert (await site.busbar("adapters", "list", "ada-chat")).lines == [
        "modelservice/ada-chat has no adapters."
    ]
    done = await site.busbar("adapters", "load", "ada-chat", "support", SUPPORT["uri"])
    assert done.out.startswith("modelservice/ada-chat: adapter support is in the spec")
    sql = (
        "adapters",
        "load",
        "ada-chat",
        "sql",
        "pvc://stdlib/sql",
        "--tenant",
        "research",
        "--tenant",
        "sales",
    )
    assert (await site.busbar(*sql)).code == 0
    assert adapters(site) == [SUPPORT, SQL]
    price = {"outputPerMillion": 3.0}
    adapters(site)[0]["price"] = price
    await site.busbar("adapters", "load", "ada-chat", "support", "pvc://stdlib/newer")
    assert adapters(site) == [SQL, {"name": "support", "uri": "pvc://stdlib/newer", "price": price}]
    assert (await site.busbar("adapters", "unload", "ada-chat", "sql")).code == 0
    assert (await site.busbar("adapters", "unload", "ada-chat", "support")).code == 0
    assert adapters(site) is None


async def test_the_list_says_which_replicas_serve_them_and_why_not(site: Site) -> None:
    site.world.kube.put(
        MODEL_SERVICES,
        {
            **SERVICE,
            "metadata": {"name": "ada-chat", "namespace": "ada-lab"},
            "spec": {**SERVICE["spec"], "adapters": [SUPPORT, SQL]},
            "status": {"adapters": [{"name": "sql", "replicas": 0, "message": "rank 4096"}]},
        },
    )
    await site.world.settle()
    lines = (await site.busbar("adapters", "list", "ada-chat")).lines
    assert [line.split() for line in lines] == [
        ["ADAPTER", "REPLICAS", "TENANTS", "URI", "REFUSED"],
        ["support", "-", "all", "pvc://stdlib/support", "-"],
        ["sql", "0", "research,", "sales", "pvc://stdlib/sql", "rank", "4096"],
    ]
    found = json.loads((await site.busbar("adapters", "list", "ada-chat", "-o", "json")).out)["items"]
    assert found[1] == {**SQL, "model": "ada-lab/ada-chat:sql", "replicas": 0, "message": "rank 4096"}
    assert (await site.busbar("adapters", "list", "ada-chat", "-o", "name")).lines == ["support", "sql"]


async def test_a_change_of_somebody_else_is_not_overwritten(site: Site) -> None:
    read = Client.get
    times: list[str] = []

    def overtaken(client: Client, kind: Kind, namespace: str, name: str) -> Object:
        found = read(client, kind, namespace, name)
        if len(times) < 2:
            times.append(name)
            stored = site.world.kube.objects["modelservices", namespace, name]
            more = [*(stored["spec"].get("adapters") or []), {**SUPPORT, "name": f"theirs-{len(times)}"}]
            site.world.kube.put(MODEL_SERVICES, {**stored, "spec": {**stored["spec"], "adapters": more}})
        return found

    site.monkeypatch.setattr(Client, "get", overtaken)
    assert (await site.busbar("adapters", "load", "ada-chat", "sql", "pvc://stdlib/sql")).code == 0
    assert [row["name"] for row in adapters(site)] == ["theirs-1", "theirs-2", "sql"]


async def test_what_cannot_be_is_told_and_changes_nothing(site: Site) -> None:
    unknown = await site.busbar("adapters", "unload", "ada-chat", "sql")
    assert (unknown.code, "has no adapter 'sql'" in unknown.err) == (3, True)
    bad = await site.busbar("adapters", "load", "ada-chat", "sql", "/models/sql")
    assert (bad.code, "adapters" in bad.err) == (1, True)
    assert (await site.busbar("adapters", "load", "job/ada-run", "sql", "pvc://a/b")).code == 2
    assert (await site.busbar("adapters", "list", "nothing")).code == 3
    assert adapters(site) is None
