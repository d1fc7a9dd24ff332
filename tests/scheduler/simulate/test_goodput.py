"""Jobs that adapt their batch size: the noise of their gradients changes what accelerators are worth to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from busbar.scheduler import PerformanceTable, Policy
from busbar.scheduler.errors import TraceError
from busbar.scheduler.model.table import TableView
from busbar.scheduler.simulate.command import simulate as command
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.learner import TableLearner
from busbar.scheduler.simulate.scaling import MOST_PHASES, adaptive, elasticflow, goodput, noise, phases_of
from busbar.scheduler.simulate.speeds import true_table
from busbar.scheduler.simulate.trace import Phase, Trace, TraceCluster, TraceJob

FOUR = TraceCluster({"t4": 1}, {"t4": 4})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model in Pollux's layout: quiet in the first quarter of its life, noisy after it."""
    own = tmp_path / "speeds" / "net"
    own.mkdir(parents=True)
    lines = ["placement,local_bsz,step_time,sync_time"]
    for placement, sync_s in (("1", 0.0), ("2", 0.1), ("4", 0.1), ("11", 0.4)):
        lines += [f"{placement},{local},{0.1 + 0.01 * local + sync_s},{sync_s}" for local in (4, 16, 64)]
    (own / "placements.csv").write_text("\n".join(lines) + "\n")
    for batch in (16, 64):
        rows = ["progress,iteration,metric,grad_sqr,grad_var"]
        rows += [f"{100 * i},{100 * i},0,1.0,{0.1 if i == 1 else 20.0}" for i in range(1, 5)]
        (own / f"validation-{batch}.csv").write_text("\n".join(rows) + "\n")
    trace = tmp_path / "trace.csv"
    head = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration,best_effort\n"
    trace.write_text(head + "1,0,4000,net,,16,1,1,1\n")
    return tmp_path


def test_without_noise_a_larger_batch_is_no_progress_and_with_much_it_is_all() -> None:
    speeds = {16: {(4, 1): 10.0}, 64: {(4, 1): 4.0}}
    assert goodput(speeds, 16, 0.0) == {(4, 1): 10.0}
    assert goodput(speeds, 16, 1e12)[4, 1] == pytest.approx(16.0)
    # (r + 1) / (r / 4 + 1) at r = 4: 2.5 steps of 16 for one of 64
    assert goodput(speeds, 16, 4.0)[4, 1] == pytest.approx(10.0)
    assert goodput(speeds, 16, 8.0)[4, 1] == pytest.approx(4.0 * 3.0)
    assert goodput(speeds, 64, 8.0) == {(4, 1): 4.0}  # batches below its own are not used


def test_a_life_is_cut_where_the_noise_changes() -> None:
    assert phases_of([(0.25, 0.1), (0.5, 20.0), (0.75, 22.0), (1.0, 20.0)]) == [
        (0.0, 0.1),
        (0.25, pytest.approx(62 / 3)),
    ]
    wild = [(i / 40, 10.0 ** (i % 7)) for i in range(1, 41)]
    found = phases_of(wild)
    assert 1 <= len(found) <= MOST_PHASES
    assert found[0][0] == 0.0


def test_a_validation_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "validation-8.csv"
    path.write_text("progress,grad_sqr,grad_var\n10,0,1\n")
    with pytest.raises(TraceError, match=r"validation-8.csv:2: not a validation"):
        noise(path)


def test_more_accelerators_are_worth_more_late_in_a_life(folder: Path) -> None:
    life = adaptive("net", 16, {"t4": folder / "speeds"}, {"t4": 4})
    assert [begin for begin, _ in life] == [0.0, 0.25]
    early, late = (rows["t4"] for _, rows in life)
    assert early[1, 1] == pytest.approx(1 / 0.26)  # one step of 16
    assert late[4, 1] / late[1, 1] > 1.5 * early[4, 1] / early[1, 1]
    assert adaptive("net", 32, {"t4": folder / "speeds"}, {"t4": 4}) == []


def test_the_policy_sees_the_class_of_the_phase_and_its_speeds(folder: Path) -> None:
    folders = {"t4": folder / "speeds"}
    trace = elasticflow(folder / "trace.csv", folders, {"t4": 4}, adapts=True)
    (job,) = trace.jobs
    view = TableView(true_table(trace, FOUR))
    gains = []
    for done in (0.0, 1000.0):
        found = [view.estimate(job.class_after(done), "t4", "resident", n * 1000, nodes=1) for n in (1, 4)]
        speeds = [one.speed for one in found if one is not None]
        assert speeds == [job.speed("t4", n * 1000, 1, done) for n in (1, 4)]
        gains.append(speeds[1] / speeds[0])
    assert gains[1] > 1.5 * gains[0]


def test_a_job_makes_progress_at_the_speed_of_each_phase() -> None:
    later = Phase(100.0, "c, phase 2", {"t4": {(1, 1): 5.0}})
    job = TraceJob("j", 0.0, 200.0, {"t4": 1.0}, "c", measured={"t4": {(1, 1): 1.0}}, phases=(later,))
    (result,) = simulate(Trace("t", (job,)), FOUR, Policy()).jobs
    assert result.end_s == pytest.approx(100.0 / 1.0 + 100.0 / 5.0)
    # A node fails at 105 s: what was done since its last save, across the change, is done again.
    settings = Settings(failures=((105.0, "t4-00000", 10.0),), checkpoint_s=1e9, charge_s=0.0)
    (again,) = simulate(Trace("t", (job,)), FOUR, Policy(), settings).jobs
    assert again.end_s > result.end_s + 10.0


def test_an_elastic_job_grows_when_its_noise_has_grown() -> None:
    """Until 100 steps a second accelerator adds nothing; after it, it doubles the speed."""
    flat = {"t4": {(1, 1): 1.0, (2, 1): 1.0}}
    later = Phase(100.0, "c, phase 2", {"t4": {(1, 1): 1.0, (2, 1): 2.0}})
    job = TraceJob("j", 0.0, 10_000.0, {"t4": 1.0}, "c", max_pods=2, measured=flat, phases=(later,))
    result = simulate(Trace("t", (job,)), FOUR, Policy(), Settings(charge_s=1.0))
    busy = {round(held) for at, _, held in result.series if at < 90.0}
    assert busy == {1}
    assert max(held for _, _, held in result.series) == 2.0
    assert result.jobs[0].end_s < 6000.0


def test_a_learner_does_not_know_phases() -> None:
    later = Phase(1.0, "c, phase 2", {"t4": {(1, 1): 5.0}})
    job = TraceJob("j", 0.0, 2.0, {"t4": 1.0}, "c", measured={"t4": {(1, 1): 1.0}}, phases=(later,))
    learner = TableLearner(PerformanceTable(), 0.1, 0)
    with pytest.raises(ValueError, match="does not know the phases"):
        simulate(Trace("t", (job,)), FOUR, Policy(), learner=learner)
    simulate(Trace("t", (replace(job, phases=()),)), FOUR, Policy(), learner=learner)


def test_the_command_replays_adaptive_jobs(folder: Path) -> None:
    arguments = [str(folder / "trace.csv"), "--format", "elasticflow", "--cluster", "t4=1x4"]
    arguments += ["--scaling", f"t4={folder / 'speeds'}"]
    hours = []
    for more in ([], ["--goodput"]):
        out = folder / f"out{len(more)}"
        outcome = CliRunner().invoke(command, [*arguments, *more, "--output", str(out)])
        assert outcome.exit_code == 0, outcome.output
        hours.append(json.loads((out / "result.json").read_text())["results"][0]["mean_h"])
    assert hours[1] < 0.8 * hours[0]


def test_goodput_without_validations_is_refused(folder: Path) -> None:
    for file in (folder / "speeds" / "net").glob("validation-*"):
        file.unlink()
    arguments = [str(folder / "trace.csv"), "--format", "elasticflow", "--cluster", "t4=1x4", "--goodput"]
    outcome = CliRunner().invoke(command, [*arguments, "--scaling", f"t4={folder / 'speeds'}"])
    assert "no folder of --scaling has Pollux's validation" in outcome.output
    other = CliRunner().invoke(
        command, [str(folder / "trace.csv"), "--format", "philly", "--cluster", "t4=1", "--goodput"]
    )
    assert "belongs to --format elasticflow" in other.output
