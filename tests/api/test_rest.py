"""REST, through the whole application."""

from __future__ import annotations

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
