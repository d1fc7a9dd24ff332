"""The prefix cache on the whole engine: it changes no token and no log-probability, whatever happens to a request."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serving.crowd import answer
from tests.serving.engines import Said, generate, load_engine, tokens_of
from tests.serving.models import VOCAB

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.prefix import salt_of
from busbar.workloads.serving.sampling import SamplingParams, TokenLogprob

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
LONGEST = 24
"""Tokens of the longest answer."""


@dataclass(frozen=True)
class Ask:
    """A request of the property below."""

    beginning: int
    end: int
    tenant: str
    count: int
    delay: int
    had: int
    """Tokens that another replica has sampled before."""
    seed: int | None = None
    cancelled_at: int | None = None


@dataclass
class Answers:
    """What requests get alone from an engine without the cache; each is computed once."""

    engine: Loaded
    known: dict[tuple[tuple[int, ...], int | None], list[Said]] = field(default_factory=dict)

    def of(self, prompt: list[int], seed: int | None) -> list[Said]:
        key = (tuple(prompt), seed)
        if key not in self.known:
            self.known[key] = generate(self.engine, [prompt], params_of(LONGEST, seed))[0]
        return self.known[key]


def params_of(count: int, seed: int | None) -> SamplingParams:
    temperature = 0.0 if seed is None else 1.1
    return SamplingParams(
        max_tokens=count, temperature=temperature, seed=seed, top_p=0.95, ignore_eos=True, logprobs=3
    )


def logprobs_of(deltas: Iterable[Delta]) -> list[TokenLogprob]:
    return [each for delta in deltas for each in delta.logprobs]


def prompts() -> list[list[list[int]]]:
    """[beginning][end]: of equal beginnings, one of them a whole number of blocks."""
    rng = random.Random(4)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(count)]

    ends = [tokens(n) for n in (0, 3, 9)]
    return [[beginning + end for end in ends] for beginning in (tokens(48), tokens(70))]


PROMPTS = prompts()


@pytest.fixture(scope="module")
def alone(llama: tuple[Path, Any]) -> Answers:
    return Answers(load_engine(llama[0], deterministic=True, prefix_cache=False))


@pytest.fixture(scope="module")
def small(llama: tuple[Path, Any]) -> Loaded:
    """Twelve blocks of 16 tokens, so that requests are preempted and cached blocks evicted."""
    loaded = load_engine(
        llama[0], deterministic=True, kv_bytes=13 * BLOCK_BYTES, max_batched_tokens=40, max_running=6
    )
    assert loaded.core.scheduler.pool.total == 12
    return loaded


ASK = st.builds(
    Ask,
    beginning=st.integers(0, 1),
    end=st.integers(0, 2),
    tenant=st.sampled_from("ab"),
    count=st.integers(3, LONGEST),
    delay=st.integers(0, 20),
    had=st.sampled_from([0, 0, 2]),
    seed=st.sampled_from([None, 7]),
    cancelled_at=st.sampled_from([None, None, None, 5, 12]),
)


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(asks=st.lists(ASK, min_size=2, max_size=8))
def test_preempted_cancelled_and_resumed_requests_get_the_tokens_of_an_engine_without_the_cache(
    small: Loaded, alone: Answers, asks: list[Ask]
) -> None:
    core = small.core

    def submit(name: str, ask: Ask) -> None:
        prompt, params = PROMPTS[ask.beginning][ask.end], params_of(ask.count, ask.seed)
        had = tokens_of(alone.of(prompt, ask.seed))[: ask.had]
        history = core.replay(prompt, params, had) if had else None
        core.submit(name, prompt, params, 0.0, Owner(ask.tenant, "key"), "", history)

    found, cancelled = answer(core, asks, submit)
    assert core.scheduler.pool.used == 0
    for index, ask in enumerate(asks):
        expected = alone.of(PROMPTS[ask.beginning][ask.end], ask.seed)
        got = tokens_of(found[index])
        assert got == tokens_of(expected)[ask.had : ask.had + len(got)]
        assert logprobs_of(found[index]) == logprobs_of(expected)[ask.had : ask.had + len(got)]
        assert index in cancelled or ask.had + len(got) == ask.count


def test_any_text_is_a_salt_also_half_of_a_surrogate_pair() -> None:
    """What fails here would fail in the engine's thread, and end it for all requests."""
    assert len({salt_of(*parts) for parts in ((), ("",), ("\ud800",), ("\udcff",), ("a", "b"), ("ab",))}) == 6


def test_the_property_above_meets_hits_and_preemptions(small: Loaded) -> None:
    """Else it shows nothing."""
    asked = [prompt for each in PROMPTS for prompt in each]
    scheduler = small.core.scheduler
    hits, preempted = scheduler.cache_hits, scheduler.preemption_count
    generate(small, asked, params_of(LONGEST, None))
    assert scheduler.cache_hits > hits
    assert scheduler.preemption_count > preempted


def test_answers_to_one_prompt_compute_it_once_and_report_the_rest_as_cached(llama: tuple[Path, Any]) -> None:
    core = load_engine(llama[0]).core
    prompt = PROMPTS[1][2]
    for number in range(4):
        core.submit(str(number), prompt, params_of(2, number), 0.0)
    cached: dict[str, int] = {}
    while not core.idle:
        for delta in core.step():
            cached[delta.request_id] = delta.cached
    full = (len(prompt) - 1) // 16 * 16
    assert sorted(cached.values()) == [0, full, full, full]
    assert core.scheduler.cache_hits == 3 * full
