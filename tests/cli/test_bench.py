"""`busbar bench`: the loads that it makes, what it reports, and a run through a real gateway."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.cli.conftest import Done, home, run_busbar
from tests.gateway.conftest import house
from tests.gateway.parts import KEY_A, House, route

from busbar.cli import load_run
from busbar.cli.errors import UsageProblem
from busbar.cli.load import (
    PROBES,
    Lengths,
    Load,
    Request,
    Texts,
    closed_load,
    load_of_file,
    open_load,
    percentile,
)
from busbar.cli.load_report import Target, remarks, report
from busbar.cli.load_run import Answered, Endpoint, _stream, _take

__all__ = ["home", "house"]


async def bench(house: House, *words: str) -> Done:
    return await asyncio.to_thread(run_busbar, "bench", f"{house.public}/v1", *words)


@pytest.fixture
async def service(house: House, home: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """A gateway with the model `m`, and the key of a member."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY_A)
    await house.publish(route("m", await house.engine("one", " two", " three")))
    return house


@pytest.mark.parametrize("api", [(), ("--completions",)])
@pytest.mark.parametrize("load", [("--concurrency", "1,3"), ("--rate", "500,900")])
async def test_requests_through_a_gateway_are_counted_and_timed(
    service: House, api: tuple[str, ...], load: tuple[str, ...]
) -> None:
    service.engines[0].cached_tokens = 2
    done = await bench(service, *load, *api, "--requests", "5", "--target", "ttft=60", "-o", "json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["model"] == "m", "the only one that the key may use"
    assert len(found["rows"]) == 2
    for row in found["rows"]:
        assert (row["requests"], row["failed"], row["target_kept"]) == (5, 0, 1.0)
        assert (row["prompt_tokens_mean"], row["output_tokens_mean"]) == (7, 3)
        assert row["cached_tokens_per_s"] * row["seconds"] == pytest.approx(10)
        assert 0 < row["ttft_s"]["p50"] <= row["whole_s"]["p50"] <= row["seconds"]
    bodies = service.engines[0].bodies
    assert all(body["ignore_eos"] is True for body in bodies)
    assert "prompts had 7 tokens in the mean, where 256 were asked for" in done.err


async def test_the_table_has_a_line_of_each_load(service: House) -> None:
    done = await bench(service, "--concurrency", "2", "--requests", "3")
    head, line = done.lines
    assert head.split()[:3] == ["LOAD", "ANSWERED", "FAILED"]
    assert line.split()[:5] == ["2", "at", "once", "3", "0"]


async def test_what_fails_is_counted_and_said_in_the_servers_words(service: House) -> None:
    """The two requests that count tokens are answered; then the replica cuts the stream of each one."""
    service.engines[0].die_at = 1
    service.overrides["max_attempts"] = 1
    done = await bench(service, "--concurrency", "1", "--requests", "2", "-o", "json")
    assert done.code == 1
    assert "No request to" in done.err
    (row,) = json.loads(done.out)["rows"]
    assert (row["requests"], row["failed"]) == (2, 2)
    assert sum(row["problems"].values()) == 2


@pytest.mark.parametrize("answered", [2, 0])
async def test_ctrl_c_shows_what_was_answered_and_begins_no_further_load(
    service: House, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    async def interrupted(load: Load, endpoint: Endpoint, texts: Texts, told: Any, **_: Any) -> float:
        for request in load.requests[:answered]:
            told(Answered(request, 0.0, ended_s=1.0, pieces_s=array("d", [0.5, 1.0])))
        raise KeyboardInterrupt

    monkeypatch.setattr(load_run, "run", interrupted)
    done = await bench(service, "--concurrency", "1,2", "--requests", "5", "-o", "json")
    assert done.code == 130
    (row,) = json.loads(done.out)["rows"]
    assert (row["requests"], row["failed"], row["interrupted"]) == (answered, 0, True)
    assert "1 at once: interrupted, so this is of what was answered until then" in done.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "Say one of --rate, --concurrency and --file"),
        (("--rate", "1", "--concurrency", "1"), 2, "Say one of"),
        (("--rate", "0"), 2, "one number above 0"),
        (("--rate", "1,x"), 2, "one number above 0"),
        (("--concurrency", "1.5"), 2, "one number above 0"),
        (("--rate", "1", "--prompt-tokens", "9-3"), 2, "neither a number of tokens nor a range"),
        (("--rate", "1", "--output-tokens", "3-10000001"), 2, "neither a number of tokens nor a range"),
        (("--rate", "1", "--target", "ttft"), 2, "write seconds such as"),
        (("--rate", "1", "--target", "ttft=-1"), 2, "write seconds such as"),
        (("--rate", "1", "--field", "a=b"), 2, "write NAME=JSON"),
        (("--rate", "1", "--model", "no-such"), 3, "no-such"),
    ],
)
async def test_wrong_use_is_said(service: House, words: tuple[str, ...], code: int, says: str) -> None:
    done = await bench(service, *words)
    assert done.code == code
    assert says in done.err


async def test_an_address_that_is_none_of_an_openai_api_is_said(service: House) -> None:
    done = await asyncio.to_thread(run_busbar, "bench", service.public, "--rate", "1")
    assert done.code == 3
    assert "There is no '/models' here" in done.err
    done = await asyncio.to_thread(run_busbar, "bench", "http://127.0.0.1:1/v1", "--rate", "1")
    assert done.code == 5


async def test_a_key_that_is_not_known_is_said(service: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "nobody")
    assert (await bench(service, "--rate", "1")).code == 4


def test_a_seed_makes_the_same_requests() -> None:
    prompts, outputs = Lengths(100, 200), Lengths(8, 8)
    one, other = (open_load(4.0, 400, prompts, outputs, seed=3) for _ in range(2))
    assert one == other
    assert one != open_load(4.0, 400, prompts, outputs, seed=4)
    assert one.requests[-1].at_s == pytest.approx(100, rel=0.2)
    assert {request.output_tokens for request in one.requests} == {8}
    assert min(request.prompt_tokens for request in one.requests) == 100
    assert max(request.prompt_tokens for request in one.requests) == 200
    assert closed_load(3, 5, prompts, outputs, 0).concurrency == 3


def test_a_file_of_requests_begins_at_once_and_may_run_faster(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n14,20,3\n10,30,4\n18,40,5\n")
    found = load_of_file(path, None, 2.0)
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in found.requests] == [
        (0.0, 30, 4),
        (2.0, 20, 3),
        (4.0, 40, 5),
    ]
    assert len(load_of_file(path, 2, 1.0).requests) == 2
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_of_file(path, None, 2.0).requests == found.requests


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no request"),
        ("a,b\n1,2\n", ":2 is no request"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\nx,2,3\n", ":3 is no request"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,2,3\n", ":2: a time"),
        ("arrival_s,prompt_tokens,output_tokens\n1,0,3\n", ":2: a time"),
        (
            "arrival_s,prompt_tokens,output_tokens\n1,10000000,3\n1,10000001,3\n",
            ":3: .* between 1 and 10000000",
        ),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,99999999999\n", ":2: .* between 1 and 10000000"),
        ("arrival_s,prompt_tokens,output_tokens\n\n1,2,3\n\nx,2,3\n", ":5 is no request"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2\n", ":2 is no request"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "load.csv"
    path.write_text(text)
    with pytest.raises(UsageProblem, match=says):
        load_of_file(path, None, 1.0)


async def test_an_answer_with_a_character_that_ends_lines_elsewhere_is_whole() -> None:
    events = ('data: {"choices": [{"delta": {"content": "a\u2028b\x85c"}}]}', "data: [DONE]")
    answer = httpx2.Response(200, content="\n\n".join([*events, ""]).encode())
    found = Answered(Request(0, 0.0, 10, 4), 0.0)
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(lambda request: answer)) as client:
        await _stream(client, Endpoint("http://bench.test/v1", None, "m"), Texts(), found, lambda: 1.0)
    assert (found.problem, list(found.pieces_s)) == ("", [1.0])


@pytest.mark.parametrize("data", ["{", "5", "null", "[]", '"x"', "[" * 100_000])
def test_an_event_that_is_no_object_is_the_requests_problem(data: str) -> None:
    found = Answered(Request(0, 0.0, 10, 4), 0.0)
    assert _take(data, found, 1.0) is False
    assert found.problem.startswith("an event is no JSON object: ")
    assert len(found.problem) < 400


def test_prompts_have_as_many_tokens_as_asked_for_and_share_their_beginning() -> None:
    """Of an endpoint whose words have two tokens each, with ten for the template."""
    texts = Texts.measured([10 + 2 * count for count in PROBES], shared_tokens=100, seed=1)
    one, other = (texts.of(Request(number, 0.0, 310, 1)).split() for number in (0, 1))
    assert len(one) == len(other) == 150
    assert one[:50] == other[:50]
    assert one[50:] != other[50:]
    assert len(texts.of(Request(0, 0.0, 5, 1)).split()) == 1, "no prompt is empty"
    assert Texts.measured([5, 5], 0, 0).tokens_per_word == 1.0, "an endpoint that does not count"


def answered(sent: float, pieces: list[float], tokens: int | None = None, **fields: object) -> Answered:
    found = Answered(Request(0, sent, 10, 4), sent, pieces_s=array("d", pieces), prompt_tokens=10)
    found.output_tokens, found.ended_s = tokens, pieces[-1] if pieces else sent
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def test_a_report_counts_what_callers_waited_for() -> None:
    """Two answers: 0.5 s to the first token and 0.1 per further one, and 2 s and 0.3; one that failed."""
    rows = [
        answered(1.0, [1.5, 1.6, 1.8], 4),
        answered(2.0, [4.0, 4.3], 2),
        answered(3.0, [3.1], 1, problem="503: no room"),
    ]
    row = report(Load("x", []), rows, 10.0, Target(ttft_s=1.0, tpot_s=0.2))
    assert (row["requests"], row["failed"], row["problems"]) == (3, 1, {"503: no room": 1})
    assert row["ttft_s"] == pytest.approx({"p50": 0.5, "p90": 2.0, "p99": 2.0})
    assert row["tpot_s"] == pytest.approx({"p50": 0.1, "p90": 0.3, "p99": 0.3})
    assert row["gap_s"]["p99"] == pytest.approx(0.3)
    assert (row["requests_per_s"], row["output_tokens_per_s"]) == (0.2, pytest.approx(0.6))
    assert row["target_kept"] == pytest.approx(1 / 3), "what failed has kept nothing"


def test_a_report_says_what_makes_it_doubtful() -> None:
    slow = report(Load("x", []), [answered(1.0, [1.5, 1.6], None, late_s=0.2)], 1.0)
    said = " ".join(remarks(slow))
    assert "sent up to 200 ms late" in said
    assert "its pieces were counted" in said
    assert remarks(report(Load("x", []), [answered(1.0, [1.5], 1)], 1.0)) == []


def test_percentiles_are_values_that_were_seen() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (50, 75, 99)] == [2.0, 3.0, 4.0]
    assert percentile([], 50) is None
