"""vLLM's metric names and buckets, and the values after one known request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.serving.engines import greedy_params, load_engine

from busbar.kube.contracts.workload import StepSums
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.metrics import ITL_S, LATENCY_S, MOST_ADAPTERS, TTFT_S, Metrics, one_two_five
from busbar.workloads.serving.report import phase_steps

FROZEN = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "busbar:expert_queries": "counter",
    "busbar:expert_hits": "counter",
    "busbar:expert_prefetches": "counter",
    "busbar:expert_prefetch_hits": "counter",
    "busbar:expert_read_bytes": "counter",
    "busbar:saturated": "gauge",
    "busbar:phase_seconds": "counter",
    "busbar:kv_blocks_copied": "counter",
    "busbar:host_kv_usage_perc": "gauge",
    "busbar:tenant_kv_blocks": "gauge",
    "busbar:migrations": "counter",
    "vllm:engine_sleep_state": "gauge",
    "busbar:server_restarts": "counter",
    "busbar:server_crash_timestamp_seconds": "gauge",
    "busbar:adapter_requests": "counter",
    "busbar:adapter_generation_tokens": "counter",
    "vllm:lora_requests_info": "gauge",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
}
LABELS = {"model_name": "tiny", "engine": "0"}


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def value(core: EngineCore, name: str, **labels: str) -> float:
    found = core.metrics.registry.get_sample_value(name, LABELS | labels)
    assert found is not None, name
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loaded(llama: tuple[Path, Any], clock: Clock) -> Loaded:
    return load_engine(llama[0], clock)


def test_names_and_kinds_are_frozen() -> None:
    metrics = Metrics("tiny", 512)
    metrics.cache_config(16, 10, "float32")
    assert {m.name: m.type for m in metrics.registry.collect()} == FROZEN


def test_buckets_are_vllms() -> None:
    assert (len(TTFT_S), TTFT_S[0], TTFT_S[-1]) == (22, 0.001, 2560.0)
    assert (len(ITL_S), ITL_S[0], ITL_S[-1]) == (19, 0.01, 80.0)
    assert (len(LATENCY_S), LATENCY_S[0], LATENCY_S[-1]) == (21, 0.3, 7680.0)
    assert one_two_five(512) == [1, 2, 5, 10, 20, 50, 100, 200, 500]


def test_a_known_request_moves_each_by_the_predicted_amount(loaded: Loaded, clock: Clock) -> None:
    """40 prompt tokens in steps of 16, then 5 tokens: arrival 10 s, first step 12 s, a second a step."""
    core = loaded.core
    object.__setattr__(core.scheduler.limits, "max_batched_tokens", 16)
    clock.now = 12.0
    core.submit("r", list(range(1, 41)), greedy_params(5, ignore_eos=True), arrived_s=10.0)
    assert value(core, "vllm:num_requests_waiting") == 1
    plan = core.scheduler.plan

    def plan_then_wait(*asked: Any) -> object:
        step = plan(*asked)
        clock.now += 1.0
        return step

    core.scheduler.plan = plan_then_wait  # type: ignore[method-assign, assignment]
    deltas = core.step()
    assert deltas == []
    assert value(core, "vllm:num_requests_running") == 1
    assert value(core, "vllm:num_requests_waiting") == 0
    assert value(core, "vllm:kv_cache_usage_perc") == 3 / core.scheduler.pool.total
    assert value(core, "vllm:gpu_cache_usage_perc") == 3 / core.scheduler.pool.total
    while not core.idle:
        core.step()
    # Steps end at 13, 14 (prompt), 15 (prompt and first token), 16, 17, 18, 19.
    assert value(core, "vllm:prompt_tokens_total") == 40
    assert value(core, "vllm:generation_tokens_total") == 5
    assert value(core, "vllm:request_success_total", finished_reason="length") == 1
    assert value(core, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(core, "vllm:num_preemptions_total") == 0
    expected = {
        "vllm:time_to_first_token_seconds": (1, 5.0),
        "vllm:inter_token_latency_seconds": (4, 4.0),
        "vllm:request_time_per_output_token_seconds": (1, 1.0),
        "vllm:e2e_request_latency_seconds": (1, 9.0),
        "vllm:request_queue_time_seconds": (1, 2.0),
        "vllm:request_prefill_time_seconds": (1, 3.0),
        "vllm:request_decode_time_seconds": (1, 4.0),
        "vllm:request_inference_time_seconds": (1, 7.0),
        "vllm:iteration_tokens_total": (7, 44.0),
        "vllm:request_prompt_tokens": (1, 40.0),
        "vllm:request_generation_tokens": (1, 5.0),
        "vllm:request_params_n": (1, 1.0),
        "vllm:request_params_max_tokens": (1, 5.0),
    }
    found = {name: (value(core, f"{name}_count"), value(core, f"{name}_sum")) for name in expected}
    assert found == expected
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(core, f"vllm:{gauge}") == 0
    assert core.requests_total == 1
    assert core.tally.tokens_total == 5
    for _ in range(2):  # totals, however often they are told
        core.metrics.phases(core.phase_seconds.model_dump())
    spent = {p: value(core, "busbar:phase_seconds_total", phase=p) for p in ("prefill", "decode", "idle")}
    assert spent == {"prefill": 3.0, "decode": 4.0, "idle": 12.0}


def test_a_cancelled_request_counts_as_aborted_and_frees_its_blocks(loaded: Loaded) -> None:
    core = loaded.core
    core.submit("r", [1] * 40, greedy_params(50, ignore_eos=True), 0.0)
    core.step()
    assert core.scheduler.pool.used == 3
    assert core.cancel("r")
    assert not core.cancel("r")
    assert core.scheduler.pool.used == 0
    assert value(core, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(core, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(core, "vllm:kv_cache_usage_perc") == 0


def counted(core: EngineCore) -> tuple[float, float, float]:
    """(tokens in all, of requests that have ended, requests that ended at a stop)."""
    assert core.tally.tokens_total == value(core, "vllm:generation_tokens_total")
    ended = value(core, "vllm:request_generation_tokens_sum")
    return core.tally.tokens_total, ended, value(core, "vllm:request_success_total", finished_reason="stop")


@pytest.mark.parametrize("length", [50, 5], ids=["it runs", "it has ended"])
def test_tokens_behind_the_one_that_a_reader_stops_at_are_counted_nowhere(
    loaded: Loaded, length: int
) -> None:
    core = loaded.core
    core.submit("r", [1] * 40, greedy_params(length, ignore_eos=True), 0.0, confirms=True)
    for _ in range(5):
        core.step()
    assert counted(core) == (0, 0, 0), "nothing is read"
    core.read("r", 2)
    assert counted(core) == (2, 0, 0)
    for _ in range(2):
        core.read("r", 3, "stop")
        assert counted(core) == (3, 3, 1)
    assert value(core, "vllm:request_success_total", finished_reason="length") == 0
    assert core.idle
    assert core.scheduler.pool.used == 0


@pytest.mark.parametrize("length", [50, 5], ids=["it runs", "it has ended"])
def test_all_tokens_count_of_a_reader_that_leaves(loaded: Loaded, length: int) -> None:
    core = loaded.core
    core.submit("r", [1] * 40, greedy_params(length, ignore_eos=True), 0.0, confirms=True)
    for _ in range(5):
        core.step()
    core.read("r", 2, "abort")
    assert core.tally.tokens_total == 5
    reason = "abort" if length == 50 else "length"
    assert value(core, "vllm:request_success_total", finished_reason=reason) == 1
    assert core.idle


def test_preemptions_are_counted(llama: tuple[Path, Any]) -> None:
    block = 2 * 2 * 2 * 16 * 16 * 4
    core = load_engine(llama[0], kv_bytes=11 * block).core
    for name in "ab":
        core.submit(name, [3] * 50, greedy_params(60, ignore_eos=True), 0.0)
    while not core.idle:
        core.step()
    assert value(core, "vllm:num_preemptions_total") == core.scheduler.preemption_count > 0
    assert value(core, "vllm:request_success_total", finished_reason="length") == 2
    assert value(core, "vllm:prompt_tokens_total") == 100


def test_the_cache_layout_is_a_constant_gauge(loaded: Loaded) -> None:
    blocks = str(loaded.core.scheduler.pool.total)
    assert (
        value(
            loaded.core,
            "vllm:cache_config_info",
            block_size="16",
            num_gpu_blocks=blocks,
            cache_dtype="float32",
        )
        == 1
    )


def test_adapters_names_are_a_bounded_set_of_labels() -> None:
    metrics = Metrics("tiny", 128)
    for number in range(MOST_ADAPTERS + 5):
        metrics.adapter_request(f"a{number}")
    labels = {f"a{number}" for number in range(MOST_ADAPTERS)} | {"other"}
    found = {
        sample.labels["adapter"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "busbar:adapter_requests_total"
    }
    assert found == labels
    rest = metrics.registry.get_sample_value("busbar:adapter_requests_total", LABELS | {"adapter": "other"})
    assert rest == 5
    for now in (1.0, 2.0):
        metrics.lora_info(4, ["b", "a", "b"], [], now)
    text = metrics.render().decode()
    assert text.count("\nvllm:lora_requests_info{") == 1
    assert 'running_lora_adapters="a,b",waiting_lora_adapters=""} 2.0' in text


def test_the_status_says_what_the_steps_of_each_phase_were_made_of(loaded: Loaded, clock: Clock) -> None:
    core = loaded.core
    object.__setattr__(core.scheduler.limits, "max_batched_tokens", 16)
    plan = core.scheduler.plan

    def plan_then_wait(*asked: Any) -> object:
        step = plan(*asked)
        clock.now += 1.0
        return step

    core.scheduler.plan = plan_then_wait  # type: ignore[method-assign, assignment]
    core.submit("r", list(range(1, 41)), greedy_params(5, ignore_eos=True), arrived_s=0.0)
    while not core.idle:
        core.step()
    told = phase_steps(core.speed)
    # The prompt of 40 tokens in pieces of 16; then four tokens behind 41, 42, 43 and 44.
    assert told.prefill == StepSums(steps=3, sequences=0, context_tokens=0, prompt_tokens=40, seconds=3.0)
    assert told.decode == StepSums(
        steps=4, sequences=4, context_tokens=41 + 42 + 43 + 44, prompt_tokens=0, seconds=4.0
    )
    spent = core.phase_seconds
    assert (told.prefill.seconds, told.decode.seconds) == (spent.prefill, spent.decode)
