"""The simulator agrees with published numbers, is deterministic, and charges the documented costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.scheduling.peers import max_min
from click.testing import CliRunner

from busbar.scheduler import Policy
from busbar.scheduler.errors import TraceError
from busbar.scheduler.simulate.command import parse_cluster
from busbar.scheduler.simulate.command import simulate as command
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.metrics import percentile
from busbar.scheduler.simulate.readers import gavel, gavel_throughputs
from busbar.scheduler.simulate.rounds import simulate_rounds
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

DATA = Path(__file__).parents[1] / "data" / "gavel"
T1 = TraceCluster({"v100": 8, "p100": 16, "k80": 24})
ORDER = ("v100", "p100", "k80")


@pytest.fixture(scope="module")
def trace() -> Trace:
    throughputs = gavel_throughputs(DATA / "simulation_throughputs.json")
    return gavel(DATA / "max_min_fairness.trace", throughputs)


@pytest.mark.parametrize(("aware", "published_h"), [(False, 5.55), (True, 4.06)])
def test_gavels_rules_give_gavels_numbers(trace: Trace, aware: bool, published_h: float) -> None:
    result = simulate_rounds(trace, T1, max_min(aware), ORDER, shuffle=None if aware else 5)
    assert result.to_json()["mean_h"] == pytest.approx(published_h, rel=0.02)


@pytest.mark.parametrize(("known", "mean_h"), [(True, 3.79), (False, 4.06)])
def test_our_policy_beats_gavels_best_on_its_own_trace(trace: Trace, known: bool, mean_h: float) -> None:
    numbers = simulate(trace, T1, Policy(), Settings(steps_known=known)).to_json()
    assert numbers["mean_h"] <= mean_h
    assert numbers["p99_h"] <= 9.8


def one_job(work: float = 1000.0, arrival: float = 0.0, name: str = "a") -> TraceJob:
    return TraceJob(name, arrival, work, {"gpu": 1.0}, "c")


def test_the_same_run_gives_the_same_numbers(trace: Trace) -> None:
    short = replace(trace, jobs=trace.jobs[:30])
    runs = [simulate(short, T1, Policy()) for _ in range(2)]
    assert runs[0].jobs == runs[1].jobs


def test_of_equal_claims_the_tenant_with_less_past_use_starts_first() -> None:
    """Both wait for one accelerator while a third runs; the one that was submitted first has used it for a day before."""
    day = 86400.0
    jobs = (
        replace(one_job(day, name="early"), tenant="greedy"),
        replace(one_job(1000.0, day - 500.0, "third"), tenant="third"),
        replace(one_job(1000.0, day + 10.0, "again"), tenant="greedy"),
        replace(one_job(1000.0, day + 20.0, "modest"), tenant="modest"),
    )
    for half_life_s, first in ((7 * day, "modest"), (0.1, "again")):  # past use has decayed: ordered by name
        result = simulate(Trace("t", jobs), TraceCluster({"gpu": 1}), Policy(usage_half_life_s=half_life_s))
        ends = {job.id: job.jct_s + job.arrival_s for job in result.jobs}
        assert min(("again", "modest"), key=ends.__getitem__) == first


def test_a_job_alone_takes_its_length_and_is_not_charged() -> None:
    result = simulate(Trace("t", (one_job(),)), TraceCluster({"gpu": 1}), Policy())
    assert result.jobs[0].jct_s == 1000.0
    assert result.jobs[0].restarts == 0


def test_as_operated_an_event_is_answered_at_once_and_planned_for_later() -> None:
    """A stream of single jobs leaves a gang of four no room by itself. It waits for its patience (twice its length), the
    stream's jobs that run then (an hour), and seven minutes of plans, as `benchmarks/scheduling/waiting.py` has it."""
    stream = [one_job(3600.0, 900.0 * n, f"s{n:02d}") for n in range(24)]
    gang = replace(one_job(1800.0, 7000.0, "gang"), pods=4)
    jobs = tuple(sorted((*stream, gang), key=lambda job: job.arrival_s))
    cluster, plans = TraceCluster({"gpu": 1}, {"gpu": 4}), []
    for settle_s in (None, 10.0):
        result = simulate(Trace("t", jobs), cluster, Policy(), Settings(settle_s=settle_s))
        plans.append(len(result.series))
        starts = {job.id: job.first_start_s for job in result.jobs}
        assert starts["s00"] == 0.0  # nobody waits for a full plan
        assert starts["s01"] == 900.0
        assert starts["gang"] is not None
        assert starts["gang"] - 7000.0 <= 2 * 1800.0 + 3600.0 + 420.0
    assert plans[1] > plans[0]


def test_what_a_job_held_and_cost_is_reported() -> None:
    """Two of four accelerators for an hour, and one that waits for them: 1 + 1 h on 2, at 3 an hour."""
    jobs = tuple(replace(one_job(3600.0, at, name), pods=2) for name, at in (("a", 0.0), ("b", 0.0)))
    cluster = TraceCluster({"gpu": 2}, prices={"gpu": 3.0})
    result = simulate(Trace("t", jobs), cluster, Policy())
    numbers = result.to_json()
    assert isinstance(numbers, dict)
    assert (numbers["accelerator_h_per_job"], numbers["cost_per_job"]) == (2.0, 6.0)
    assert numbers["work_utilisation"] == pytest.approx(1.0)
    assert numbers["largest_wait_h"] == 0.0  # the largest tenth is the first of the two
    assert simulate(Trace("t", jobs), TraceCluster({"gpu": 2}), Policy()).cost_per_job is None


def test_a_failed_node_costs_the_work_since_the_last_checkpoint_and_a_restart() -> None:
    settings = Settings(charge_s=30, checkpoint_s=1e9, failures=((500.0, "gpu-00000", 100.0),))
    result = simulate(Trace("t", (one_job(),)), TraceCluster({"gpu": 1}), Policy(), settings)
    (job,) = result.jobs
    assert job.restarts == 1
    assert job.lost_s == pytest.approx(530)
    assert job.jct_s == pytest.approx(500 + 100 + 30 + 1000)


def test_a_failure_costs_at_most_what_was_done_since_the_last_checkpoint() -> None:
    settings = Settings(charge_s=30, checkpoint_s=200, failures=((500.0, "gpu-00000", 100.0),))
    result = simulate(Trace("t", (one_job(),)), TraceCluster({"gpu": 1}), Policy(), settings)
    (job,) = result.jobs
    assert job.lost_s == pytest.approx(100 + 30)  # checkpoints at 200 and 400
    assert job.jct_s == pytest.approx(500 + 100 + 30 + 600)


def test_node_failures_have_the_given_rate_and_repeat_for_a_seed(trace: Trace) -> None:
    short = replace(trace, jobs=trace.jobs[:30])
    settings = Settings(node_mtbf_s=20 * 3600.0, repair_s=1800.0, checkpoint_s=900.0, seed=3)
    one, two = (simulate(short, T1, Policy(), settings) for _ in range(2))
    assert one.jobs == two.jobs
    other = simulate(short, T1, Policy(), replace(settings, seed=4))
    assert other.jobs != one.jobs
    failures = one.notes["node_failures"]
    assert isinstance(failures, int)
    node_hours = 48 * one.makespan_s / 3600
    assert failures == pytest.approx(node_hours / 20.5, rel=0.3)
    calm = simulate(short, T1, Policy())
    assert calm.notes["node_failures"] == 0
    assert sum(job.lost_s for job in one.jobs) > sum(job.lost_s for job in calm.jobs)


def test_a_job_that_can_never_start_is_an_error_not_a_hang() -> None:
    job = replace(one_job(), pods=2)
    with pytest.raises(ValueError, match="never start"):
        simulate(Trace("t", (job,)), TraceCluster({"gpu": 1}), Policy())


def test_a_broken_trace_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    path.write_text("one\ttwo\n")
    with pytest.raises(TraceError, match=r"x\.trace:1: expected 10 or 7 columns"):
        gavel(path, {})


def test_percentiles_are_linear() -> None:
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)


def test_a_cluster_is_read_from_text() -> None:
    cluster = parse_cluster("v100=8, gpu=80x4")
    assert cluster.capacity() == {"v100": 8, "gpu": 320}
    with pytest.raises(ValueError, match="'v100' is not TYPE=NODES"):
        parse_cluster("v100")


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    arguments = [str(DATA / "max_min_fairness.trace"), "--cluster", "v100=8,p100=16,k80=24", "--limit", "20"]
    outcome = CliRunner().invoke(command, [*arguments, "--output", str(tmp_path / "out"), "--plots"])
    assert outcome.exit_code == 0, outcome.output
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["results"][0]["jobs"] == 20
    assert written["results"][0]["policy"] == Policy().hash
    assert (tmp_path / "out" / "jct.png").stat().st_size > 1000


def test_the_command_lets_nodes_fail(tmp_path: Path) -> None:
    arguments = [str(DATA / "max_min_fairness.trace"), "--cluster", "v100=8,p100=16,k80=24", "--limit", "10"]
    arguments += ["--node-mtbf", "24", "--repair", "2", "--checkpoint", "30", "--output", str(tmp_path)]
    arguments += ["--as-operated"]
    outcome = CliRunner().invoke(command, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "result.json").read_text())["results"][0]["node_failures"] > 0
