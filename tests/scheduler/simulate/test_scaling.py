"""Measured speeds of elastic jobs, and the traces that use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from busbar.scheduler import Policy
from busbar.scheduler.errors import TraceError
from busbar.scheduler.model.table import TableView
from busbar.scheduler.simulate.command import simulate as command
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.scaling import (
    elastic_job,
    elasticflow,
    elasticflow_speeds,
    measured,
    pollux,
)
from busbar.scheduler.simulate.speeds import true_table
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

DATA = Path(__file__).parents[1] / "data"
POLLUX, FLOW = DATA / "pollux", DATA / "elasticflow"
FOUR_PER_NODE = TraceCluster({"t4": 4}, {"t4": 4})


def test_pollux_step_times_give_elasticflows_table() -> None:
    """ElasticFlow made its T4 table from the same measurements: the rule for accumulated gradients is the same."""
    flow = elasticflow_speeds(FLOW / "T4" / "bert.csv", per_node=4)[384]
    ours = pollux(POLLUX / "bert", 384)
    for size in ((1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (64, 16)):
        assert ours[size] == pytest.approx(flow[size], rel=1e-6)


def test_the_same_accelerators_on_more_nodes_are_another_speed() -> None:
    cells = pollux(POLLUX / "bert", 384)
    assert cells[2, 2] < cells[2, 1]
    # Two placements of four accelerators on two nodes: their median.
    one, other = (pollux_of(placement) for placement in ("13", "22"))
    assert cells[4, 2] == pytest.approx((one + other) / 2)


def pollux_of(placement: str) -> float:
    """The speed with rows of one placement only, worked out again: parts of 96 samples, 8 of them with 12."""
    rows = [line.split(",") for line in (POLLUX / "bert" / "placements.csv").read_text().splitlines()]
    step, sync = next((float(r[2]), float(r[3])) for r in rows if r[:2] == [placement, "12"])
    return 1 / (7 * (step - sync) + step)


def test_sizes_that_cannot_run_are_left_out() -> None:
    assert sorted(elasticflow_speeds(FLOW / "T4" / "yolov3.csv", 4)[64]) == [
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 2),
        (16, 4),
    ]
    assert (64, 8) not in measured(FLOW / "A100", "deepspeech2", 32, 8)
    assert measured(FLOW / "A100", "deepspeech2", 31, 8) == {}
    assert measured(FLOW / "A100", "bert", 384, 8) == {}


def test_a_job_may_grow_as_far_as_it_gets_faster() -> None:
    cells = {"t4": elasticflow_speeds(FLOW / "T4" / "yolov3.csv", 4)[64]}
    job = elastic_job("a", 0.0, 100.0, "yolov3", cells, most=16)
    assert (job.pods, job.max_pods) == (1, 4)
    assert elastic_job("a", 0.0, 100.0, "yolov3", cells, most=2).max_pods == 2
    with pytest.raises(ValueError, match="yolov3 was not measured with one accelerator"):
        elastic_job("a", 0.0, 100.0, "yolov3", {"t4": {(2, 1): 1.0}}, most=16)


def test_a_trace_says_which_model_was_measured_nowhere() -> None:
    trace = elasticflow(FLOW / "trace.csv", {"t4": POLLUX}, {"t4": 4})
    assert {(job.workload_class, job.max_pods) for job in trace.jobs} == {("bert batch 384", 16)}
    with pytest.raises(TraceError, match=r"trace\.csv:2: bert batch 384 was not measured .* in .*A100"):
        elasticflow(FLOW / "trace.csv", {"a100": FLOW / "A100"}, {"a100": 8})


@pytest.mark.parametrize("line", ["x,1,2,bert,3,384,1,4", "x,1,many,bert,3,384,1,4", "x,1"])
def test_a_broken_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text((FLOW / "trace.csv").read_text() + line + "\n")
    if line == "x,1,2,bert,3,384,1,4":
        assert elasticflow(path, {"t4": POLLUX}, {"t4": 4}).jobs[-1].work == 2
        return
    with pytest.raises(
        TraceError, match=r"trace\.csv:8: (not a job of ElasticFlow|2 values under 8 columns)"
    ):
        elasticflow(path, {"t4": POLLUX}, {"t4": 4})


def test_deadlines_of_a_trace_are_counted() -> None:
    trace = elasticflow(FLOW / "trace.csv", {"t4": POLLUX}, {"t4": 4})
    assert all(job.deadline_s is not None for job in trace.jobs)
    numbers = simulate(trace, FOUR_PER_NODE, Policy(), Settings()).to_json()
    assert isinstance(numbers, dict)
    kept = {name: numbers[name] for name in ("deadlines", "deadlines_kept", "promises", "promises_kept")}
    assert kept["deadlines"] == len(trace.jobs)
    assert kept["promises_kept"] == kept["promises"] <= kept["deadlines_kept"]
    without = Trace("t", tuple(replace(job, deadline_s=None) for job in trace.jobs))
    assert "deadlines" not in str(simulate(without, FOUR_PER_NODE, Policy(), Settings()).to_json())


def elastic(work: float, most: int) -> TraceJob:
    return elastic_job("a", 0.0, work, "bert", {"t4": pollux(POLLUX / "bert", 384)}, most)


def test_an_elastic_job_alone_runs_at_the_speed_measured_at_its_size() -> None:
    job = elastic(1000.0, 4)
    result = simulate(Trace("t", (job,)), FOUR_PER_NODE, Policy(), Settings())
    assert result.jobs[0].jct_s == pytest.approx(1000 / job.measured["t4"][4, 1])


def test_the_policy_is_told_the_speed_on_the_fewest_nodes() -> None:
    job = elastic(1000.0, 16)
    table = TableView(true_table(Trace("t", (job,)), FOUR_PER_NODE))
    for pods in (1, 2, 3, 4, 6, 8, 11, 16):
        told = table.estimate("bert", "t4", "resident", 1000 * pods)
        assert told is not None
        assert told.speed == job.speed("t4", 1000 * pods, -(-pods // 4))


def test_without_measured_sizes_speed_grows_as_before() -> None:
    job = TraceJob("a", 0.0, 1.0, {"gpu": 2.0}, pods=2)
    assert job.speed("gpu", 4000, 1) == pytest.approx(2 * 2**0.9)
    assert job.speed("other", 4000, 1) == 0.0
    measured_to_four = elastic_job("b", 0.0, 1.0, "c", {"gpu": {(1, 1): 1.0, (4, 1): 3.0}}, 8)
    assert (measured_to_four.speed("gpu", 4000, 1), measured_to_four.speed("gpu", 5000, 2)) == (3.0, 0.0)


def test_the_command_replays_elasticflow() -> None:
    arguments = [str(FLOW / "trace.csv"), "--format", "elasticflow", "--cluster", "t4=2x4"]
    outcome = CliRunner().invoke(command, [*arguments, "--scaling", f"t4={POLLUX}"])
    assert outcome.exit_code == 0, outcome.output
    assert "cost per job" in outcome.output
    assert "deadlines kept" in outcome.output
    for bad in ("t4=cheap", "l4=1", "t4=-1"):
        outcome = CliRunner().invoke(command, [*arguments, "--scaling", f"t4={POLLUX}", "--price", bad])
        assert (outcome.exit_code, "--price" in outcome.output) == (1, True)
    for wrong in ([], ["--scaling", f"a100={POLLUX}"], ["--scaling", "t4=nowhere"]):
        outcome = CliRunner().invoke(command, [*arguments, *wrong])
        assert outcome.exit_code == 1
        assert "--scaling" in outcome.output
