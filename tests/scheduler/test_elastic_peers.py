"""The published programs for elastic jobs that the kit compares with."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from benchmarks.scheduling.elastic_peers import Config, Peer, pollux, sia

from busbar.scheduler import Job, JobId, Plan, Policy, Snapshot
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

CLUSTER = TraceCluster({"fast": 1, "slow": 2}, {"fast": 4, "slow": 4})
CURVES = {
    "steep": (1.0, 1.9, 2.8, 3.6, 4.2, 4.9, 5.5, 6.0),
    "flat": (1.0, 1.2, 1.3, 1.35, 1.3, 1.2, 1.1, 1.0),
}


def job(name: str, kind: str, at: float = 0.0, work: float = 2400.0, most: int = 8) -> TraceJob:
    speeds = {"fast": 3.0, "slow": 1.0}
    cells = {
        on: {(n, -(-n // 4)): first * CURVES[kind][n - 1] for n in range(1, (4 if on == "fast" else 8) + 1)}
        for on, first in speeds.items()
    }
    return TraceJob(name, at, work, speeds, kind, max_pods=most, measured=cells)


def trace(count: int = 5) -> Trace:
    return Trace("t", tuple(job(f"j{i}", ("steep", "flat")[i % 2], 200.0 * i) for i in range(count)))


def seen(one: TraceJob) -> Job:
    return Job(JobId(one.id), one.id, "a", "a", max_pods=one.max_pods or 1, submitted_at_s=one.arrival_s)


@pytest.mark.parametrize("peer", [sia, pollux])
def test_the_choice_is_the_best_of_all(peer: Callable[[Trace, TraceCluster], Peer]) -> None:
    """Of three waiting jobs; the same objective, worked out over all choices."""
    found = trace(3)
    one = peer(found, CLUSTER)
    one.slow_growth = False
    jobs = [seen(job) for job in found.jobs]
    options = [one._options(job, 3600.0, 3) for job in jobs]
    best = min(
        sum(penalty if c is None else costs[c] for (costs, penalty), c in zip(options, choice, strict=True))
        for choice in itertools.product(*([None, *costs] for costs, _ in options))
        if fits(choice)
    )
    chosen = one._choose(jobs, 3600.0)
    got = sum(
        costs[chosen[job.id]] if job.id in chosen else penalty
        for job, (costs, penalty) in zip(jobs, options, strict=True)
    )
    assert got == pytest.approx(best, rel=1e-3)
    assert len(chosen) == 3


def fits(choice: tuple[Config | None, ...]) -> bool:
    used: Counter[str] = Counter()
    for config in choice:
        if config is not None:
            used[config[0]] += config[1]
    return all(used[kind] <= total for kind, total in CLUSTER.capacity().items())


@pytest.mark.parametrize("peer", [sia, pollux])
def test_no_node_ever_holds_more_than_it_has(peer: Callable[[Trace, TraceCluster], Peer]) -> None:
    found = trace(12)
    own = peer(found, CLUSTER)

    def checked(snapshot: Snapshot, policy: Policy, now: float) -> tuple[Plan, None]:
        plan, _ = own(snapshot, policy, now)
        places = {job.id: None if job.run is None else job.run.placement for job in snapshot.jobs}
        places |= {action.job: action.to for action in plan.actions}
        used = Counter(node for place in places.values() if place is not None for node in place.nodes)
        assert not used or max(used.values()) <= 4
        return plan, None

    settings = Settings(check=False, grid_s=60.0, round_s=60.0)
    result = simulate(found, CLUSTER, Policy(), settings, decide=checked)
    assert len(result.jobs) == 12
    assert all(one.jct_s > 0 for one in result.jobs)


def test_sia_starts_small_and_doubles_at_most() -> None:
    found = Trace("t", (job("a", "steep", work=2e4),))
    peer = sia(found, CLUSTER)
    first = peer._choose([seen(found.jobs[0])], 0.0)
    assert first == {JobId("a"): ("fast", 1)}
    sizes: list[int] = []

    def watched(snapshot: Snapshot, policy: Policy, now: float) -> tuple[Plan, None]:
        plan, _ = peer(snapshot, policy, now)
        sizes.extend(action.to.pods for action in plan.actions if action.to is not None)
        return plan, None

    simulate(found, CLUSTER, Policy(), Settings(check=False, grid_s=60.0, round_s=60.0), decide=watched)
    assert sizes == [1, 2, 4]


def test_a_start_costs_what_the_class_needs() -> None:
    """The job doubles twice: two restarts of a minute, and with `charge_first` a third charge."""
    found = Trace("t", (replace(job("a", "steep", work=2e4), restart_s=60.0),))
    for first, lost_s in ((False, 120.0), (True, 180.0)):
        settings = Settings(check=False, grid_s=60.0, round_s=60.0, charge_first=first)
        (one,) = simulate(found, CLUSTER, Policy(), settings, decide=sia(found, CLUSTER)).jobs
        assert (one.restarts, one.lost_s) == (2, lost_s)
