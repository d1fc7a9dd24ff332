"""Turns of jobs that are larger than their tenant's share, beside smaller jobs of another tenant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Job, JobId, Reservation, Snapshot, applied, updated
from busbar.scheduler.model.snapshot import Delta

from ..build import NOW, cluster, placed, tenant
from .test_reservations import HOUR, fast, known, made, started

EVERYWHERE = placed("H100", "H100-0000", "H100-0001", size=8)


def _runs(ran_h: float = 0.5, left_h: float | None = 0.5) -> Job:
    """A gang of a on both nodes, twice a's share."""
    one = known(
        "first", left_h or 0.0, size=8, pods=2, tenant="a", on=EVERYWHERE, since=NOW - ran_h * HOUR, saved=NOW
    )
    return one if left_h is not None else replace(one, remaining_work=None)


def _waits(waited_h: float, **more: object) -> Job:
    return known("next", 1, size=8, pods=2, tenant="a", submitted=NOW - waited_h * HOUR, **more)


def _small(count: int = 4) -> list[Job]:
    return [known(f"s{i}", 0.1, size=8, tenant="b", submitted=NOW - 60) for i in range(count)]


def _snapshot(*jobs: Job, weight: float = 1.0) -> Snapshot:
    return fast(cluster(*jobs, tenants=(tenant("a", weight), tenant("b")), H100=2))


def _reserved(snapshot: Snapshot, now: float = NOW) -> Reservation | None:
    own = (one for one in made(snapshot, now).reservations if one.job == JobId("uid-next"))
    return next(own, None)


@pytest.mark.parametrize(
    ("left_h", "weight", "turn_h"),
    [
        (0.5, 1.0, 1.5),  # it will have run for an hour, of two times a's share: an hour later
        (0.5, 3.0, 0.5 + 1 / 3),  # of 4/3 of the share: a third of an hour later
        (None, 1.0, 0.5),  # as if it ended now
    ],
)
def test_the_next_one_has_its_turn_when_the_others_had_theirs(
    left_h: float | None, weight: float, turn_h: float
) -> None:
    found = _reserved(_snapshot(_runs(left_h=left_h), _waits(3), *_small(), weight=weight))
    assert found is not None
    assert found.turn_s == pytest.approx(NOW + turn_h * HOUR)
    assert found.start_s >= found.turn_s


def test_the_others_run_until_then_and_it_starts_when_it_is_its_turn() -> None:
    before = _snapshot(_runs(), _waits(3), *_small(40))
    last = made(before)
    ended_s = NOW + 0.5 * HOUR
    after = updated(applied(before, last, NOW), Delta(gone_jobs=(JobId("uid-first"),)))
    meanwhile = made(after, ended_s)
    assert started(meanwhile) == {"s0", "s1"}
    (kept,) = (one for one in meanwhile.reservations if one.job == JobId("uid-next"))
    assert kept.turn_s == pytest.approx(NOW + 1.5 * HOUR)
    gone = tuple(JobId(f"uid-s{i}") for i in range(2))
    then = updated(applied(after, meanwhile, ended_s), Delta(gone_jobs=gone))
    assert started(made(then, kept.turn_s)) == {"next"}


def test_it_starts_at_once_where_nobody_wants_the_room() -> None:
    before = _snapshot(_runs(), _waits(3), *_small(2))
    last = made(before)
    gone = ("first", "s0", "s1")
    after = updated(applied(before, last, NOW), Delta(gone_jobs=tuple(JobId("uid-" + one) for one in gone)))
    assert started(made(after, NOW + 0.5 * HOUR)) == {"next"}


@pytest.mark.parametrize(("waited_h", "patient"), [(0.9, False), (1.1, True)])
def test_the_first_one_waits_for_as_long_as_its_part_of_the_time_says(waited_h: float, patient: bool) -> None:
    """Of two times its tenant's share: for its own duration, not for the twice of `Policy.patience`."""
    busy = [
        known(f"r{i}", 0.2, tenant="b", size=8, on=placed("H100", f"H100-000{i}", size=8), saved=NOW)
        for i in range(2)
    ]
    busy = [replace(one, preemptible=False) for one in busy]
    found = _reserved(_snapshot(*busy, _waits(waited_h), *_small()))
    assert (found is not None) is patient


def test_jobs_with_a_right_do_not_use_up_the_search_for_those_that_are_patient() -> None:
    """While the gang runs, each of b's many jobs is inside b's share and looks for a place first."""
    assert _reserved(_snapshot(_runs(), _waits(3), *_small(40))) is not None
