"""What power limits cost is told in a job's status, when somebody would see the difference."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.operator.builders import NOW, admitted, job, running, view, with_status

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import PowerUse
from busbar.operator.training.reconcile import reconcile

POD = running(0)
TOLD = PowerUse(attempt=1, limit_percent=70, seconds=600, slowdown=1.1)


def limited(of: TrainingJob, power: PowerUse | None, minutes: int = 1) -> PowerUse | None:
    """What the status says after a reconcile."""
    update = reconcile(view(of, POD, now=NOW + timedelta(minutes=minutes), power=power))
    status = update.status or of.status
    assert status is not None
    return status.power


@pytest.fixture
def of() -> TrainingJob:
    made = admitted(job(), 1)
    made = with_status(made, reconcile(view(made, POD)))
    assert made.status is not None
    assert made.status.power is None
    return made.model_copy(update={"status": made.status.model_copy(update={"power": TOLD})})


def test_a_job_on_limited_boards_says_so_and_others_do_not(of: TrainingJob) -> None:
    assert of.status is not None
    plain = of.model_copy(update={"status": of.status.model_copy(update={"power": None})})
    assert limited(plain, TOLD) == TOLD
    assert limited(plain, None) is None


@pytest.mark.parametrize(
    ("now", "is_told"),
    [
        (TOLD.model_copy(update={"seconds": 1100}), False),
        (TOLD.model_copy(update={"seconds": 1200}), True),
        (TOLD.model_copy(update={"limit_percent": 74}), False),
        (TOLD.model_copy(update={"limit_percent": 75}), True),
        (TOLD.model_copy(update={"limit_percent": None}), True),
        (TOLD.model_copy(update={"slowdown": 1.105}), False),
        (TOLD.model_copy(update={"slowdown": 1.12}), True),
        (TOLD.model_copy(update={"attempt": 2, "seconds": 1}), True),
        (None, False),
    ],
)
def test_small_changes_are_no_reason_to_write(of: TrainingJob, now: PowerUse | None, is_told: bool) -> None:
    assert limited(of, now) == (now if is_told else TOLD)
