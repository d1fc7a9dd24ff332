"""REST, through the whole application."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.conftest import BASE, JOB, World


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
