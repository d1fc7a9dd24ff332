"""REST, through the whole application."""

from __future__ import annotations

import html
import json
import re
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
from tests.api.conftest import BASE, JOB, World

from busbar.api.access.identity import CallerRole
from busbar.kube.resources import TRAINING_JOBS


async def test_a_member_creates_reads_changes_cancels_resumes_and_deletes_a_job(world: World) -> None:
    alice = await world.as_("alice")
    at = f"{BASE}/namespaces/ada-lab/trainingjobs"
    made = await alice.post(at, json=JOB)
    assert made.status_code == 201, made.text
    assert made.json()["metadata"]["annotations"]["busbar.dev/requester"] == "alice"
    assert (await alice.get(f"{at}/stdlib")).json()["spec"]["engine"]["steps"] == 100
    assert "stdlib" in [o["metadata"]["name"] for o in (await alice.get(at)).json()["items"]]
    changed = await alice.patch(f"{at}/stdlib", json={"spec": {"priority": 200}})
    assert changed.json()["spec"]["priority"] == 200
    assert (await alice.post(f"{at}/stdlib/cancel")).json()["spec"]["suspend"] is True
    assert (await alice.post(f"{at}/stdlib/resume")).json()["spec"]["suspend"] is False
    assert (await alice.delete(f"{at}/stdlib")).status_code == 204
    gone = await alice.get(f"{at}/stdlib")
    assert gone.status_code == 404
    assert gone.json() == {
        "error": {"code": "NotFound", "message": "TrainingJob ada-lab/stdlib does not exist"}
    }


async def test_an_object_of_another_version_is_left_out_of_lists_and_can_be_deleted(world: World) -> None:
    odd = {"metadata": {"name": "odd", "namespace": "ada-lab"}, "spec": {"wings": 2}}
    world.kube.put(TRAINING_JOBS, odd)
    world.kube.put(TRAINING_JOBS, {**JOB, "metadata": {"name": "even", "namespace": "ada-lab"}})
    alice = await world.as_("alice")
    at = f"{BASE}/namespaces/ada-lab/trainingjobs"
    await world.until_listed("ada-lab", "even")
    found = [o["metadata"]["name"] for o in (await alice.get(at)).json()["items"]]
    assert "odd" not in found
    answer = await alice.get(f"{at}/odd")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "Conflict")
    assert "another version" in answer.json()["error"]["message"]
    assert (await alice.get("/jobs/ada-lab/odd")).status_code == 409
    assert (await alice.get("/jobs")).status_code == 200
    assert (await alice.delete(f"{at}/odd")).status_code == 204


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kind": "TrainingJob", "kind": "ModelService"}', "'kind' is there twice in one object"),
        ('{"spec": {"priority": NaN}}', "NaN is no number of JSON"),
        ('{"spec": {"priority": 1e999}}', "1e999 is no number of JSON"),
        ('{"spec": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
    ],
)
async def test_a_body_that_would_lose_a_value_is_refused(world: World, text: str, says: str) -> None:
    alice = await world.as_("alice")
    for path in ("trainingjobs", "preview"):
        answer = await alice.post(f"{BASE}/namespaces/ada-lab/{path}", content=text)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [100, 900, *range(960, 1000, 2)])
async def test_nesting_is_a_mistake_of_the_client_at_any_depth(world: World, depth: int) -> None:
    alice = await world.as_("alice")
    text = json.dumps({**JOB, "metadata": {"name": "x", "annotations": {"a": "NESTED"}}})
    text = text.replace('"NESTED"', "[" * depth + "]" * depth)
    answer = await alice.post(f"{BASE}/namespaces/ada-lab/preview", content=text)
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("metadata", ["x", ["name"], 5, [], [["labels"]]])
async def test_metadata_that_is_no_object_is_refused_with_its_field(world: World, metadata: Any) -> None:
    alice = await world.as_("alice")
    namespace = f"{BASE}/namespaces/ada-lab"
    for answer in (
        await alice.post(f"{namespace}/trainingjobs", json={**JOB, "metadata": metadata}),
        await alice.post(f"{namespace}/preview", json={**JOB, "metadata": metadata}),
        await alice.patch(f"{namespace}/trainingjobs/ada-run", json={"metadata": metadata}),
    ):
        assert (answer.status_code, answer.json()["error"].get("field")) == (422, "metadata")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("until=0001-01-02T00:00:00Z", "until"),
        ("since=0001-01-01T00:00:00%2B14:00", "since"),
        ("until=9999-12-31T23:59:59-14:00", "until"),
        ("since=2026-01-01T00:00:00", "since"),
        ("since=2026-02-01T00:00:00Z&until=2026-01-01T00:00:00Z", "since"),
    ],
)
async def test_ranges_of_time_that_cannot_be_are_refused(world: World, query: str, field: str) -> None:
    answer = await (await world.as_("alice")).get(f"{BASE}/usage?{query}")
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)


HALF = "\ud83d"
"""Half of a surrogate pair: JSON can spell it, no encoding of Unicode can carry it."""


@pytest.mark.parametrize(
    "path",
    ["metadata/name", "metadata/labels/x", "metadata/labels/" + HALF, "spec/template/image", HALF, "kind"],
)
async def test_text_that_no_encoding_can_carry_is_refused_with_a_sentence(world: World, path: str) -> None:
    alice = await world.as_("alice")
    *parents, last = path.split("/")
    body: Any = deepcopy(JOB)
    node = body
    for step in parents:
        node = node.setdefault(step, {})
    node[last] = HALF + "x"
    namespace = f"{BASE}/namespaces/ada-lab"
    for method, at in (
        ("POST", f"{namespace}/trainingjobs"),
        ("POST", f"{namespace}/preview"),
        ("PATCH", f"{namespace}/trainingjobs/ada-run"),
    ):
        answer = await alice.request(method, at, content=json.dumps(body))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "BadRequest"), answer.text
        assert "surrogate" in answer.json()["error"]["message"]


async def test_the_yaml_box_refuses_the_same_text(world: World) -> None:
    alice = await world.as_("alice")
    yaml = 'kind: TrainingJob\nmetadata: {name: "\\ud83d"}\nspec: {}\n'
    for at in ("/submit", "/submit/preview"):
        answer = await alice.post(at, data={"form": "yaml", "namespace": "ada-lab", "yaml": yaml})
        assert answer.status_code in (200, 400)
        assert "surrogate" in answer.text


async def test_a_form_in_a_charset_of_its_own_breaks_no_page(world: World) -> None:
    """A multipart form names its own charset, and Python knows some whose text is not Unicode."""
    alice = await world.as_("alice")
    kind = "multipart/form-data; boundary=b; charset=unicode_escape"
    for at, name in (("/submit", "name"), ("/submit/preview", "name"), ("/tokens", "description")):
        part = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n\\ud83d\r\n--b--\r\n'
        answer = await alice.post(at, content=part, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422), (at, answer.text)


async def test_a_field_name_that_no_encoding_can_carry_is_refused_too(world: World) -> None:
    alice = await world.as_("alice")
    answer = await alice.post(f"{BASE}/tokens", content=json.dumps({HALF: 1}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "Invalid")


@pytest.mark.parametrize("before", ["1e20", "100000000000000000000", str(2**63), "0", "x"])
async def test_a_place_in_the_audit_trail_that_no_row_can_have_is_refused(world: World, before: str) -> None:
    root = await world.as_("root", CallerRole.ADMIN)
    for at in (f"{BASE}/audit", "/audit"):
        answer = await root.get(at, params={"before": before})
        assert answer.status_code == 422, (at, answer.text)
        assert "before" in answer.text
    assert (await root.get(f"{BASE}/audit", params={"before": str(2**63 - 1)})).status_code == 200


async def test_usage_is_exported_to_members_for_their_own_tenants_only(world: World) -> None:
    for namespace, name in (("ada-lab", "ada-run"), ("bob-lab", "bob-run")):
        usage = {"acceleratorSeconds": 7200.0, "energyJoules": 7.2e6, "cost": 5.0}
        world.kube.status(TRAINING_JOBS, namespace, name, usage=usage)
    await world.settle()
    await world.services.history.flush()
    until = f"until={(world.clock.now + timedelta(hours=1)).isoformat().replace('+', '%2B')}"
    seen = {}
    for caller, role in (("alice", CallerRole.USER), ("bob", CallerRole.USER), ("root", CallerRole.ADMIN)):
        answer = await (await world.as_(caller, role)).get(f"{BASE}/usage/export?by=tenant&{until}")
        assert answer.status_code == 200
        seen[caller] = {item["tenant"]: item["kilowattHours"] for item in answer.json()["items"]}
    assert seen == {"alice": {"ada": 2.0}, "bob": {"bob-corp": 2.0}, "root": {"ada": 2.0, "bob-corp": 2.0}}
    alice = await world.as_("alice")
    for query in ("format=csv&by=job", "format=focus&currency=EUR"):
        answer = await alice.get(f"{BASE}/usage/export?{query}&{until}")
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        assert "attachment" in answer.headers["content-disposition"]
        assert "ada-run" in answer.text
        assert "bob" not in answer.text
    for query, field in (
        ("format=focus", "currency"),
        ("format=focus&currency=euro", "currency"),
        ("by=model", "by"),
    ):
        answer = await alice.get(f"{BASE}/usage/export?{query}")
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "namespaces/ada-lab/modelservices/ada-chat/scale"),
        ("POST", "tokens"),
        ("POST", "tokens/revoke"),
        ("PATCH", "namespaces/ada-lab/modelservices/ada-chat"),
    ],
)
async def test_json_that_would_be_lost_or_misread_is_a_400(world: World, method: str, path: str) -> None:
    alice = await world.as_("alice")
    for body, words in (
        (b'{"replicas": 1, "replicas": 2}', "'replicas' is there twice in one object"),
        (b'{"replicas": NaN}', "NaN is no number of JSON"),
        (b'{"replicas": "\xff"}', "utf-8"),
        (b"{", "the body is not JSON"),
    ):
        headers = {"Content-Type": "application/json"}
        answer = await alice.request(method, f"{BASE}/{path}", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["usage", "usage/export"])
async def test_a_number_is_no_time(world: World, path: str) -> None:
    alice = await world.as_("alice")
    for name in ("since", "until"):
        for number in ("0.5", "1767225600", "1e9"):
            answer = await alice.get(f"{BASE}/{path}?{name}={number}")
            assert answer.status_code == 422, answer.text
            error = answer.json()["error"]
            assert (error["field"], "2026-01-31T00:00:00Z" in error["message"]) == (name, True)
    assert (await alice.get(f"{BASE}/{path}?since=2026-01-31T00:00:00Z")).status_code == 200


async def test_the_usage_page_offers_what_it_shows_as_csv(world: World) -> None:
    alice = await world.as_("alice")
    page = (await alice.get("/usage?by=namespace")).text
    link = re.search(r'href="(/api/v1alpha1/usage/export[^"]*)"', page)
    assert link is not None
    answer = await alice.get(html.unescape(link.group(1)))
    assert answer.text.startswith("tenant,namespace,objects,")
    assert "usage/export" not in (await alice.get("/usage?by=model")).text
