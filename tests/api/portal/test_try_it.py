"""The try-it box's routes before a scripted gateway: events, errors as sentences, adapters, and who may ask."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.api.conftest import World, settings, sqlite_template, sqlite_url, world

__all__ = ["settings", "sqlite_template", "sqlite_url", "world"]

PAGE = "/services/ada-lab/ada-chat"
HELLO = {"messages": json.dumps([{"role": "user", "content": "hello"}])}


@dataclass
class Gateway:
    """Answers every request with the same lines, or an error; keeps what it was asked."""

    lines: list[object] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """Route, Authorization and body."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, request.headers["Authorization"], await request.json()))
        if self.refusal is not None:
            return web.Response(status=self.refusal[0], text=self.refusal[1])
        text = "".join(f"data: {x if isinstance(x, str) else json.dumps(x)}\n\n" for x in self.lines)
        return web.Response(text=": alive\n\n" + text, content_type="text/event-stream")


@pytest.fixture
async def gateway(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    scripted, app = Gateway(), web.Application()
    app.router.add_post("/v1/{rest:.*}", scripted.answer)
    async with TestServer(app) as server:
        monkeypatch.setattr(world.services.completions, "_url", str(server.make_url("")).rstrip("/"))
        yield scripted


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def chunk(finish: str | None = None, **choice: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, **choice, "finish_reason": finish}]}


async def test_a_turn_is_streamed_with_its_tool_calls(world: World, gateway: Gateway) -> None:
    begin = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    gateway.lines = [
        chunk(delta={"role": "assistant", "content": ""}),
        chunk(delta={"content": "I look."}),
        chunk(delta={"tool_calls": [begin]}),
        chunk("tool_calls", delta={"tool_calls": [more]}),
        {"choices": [], "usage": {"completion_tokens": 9}},
        "[DONE]",
    ]
    alice = await world.as_("alice")
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    answer = await alice.post(f"{PAGE}/chat", data={**HELLO, "tools": tools, "tool_choice": "required"})
    assert events(answer.text) == [
        ("token", {"text": "I look."}),
        ("call", {"index": 0, "id": "call_1", "name": "f", "arguments": ""}),
        ("call", {"index": 0, "id": "", "name": "", "arguments": "{}"}),
        ("done", {"tokens": 9, "finish": "tool_calls"}),
    ]
    ((path, key, body),) = gateway.asked
    assert (path, body["tool_choice"], body["model"]) == (
        "/v1/chat/completions",
        "required",
        "ada-lab/ada-chat",
    )
    assert key.startswith("Bearer bb_")
    assert key.removeprefix("Bearer ") not in answer.text


async def test_a_prompt_is_completed_with_an_adapter(world: World, gateway: Gateway) -> None:
    gateway.lines = [chunk(text="x"), chunk("length", text="y"), "[DONE]"]
    alice = await world.as_("alice")
    answer = await alice.post(f"{PAGE}/complete", data={"prompt": "def ", "adapter": "sql"})
    assert events(answer.text) == [
        ("token", {"text": "x"}),
        ("token", {"text": "y"}),
        ("done", {"tokens": 0, "finish": "length"}),
    ]
    assert gateway.asked[0][2]["model"] == "ada-lab/ada-chat:sql"


FAILURES: list[tuple[list[object], tuple[int, str] | None, str]] = [
    ([], (400, '{"error": {"message": "tools[0] has no name"}}'), "tools[0] has no name"),
    ([], (502, "<html>"), "the gateway answered 502"),
    ([], (503, '{"error": null}'), "the gateway answered 503"),
    ([{"error": {"message": "the replica left"}}], None, "the replica left"),
    ([{"error": "odd"}], None, "odd"),
    ([chunk(text="x")], None, "the stream ended early; try again"),
    (["no json"], None, "the gateway does not answer; try again in a moment"),
]


@pytest.mark.parametrize(("lines", "refusal", "sentence"), FAILURES)
async def test_whatever_goes_wrong_is_a_sentence(
    world: World, gateway: Gateway, lines: list[object], refusal: tuple[int, str] | None, sentence: str
) -> None:
    gateway.lines, gateway.refusal = lines, refusal
    answer = await (await world.as_("alice")).post(f"{PAGE}/chat", data=HELLO)
    assert events(answer.text)[-1] == ("failed", {"message": sentence})


async def test_who_may_not_ask_and_what_is_not_json_reach_no_gateway(world: World, gateway: Gateway) -> None:
    alice, vera, bob = [await world.as_(name) for name in ("alice", "vera", "bob")]
    bad = await alice.post(
        f"{PAGE}/chat", data={**HELLO, "answer_schema": "{"}, headers={"HX-Request": "true"}
    )
    assert (bad.status_code, "schema must be JSON; line 1, column 2" in bad.text) == (422, True)
    assert (await alice.post(f"{PAGE}/chat", data={**HELLO, "tool_choice": "perhaps"})).status_code == 422
    assert (await vera.post(f"{PAGE}/chat", data=HELLO)).status_code == 403
    assert (await bob.post(f"{PAGE}/chat", data=HELLO)).status_code == 404
    assert gateway.asked == []


async def test_the_box_offers_the_adapters_that_its_key_may_use(world: World) -> None:
    alice = await world.as_("alice")
    for name, tenants in (("support", ""), ("sql", "ada"), ("foreign", "bob-corp")):
        row = {"adapter": name, "uri": f"pvc://stdlib/{name}", "tenants": tenants}
        assert (await alice.post(f"{PAGE}/adapters", data=row)).status_code == 303
    shown = (await alice.get(PAGE)).text
    assert "<option>support</option><option>sql</option></select>" in shown


async def test_a_model_that_was_trained_here_is_first_asked_to_complete(world: World) -> None:
    alice = await world.as_("alice")
    chat, complete = 'value="chat" checked', 'value="complete" checked'
    shown = (await alice.get(PAGE)).text
    assert (chat in shown, complete in shown) == (True, False)
    spec = {"model": {"trainingJob": "ada-run"}, "accelerators": ["cpu"]}
    made = {"metadata": {"name": "own"}, "spec": spec}
    answer = await alice.post("/api/v1alpha1/namespaces/ada-lab/modelservices", json=made)
    assert answer.status_code == 201, answer.text
    shown = (await alice.get("/services/ada-lab/own")).text
    assert (chat in shown, complete in shown) == (False, True)
