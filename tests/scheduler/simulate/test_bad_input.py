"""What the simulators' commands refuse, each beside a neighbour that they take."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from busbar.scheduler.errors import TraceError
from busbar.scheduler.simulate.command import simulate
from busbar.scheduler.simulate.csv_rows import named_rows
from busbar.scheduler.simulate.readers import gavel_throughputs
from busbar.scheduler.simulate.scaling import elasticflow
from busbar.scheduler.simulate.serving_command import plan_capacity
from busbar.scheduler.simulate.serving_trace import requests_csv, servegen

HEADER = "timestamp,duration,num_gpus,cluster\n"
JOBS = HEADER + "2017-10-03 00:00:00,100,1,a\n2017-10-03 00:01:00,200,2,b\n"
REQUESTS = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n"
MARKED = b"\xef\xbb\xbf"


def jobs(folder: Path, text: str = JOBS) -> str:
    path = folder / "jobs.csv"
    path.write_text(text)
    return str(path)


def ran(command: click.Command, *words: str) -> Result:
    found = CliRunner().invoke(command, words)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exc_info
    return found


def philly(folder: Path, *words: str, text: str = JOBS, cluster: str = "gpu=2x8") -> Result:
    return ran(simulate, jobs(folder, text), "--format", "philly", "--cluster", cluster, *words)


def test_a_table_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_bytes(MARKED + REQUESTS.replace("\n", "\r\n").encode())
    assert list(requests_csv(path).prompts) == [100, 200]
    path.write_bytes(MARKED + b"\r\na,b\r\n\r\n1,2\r\n")
    assert list(named_rows(path)) == [(4, {"a": "1", "b": "2"})]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\n1\n", "t.csv:2: 1 values under 2 columns"),
        (b"a,b\n1,2,3\n", "t.csv:2: 3 values under 2 columns"),
        (b"a,b,a\n1,2,3\n", "the column 'a' is there twice"),
        (b"a\n\xff\n", "behind line . is what is no text in UTF-8 .*; save it as UTF-8"),
        (b"\x1f\x8b\x08", "unpack a file that is compressed"),
        (b"a\n" + b"1" * 200_000 + b"\n", "line 2 is no CSV: field larger"),
    ],
)
def test_a_table_that_would_lose_values_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        list(named_rows(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no job in it"),
        (HEADER, "there is no job in it"),
        (HEADER + "2017-10-03 00:00:00,100\n", "jobs.csv:2: 2 values under 4 columns"),
        (
            HEADER + "2017-10-03 00:00:00,nan,1,a\n",
            "jobs.csv:2: .* column 'duration' is 'nan', no finite number",
        ),
        (
            HEADER + "2017-10-03 00:00:00,inf,1,a\n",
            "jobs.csv:2: .* column 'duration' is 'inf', no finite number",
        ),
        (HEADER + "2017-10-03 00:00:00,100,many,a\n", "jobs.csv:2: .*'many'"),
        (
            HEADER + "2017-10-03 00:00:00,1e308,1,a\n2017-10-03 00:00:00,315360000,1,a\n",
            "1 of 2 jobs of jobs last longer than 3.1536e\\+08 s. .* 000000: alone it needs 1e\\+308 s",
        ),
        (HEADER + "2017-10-03 00:00:00,100,17,a\n", "1 of 1 jobs .* needs 3 x 8 accelerators .* has 16 gpu"),
        ("when,duration,num_gpus,cluster\nx,1,1,a\n", "jobs.csv:2: .*column 'timestamp' is missing"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused(tmp_path: Path, text: str, words: str) -> None:
    found = philly(tmp_path, text=text)
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert re.search(words, found.output), found.output


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("gpu=2x0", "'gpu=2x0' is not TYPE=NODES"),
        ("gpu=0x8", "'gpu=0x8' is not TYPE=NODES"),
        ("gpu=²", "'gpu=²' is not TYPE=NODES"),
        ("gpu=2,gpu=4x8", "gpu is named twice"),
        ("gpu=999999999x8", "are more than the 100000 of a simulation"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, cluster: str, words: str) -> None:
    found = philly(tmp_path, cluster=cluster)
    assert (found.exit_code, words in found.output) == (1, True), found.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--charge", "nan"), "nan is no finite number"),
        (("--charge", "-5"), "--charge"),
        (("--every", "inf"), "inf is no finite number"),
        (("--node-mtbf", "nan"), "nan is no finite number"),
        (("--node-mtbf", "1e-9"), "--node-mtbf"),
        (("--node-mtbf", "0.1"), "make --node-mtbf longer or --checkpoint shorter"),
        (("--repair", "2"), "give --node-mtbf, too"),
        (("--checkpoint", "2"), "give --node-mtbf, too"),
        (("--throughputs", __file__), "--throughputs belongs to --format gavel"),
    ],
)
def test_options_without_meaning_are_refused(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    found = philly(tmp_path, *options)
    assert (found.exit_code, words in found.output) == (2, True), found.output


def test_what_the_options_refuse_has_accepted_neighbours(tmp_path: Path) -> None:
    options = ("--charge", "0", "--every", "60", "--node-mtbf", "0.1", "--checkpoint", "2", "--repair", "0.5")
    assert philly(tmp_path, *options, "--price", "gpu=1").exit_code == 0
    found = philly(tmp_path, "--price", "gpu=1", "--price", "gpu=2")
    assert "gpu has two prices" in found.output


def test_a_folder_that_takes_no_files_is_refused_before_the_replay(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = philly(tmp_path, "--output", str(tmp_path / "file" / "out"))
    assert found.exit_code == 2
    assert "name another folder" in found.output
    assert "makespan" not in found.output


@pytest.mark.parametrize("content", ["[1]", "{", '{"v100": {"LM": 3}}', '{"v100": {"(": {"null": 1}}}'])
def test_a_table_that_holds_no_throughputs_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "simulation_throughputs.json"
    path.write_text(content)
    with pytest.raises(TraceError, match="holds no throughputs of Gavel"):
        gavel_throughputs(path)


def test_equal_names_of_elastic_jobs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t4").mkdir()
    (tmp_path / "t4" / "m.csv").write_text("global_batch_size,1\n8,2.0\n")
    path = tmp_path / "trace.csv"
    header = "job_id,submit_time,iteration,model_name,ddl,batch_size\n"
    path.write_text(header + "1,0,10,m,,8\n2,0,10,m,,8\n")
    assert len(elasticflow(path, {"t4": tmp_path / "t4"}, {"t4": 1}).jobs) == 2
    path.write_text(header + "1,0,10,m,,8\n01,0,10,m,,8\n")
    with pytest.raises(TraceError, match=r"trace\.csv:3: .*job_id 00001 is there twice"):
        elasticflow(path, {"t4": tmp_path / "t4"}, {"t4": 1})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0,99999999999,1", "not between 0 and 10000000 tokens"),
        ("inf,1,1", "column 'arrival_s' is 'inf', no finite number"),
        ("0,1.5,1", "this line is no request"),
    ],
)
def test_a_request_that_cannot_be_is_named(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(REQUESTS + row + "\n")
    with pytest.raises(TraceError, match=rf"requests\.csv:4: .*{words}"):
        requests_csv(path)


def test_requests_that_lie_further_apart_than_a_clock_can_tell_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(REQUESTS + "9e8,1,1\n")
    assert len(requests_csv(path)) == 3
    path.write_text(REQUESTS + "1e300,1,1\n")
    with pytest.raises(TraceError, match=r"lie 1e\+300 s apart, of at most 1e\+09; arrival_s is in seconds"):
        requests_csv(path)


def test_a_scale_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(REQUESTS)
    assert len(requests_csv(path, 100.0)) == 200
    with pytest.raises(TraceError, match="scale by less"):
        requests_csv(path, 1e9)


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"0": {}}', '{"0": {"input_tokens": "(", "output_tokens": ""}}']
)
def test_lengths_that_are_none_of_servegen_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text("0,1.0,1.0\n")
    (tmp_path / "chunk-1-dataset.json").write_text(content)
    with pytest.raises(TraceError, match=r"chunk-1-dataset\.json has no lengths of ServeGen"):
        servegen(tmp_path, 1, 1.0)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--pools", "A100=8@0"), 1, "costs nothing"),
        (("--pools", "A100=99999999@1"), 1, "a pool has at most 1000000"),
        (("--slo", "ttft=2,ttft=3"), 1, "ttft is given twice"),
        (("--hours", "nan"), 2, "no finite number"),
        (("--scale", "nan"), 2, "no finite number"),
        (("--budget", "nan"), 2, "no finite number"),
        (("--watts", "inf"), 2, "no finite number"),
        (("--zone-reserve", "0.5"), 2, "one of the zones of --min-zones; give both"),
    ],
)
def test_a_plan_without_meaning_is_refused(
    tmp_path: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(REQUESTS)
    found = ran(plan_capacity, "--trace", str(path), "--pools", "A100=8@3.67", *options)
    assert (found.exit_code, words in found.output) == (code, True), found.output


def test_a_load_in_milliseconds_is_seen_by_its_length(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(REQUESTS + "36000000,1,1\n")
    found = ran(plan_capacity, "--trace", str(path), "--pools", "A100=8@3.67")
    assert found.exit_code == 1
    assert "416.7 days apart, of at most 31; arrival_s is in seconds" in found.output
