"""Our tokens against `transformers`' greedy output, in every family and under pressure."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import VOCAB, greedy, save_model

from busbar.workloads.serving.kvcache import KvShape
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.probe import LAYOUTS, try_blocks
from busbar.workloads.serving.sampling import SamplingParams

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, all biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32}),
    "llama odd sizes": (
        "llama",
        {"hidden_size": 60, "intermediate_size": 101, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama rope yarn": ("llama", {"rope_parameters": YARN}),
    "llama rope linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama rope dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 300}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "mixtral one expert, a window": (
        "mixtral",
        {"num_experts_per_tok": 1, "sliding_window": 300},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe as it is, all biases": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
}


def random_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """With blocks read in place, and with the deterministic order of summation."""
    family, changes = VARIANTS[name]
    model = save_model(tmp_path, family, **changes)
    prompts = random_prompts(1, 5, 120)
    expected = [greedy(model, p, 24) for p in prompts]
    for deterministic in (False, True):
        loaded = load_engine(tmp_path, max_batched_tokens=48, deterministic=deterministic)
        assert loaded.core.runner.decoder.fixed_order is deterministic
        found = generate(loaded, prompts, greedy_params(24))
        assert [tokens_of(d) for d in found] == expected


def test_prompts_longer_than_a_tile_and_a_step_equal_transformers(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    loaded = load_engine(folder, max_batched_tokens=100)
    prompts = [p * 4 for p in random_prompts(2, 3, 110)]
    found = generate(loaded, prompts, greedy_params(20))
    assert [tokens_of(d) for d in found] == [greedy(model, p, 20) for p in prompts]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "layouts"),
    [
        (4, 2, LAYOUTS),
        (4, 4, [((2,), 0, 1)]),
        (8, 1, [((1, 2, 3), 9, 1), ((4, 5), 6, 1)]),
        (4, 2, [((1, 2), 5, 1), ((1, 3), 7, 1)]),
        (8, 2, [((1, 2, 3 + i), 9 + i % 3, 1) for i in range(5)] + [((1, 9), 6, 1), ((10, 11), 5, 1)]),
        (4, 2, [((1, 40, 3), 9, 1), ((1, 40, 4), 10, 1), ((1, 5), 4, 1)]),
        (4, 2, [((1,), 2, 1), ((40,), 3, 1)]),  # far apart: gathered
        (4, 2, [((9, 2, 7), 8, 5)]),
    ],
    ids=[
        "mixed",
        "alone",
        "one kv head",
        "shared",
        "shared by 2, 5 and 6",
        "shared, far apart",
        "far apart",
        "prompt with a past",
    ],
)
def test_attention_in_place_is_that_of_float64(
    heads: int, kv_heads: int, layouts: list[tuple[tuple[int, ...], int, int]]
) -> None:
    shape = KvShape(2, kv_heads, 16, 8, torch.float32)
    assert try_blocks(shape, heads, layouts).max_error < 1e-5


@pytest.fixture(scope="module")
def small_pool(llama: tuple[Path, Any]) -> Loaded:
    """Twelve usable blocks of 16 tokens: 192 tokens in all."""
    block = 2 * 2 * 2 * 16 * 16 * 4
    loaded = load_engine(llama[0], kv_bytes=13 * block, max_batched_tokens=40, max_running=6)
    assert loaded.core.scheduler.pool.total == 12
    return loaded


REFERENCE: dict[tuple[int, ...], list[int]] = {}


def reference(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' tokens, computed once per prompt for the longest length used."""
    key = tuple(prompt)
    if key not in REFERENCE:
        REFERENCE[key] = greedy(model, prompt, 60)
    return REFERENCE[key][:count]


PROMPTS = random_prompts(3, 8, 90)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 60), st.integers(0, 30)), min_size=2, max_size=8
    ),
    cancels=st.dictionaries(st.integers(1, 60), st.integers(0, 7), max_size=3),
)
def test_a_pool_smaller_than_the_contexts_changes_no_token(
    small_pool: Loaded,
    llama: tuple[Path, Any],
    requests: list[tuple[int, int, int]],
    cancels: dict[int, int],
) -> None:
    """Requests join and leave between steps, are preempted and cancelled; all others equal transformers."""
    core = small_pool.core
    found: dict[str, list[int]] = {}
    finished: set[str] = set()
    starts = sorted((delay, i) for i, (_, _, delay) in enumerate(requests))
    cancelled: set[str] = set()
    tick = 0
    while starts or not core.idle:
        while starts and (starts[0][0] <= tick or core.idle):
            index = starts.pop(0)[1]
            prompt, count, _ = requests[index]
            found[str(index)] = []
            core.submit(str(index), PROMPTS[prompt], greedy_params(count), 0.0)
        if (victim := cancels.get(tick)) is not None and core.cancel(str(victim)):
            cancelled.add(str(victim))
        for delta in core.step():
            found[delta.request_id] += delta.tokens
            if delta.finish:
                finished.add(delta.request_id)
        tick += 1
    assert core.scheduler.pool.free == core.scheduler.pool.total
    assert core.live == 0
    for index, (prompt, count, _) in enumerate(requests):
        expected = reference(llama[1], PROMPTS[prompt], count)
        got = found[str(index)]
        if str(index) in cancelled:
            assert got == expected[: len(got)]
        else:
            assert str(index) in finished
            assert got == expected


def test_preemptions_happen_in_the_small_pool_and_change_nothing(
    small_pool: Loaded, llama: tuple[Path, Any]
) -> None:
    before = small_pool.core.scheduler.preemption_count
    prompts = [p for p in PROMPTS if len(p) > 20][:5]
    found = generate(small_pool, prompts, greedy_params(60, ignore_eos=True))
    assert small_pool.core.scheduler.preemption_count > before
    for prompt, deltas in zip(prompts, found, strict=True):
        expected = reference(llama[1], prompt, 60)
        assert tokens_of(deltas)[: len(expected)] == expected


def test_logits_are_bit_equal_alone_in_a_crowd_and_after_a_preemption(llama: tuple[Path, Any]) -> None:
    """The start-up check itself; with one thread on a CPU it must succeed."""
    assert load_engine(llama[0], deterministic=True).batch_invariant
    assert not load_engine(llama[0]).batch_invariant  # not promised, and not checked


def test_sampled_tokens_do_not_depend_on_the_batch(llama: tuple[Path, Any]) -> None:
    params = [SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=s) for s in range(6)]
    prompts = random_prompts(5, 6, 60)
    loaded = load_engine(llama[0], deterministic=True)
    alone = [tokens_of(generate(loaded, [p], [q])[0]) for p, q in zip(prompts, params, strict=True)]
    assert [tokens_of(d) for d in generate(loaded, prompts, params)] == alone
    assert alone != [tokens_of(d) for d in generate(loaded, prompts, params[1:] + params[:1])]


def test_bf16_weights_on_a_cpu_stay_close_to_float32(llama: tuple[Path, Any]) -> None:
    """bf16 rounds, so tokens may differ; the logits of a prompt must agree to bf16's precision."""
    prompt = random_prompts(6, 1, 60)[0]
    logs = []
    for dtype in ("float32", "bfloat16"):
        loaded = load_engine(llama[0], dtype=dtype)
        deltas = generate(loaded, [prompt], greedy_params(1, logprobs=VOCAB))
        logs.append(dict(deltas[0][0].logprobs[0].top))
    exact, rounded = (torch.tensor([each[t] for t in range(VOCAB)]) for each in logs)
    assert (exact.exp() - rounded.exp()).abs().max() < 0.05


def test_cached_beginnings_change_no_token_and_are_told(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    prefix = random_prompts(8, 1, 90)[0] * 2
    prompts = [prefix + tail for tail in random_prompts(9, 4, 20)]
    for deterministic in (False, True):
        loaded = load_engine(folder, deterministic=deterministic)
        found = [generate(loaded, [prompt], greedy_params(12))[0] for prompt in prompts]
        assert [tokens_of(d) for d in found] == [greedy(model, p, 12) for p in prompts]
        full = len(prefix) // 16 * 16
        assert [d[0].cached for d in found] == [0, full, full, full]
