"""Adapters of a service as a client of the gateway sees them."""

from __future__ import annotations

import json

import pytest
from tests.gateway.parts import KEY_A, House, route

from busbar.gateway.delivery import Call, Delivery

ADAPTERS = [
    {"name": "all"},
    {"name": "ours", "tenants": ["tenant-a", "tenant-c"]},
    {"name": "theirs", "tenants": ["tenant-b"]},
    {"name": "nobodys", "tenants": []},
]


async def test_a_name_with_an_adapter_reaches_the_replicas_of_its_service(house: House) -> None:
    engine = await house.engine("hello")
    await house.publish(route("m", engine, modelId="org/other", adapters=ADAPTERS))
    for name in ("org/other:all", "team-a/m:all", "org/other:ours"):
        assert (await house.ask(name))[0] == 200
    names = ["org/other:all", "org/other:all", "org/other:ours"]
    assert [body["model"] for body in engine.bodies] == names
    await house.stream("team-a/m:ours")
    assert engine.bodies[-1]["model"] == "org/other:ours"


@pytest.mark.parametrize("name", ["m:theirs", "team-a/m:theirs", "m:nobodys", "m:other", "m:", "other:all"])
async def test_a_foreign_adapter_and_an_unknown_one_give_the_answer_of_an_unknown_model(
    house: House, name: str
) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine, adapters=ADAPTERS))
    found, unknown = await house.ask(name), await house.ask("x" * len(name))
    assert found[0] == unknown[0] == 404
    assert str(found[1]).replace(name, "?") == str(unknown[1]).replace("x" * len(name), "?")
    assert not engine.bodies


async def test_the_list_has_the_adapters_of_the_tenant_with_their_parent(house: House) -> None:
    await house.publish(
        route("m", adapters=ADAPTERS, maxModelLen=64), route("secret", tenant="tenant-b", adapters=ADAPTERS)
    )
    assert house.session is not None
    headers = {"Authorization": f"Bearer {KEY_A}"}
    async with house.session.get(house.public + "/v1/models", headers=headers) as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card.get("parent"), card["max_model_len"]) for card in cards] == [
        *(("m", None, 64), ("m:all", "m", 64), ("m:ours", "m", 64))
    ]
    for name, status in (("m:all", 200), ("team-a/m:ours", 200), ("m:theirs", 404)):
        async with house.session.get(f"{house.public}/v1/models/{name}", headers=headers) as response:
            assert response.status == status
            if status == 200:
                assert (await response.json())["parent"] == name.rpartition(":")[0]


async def test_an_adapter_that_no_replica_serves_is_not_listed_and_refused_with_its_reason(
    house: House,
) -> None:
    engine = await house.engine()
    broken = {"name": "broken", "problem": "its base is another model"}
    foreign = {"name": "foreign", "tenants": ["tenant-b"], "problem": "a secret of theirs"}
    await house.publish(route("m", engine, adapters=[{"name": "all"}, broken, foreign]))
    assert house.session is not None
    headers = {"Authorization": f"Bearer {KEY_A}"}
    async with house.session.get(house.public + "/v1/models", headers=headers) as response:
        assert [card["id"] for card in (await response.json())["data"]] == ["m", "m:all"]
    for name in ("m:broken", "team-a/m:broken"):
        status, body = await house.ask(name)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert (
            body["error"]["message"]
            == "No replica of team-a/m serves its adapter 'broken': its base is another model"
        )
    status, body = await house.ask("m:foreign")
    assert status == 404
    assert "secret" not in str(body)
    assert not engine.bodies


async def test_a_whole_name_goes_before_one_with_an_adapter(house: House) -> None:
    engine = await house.engine()
    await house.publish(route("x", engine, modelId="m:all"), route("m", adapters=ADAPTERS))
    assert (await house.ask("m:all"))[0] == 200
    assert engine.bodies[0]["model"] == "m:all"


async def test_one_name_of_two_services_must_be_written_in_full(house: House) -> None:
    engine = await house.engine()
    services = [route(name, engine, modelId="m", adapters=ADAPTERS) for name in ("x", "y")]
    await house.publish(*services)
    status, answer = await house.ask("m:all")
    assert status == 400
    assert "team-a/x:all, team-a/y:all" in answer["error"]["message"]
    assert (await house.ask("team-a/y:all"))[0] == 200


def test_a_stream_is_resumed_with_its_adapter() -> None:
    call = Call("/v1/completions", "1", {"model": "m:a", "prompt": "x"}, True, 0.0, adapter="a")
    body = json.loads(Delivery(call, 10).resume_body("m"))
    assert body["request"]["model"] == "m:a"
