"""A running job moves where the time it saves is worth the work that it repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Job, JobId, JobKind, Policy, Snapshot
from busbar.scheduler.search.migration import better, move
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, speeds

HOUR = 3600.0


def _job(hours: float, saved: float | None = NOW - 60) -> Job:
    """A job on an L4 with so many hours of work left there."""
    return job("r", workload_class="c", on=placed("L4", "L4-0000"), saved=saved, remaining=hours * HOUR)


def _snapshot(one: Job, *others: Job, fast: float = 2.0) -> Snapshot:
    return replace(cluster(one, *others, L4=1, H100=1), table=speeds("c", L4=1.0, H100=fast))


def _round(snapshot: Snapshot) -> Round:
    return Round(PlanningState(snapshot, Policy(), NOW), NOW)


@pytest.mark.parametrize(
    ("hours", "saved", "fast", "moves"),
    [
        (2.0, NOW - 60, 2.0, True),  # saves an hour, and repeats 90 s
        (2.0, None, 2.0, False),  # would repeat its two hours: twice that is more than the hour saved
        (0.2, NOW - 60, 2.0, True),  # saves 360 s; twice 90 s is less
        (0.2, NOW - 200, 2.0, False),  # saves 360 s; twice 230 s is more
        (2.0, NOW - 60, 1.09, False),  # 9 % faster: may be noise
    ],
)
def test_a_job_moves_where_that_saves_twice_what_it_costs(
    hours: float, saved: float | None, fast: float, moves: bool
) -> None:
    one = _job(hours, saved)
    round_ = _round(_snapshot(one, fast=fast))
    assert move(round_) == moves
    placement = round_.assignments[one.id].placement
    assert placement is not None
    assert placement.accelerator == ("H100" if moves else "L4")


@pytest.mark.parametrize(
    "change",
    [{"preemptible": False}, {"kind": JobKind.SERVING}, {"last_move_at_s": NOW - 10}],
    ids=["not preemptible", "serving", "no budget"],
)
def test_a_job_that_must_not_be_disturbed_does_not_move(change: dict[str, object]) -> None:
    one = replace(_job(2.0), **change)  # type: ignore[arg-type]
    others = [
        replace(job(f"w{i}", size=8, accelerators=("X",)), last_move_at_s=NOW - 10)
        for i in range(8 if "last_move_at_s" in change else 0)
    ]
    round_ = _round(_snapshot(one, *others))
    assert not move(round_)
    assert round_.assignments[one.id].stays


def test_a_job_that_has_just_started_does_not_move() -> None:
    one = _job(2.0)
    assert one.run is not None
    fresh = replace(one, run=replace(one.run, started_at_s=NOW - 299))
    assert not move(_round(_snapshot(fresh)))


def test_a_better_place_is_worth_more_after_its_price() -> None:
    round_ = _round(_snapshot(_job(2.0)))
    assignment = round_.assignments[JobId("uid-r")]
    ((gain, candidate),) = better(round_, assignment)
    assert candidate.accelerator == "H100"
    assert gain == pytest.approx(0.5 * assignment.option.weight), "from half to its best speed; prices are 0"


def test_a_job_exchanges_places_with_one_that_loses_less() -> None:
    """The job on the H100 gains nothing from it; both placements are occupied, so the jobs swap."""
    mine = _job(5.0)
    other = job("o", workload_class="d", on=placed("H100", "H100-0000"), saved=NOW, remaining=5 * HOUR)
    table = speeds("c", L4=1.0, H100=2.0)
    both = replace(table, cells=(*table.cells, *speeds("d", L4=1.0, H100=1.0).cells))
    snapshot = cluster(mine, other, L4=1, H100=1)
    small = tuple(replace(n, capacity=replace(n.capacity, accelerators_m=1000)) for n in snapshot.nodes)
    round_ = _round(replace(snapshot, table=both, nodes=small))
    assert move(round_)
    where = {one.job.name: one.placement.accelerator for one in round_.changed if one.placement is not None}
    assert where == {"r": "H100", "o": "L4"}
