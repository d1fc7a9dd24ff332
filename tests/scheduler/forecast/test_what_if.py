"""Whether a job would start now, or when: forecasts from simulated futures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Finished,
    History,
    Job,
    JobId,
    JobKind,
    Outcome,
    Policy,
    PowerDomain,
    Rate,
    Snapshot,
    TableView,
    WaitCode,
    what_if,
)
from busbar.scheduler.forecast.watts import carried

from ..build import NOW, cluster, job, placed, tenant
from ..strategies import snapshots

HISTORY = tuple(Finished("a", 8000, 7250.0 + 50 * i) for i in range(70))
FEW = 6


def full(size: int = 8, remaining: float | None = None) -> Job:
    return job(
        "old",
        size=size,
        on=placed("H100", "H100-0000", size=size),
        preemptible=False,
        remaining=remaining,
    )


def test_a_job_that_fits_starts_now_and_nothing_is_changed() -> None:
    snapshot = cluster(job("other"), H100=1)
    forecast = what_if(snapshot, Policy(), job("x"), NOW)
    assert forecast.starts_now
    assert forecast.action is not None
    assert len(snapshot.jobs) == 1


def test_a_job_behind_another_waits_as_long_as_history_says() -> None:
    forecast = what_if(cluster(full(), H100=1), Policy(), job("x", size=8), NOW, HISTORY)
    assert not forecast.starts_now
    assert forecast.p50_s is not None
    assert forecast.p90_s is not None
    # It has run 7,200 s; jobs that ran so long ran 50 to 3,500 s more.
    assert 1000 <= forecast.p50_s <= 2500
    assert forecast.p50_s <= forecast.p90_s <= 3500


def test_a_job_does_not_wait_for_replicas_that_sleep() -> None:
    on = placed("H100", "H100-0000", size=4)
    replica = job("s", size=4, kind=JobKind.SERVING, on=on, preemptible=False)
    alone, asleep, awake = (
        what_if(cluster(full(4), *more, H100=1), Policy(), job("x", size=8), NOW, HISTORY).p50_s
        for more in ((), (replace(replica, yields=True),), (replica,))
    )
    assert alone is not None
    assert awake is not None
    assert asleep == alone < awake


def test_the_seed_decides_and_the_order_does_not() -> None:
    running = [
        job(f"r{i}", size=4, on=placed("H100", "H100-0000", size=4), preemptible=False) for i in range(2)
    ]
    one = cluster(*running, H100=1)
    other = replace(one, jobs=one.jobs[::-1])
    new = job("x", size=8)
    same = what_if(one, Policy(), new, NOW, HISTORY, 3)
    assert same == what_if(other, Policy(), new, NOW, HISTORY, 3)
    assert same.raw != what_if(one, Policy(), new, NOW, HISTORY, 4).raw


def test_what_can_never_start_gets_a_reason_and_no_date() -> None:
    forecast = what_if(cluster(H100=1), Policy(), job("x", size=8, pods=2), NOW)
    assert forecast.p50_s is None
    assert forecast.record is not None
    assert forecast.record.code in (WaitCode.NODE_TOO_SMALL, WaitCode.UNKNOWN_TENANT)
    assert forecast.record.job == JobId("uid-x")


def test_a_forecast_does_not_use_the_true_length_of_running_jobs() -> None:
    new = job("x", size=8)
    forecasts = [
        what_if(cluster(full(remaining=left), H100=1), Policy(), new, NOW, HISTORY).raw
        for left in (1.0, 1e3, 1e9, None)
    ]
    assert len(set(forecasts)) == 1


def test_submissions_that_will_overtake_are_in_the_forecast() -> None:
    """Another tenant with an equal share sends small jobs all day: the gang waits longer than without them."""
    submitted = tuple(
        Finished("b", 1000, 3600.0, NOW - 86400 + 120 * i, NOW - 86400 + 120 * i + 3600) for i in range(690)
    )
    snapshot = cluster(full(), tenants=(tenant("a"), tenant("b")), H100=1)
    new = job("x", size=8)
    quiet = what_if(snapshot, Policy(), new, NOW, HISTORY)
    busy = what_if(snapshot, Policy(), new, NOW, (*HISTORY, *submitted))
    assert quiet.p50_s is not None
    assert busy.p50_s is not None
    assert busy.p50_s > quiet.p50_s + 600


@pytest.mark.parametrize(("factor", "least", "most"), [(3.0, 2.0, 3.2), (1.0, 0.9, 1.1)])
def test_past_outcomes_correct_the_forecast(factor: float, least: float, most: float) -> None:
    history = History(HISTORY)
    new = job("x", size=8)
    before = what_if(cluster(full(), H100=1), Policy(), new, NOW, history)
    assert before.raw is not None
    assert before.p90_s is not None
    for i in range(200):
        made = NOW - 4 * 86400 + 1500 * i
        history.promised(f"past-{i}", Outcome(made, "a", 8000, before.raw))
        history.started(f"past-{i}", made + factor * (before.raw[0] if i % 10 < 5 else before.raw[1]))
    after = what_if(cluster(full(), H100=1), Policy(), new, NOW, history)
    assert after.raw == before.raw
    assert after.p90_s is not None
    assert least <= after.p90_s / before.p90_s <= most


def test_a_wave_of_jobs_counts_as_little_more_than_one() -> None:
    """The same outcomes, three times as long as simulated, reported together and one after the other."""

    def p50_s(apart_s: float) -> float:
        history = History(HISTORY)
        for i in range(60):
            made = NOW - 2 * 86400 + apart_s * i
            history.promised(f"past-{i}", Outcome(made, "a", 8000, (1800.0, 3500.0)))
            history.started(f"past-{i}", made + 5400)
        found = what_if(cluster(full(), H100=1), Policy(), job("x", size=8), NOW, history)
        assert found.p50_s is not None
        assert found.raw is not None
        return found.p50_s / found.raw[0]

    assert 1.1 < p50_s(1.0) < 1.6
    assert 1.8 < p50_s(2400.0) < 3.0


def test_a_job_that_still_waits_pulls_the_forecast_up() -> None:
    def p90_s(waiting: int) -> float:
        history = History()
        for i in range(100):
            made = NOW - 100_000 + 600 * (i // 2 + 50 * (i % 2))
            history.promised(f"past-{i}", Outcome(made, "a", 8000, (2000.0, 3000.0)))
            if i >= waiting:
                history.started(f"past-{i}", made + 2000)
        snapshot = cluster(full(), H100=1)
        history_of_lengths = History(HISTORY)
        history_of_lengths.outcomes = history.outcomes
        found = what_if(snapshot, Policy(), job("x", size=8), NOW, history_of_lengths).p90_s
        assert found is not None
        return found

    assert p90_s(50) > 2 * p90_s(0)


def test_a_cluster_where_nobody_sent_anything_for_days_has_a_forecast() -> None:
    """Every period of the history that is sampled as the future is empty, which is a valid sample."""
    long_ago = replace(full(), submitted_at_s=NOW - 60 * 86400)
    found = what_if(cluster(long_ago, H100=1), Policy(), job("x", size=8), NOW, HISTORY)
    assert found.p50_s is not None
    assert found.p50_s < 3500


@settings(max_examples=25, deadline=None)
@given(snapshots(), st.integers(0, 5), st.floats(1.0, 1e7))
def test_forecasts_are_ordered_repeatable_and_ignore_true_lengths(
    snapshot: Snapshot, seed: int, length: float
) -> None:
    """For any cluster: p50 <= p90, the same seed gives the same answer, true lengths of running jobs do not change the
    random samples, and the snapshot is not changed."""
    new = job("x", size=2)
    before = snapshot.to_json()
    one = what_if(snapshot, Policy(), new, NOW, HISTORY, seed, FEW)
    assert what_if(snapshot, Policy(), new, NOW, HISTORY, seed, FEW) == one
    assert snapshot.to_json() == before
    if one.p50_s is not None:
        assert one.p90_s is not None
        assert 0 <= one.p50_s <= one.p90_s
    told = replace(snapshot, jobs=tuple(replace(j, remaining_work=length) for j in snapshot.jobs))
    other = what_if(told, Policy(), new, NOW, HISTORY, seed, FEW)
    if one.raw is not None and other.raw is not None:
        assert one.raw == other.raw


def test_no_forecast_goes_far_beyond_what_was_seen() -> None:
    """Half of the jobs that ran so long run for weeks more; no job has waited for more than a day yet."""
    lengths = [Finished("a", 8000, 7250.0 + (0 if i % 2 else 3e6)) for i in range(70)]
    history = History(lengths)
    before = what_if(cluster(full(), H100=1), Policy(), job("x", size=8), NOW, history).p90_s
    assert before is not None
    assert before > 10 * 86400
    for i in range(20):
        made = NOW - 10 * 86400 + 8000.0 * i
        history.promised(f"past-{i}", Outcome(made, "b", 1000, (60.0, 120.0)))
        history.started(f"past-{i}", made + 86400)
    after = what_if(cluster(full(), H100=1), Policy(), job("x", size=8), NOW, history)
    assert after.raw is not None
    assert after.raw[1] == pytest.approx(2 * 86400)
    assert after.p90_s is not None
    assert after.p90_s <= 2 * 86400


def on_rack(snapshot: Snapshot, watts: float, closed: bool = False) -> Snapshot:
    """All nodes on one power domain; an H100 draws 700 W."""
    table = replace(snapshot.table, rates=(Rate("H100", 1.0, 700.0),))
    nodes = tuple(replace(node, domain="rack") for node in snapshot.nodes)
    return replace(snapshot, table=table, nodes=nodes, domains=(PowerDomain("rack", watts, closed=closed),))


def test_a_job_that_lacks_watts_waits_as_if_the_other_nodes_were_not_there() -> None:
    two = on_rack(cluster(full(), H100=2), watts=8 * 700 + 699)
    short = what_if(two, Policy(), job("x", size=8), NOW, HISTORY)
    assert short.record is not None
    assert short.record.code is WaitCode.POWER
    one = what_if(cluster(full(), H100=1), Policy(), job("x", size=8), NOW, HISTORY)
    assert (short.p50_s, short.p90_s) == (one.p50_s, one.p90_s)
    assert short.p50_s is not None
    never = what_if(on_rack(cluster(full(), H100=2), watts=8 * 699), Policy(), job("x", size=8), NOW, HISTORY)
    assert (never.p50_s, never.record and never.record.above_limit) == (None, True)
    assert what_if(on_rack(cluster(full(), H100=2), 16 * 700), Policy(), job("x", size=8), NOW).starts_now


def test_free_accelerators_beyond_the_watts_are_left_out_deepest_domain_first() -> None:
    snapshot = on_rack(cluster(full(size=4), H100=3), watts=8 * 700)
    tree = (PowerDomain("row", 10 * 700.0), PowerDomain("rack", 8 * 700.0, "row"))
    nodes = tuple(replace(n, domain="row" if n.name.endswith("2") else "rack") for n in snapshot.nodes)
    found = carried(replace(snapshot, nodes=nodes, domains=tree), TableView(snapshot.table))
    left = [node.capacity.accelerators_m - (4000 if node.name.endswith("0") else 0) for node in found.nodes]
    assert left == [4000, 0, 2000], "four more below the rack, and two more on the row"
    closed = carried(on_rack(cluster(full(size=4), H100=1), 9e9, closed=True), TableView(snapshot.table))
    assert closed.nodes[0].capacity.accelerators_m == 4000
    bare = cluster(full(), H100=2)
    assert carried(bare, TableView(bare.table)) is bare
