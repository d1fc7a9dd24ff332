"""The try-it box in a real Chromium, through the real gateway: a conversation with an adapter, tools and a schema."""

from __future__ import annotations

import json
import time

from playwright.sync_api import expect
from tests.api.conftest import SERVICE
from tests.portal.conftest import Target, Visit, log_in
from tests.portal.engine import REFUSED
from tests.portal.stage import Stage
from tests.portal.test_portal import CONTRAST

from busbar.kube.resources import MODEL_SERVICES

TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'


def test_a_conversation_with_an_adapter_tools_and_a_schema_on_a_phone(
    phone: Visit, target: Target, staged: Stage
) -> None:
    page, name = phone.page, f"talk-{int(time.time() * 1000) % 10_000_000}"
    adapters = [{"name": "sql", "uri": "pvc://stdlib/sql"}]
    spec = {**SERVICE["spec"], "adapters": adapters, "minReplicas": 1}
    made = {**SERVICE, "metadata": {"name": name, "namespace": "ada-lab"}, "spec": spec}
    staged.kube_call(lambda kube: kube.put(MODEL_SERVICES, made))
    log_in(page, target.token)
    staged.wait_until_routed(f"{name}:sql")
    page.goto(f"/services/ada-lab/{name}")
    box = page.get_by_role("region", name="Try it")
    message, turns = box.get_by_label("Message", exact=True), box.get_by_role("log", name="Conversation")

    def send(text: str) -> None:
        message.fill(text)
        message.press("Enter")

    box.get_by_label("Adapter").select_option("sql")
    send("hello")
    expect(turns).to_contain_text(f"{name}:sql heard hello as message 1.")
    expect(box.get_by_role("status")).to_contain_text("in all")
    expect(message).to_be_focused()
    box.get_by_text("System message, tools, schema").click()
    box.get_by_label("System message").fill("Be brief")
    send("again")
    expect(turns).to_contain_text(f"Be brief: {name}:sql heard again as message 4.")

    send(REFUSED)
    expect(box.get_by_role("alert")).to_have_text("messages[0].content is refused by this engine")
    expect(message).to_have_value(REFUSED)
    box.get_by_label("Tools, as JSON").fill("[{]")
    send("and the weather?")
    expect(box.get_by_role("alert")).to_contain_text("tools must be JSON; line 1, column 3")
    box.get_by_label("Tools, as JSON").fill(TOOLS)
    message.press("Enter")
    expect(turns).to_contain_text('weather({"city": "Paris"})')
    result = box.get_by_label("Result of weather")
    expect(result).to_be_focused()
    result.fill("rain")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(turns).to_contain_text("call_1 says rain.")

    box.get_by_label("Tools, as JSON").fill("")
    box.get_by_label("JSON schema of the answer").fill(SCHEMA)
    send("who?")
    expect(turns).to_contain_text('{"name": "Ada"}')
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CONTRAST) == []
    box.get_by_role("button", name="New conversation").click()
    expect(turns).to_be_hidden()
    phone.errors[:] = [error for error in phone.errors if not error.startswith("422")]
