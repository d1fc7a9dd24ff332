"""Requests replayed through the engine's scheduler: cases worked out by hand, and the engine itself on the same clock."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from busbar.workloads.serving.replay import (
    Request,
    Seen,
    StepTimes,
    replay,
    requests_of,
    simulated,
)
from busbar.workloads.serving.replay_command import simulate_serving
from busbar.workloads.serving.scheduler import StepLimits

TIMES = StepTimes(0.01, 0.001, 0.002, 0.0001)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""Of 16 tokens of the tiny model."""
Rows = list[tuple[float, int, int]]


def seen_of(
    rows: Rows, *, blocks: int = 64, tpot_s: float | None = None, shared: int = 0, **limits: Any
) -> list[Seen]:
    engine = simulated(TIMES, blocks, StepLimits(**{"block_tokens": 16, **limits}), tpot_s)
    return replay(requests_of(rows, shared), engine)


def test_a_request_alone_takes_the_step_of_its_prompt_and_one_for_each_further_token() -> None:
    (one,) = seen_of([(5.0, 100, 3)])
    prompt_s = 0.01 + 0.0001 * 100
    assert one.ttft_s == pytest.approx(prompt_s)
    second_s = 0.01 + 0.001 + 0.002 * 0.101
    third_s = 0.01 + 0.001 + 0.002 * 0.102
    assert one.times_s == pytest.approx(
        [5 + prompt_s, 5 + prompt_s + second_s, 5 + prompt_s + second_s + third_s]
    )
    assert one.tpot_s == pytest.approx((second_s + third_s) / 2)


def test_a_long_prompt_comes_in_pieces_and_those_who_decode_wait_for_each() -> None:
    short, long = seen_of([(0.0, 10, 5), (0.001, 200, 1)], max_batched_tokens=64)
    gaps = [b - a for a, b in zip(short.times_s, short.times_s[1:], strict=False)]
    assert all(gap > 0.01 + 0.0001 * 60 for gap in gaps[:3]), "63 prompt tokens in each of the first three"
    assert gaps[3] < gaps[0], "and what is left in the fourth"
    assert long.times_s == [short.times_s[4]]


def test_a_promise_makes_the_pieces_smaller() -> None:
    rows = [(0.0, 10, 40), (0.001, 400, 1)]
    free, kept = seen_of(rows), seen_of(rows, tpot_s=0.02)
    assert max(b - a for a, b in zip(kept[0].times_s, kept[0].times_s[1:], strict=False)) <= 0.02
    assert max(b - a for a, b in zip(free[0].times_s, free[0].times_s[1:], strict=False)) > 0.04
    assert kept[1].ttft_s > free[1].ttft_s


def test_prompts_that_begin_alike_are_computed_once() -> None:
    rows = [(float(i), 100, 2) for i in range(3)]
    first, *others = seen_of(rows, shared=64, prefix_cache=True)
    assert [first.cached_tokens, *(one.cached_tokens for one in others)] == [0, 64, 64]
    assert others[0].ttft_s < first.ttft_s
    assert {one.cached_tokens for one in seen_of(rows, shared=64)} == {0}


def test_who_finds_too_many_waiting_is_refused() -> None:
    engine = simulated(TIMES, 64, StepLimits(16, max_running=1))
    rows = [(0.0, 10, 20), (0.001, 10, 2), (0.002, 10, 2), (9.0, 10, 2)]
    told: list[int] = []
    seen = replay(requests_of(rows), engine, lambda: told.append(1), max_waiting=1)
    assert [len(one.times_s) for one in seen] == [20, 2, 0, 2]
    assert len(told) == 4


def test_a_request_that_could_never_run_is_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="does not fit the KV cache of 64 tokens"):
        seen_of([(0.0, 100, 2)], blocks=4)


@pytest.mark.engine
@pytest.mark.parametrize("blocks", [13, 60])
def test_the_engine_sees_the_same_times_where_its_steps_take_what_the_model_says(
    llama: tuple[Path, Any], blocks: int
) -> None:
    """Also with preemptions, which 13 blocks force, and with a prefix in the cache."""
    from tests.serving.engines import greedy_params, load_engine

    rng = random.Random(blocks)
    rows = [(0.01 * number, rng.randint(5, 90), rng.randint(1, 40)) for number in range(24)]
    head = [rng.randrange(300) for _ in range(32)]
    requests = [
        Request(at, [*head, *(rng.randrange(300) for _ in range(prompt))], output)
        for at, prompt, output in rows
    ]
    now = 0.0
    core = load_engine(
        llama[0],
        lambda: now,
        kv_bytes=blocks * BLOCK_BYTES,
        max_running=6,
        max_batched_tokens=48,
        prefix_cache=True,
    ).core
    engine = simulated(TIMES, core.scheduler.pool.total, core.scheduler.limits)
    run = core.runner.run

    def timed(step: Any) -> Any:
        nonlocal now
        now += engine.seconds(step)
        return run(step)

    core.runner.run = timed  # type: ignore[method-assign]
    times: list[list[float]] = [[] for _ in requests]
    number = 0
    while number < len(requests) or not core.idle:
        if core.idle:
            now = max(now, requests[number].at_s)
        while number < len(requests) and requests[number].at_s <= now:
            one = requests[number]
            core.submit(str(number), one.prompt, greedy_params(one.output_tokens, ignore_eos=True), now)
            number += 1
        for delta in core.step():
            times[int(delta.request_id)] += [now] * len(delta.tokens)
    found = replay(requests, engine)
    assert [one.times_s for one in found] == times
    assert engine.scheduler.preemption_count == core.scheduler.preemption_count
    assert (engine.scheduler.preemption_count > 0) == (blocks == 13)


def ran(*words: str) -> Result:
    return CliRunner().invoke(simulate_serving, words)


STATED = ("--times", "0.01,0.001,0.002,0.0001")


def test_the_command_says_what_callers_would_wait_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,3\n5,100,3\n")
    done = ran(*STATED, "--trace", str(trace), "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["requests"], found["refused"], found["promptTokens"]) == (2, 0, 200)
    assert found["ttftSeconds"]["p50"] == pytest.approx(0.02)
    text = ran(*STATED, "--rate", "50", "--requests", "40").output
    assert "40 requests answered" in text
    assert "to the first token" in text


def test_the_command_reads_what_an_engine_reports(tmp_path: Path) -> None:
    model = {
        "secondsPerStep": 0.01,
        "secondsPerSequence": 0.001,
        "secondsPerThousandContextTokens": 0.002,
        "secondsPerPromptToken": 0.0001,
        "rmsErrorSeconds": 0.0,
        "steps": 99,
    }
    report = {
        "class": "c",
        "accelerator": "cpu",
        "mode": "resident",
        "kvBytes": 640_000,
        "kvBytesPerToken": 1000,
    }
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"report": {**report, "kvBlockTokens": 16, "stepModel": model}}))
    found = json.loads(ran("--engine", str(status), "--rate", "1", "--requests", "1", "-o", "json").stdout)
    assert found["kvTokens"] == 640
    assert found["ttftSeconds"]["p50"] == pytest.approx(0.01 + 0.0256)
    status.write_text(json.dumps({"report": report}))
    assert "no step model yet" in ran("--engine", str(status), "--rate", "1").output
    status.write_text("[]")
    assert "no status of a serving engine" in ran("--engine", str(status), "--rate", "1").output


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "Which engine?"),
        ((*STATED, "--engine", "x", "--rate", "1"), 2, "Which engine?"),
        (STATED, 2, "Which load?"),
        (("--times", "1,2", "--rate", "1"), 2, "write four numbers"),
        (("--times", "0,0,0,0", "--rate", "1"), 2, "write four numbers"),
        (("--times", "-1,0,0,1", "--rate", "1"), 2, "write four numbers"),
        (("--engine", "/no/such", "--rate", "1"), 1, "cannot be read as an engine's status"),
        ((*STATED, "--rate", "1", "--prompt-tokens", "70000"), 1, "could never run"),
        ((*STATED, "--rate", "1", "--prompt-tokens", "999999999"), 1, "do not fit the KV cache of 65536"),
        ((*STATED, "--rate", "1", "--kv-tokens", "999999999"), 2, "--kv-tokens"),
        ((*STATED, "--rate", "nan"), 2, "nan is no finite number"),
        ((*STATED, "--rate", "1", "--tpot", "inf"), 2, "inf is no finite number"),
        ((*STATED, "--rate", "1", "--scale", "2"), 2, "--scale belongs to --trace; leave it out with --rate"),
        ((*STATED, "--trace", __file__, "--output-tokens", "2"), 2, "--output-tokens belongs to --rate"),
    ],
)
def test_wrong_use_is_said(words: tuple[str, ...], code: int, says: str) -> None:
    done = ran(*words)
    assert done.exit_code == code
    assert says in done.output


def test_a_replay_imports_no_torch() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\n"
        "from busbar.workloads.serving.replay_command import simulate_serving\n"
        f"done = CliRunner().invoke(simulate_serving, {[*STATED, '--rate', '9', '--requests', '3']!r})\n"
        "assert done.exit_code == 0, done.output\nassert not {'torch', 'aiohttp'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
