"""Objects of the API server as models: a page shows the valid parts of an object that another version wrote."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.api.conftest import JOB

from busbar.api.kubernetes.typed import read
from busbar.kube.types import TrainingJob

OBJECT: dict[str, Any] = {
    **JOB,
    "metadata": {"name": "run", "namespace": "ada-lab", "uid": "u", "resourceVersion": "7"},
    "status": {
        "phase": "Running",
        "progress": {"step": 3, "totalSteps": 9, "loss": 2.5},
        "conditions": [
            {"type": kind, "status": "True", "reason": "R", "lastTransitionTime": "2026-03-01T11:59:00Z"}
            for kind in ("Ready", "Admitted")
        ],
    },
}


def changed(*path: str | int, to: object) -> dict[str, Any]:
    found = copy.deepcopy(OBJECT)
    holder: Any = found
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = to
    return found


def test_an_object_goes_through_its_model_unchanged() -> None:
    job = read(TrainingJob, OBJECT)
    assert job is not None
    assert job.model_dump(mode="json", by_alias=True, exclude_unset=True) == OBJECT


@pytest.mark.parametrize("junk", ["", "soon", {}, [], -1])
def test_a_part_of_the_status_that_does_not_fit_is_left_out_alone(junk: object) -> None:
    job = read(TrainingJob, changed("status", "progress", "totalSteps", to=junk))
    assert job is not None
    assert job.status is not None
    assert job.status.progress is not None
    assert (job.status.progress.step, job.status.progress.total_steps) == (3, 0)


def test_an_enum_value_of_a_newer_version_is_left_out() -> None:
    job = read(TrainingJob, changed("status", "phase", to="Dreaming"))
    assert job is not None
    assert job.status is not None
    assert job.status.phase is None
    assert job.status.progress is not None


def test_of_a_list_only_the_items_that_fit_are_kept() -> None:
    job = read(TrainingJob, changed("status", "conditions", 0, to={"type": "Ready"}))
    assert job is not None
    assert job.status is not None
    assert [c.type for c in job.status.conditions or []] == ["Admitted"]


def test_a_status_that_is_none_at_all_is_left_out() -> None:
    job = read(TrainingJob, changed("status", to="none"))
    assert job is not None
    assert job.status is None


def test_an_object_whose_spec_does_not_fit_has_no_model(caplog: pytest.LogCaptureFixture) -> None:
    assert read(TrainingJob, changed("spec", "wings", to=2)) is None
    assert "TrainingJob ada-lab/run does not match" in caplog.text
