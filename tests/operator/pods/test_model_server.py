"""A vLLM as its metrics tell it: three recorded answers of vLLM 0.32.0 on a CPU, some 2 s apart, and made ones.

The recordings are of a Llama of 26 M parameters (8 layers, width 512) under four requests a second. Lines that explain a
metric are left out, and of the later two also buckets and times of creation."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from tests.operator.pods.answering import answering

from busbar.kube.types.engines import VLLM
from busbar.operator.errors import ProbeRefused
from busbar.operator.pods.model_server import LEAST_STEPS, Exposition, ModelServer
from busbar.operator.pods.model_server_stop import pre_stop

RECORDED = [(Path(__file__).parent / f"recorded/vllm_0.32.0_{i}.txt").read_bytes() for i in range(3)]
AT_S = (0.0, 2.006, 4.012)


def exposition(
    *,
    running: int = 4,
    waiting: int = 0,
    steps: int = 0,
    generated: int = 0,
    computed: int = 0,
    gaps_s: float = 0.0,
    used: float = 0.5,
    engine: str = "0",
) -> bytes:
    of = f'engine="{engine}",model_name="m"'
    return f"""\
vllm:num_requests_running{{{of}}} {running}
vllm:num_requests_waiting{{{of}}} {waiting}
vllm:kv_cache_usage_perc{{{of}}} {used}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="1000",{of}}} 1.0
vllm:iteration_tokens_total_count{{{of}}} {steps}
vllm:generation_tokens_total{{{of}}} {generated}
vllm:prompt_tokens_by_source_total{{{of},source="local_compute"}} {computed}
vllm:prompt_tokens_by_source_total{{{of},source="local_cache_hit"}} 999999
vllm:inter_token_latency_seconds_count{{{of}}} {generated}
vllm:inter_token_latency_seconds_sum{{{of}}} {gaps_s}
""".encode()


def test_a_recorded_answer_is_read() -> None:
    found = Exposition.parsed(VLLM, RECORDED[0])
    assert (found.engines, found.running, found.waiting, found.sleep_level) == (1, 15, 0, 0)
    assert (found.cache_tokens, found.block_tokens) == (65536, 128)
    assert found.context_tokens == pytest.approx(65536 * 33 / 511), "33 blocks; vLLM keeps one for itself"
    assert (found.steps, found.generated, found.computed) == (5095, 39142, 144441)
    assert found.gaps_s / found.gaps == pytest.approx(0.053, abs=1e-3)


def test_the_status_of_recorded_answers() -> None:
    server = ModelServer(VLLM, "uid-1")
    for answer, at_s in zip(RECORDED, AT_S, strict=True):
        status = server.take(answer, at_s)
    assert status.ready
    assert not status.draining
    assert (status.running, status.waiting) == (12, 0)
    assert (status.kv_blocks_total, status.kv_blocks_free) == (512, 486)
    assert status.report is not None
    assert status.report.cache_tokens == 65536
    assert status.report.workload_class.startswith("serve-vllm-")
    other = ModelServer(VLLM, "uid-2").take(RECORDED[0], 0.0).report
    assert other is not None
    assert status.report.workload_class != other.workload_class


def test_two_recorded_intervals_of_steps_without_a_pause_are_two_rows() -> None:
    server = ModelServer(VLLM, "uid-1")
    for answer, at_s in zip(RECORDED, AT_S, strict=True):
        server.take(answer, at_s)
    assert server.speed.model.steps == 2
    assert server.speed.decode_s + server.speed.prefill_s == pytest.approx(AT_S[2])


def test_a_known_law_is_found_from_counters() -> None:
    """Intervals of steps that take 2 ms, 0.3 ms a sequence, 0.5 ms a thousand tokens of context, 20 µs a prompt token."""
    rng, server = Random(0), ModelServer(VLLM, "uid-1")
    at_s = gaps_s = 0.0
    steps = generated = computed = 0
    for _ in range(400):
        batch, prompt, used = rng.randrange(1, 32), rng.choice([0, 10, 60]), rng.uniform(0.1, 0.9)
        step_s = 0.002 + 0.0003 * batch + 0.0005 * used * 16 + 0.00002 * prompt
        count = int(2 / step_s)
        server.take(
            exposition(
                running=batch, steps=steps, generated=generated, computed=computed, gaps_s=gaps_s, used=used
            ),
            at_s,
        )
        steps, generated, computed = steps + count, generated + count * batch, computed + count * prompt
        at_s, gaps_s = at_s + count * step_s, gaps_s + count * batch * step_s
        status = server.take(
            exposition(
                running=batch, steps=steps, generated=generated, computed=computed, gaps_s=gaps_s, used=used
            ),
            at_s,
        )
    report = status.report
    assert report is not None
    assert report.step_model is not None
    assert report.step_model.seconds_per_step == pytest.approx(0.002, rel=0.05)
    assert report.step_model.seconds_per_sequence == pytest.approx(0.0003, rel=0.05)
    assert report.step_model.seconds_per_thousand_context_tokens == pytest.approx(0.0005, rel=0.05)
    assert report.step_model.seconds_per_prompt_token == pytest.approx(0.00002, rel=0.05)
    assert report.decode_tokens_per_second is not None
    assert report.prefill_tokens_per_second is not None


BEFORE = {"running": 4, "steps": 100, "generated": 400, "computed": 50, "gaps_s": 10.0}
AFTER = {"running": 4, "steps": 200, "generated": 800, "computed": 90, "gaps_s": 18.0}
"""A hundred steps of 20 ms, which fill 2 s."""


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        ({}, {}, 1),
        ({}, {"gaps_s": 14.0}, 0),  # its steps fill half of the time
        ({}, {"gaps_s": 40.0}, 0),  # more time than there was: some steps are not counted
        ({"running": 0}, {}, 0),
        ({}, {"running": 0}, 0),
        ({}, {"steps": 99}, 0),  # a counter that falls
        ({}, {"computed": 10}, 0),
        ({}, {"steps": 100 + LEAST_STEPS - 1}, 0),
        ({}, {"generated": 400}, 0),  # no gap between tokens was seen
    ],
    ids=[
        "steady",
        "pause",
        "more",
        "idle-before",
        "idle-after",
        "restarted",
        "restarted-prompts",
        "few",
        "no-gaps",
    ],
)
def test_only_intervals_without_a_pause_teach(
    before: dict[str, float], after: dict[str, float], rows: int
) -> None:
    server = ModelServer(VLLM, "uid-1")
    server.take(exposition(**BEFORE | before), 0.0)  # type: ignore[arg-type]
    server.take(exposition(**AFTER | after), 2.0)  # type: ignore[arg-type]
    assert server.speed.model.steps == rows


def test_the_engines_of_a_data_parallel_server_are_added_up() -> None:
    server = ModelServer(VLLM, "uid-1")
    for values, at_s in ((BEFORE, 0.0), (AFTER, 2.0)):
        both = exposition(**values) + exposition(engine="1", **values)  # type: ignore[arg-type]
        status = server.take(both, at_s)
    assert (status.running, status.kv_blocks_total) == (8, 2000)
    assert server.speed.model.steps == 1
    assert server.speed.model.predict(4, 8000, 0.4) == pytest.approx(0.02, rel=0.01)


def test_older_names_are_read() -> None:
    older = (
        exposition(**AFTER)  # type: ignore[arg-type]
        .replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc")
        .replace(b"inter_token_latency_seconds", b"time_per_output_token_seconds")
    )
    lines = [line for line in older.splitlines() if b"by_source" not in line]
    lines += [b'vllm:prompt_tokens_total{engine="0"} 100', b'vllm:prefix_cache_hits_total{engine="0"} 40']
    found = Exposition.parsed(VLLM, b"\n".join(lines))
    assert (found.cache_used, found.gaps, found.gaps_s, found.computed) == (0.5, 800, 18.0, 60)


def test_a_server_that_sleeps_is_not_ready() -> None:
    asleep = exposition(running=0) + b'vllm:engine_sleep_state{sleep_state="weights_offloaded"} 1\n'
    status = ModelServer(VLLM, "uid-1").take(asleep, 0.0)
    assert (status.ready, status.sleep_level) == (False, 1)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "no vllm:num_requests_running"),
        (b"process_cpu_seconds_total 1.0\n", "no vllm:num_requests_running"),
        (b"vllm:num_requests_running{engine=\xff} 1\n", "no exposition"),
        (b'vllm:num_requests_running{engine="0 1\n', "no exposition"),
        (b"vllm:num_requests_running{} many\n", "no exposition"),
    ],
)
def test_what_is_no_exposition_of_a_vllm_is_refused(answer: bytes, why: str) -> None:
    with pytest.raises(ProbeRefused, match=why):
        Exposition.parsed(VLLM, answer)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300"])
def test_numbers_that_no_counter_has_are_dropped(value: str) -> None:
    found = Exposition.parsed(
        VLLM,
        exposition() + f"vllm:prompt_tokens_total {value}\nvllm:request_success_total {value}\n".encode(),
    )
    assert (found.ended, found.running) == (0, 4)


def test_a_cache_of_nonsense_holds_nothing() -> None:
    answer = exposition().replace(b'"1000"', b'"' + b"9" * 40 + b'"')
    status = ModelServer(VLLM, "uid-1").take(answer, 0.0)
    assert status.kv_blocks_total == 0
    assert status.report is not None
    assert status.report.cache_tokens is None


def gauges(*rows: tuple[int, int]) -> list[bytes]:
    """Metrics with these numbers of requests that run and that wait."""
    return [exposition(running=running, waiting=waiting) for running, waiting in rows]


def run_hook(port: int, limit_s: float) -> None:
    command = pre_stop(VLLM, port, 60)["preStop"]["exec"]["command"]
    command = [sys.executable, *command[1:4], "0.1", str(limit_s)]
    assert subprocess.run(command, timeout=30, capture_output=True, check=True).stderr == b""


def test_the_stop_is_held_back_while_requests_run_or_wait() -> None:
    answers = gauges((2, 0), (0, 1), (0, 0))
    with answering(answers) as port:
        run_hook(port, 20)
    assert answers == gauges((0, 0))


def test_the_stop_is_held_back_while_the_server_is_too_busy_to_answer() -> None:
    answers = gauges((2, 0), (2, 0), (0, 0))
    with answering(answers, first_after_s=2.5) as port:
        run_hook(port, 20)
    assert answers == gauges((0, 0))


def test_the_stop_is_held_back_no_longer_than_its_limit() -> None:
    with answering(gauges((1, 0))) as port:
        began = time.monotonic()
        run_hook(port, 1)
    assert time.monotonic() - began >= 1


def test_the_stop_is_not_held_back_where_nothing_answers() -> None:
    with answering(gauges((1, 0))) as port:
        pass
    run_hook(port, 25)
