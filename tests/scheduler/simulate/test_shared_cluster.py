"""A service's replicas and training jobs on one cluster: training gives way inside the guarantee, and grows back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from busbar.scheduler.autoscale.step_model import Slo
from busbar.scheduler.errors import ServingModelError
from busbar.scheduler.model.plans import Policy
from busbar.scheduler.simulate.command import simulate
from busbar.scheduler.simulate.engine import SETTLE_S, Settings
from busbar.scheduler.simulate.serving_failures import Failures, Outage
from busbar.scheduler.simulate.serving_pools import LLAMA_8B, parse_pools
from busbar.scheduler.simulate.serving_trace import ServingTrace, steps
from busbar.scheduler.simulate.shared_cluster import SharedCluster, elastic, full_size, window
from busbar.scheduler.simulate.shared_run import SharedQuestion, SharedResult, reference_speeds, share
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

CLUSTER = TraceCluster({"A100": 1}, {"A100": 8}, prices={"A100": 3.67})
GUARANTEE = {"A100": 4}
HOUR = 3600.0


def train(name: str, count: int = 1, hours: float = 10.0, at_s: float = 0.0) -> TraceJob:
    return TraceJob(
        name, at_s, hours * HOUR, {"A100": 1.0}, pods=1, per_pod_m=1000 * count, tenant="research"
    )


def jobs(*those: TraceJob) -> Trace:
    return Trace("jobs", those)


def placed(trace: Trace, give_s: float = 10.0) -> SharedCluster:
    return SharedCluster(trace, CLUSTER, Policy(), Settings(settle_s=SETTLE_S), GUARANTEE, give_s)


def sizes(shared: SharedCluster) -> list[int]:
    """Accelerators of each training job now."""
    runs = [entry.seen.run for entry in shared.live.values()]
    return [run.placement.accelerators_m // 1000 if run is not None else 0 for run in runs]


def test_an_elastic_job_shrinks_for_a_replica_inside_the_guarantee_and_grows_back_when_it_leaves() -> None:
    shared = placed(elastic(jobs(train("big", 8))))
    shared.advance(2 * HOUR)
    assert sizes(shared) == [8]
    names = [shared.ask("A100", 2 * HOUR) for _ in range(2)]
    granted = dict(shared.advance(2 * HOUR + 15))
    assert granted.keys() == set(names)
    assert min(granted.values()) >= 2 * HOUR + 10, "its places are free once the step has ended"
    assert sizes(shared) == [6]
    for name in names:
        shared.give_back(name, 3 * HOUR)
    shared.advance(4 * HOUR)
    assert sizes(shared) == [8]
    told = shared.figures(4 * HOUR)
    assert told.resized >= 2
    assert 0 < told.lost_h / told.held_h <= 0.01
    assert 28 < told.work_h < 32


def test_a_rigid_job_is_stopped_for_it_goes_on_later_and_has_lost_one_restart() -> None:
    shared = placed(jobs(*(train(f"job-{n}", 2) for n in range(4))))
    shared.advance(2 * HOUR)
    assert sizes(shared) == [2, 2, 2, 2]
    name = shared.ask("A100", 2 * HOUR)
    assert [row[0] for row in shared.advance(2 * HOUR + 15)] == [name]
    assert sorted(sizes(shared)) == [0, 2, 2, 2]
    shared.give_back(name, 3 * HOUR)
    shared.advance(4 * HOUR)
    assert sizes(shared) == [2, 2, 2, 2]
    assert shared.figures(4 * HOUR).lost_h == pytest.approx(2 * 30 / HOUR, rel=0.01)


def test_a_node_that_fails_takes_replicas_and_training_and_the_service_is_placed_on_the_other() -> None:
    trace = steps([4, 4, 4, 4, 4], 120, [(300, 120)])
    cluster = TraceCluster({"A100": 2}, {"A100": 4}, prices={"A100": 3.67})
    training = jobs(train("one", 2), train("two", 2), train("three", 2))
    results: list[SharedResult] = []
    for listed in ((), (Outage(330.0, "A100", 0, 5000.0), Outage(100.0, "A100", 1, 110.0))):
        question = SharedQuestion(
            parse_pools("A100=3@3.67"),
            cluster,
            Slo(2.0, 0.1, 99.0),
            LLAMA_8B,
            policies=("busbar",),
            check=True,
            failures=Failures(listed=listed),
        )
        results += share(trace, training, question).results
    calm, failed = results
    assert (calm.serving.told.node_failures, failed.serving.told.node_failures) == (0, 2)
    assert failed.serving.requests == calm.serving.requests
    assert failed.serving.told.retried + failed.serving.told.resumed > 0
    assert 0.2 < failed.serving.attainment < calm.serving.attainment
    assert failed.training.work_h < calm.training.work_h
    with pytest.raises(ServingModelError, match="names a zone"):
        SharedQuestion(parse_pools("A100:a=3@3.67"), cluster, Slo(), LLAMA_8B)


def test_a_free_place_is_given_at_once_and_never_more_than_the_guarantee() -> None:
    shared = placed(jobs(train("small")))
    shared.advance(60.0)
    names = [shared.ask("A100", 60.0) for _ in range(5)]
    granted = shared.advance(90.0)
    assert [free_s for _, free_s in granted] == [60.0] * 4
    assert sum(job.run is None for job in shared.replicas.values()) == 1
    shared.give_back(granted[0][0], 100.0)
    assert len(shared.advance(130.0)) == 1
    assert len(names) == 5


def test_a_window_of_a_trace_begins_at_zero_with_its_backlog_and_without_what_is_too_large() -> None:
    source = jobs(
        train("old"),
        train("before", at_s=900.0),
        train("big", 9, at_s=1000.0),
        train("in", at_s=1500.0),
        train("after", at_s=2000.0),
    )
    found = window(source, 1000.0, 1000.0, 200.0, 8, {"A100": 1.0, "H100": 2.0})
    assert [(job.id, job.arrival_s, job.speeds["H100"]) for job in found.jobs] == [
        ("before", 0.0, 2.0),
        ("in", 500.0, 2.0),
    ]
    [half] = elastic(jobs(train("big", 5))).jobs
    assert (half.pods, half.max_pods, full_size(half)) == (3, 5, 5)
    assert half.speed("A100", 5000, 1) == pytest.approx(1.0)
    assert elastic(jobs(train("one"))).jobs == (train("one"),)
    speeds = reference_speeds(TraceCluster({"A100": 1, "H100": 1}))
    assert speeds["A100"] == 1.0
    assert speeds["H100"] > 2


def load() -> ServingTrace:
    return steps([12, 36, 6], 600, [(800, 200), (200, 100)], seed=1)


def question(**fields: object) -> SharedQuestion:
    made = SharedQuestion(parse_pools("A100=6@3.67"), CLUSTER, Slo(2.0, 0.1, 99.0), LLAMA_8B, check=True)
    return replace(made, **fields)  # type: ignore[arg-type]


def test_both_on_one_cluster_train_more_than_a_fixed_split_and_the_same_seed_gives_the_same() -> None:
    work = elastic(jobs(train("big", 8), *(train(f"job-{n}", 1) for n in range(8))))
    found = share(load(), work, question())
    ours, split = found.results
    assert (ours.policy, split.policy) == ("busbar", "static")
    assert ours.training.work_h > 1.05 * split.training.work_h
    assert found.bound_ratio is not None
    assert ours.training.held_h < found.bound_ratio * split.training.held_h * 1.05
    assert max(ours.serving.peak.values()) <= 6
    assert split.serving.replica_hours["A100"] == pytest.approx(
        found.static_replicas * split.serving.hours, rel=1e-6
    )
    again = share(load(), work, question())
    assert json.dumps(again.to_json()) == json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ("A100=9@3.67", "is to have 9 A100, the cluster has 8"),
        ("A100=1@3.67", "the static fleet needs"),
        ("A100=0@3.67", "the pools have room for 0 replicas of at least 1"),
        ("L4=1@1", "has 0"),
    ],
)
def test_a_service_that_cannot_have_its_pools_is_refused(pools: str, words: str) -> None:
    with pytest.raises(ServingModelError, match=words):
        share(load(), jobs(train("one")), question(pools=parse_pools(pools)))


@pytest.mark.parametrize("start_s", [-1.0, float("nan"), float("inf")])
def test_a_start_that_never_ends_is_refused(start_s: float) -> None:
    with pytest.raises(ServingModelError, match="the start time is"):
        question(start_s=start_s)


def test_a_split_that_leaves_training_nothing_bounds_no_gain() -> None:
    one, calm = TraceCluster({"A100": 1}, {"A100": 1}), steps([1], 400, [(200, 50)])
    found = share(calm, jobs(train("one")), question(cluster=one, pools=parse_pools("A100=1@3.67")))
    assert (found.static_replicas, found.bound_ratio) == (1, None)
    assert found.results[1].training.held_h == 0


def test_the_command_prints_each_fleet_and_the_bound(tmp_path: Path) -> None:
    requests, philly = tmp_path / "requests.csv", tmp_path / "jobs.csv"
    made = load().until(700)
    rows = zip(made.arrivals_s, made.prompts, made.outputs, strict=True)
    requests.write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{a},{p},{o}\n" for a, p, o in rows)
    )
    philly.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,9000,4,0,a\n2017-10-09 07:05:00,9000,1,0,b\n"
        "2017-10-09 07:05:30,9000,9,0,b\n"
    )
    line = [
        "--serving",
        str(requests),
        "--jobs",
        str(philly),
        "--cluster",
        "A100=1x8",
        "--pools",
        "A100=6@3.67",
    ]
    told = CliRunner().invoke(
        simulate, [*line, "--elastic", "--policy", "busbar", "--policy", "hpa", "--policy", "static"]
    )
    assert told.exit_code == 0, told.output
    assert [
        name in told.output
        for name in (
            "busbar",
            "hpa",
            "static",
            "2 jobs on 8 accelerators, without 1 that",
            "knows the future",
        )
    ] == [True] * 5
    assert "late for each" not in told.output
    failing = [*line, "--elastic", "--policy", "busbar", "--replica-mtbf", "0.1", "--hang-mtbf", "0.1"]
    told = CliRunner().invoke(simulate, failing)
    assert told.exit_code == 0, told.output
    assert [name in told.output for name in ("replicas lost", "late for each", "hung, which stopped")] == [
        True
    ] * 3
    [fleet] = json.loads(CliRunner().invoke(simulate, [*failing, "-o", "json"]).stdout)["fleets"]
    assert fleet["replicas_lost"] > 0
    assert fleet["serving"]["attainment"] < fleet["attainment_without_failures"]
    assert fleet["late_for_each_lost_replica"] > 0
    refused = CliRunner().invoke(simulate, [*failing, "--repair", "2"])
    assert "give --node-mtbf, too" in refused.output
    late = CliRunner().invoke(simulate, [*line, "--begin", "50"])
    assert "no job of jobs.csv arrives in this time" in late.output
    assert CliRunner().invoke(simulate, ["--serving", str(requests), "--cluster", "A100=1x8"]).exit_code == 2
