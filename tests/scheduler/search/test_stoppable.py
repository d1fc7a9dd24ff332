"""Lists of jobs that may be stopped follow the round: they are what they would be if they were made now."""

from __future__ import annotations

from random import Random

import pytest

from busbar.scheduler import Job, Policy
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.state import Assignment, PlanningState
from busbar.scheduler.search.stoppable import Stoppable
from busbar.scheduler.search.victim_groups import VictimGroup

from ..build import NOW, cluster, job, placed

NODES = 3


def _round(random: Random) -> Round:
    """Twelve jobs, most of which run, in two tenants; some have just started, some must not be stopped."""
    jobs: list[Job] = []
    for number in range(12):
        on = placed("H100", f"H100-{number % NODES:04d}", size=2) if number < 9 else None
        jobs.append(
            job(
                f"j{number:02d}", random.choice("ab"), size=2, on=on, preemptible=random.random() < 0.8,
                since=NOW - random.choice((10, 2000, 5000)), priority=random.choice((50, 100, 200)),
            )
        )  # fmt: skip
    return Round(PlanningState(cluster(*jobs, H100=NODES), Policy(), NOW), NOW)


def _low(assignment: Assignment) -> bool:
    return assignment.job.priority < 200


def _afresh(round_: Round) -> Stoppable:
    return Stoppable(
        round_.cluster,
        round_.held,
        round_.holdings.version,
        round_.lost_s,
        round_.lost_units,
        round_.ran_min_time,
        round_.shrunk,
    )


def _ids(group: VictimGroup) -> dict[int, list[tuple[float, str]]]:
    return {
        i: [(offer.unit_cost, str(offer.id)) for offer in offers]
        for i, offers in sorted(group.on_node.items())
    }


@pytest.mark.parametrize("seed", range(6))
def test_lists_and_groups_follow_every_change_and_every_undo(seed: int) -> None:
    random = Random(seed)
    round_ = _round(random)
    own, nodes = round_.stoppable, round_.cluster.pools["H100"]
    for _ in range(40):
        with round_.trial() as trial:
            for _ in range(random.randint(1, 3)):
                one = random.choice(list(round_.assignments.values()))
                if one.placement is not None:
                    round_.clear(one)
                else:
                    round_.put_now(one, one.option.candidates[0])
            if random.random() < 0.5:
                trial.keep()
        for tenant in "ab":
            fresh = _afresh(round_)
            assert [v.id for v in own.ran("H100", tenant)] == [v.id for v in fresh.ran("H100", tenant)]
            low = own.passing("H100", tenant, "low", (_low,))
            assert [v.id for v in low] == [v.id for v in own.ran("H100", tenant) if _low(v.assignment)]
            planned = own.passing("H100", tenant, "low", (_low,), planned=True)
            assert [v.id for v in planned] == sorted(
                one.job.id
                for one in round_.held.get(("H100", tenant), {}).values()
                if one.job.run is None and _low(one)
            )
            found = [*planned, *low]
            group = own.group(("low", tenant), "H100", tenant, lambda found=found: list(found))  # type: ignore[misc]
            built = VictimGroup(found, nodes)
            assert _ids(group) == _ids(built)
            for missing_m in (0, 2000, 8000):
                assert group.least(missing_m).tolist() == built.least(missing_m).tolist()
            assert [own_m.tolist() for own_m in group.amounts] == [m.tolist() for m in built.amounts]
