"""KV blocks in host memory, with a model: the same answers as without pressure, and what is copied."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import VOCAB, greedy

from busbar.workloads.serving.errors import BadRequest, MemoryTooSmall, SettingsError
from busbar.workloads.serving.hosttier import Move
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.kvcodes import INT4, KvForm
from busbar.workloads.serving.mover import BlockMover
from busbar.workloads.serving.quota import Quota
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import parse_quota
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake

BLOCK = 16 * 2 * 2 * 2 * 16 * 4
"""Bytes of a block of 16 tokens of the tiny Llama: layers, k and v, heads, numbers, float32."""
FEW, MANY = 13 * BLOCK, 200 * BLOCK


def prompts(seed: int, count: int = 6) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(30, 70))] for _ in range(count)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_swapped_requests_answer_as_transformers_does(llama: tuple[Path, Any], prefix_cache: bool) -> None:
    folder, model = llama
    asked = prompts(1)
    loaded = load_engine(
        folder, kv_bytes=FEW, host_kv_bytes=MANY, max_model_len=150, prefix_cache=prefix_cache
    )
    found = [tokens_of(each) for each in generate(loaded, asked, greedy_params(60))]
    scheduler = loaded.core.scheduler
    assert scheduler.preemption_count > 0
    assert scheduler.pool.host.moves_total[False] > 0
    assert found == [greedy(model, prompt, 60) for prompt in asked]
    assert scheduler.pool.used == 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_swapping_changes_no_bit_of_a_log_probability(llama: tuple[Path, Any], kv_dtype: str) -> None:
    """Sampled, with logprobs, in every form of the cache; alone and unpressed against swapped."""
    asked = prompts(2)
    params = [
        SamplingParams(max_tokens=50, temperature=0.9, seed=i, ignore_eos=True, logprobs=2)
        for i in range(len(asked))
    ]
    form: dict[str, Any] = {"kv_dtype": kv_dtype, "deterministic": True, "max_model_len": 150}
    roomy = load_engine(llama[0], **form)
    block = roomy.core.runner.cache.shape.block_bytes
    tight = load_engine(llama[0], kv_bytes=13 * block, host_kv_bytes=200 * block, **form)
    expected, found = (
        [[(d.tokens, d.logprobs) for d in each] for each in generate(loaded, asked, params)]
        for loaded in (roomy, tight)
    )
    assert found == expected
    assert tight.core.scheduler.pool.host.moves_total[False] > 0
    assert roomy.core.scheduler.preemption_count == 0


def test_what_is_computed_is_what_is_needed(llama: tuple[Path, Any]) -> None:
    asked = prompts(3)
    loaded = load_engine(llama[0], kv_bytes=FEW, host_kv_bytes=MANY, max_model_len=150)
    computed = 0
    run = loaded.core.runner.run

    def counted(step: Any) -> Any:
        nonlocal computed
        computed += step.token_count
        return run(step)

    loaded.core.runner.run = counted  # type: ignore[method-assign]
    generate(loaded, asked, greedy_params(60, ignore_eos=True))
    assert loaded.core.scheduler.preemption_count > 0
    assert computed == sum(len(prompt) + 59 for prompt in asked)


def test_a_conversation_comes_back_from_the_host(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], kv_bytes=FEW, host_kv_bytes=MANY, max_model_len=150)
    first, others = prompts(4)[0], prompts(5)
    answer = tokens_of(generate(loaded, [first], greedy_params(20, ignore_eos=True))[0])
    generate(loaded, others, greedy_params(20, ignore_eos=True))
    hits = loaded.core.scheduler.cache_hits
    again = generate(loaded, [first + answer], greedy_params(4, ignore_eos=True))[0]
    assert again[0].cached == loaded.core.scheduler.cache_hits - hits
    assert again[0].cached >= (len(first) + 19) // 16 * 16
    text = loaded.core.metrics.render().decode()
    assert 'busbar:kv_blocks_copied_total{direction="in"' in text


def test_sleep_drops_the_hosts_blocks_too(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], kv_bytes=FEW, host_kv_bytes=MANY, max_model_len=150)
    asked = prompts(6)
    before = [tokens_of(each) for each in generate(loaded, asked, greedy_params(40))]
    mover = loaded.core.runner.mover
    assert mover is not None
    fall_asleep(loaded, SleepLevel.WEIGHTS_KEPT)
    assert mover.bytes == 0
    wake(loaded)
    assert mover.bytes == 200 * BLOCK
    assert [tokens_of(each) for each in generate(loaded, asked, greedy_params(40))] == before


@pytest.mark.parametrize("form", [None, INT4])
def test_the_mover_copies_in_order_and_tells_what_is_done(form: KvForm | None) -> None:
    shape = KvShape(2, 1, 8, 4, torch.bfloat16, form)
    cache = KvCache(shape, 6, torch.device("cpu"))
    mover = BlockMover(cache, 3)
    cache.pool.copy_(torch.arange(cache.pool.numel()).view_as(cache.pool) % 100)
    kept = cache.pool.clone()
    # Two neighbours together, a slot that is overwritten after it was read, and back in another order.
    mover.submit([Move(1, 1, 0, True), Move(2, 2, 1, True), Move(3, 5, 0, False), Move(4, 3, 0, True)])
    mover.submit([Move(5, 6, 0, False), Move(6, 4, 1, False)])
    mover.wait(6)
    assert mover.done == 6
    assert torch.equal(cache.pool[[5, 6, 4]], kept[[1, 3, 2]])
    assert torch.equal(cache.pool[[1, 2, 3]], kept[[1, 2, 3]])
    assert mover.block_s > 0


def test_a_copy_that_fails_is_the_engines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no memory")

    cache = KvCache(KvShape(1, 1, 8, 4, torch.float32), 2, torch.device("cpu"))
    mover = BlockMover(cache, 2)
    monkeypatch.setattr(mover, "_copy", fails)
    mover.submit([Move(1, 1, 0, True)])
    with pytest.raises(RuntimeError, match="KV blocks could not be copied"):
        mover.wait(1)
    with pytest.raises(RuntimeError, match="could not be copied"):
        assert mover.done


def test_a_released_mover_ends_its_thread_behind_its_copies() -> None:
    cache = KvCache(KvShape(1, 1, 8, 4, torch.float32), 4, torch.device("cpu"))
    mover = BlockMover(cache, 2, time.perf_counter)
    mover.submit([Move(1, 1, 0, True)])
    mover.release()
    mover.allocate()
    assert mover.done == 0
    mover.submit([Move(1, 2, 1, True)])
    mover.wait(1)


def test_too_little_host_memory_is_refused(llama: tuple[Path, Any]) -> None:
    with pytest.raises(MemoryTooSmall, match="hold no KV block"):
        load_engine(llama[0], host_kv_bytes=BLOCK - 1)
    assert load_engine(llama[0], host_kv_bytes=BLOCK).core.scheduler.pool.host.total == 1


@pytest.mark.parametrize("text", ["research", "research=25", "=1:2", "a=25:50:60", "a=-1:5", "a=x:5"])
def test_a_quota_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="TENANT=GUARANTEED:MOST"):
        parse_quota(text)


def test_a_quota_is_in_percent_of_the_cache(llama: tuple[Path, Any]) -> None:
    assert parse_quota("research=25:50") == ("research", Quota(0.25, 0.5))
    loaded = load_engine(llama[0], kv_bytes=21 * BLOCK, kv_quotas=(parse_quota("research=25:50"),))
    quotas = loaded.core.scheduler.quotas
    assert (quotas.guaranteed("research"), quotas.most("research"), quotas.most("x")) == (5, 10, 20)
    limits = loaded.core.context_limits
    assert limits.limit("research") == 160
    assert limits.limit("x") == 320
    limits.check(150, 20, "x")
    limits.check(150, 10, "research")
    with pytest.raises(BadRequest, match="under your tenant's KV quota the maximum context length is 160"):
        limits.check(150, 11, "research")
