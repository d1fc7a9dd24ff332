"""A reservation in a TrainingJob's status: written when people see a difference, and read back as it was."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, admit, gang, placement, view

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import TrainingJobStatus
from busbar.operator.decisions import Forecast, Reserved, Wait
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.reservation import reservation_of
from busbar.scheduler import JobId, Reservation

NOW_S = NOW.timestamp()
PLACE = Reservation(
    JobId("uid-job"),
    placement(3, nodes=("node-0", "node-0", "node-1")),
    (NOW_S - 60, NOW_S - 60, NOW_S - 5.25),
    NOW_S + 7200,
    collected=1,
)


def waiting(**spec: Any) -> TrainingJob:
    return gang(3, status={"phase": "Queued", "reason": "LowerPriority"}, **spec)


def told(of: TrainingJob, place: Reservation | None, after_s: float = 0.0) -> TrainingJob | None:
    """The job as the API server keeps it after a round's word; None where nothing is written."""
    update = reconcile(view(of, now=NOW + timedelta(seconds=after_s)), reserved=Reserved(place))
    if update.status is None:
        return None
    return of.model_copy(update={"status": TrainingJobStatus.model_validate(update.status.to_wire())})


@pytest.fixture(name="first")
def _first() -> TrainingJob:
    found = told(waiting(), PLACE)
    assert found is not None
    return found


def test_a_reservation_is_read_back_as_it_was_written(first: TrainingJob) -> None:
    assert reservation_of(first) == PLACE
    assert first.status is not None
    written = first.status.reservation
    assert written is not None
    assert [(n.name, n.pods) for n in written.nodes] == [("node-0", 2), ("node-1", 1)]
    assert (written.collected, written.needed) == (1, 2)
    assert reservation_of(waiting()) is None


@pytest.mark.parametrize(
    ("change", "after_s", "writes"),
    [
        ({}, 300, False),
        ({"start_s": NOW_S + 7200 + 700}, 0, False),  # less than a tenth of what is left
        ({"start_s": NOW_S + 7200 + 900}, 0, True),
        ({"start_s": NOW_S + 7200 - 900}, 0, True),
        ({"collected": 2}, 0, True),
        ({"since_s": (NOW_S - 60, NOW_S - 60, NOW_S)}, 0, True),
        ({"placement": replace(PLACE.placement, nodes=("node-0", "node-0", "node-2"))}, 0, True),
        ({"placement": replace(PLACE.placement, pool="other")}, 0, True),
    ],
)
def test_only_what_people_can_see_is_written_again(
    first: TrainingJob, change: dict[str, Any], after_s: float, writes: bool
) -> None:
    assert (told(first, replace(PLACE, **change), after_s) is not None) is writes


def test_near_the_start_a_minute_matters_and_a_start_that_is_due_stays_due() -> None:
    soon = told(waiting(), replace(PLACE, start_s=NOW_S + 120))
    assert soon is not None
    assert told(soon, replace(PLACE, start_s=NOW_S + 170)) is None
    assert told(soon, replace(PLACE, start_s=NOW_S + 190)) is not None
    assert told(soon, replace(PLACE, start_s=NOW_S + 900), 900) is None


def test_a_reservation_goes_with_the_start_a_suspension_and_its_loss(first: TrainingJob) -> None:
    paused = first.model_copy(update={"spec": first.spec.model_copy(update={"suspend": True})})
    for update in (
        reconcile(view(first), admit(3)),
        reconcile(view(paused)),
        reconcile(view(first), reserved=Reserved(None)),
    ):
        assert update.status is not None
        assert update.status.reservation is None
    assert reconcile(view(waiting()), reserved=Reserved(None)).status is None


def test_a_reason_a_forecast_and_a_place_are_one_status() -> None:
    forecast = Forecast(NOW, (605, 3700), (300, 1850))
    status = reconcile(view(waiting()), Wait("FairShare", "Next."), forecast, Reserved(PLACE)).status
    assert status is not None
    assert (status.reason, status.message) == ("FairShare", "Next.")
    assert status.forecast is not None
    assert status.reservation is not None
