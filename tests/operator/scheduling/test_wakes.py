"""A change wakes a round where it asks for something or frees something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import NOW, ended, gated, job, running

from busbar.operator.scheduling.wakes import matters


def _status(phase: str, **fields: Any) -> dict[str, Any]:
    return {"phase": phase, **fields}


ADMITTED: dict[str, Any] = {
    "admission": {"id": "a-1", "pool": "cpu", "accelerator": "cpu", "pods": 1, "nodes": ["n"]}
}

LOST = {"rank": 0, "times": 1, "since": NOW.isoformat(), "needsNode": True}
LACKS_A_NODE = {"admission": {**ADMITTED["admission"], "replaced": [LOST]}}


@pytest.mark.parametrize(
    ("old", "new", "wakes"),
    [
        (None, None, True),  # submitted
        (_status("Queued"), _status("Queued", message="other"), False),
        (_status("Queued"), _status("Admitted", **ADMITTED), False),  # by the round itself
        (_status("Admitted", **ADMITTED), _status("Starting", **ADMITTED), False),
        (_status("Starting", **ADMITTED), _status("Running", **ADMITTED), False),
        (_status("Running", **ADMITTED), _status("Succeeded", **ADMITTED), True),
        (_status("Running", **ADMITTED), _status("Starting", **LACKS_A_NODE), True),
        (_status("Preempting", **ADMITTED), _status("Queued"), True),
        (_status("Queued"), _status("Suspended"), True),
        (_status("Suspended"), _status("Queued"), True),
        (_status("Queued", reason="ClaimMissing"), _status("Queued", reason="Waiting"), True),
    ],
)
def test_a_job_wakes_a_round_when_it_asks_or_frees(
    old: dict[str, Any] | None, new: dict[str, Any] | None, wakes: bool
) -> None:
    before = job(status=old) if old is not None else None
    assert matters("TrainingJob", before, job(status=new)) is wakes


def test_a_pod_wakes_a_round_when_it_frees_or_is_not_of_an_admitted_job() -> None:
    mine = gated()
    assert not matters("Pod", None, mine)
    assert not matters("Pod", mine, running())
    assert matters("Pod", running(), ended())
    assert matters("Pod", running(), None)
    assert not matters("Pod", ended(), None)
    assert matters("Pod", None, replace(mine, kind="", job="", owner_uid=""))
    assert matters("Pod", running(), replace(running(), draining_since=NOW))
