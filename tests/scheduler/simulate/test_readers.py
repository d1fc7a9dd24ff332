"""The readers of public traces."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from busbar.scheduler import Policy
from busbar.scheduler.errors import TraceError
from busbar.scheduler.simulate.command import simulate as command
from busbar.scheduler.simulate.engine import simulate
from busbar.scheduler.simulate.readers import gavel, openb, philly
from busbar.scheduler.simulate.trace import TraceCluster

PODS = Path(__file__).parents[1] / "data" / "openb" / "pods.csv"
PHILLY = """\
timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:13:03,2951.0,12,35412.0,6214e9
2017-10-09 08:00:00,0,1,0,6214e9
2017-10-09 09:00:00,100.0,0,0,6214e9
2017-10-09 07:01:55,10.0,8,80.0,6214e9
"""


def test_philly_jobs_are_sorted_and_large_ones_become_gangs_of_whole_nodes(tmp_path: Path) -> None:
    path = tmp_path / "philly_jobs.csv"
    path.write_text(PHILLY)
    jobs = philly(path).jobs
    assert [(job.id, job.pods, job.per_pod_m, job.work) for job in jobs] == [
        ("000001", 2, 8000, 2951.0),
        ("000000", 1, 1000, 66.0),
        ("000004", 1, 8000, 10.0),
    ]
    assert jobs[1].arrival_s - jobs[0].arrival_s == 48 * 60 + 52
    assert [job.tenant for job in jobs] == ["6214e9", "11cb48", "6214e9"]
    assert jobs[0].speeds == {"gpu": 1.0}


def test_a_broken_philly_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "philly_jobs.csv"
    path.write_text(PHILLY + "yesterday,1,1,1,x\n")
    with pytest.raises(TraceError, match=r"philly_jobs\.csv:7: .*yesterday"):
        philly(path)


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Australia/Lord_Howe"])
def test_times_without_a_zone_are_the_same_on_every_machine(
    zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "philly_jobs.csv"
    times = ("2017-11-05 00:59:00", "2017-11-05 01:30:00", "2017-11-05 02:01:00", "2017-11-05T03:00:00+01:00")
    path.write_text("timestamp,duration,num_gpus,cluster\n" + "".join(f"{at},60,1,a\n" for at in times))
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        jobs = philly(path).jobs
    finally:
        monkeypatch.undo()
        time.tzset()
    first = jobs[0].arrival_s
    assert [(job.id, job.arrival_s - first) for job in jobs] == [
        ("000000", 0), ("000001", 31 * 60), ("000003", 61 * 60), ("000002", 62 * 60),
    ]  # fmt: skip
    assert first == datetime(2017, 11, 5, 0, 59, tzinfo=UTC).timestamp()


def test_numbers_may_be_written_as_tables_with_gaps_write_them(tmp_path: Path) -> None:
    path = tmp_path / "philly_jobs.csv"
    path.write_text("timestamp, duration, num_gpus, cluster\n2017-10-09 07:01:55, 60, 8.0, a\n")
    [job] = philly(path).jobs
    assert (job.per_pod_m, job.work, job.tenant) == (8000, 60.0, "a")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (",1,1,a", "column 'timestamp' is '', no time"),
        ("1506816000,1,1,a", "column 'timestamp' is '1506816000', no time"),
        ("2017-10-09,,1,a", "column 'duration' is '', no finite number"),
        ("2017-10-09,nan,1,a", "column 'duration' is 'nan', no finite number"),
        ("2017-10-09,1,1.5,a", "column 'num_gpus' is '1.5', no whole number"),
        ("2017-10-09,1,x,a", "column 'num_gpus' is 'x', no finite number"),
    ],
)
def test_a_bad_value_is_named_with_its_column(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "philly_jobs.csv"
    path.write_text(f"timestamp,duration,num_gpus,cluster\n{line}\n")
    with pytest.raises(TraceError, match=rf"philly_jobs\.csv:2: not a job of Philly: {re.escape(says)}"):
        philly(path)


def test_an_slo_of_gavel_is_a_multiple_of_the_time_on_a_v100(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for slo, deadline_s in (("-1.0", None), ("1.5", 44.5 + 1.5 * 900 / 10)):
        row = ("LM (batch size 5)", "python main.py", "lm", "--steps", "1", "900", "2", "1", slo, "44.5")
        path.write_text("\t".join(row) + "\n")
        speeds = {"v100": {("LM (batch size 5)", 2): 10.0}, "k80": {("LM (batch size 5)", 2): 2.0}}
        assert gavel(path, speeds).jobs[0].deadline_s == deadline_s
    assert gavel(path, {"k80": speeds["k80"]}).jobs[0].deadline_s is None


def test_both_layouts_of_gavel_say_the_same(tmp_path: Path) -> None:
    table = {"v100": {("LM (batch size 5)", 2): 3.0}}
    lines = {
        "ten": ("LM (batch size 5)", "python main.py", "lm", "--steps", "1", "900", "2", "1", "-1.0", "44.5"),
        "seven": ("LM (batch size 5)", "cd lm && python main.py", "--steps", "1", "900", "44.5", "2"),
    }
    found = []
    for name, columns in lines.items():
        path = tmp_path / f"{name}.trace"
        path.write_text("\t".join(columns) + "\n")
        found.append(gavel(path, table).jobs)
    assert found[0] == found[1]
    assert (found[0][0].work, found[0][0].arrival_s, found[0][0].pods) == (900.0, 44.5, 2)
    path.write_text("\t".join(lines["seven"]).replace("44.5", "soon") + "\n")
    with pytest.raises(TraceError, match=r"seven\.trace:1: not a job of Gavel.*soon"):
        gavel(path, table)


def test_openb_pods_keep_their_share_their_types_and_their_length() -> None:
    trace = openb(PODS, ["g2", "t4"])
    # 36 rows, of which three ask for no accelerator and three were never scheduled.
    assert len(trace.jobs) == 30
    assert [job.arrival_s for job in trace.jobs] == sorted(job.arrival_s for job in trace.jobs)
    first = trace.jobs[0]
    assert (first.pods, first.per_pod_m, first.work) == (1, 810, 152.0)
    assert first.speeds == {"g2": 1.0, "t4": 1.0}
    assert [job.work for job in trace.jobs if job.per_pod_m == 8000] == [839.0]
    assert {(job.workload_class, *job.speeds) for job in trace.jobs if job.per_pod_m == 1000} == {
        ("any 1000m", "g2", "t4"),
        ("G2 1000m", "g2"),
        ("T4 1000m", "t4"),
    }


def test_a_pod_for_a_type_that_the_cluster_lacks_is_named() -> None:
    with pytest.raises(
        TraceError,
        match=r"pods\.csv:14: not an openb pod: pod openb-pod-0133 runs on T4 only, .* has G2; add",
    ):
        openb(PODS, ["G2"])


def test_openb_pods_are_replayed_on_the_types_that_they_accept() -> None:
    trace = openb(PODS, ["G2", "T4"])
    result = simulate(trace, TraceCluster({"G2": 4, "T4": 4}, {"G2": 8, "T4": 2}), Policy())
    # All jobs fit, so each completes after its run time.
    assert {job.id: job.jct_s for job in result.jobs} == pytest.approx(
        {job.id: job.work for job in trace.jobs}
    )


def test_the_command_replays_openb(tmp_path: Path) -> None:
    arguments = [str(PODS), "--format", "openb", "--cluster", "G2=4x8,T4=4x2", "--output", str(tmp_path)]
    outcome = CliRunner().invoke(command, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "result.json").read_text())["results"][0]["jobs"] == 30
    outcome = CliRunner().invoke(command, [str(PODS), "--format", "openb", "--cluster", "G2=4x8"])
    assert outcome.exit_code == 1
    assert "add one of those types" in outcome.output
