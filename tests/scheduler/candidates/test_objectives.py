"""Each objective improves what it names, on a small constructed case."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from busbar.scheduler import Objective, Policy, Snapshot, plan
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.metrics import Result
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

from ..build import NOW, cluster, job, speeds

HOUR = 3600.0


def _result(trace: Trace, machines: TraceCluster, objective: Objective, known: bool = True) -> Result:
    policy = Policy(objective=objective, solver=False)
    return simulate(trace, machines, policy, Settings(steps_known=known))


def _priced(**prices: float) -> Snapshot:
    """One waiting job, four times as fast on an H100 as on an L4."""
    snapshot = cluster(job("x", workload_class="c"), H100=1, L4=1)
    pools = tuple(replace(pool, price_per_hour=prices[pool.name]) for pool in snapshot.pools)
    return replace(snapshot, pools=pools, table=speeds("c", H100=4.0, L4=1.0))


@pytest.mark.parametrize(
    ("h100", "l4", "chosen"),
    [(10.0, 1.0, "L4"), (3.0, 1.0, "H100"), (3.0, 0.0, "L4"), (0.0, 1.0, "H100"), (0.0, 0.0, "H100")],
)
def test_cost_takes_the_pool_with_more_speed_per_money(h100: float, l4: float, chosen: str) -> None:
    made, _ = plan(_priced(H100=h100, L4=l4), Policy(objective=Objective.COST, solver=False), NOW)
    (action,) = made.actions
    assert action.to is not None
    assert action.to.pool == chosen


def test_fairness_takes_the_fast_pool_whatever_it_costs() -> None:
    made, _ = plan(_priced(H100=10.0, L4=1.0), Policy(solver=False), NOW)
    assert [action.to.pool for action in made.actions if action.to is not None] == ["H100"]


def test_makespan_ends_earlier_by_starting_the_longest_first() -> None:
    """Two GPUs, eight jobs of 2 h and one of 9 h: 17 h if the long job is last, and at least 12.5 h in any order."""
    short = [TraceJob(f"s{i}", 0.0, 2 * HOUR, {"gpu": 1.0}, "s") for i in range(8)]
    trace = Trace("one long", (*short, TraceJob("long", 0.0, 9 * HOUR, {"gpu": 1.0}, "l")))
    ends = {
        objective: _result(trace, TraceCluster({"gpu": 2}), objective).makespan_s / HOUR
        for objective in (Objective.FAIRNESS, Objective.MAKESPAN)
    }
    assert ends[Objective.MAKESPAN] < 13.0 < 16.0 < ends[Objective.FAIRNESS]


def _mixed(seed: int) -> Trace:
    """Thirty jobs of very different lengths and with different speed-ups on the fast type."""
    random, now, jobs = Random(seed), 0.0, []
    for number in range(30):
        pods = random.choice((1, 1, 1, 2, 4))
        gain = random.uniform(1, 4)
        work = pods * random.lognormvariate(8.5, 1.2)
        now += random.expovariate(1 / 460)
        rates = {"fast": gain * pods**0.9, "slow": pods**0.9}
        jobs.append(TraceJob(f"j{number}", now, work, rates, f"c{number}", pods=pods))
    return Trace(f"mixed {seed}", tuple(jobs))


def test_finish_time_fairness_lowers_the_worst_ratio() -> None:
    """With unknown lengths, where waiting delays short jobs most; the mean of three seeds."""
    machines = TraceCluster({"fast": 6, "slow": 8}, rates={"fast": 2.0})
    worst = {
        objective: sum(
            max(_result(_mixed(seed), machines, objective, known=False).ratios) for seed in range(3)
        )
        / 3
        for objective in (Objective.FAIRNESS, Objective.FINISH_TIME_FAIRNESS)
    }
    assert worst[Objective.FINISH_TIME_FAIRNESS] < 0.9 * worst[Objective.FAIRNESS]
