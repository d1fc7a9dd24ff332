"""Jain's index of the work of tenants that want more than they have, and plans once in a while."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from busbar.scheduler import Policy
from busbar.scheduler.model.plans import Plan
from busbar.scheduler.model.snapshot import Snapshot
from busbar.scheduler.planner import plan
from busbar.scheduler.search.state import Memo
from busbar.scheduler.simulate.command import simulate as command
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.metrics import Shares, jain_index
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

DATA = Path(__file__).parents[1] / "data" / "gavel"
CLUSTER = TraceCluster({"gpu": 4})


def backlog(tenant: str, count: int, work: float = 7200.0) -> tuple[TraceJob, ...]:
    return tuple(
        TraceJob(f"{tenant}{i:02d}", 0.0, work, {"gpu": 1.0}, "c", tenant=tenant) for i in range(count)
    )


@pytest.mark.parametrize(
    ("amounts", "index"), [((3.0, 3.0, 3.0), 1.0), ((1.0, 0.0), 0.5), ((4.0, 2.0), 0.9), ((0.0, 0.0), 1.0)]
)
def test_jains_index_is_one_for_equals_and_one_in_n_for_one_that_has_all(
    amounts: tuple[float, ...], index: float
) -> None:
    assert jain_index(amounts) == pytest.approx(index)


def test_tenants_that_wait_all_the_time_share_the_work_evenly() -> None:
    result = simulate(Trace("t", backlog("a", 12) + backlog("b", 12)), CLUSTER, Policy())
    assert result.jain == pytest.approx(1.0)
    assert result.to_json()["jain"] == result.jain


def test_a_policy_that_favours_one_tenant_is_seen() -> None:
    def unfair(snapshot: Snapshot, policy: Policy, now: float) -> tuple[Plan, Memo]:
        """The planner, which is told that tenant b has a tenth of a's weight."""
        tenants = tuple(replace(one, weight=1.0 if one.name == "a" else 0.1) for one in snapshot.tenants)
        return plan(replace(snapshot, tenants=tenants), policy, now)

    trace = Trace("t", backlog("a", 12) + backlog("b", 12))
    result = simulate(trace, CLUSTER, Policy(), decide=unfair)
    assert result.jain is not None
    assert result.jain < 0.9


def test_work_counts_by_weight_and_by_the_mean_speed_of_its_types() -> None:
    shares = Shares(TraceCluster({"fast": 1, "slow": 1}, weights={"a": 2.0}))
    a = TraceJob("a", 0.0, 1.0, {"fast": 3.0, "slow": 1.0}, "x", tenant="a")
    b = TraceJob("b", 0.0, 1.0, {"fast": 10.0}, "y", tenant="b")
    shares.planned(0.0, {"a", "b"})
    shares.add(a, 4 * 2.0)  # 4 accelerator-seconds, 2 per weight
    shares.add(b, 20.0)  # 2
    shares.planned(3600.0, {"a", "b"})
    assert shares.jain() == pytest.approx(1.0)


def test_only_tenants_that_wait_at_every_plan_of_the_hour_count() -> None:
    shares = Shares(CLUSTER)
    shares.planned(0.0, {"a", "b"})
    shares.planned(1800.0, {"a"})
    shares.planned(3600.0, {"a", "b"})
    assert shares.jain() is None


# -- plans once in a while -------------------------------------------------------------------------------


def test_with_every_what_happens_between_two_plans_shares_one(tmp_path: Path) -> None:
    arguments = [str(DATA / "max_min_fairness.trace"), "--cluster", "v100=8,p100=16,k80=24", "--limit", "20"]
    found = {}
    for every in ("0", "600"):
        folder = tmp_path / every
        outcome = CliRunner().invoke(command, [*arguments, "--every", every, "--output", str(folder)])
        assert outcome.exit_code == 0, outcome.output
        (found[every],) = json.loads((folder / "result.json").read_text())["results"]
    assert found["600"]["plans"] < found["0"]["plans"]
    assert found["0"]["mean_h"] < found["600"]["mean_h"] < found["0"]["mean_h"] + 2 * 600 / 3600


def test_starts_are_at_multiples_of_the_interval() -> None:
    trace = Trace("t", tuple(TraceJob(f"j{i}", 50.0 * i + 1, 100.0, {"gpu": 1.0}) for i in range(9)))
    result = simulate(trace, CLUSTER, Policy(), Settings(grid_s=60.0))
    assert {one.first_start_s % 60 for one in result.jobs if one.first_start_s is not None} == {0.0}


def test_every_and_as_operated_exclude_each_other() -> None:
    arguments = [
        str(DATA / "max_min_fairness.trace"),
        "--cluster",
        "v100=8",
        "--every",
        "60",
        "--as-operated",
    ]
    outcome = CliRunner().invoke(command, arguments)
    assert outcome.exit_code == 2
    assert "exclude each other" in outcome.output
