"""Log-probabilities of prompts against transformers' log-softmax, and the form in which vLLM gives them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.inside import TOKEN, serving_inside
from tests.serving.models import VOCAB, make_tokenizer
from tests.serving.processes import Service

from busbar.workloads.serving import generation, prompt_logprobs
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.settings import EngineSettings

MODEL = "tiny"
RANDOM = random.Random(11)
PROMPTS = [[RANDOM.randrange(1, VOCAB) for _ in range(length)] for length in (1, 2, 15, 16, 17, 70, 150)]
PROMPTS += [PROMPTS[-1][:140]]  # begins as another
TOKENIZER = make_tokenizer()
LITTLE_MEMORY = 13 * 16 * 2 * 2 * 2 * 16 * 4


def expected(model: Any, prompt: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.float().log_softmax(-1)


def told_of(deltas: Sequence[Delta]) -> PromptLogprobs:
    (found,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert found is deltas[0].prompt_logprobs
    return found


def check(model: Any, prompt: list[int], told: PromptLogprobs, count: int) -> None:
    wanted = expected(model, prompt)
    following = torch.tensor(prompt[1:])
    assert list(told.tokens) == prompt[1:]
    own = wanted.gather(1, following[:, None])
    torch.testing.assert_close(torch.tensor(told.logprobs), own[:, 0], rtol=2e-5, atol=2e-4)
    # A rank is exact wherever no other token is as likely up to rounding.
    least, most = ((wanted > own + margin).sum(-1) + 1 for margin in (1e-3, -1e-3))
    ranks = torch.tensor(told.ranks)
    assert bool(((least <= ranks) & (ranks <= most)).all())
    assert (ranks == (wanted > own).sum(-1) + 1).float().mean() > 0.95 or len(prompt) < 15
    best = wanted.topk(count) if count else None
    assert len(told.top_tokens) == len(told.top_logprobs) == count * (len(prompt) - 1)
    if best is not None:
        top = torch.tensor(told.top_logprobs).view(-1, count)
        torch.testing.assert_close(top, best.values, rtol=2e-5, atol=2e-4)
        ids = torch.tensor(list(told.top_tokens), dtype=torch.int64).view(-1, count)
        torch.testing.assert_close(wanted.gather(1, ids), best.values, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": True},
        {"deterministic": False},
        {"max_batched_tokens": 24},
        {"deterministic": True, "max_batched_tokens": 24, "prefix_cache": False},
        {"max_batched_tokens": 24, "kv_bytes": LITTLE_MEMORY, "max_model_len": 180},
    ],
    ids=["fixed", "in-place", "in-pieces", "no-cache", "little-memory"],
)
def test_they_are_transformers_log_softmax(llama: tuple[Path, Any], changes: dict[str, Any]) -> None:
    loaded = load_engine(llama[0], **changes)
    counts = [(0, 1, 20)[i % 3] for i in range(len(PROMPTS))]
    params = [greedy_params(20, prompt_logprobs=count) for count in counts]
    for _ in range(2):  # the second time with a prefix cache
        found = generate(loaded, PROMPTS, params)
        for prompt, deltas, count in zip(PROMPTS, found, counts, strict=True):
            if len(prompt) > 1:
                check(llama[1], prompt, told_of(deltas), count)
            else:
                assert told_of(deltas).document(str) == [None]
            assert {delta.cached for delta in deltas} == {0}
    scheduler = loaded.core.scheduler
    assert (scheduler.preemption_count > 0) is ("kv_bytes" in changes)
    assert (scheduler.pool.used, loaded.core.live) == (0, 0)


def test_a_prompt_that_is_preempted_in_its_middle_tells_every_token_once(llama: tuple[Path, Any]) -> None:
    """Older requests grow until the blocks of the prompt are taken, which is half computed then."""
    loaded = load_engine(llama[0], max_batched_tokens=3, kv_bytes=LITTLE_MEMORY, max_model_len=180)
    core = loaded.core
    for name, prompt in (("a", PROMPTS[3]), ("b", PROMPTS[4])):
        core.submit(name, prompt, greedy_params(60, ignore_eos=True), 0.0)
    while core.scheduler.waiting or any(s.missing > 1 for s in core.scheduler.running):
        core.step()
    core.submit("x", PROMPTS[5], greedy_params(3, prompt_logprobs=2), 0.0)
    deltas: list[Delta] = []
    half = False
    while not core.idle:
        deltas += [delta for delta in core.step() if delta.request_id == "x"]
        half |= any(s.preemptions > 0 and 0 < s.explained < s.prompt_len - 1 for s in core.scheduler.waiting)
    assert half
    check(llama[1], PROMPTS[5], told_of(deltas), 2)


def test_the_cache_gives_such_a_prompt_nothing_and_keeps_its_blocks(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0])
    plain, told = greedy_params(4), greedy_params(4, prompt_logprobs=1)
    assert generate(loaded, [PROMPTS[6]], told)[0][0].cached == 0
    assert generate(loaded, [PROMPTS[6]], plain)[0][0].cached == 144
    again = generate(loaded, [PROMPTS[6]], told)[0]
    assert again[0].cached == 0
    check(llama[1], PROMPTS[6], told_of(again), 1)


def test_answers_beside_and_behind_them_stay_the_same(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], deterministic=True, prefix_cache=False)
    alone = [tokens_of(generate(loaded, [prompt], greedy_params(20))[0]) for prompt in PROMPTS]
    params = [greedy_params(20, prompt_logprobs=20 if i % 2 else None) for i in range(len(PROMPTS))]
    assert [tokens_of(deltas) for deltas in generate(loaded, PROMPTS, params)] == alone


def test_only_a_few_rows_of_logits_are_made_at_a_time(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS_AT_ONCE", 8)
    loaded = load_engine(llama[0])
    rows: list[int] = []
    logits = loaded.core.runner.logits

    def counted(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return logits(states)

    monkeypatch.setattr(loaded.core.runner, "logits", counted)
    (found,) = generate(loaded, [PROMPTS[5]], greedy_params(1, prompt_logprobs=3))
    assert rows == [8] * 8 + [5]
    check(llama[1], PROMPTS[5], told_of(found), 3)


def test_a_cancelled_request_leaves_nothing(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], max_batched_tokens=24)
    loaded.core.submit("x", PROMPTS[6], greedy_params(5, prompt_logprobs=5), 0.0)
    assert loaded.core.step() == []
    assert loaded.core.cancel("x")
    assert loaded.core.idle
    assert loaded.core.scheduler.pool.used == 0


def test_such_steps_do_not_count_for_the_step_model(llama: tuple[Path, Any]) -> None:
    def counted(loaded: Loaded, **changes: Any) -> int:
        records: list[object] = []
        loaded.core.speed.record = lambda *seen, **_: records.append(seen)  # type: ignore[method-assign]
        generate(loaded, [PROMPTS[4]], greedy_params(4, ignore_eos=True, **changes))
        return len(records)

    assert counted(load_engine(llama[0])) == 4
    assert counted(load_engine(llama[0]), prompt_logprobs=0) == 3


# -- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(llama: tuple[Path, Any]) -> Iterator[Service]:
    with serving_inside(EngineSettings(llama[0], block_tokens=16, threads=1), MODEL) as running:
        yield running


@pytest.fixture
def client(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as made:
        yield made


def check_document(model: Any, prompt: list[int], document: list[Any], count: int) -> None:
    wanted = expected(model, prompt)
    assert len(document) == len(prompt)
    assert document[0] is None
    for i, (token, entries) in enumerate(zip(prompt[1:], document[1:], strict=True)):
        assert next(iter(entries)) == str(token)
        likeliest = wanted[i].topk(max(1, count)).indices.tolist()[:count]
        assert set(entries) == {str(token), *map(str, likeliest)}
        for key, entry in entries.items():
            assert set(entry) == {"logprob", "rank", "decoded_token"}
            assert entry["logprob"] == pytest.approx(wanted[i, int(key)].item(), abs=2e-4)
            assert entry["rank"] == (wanted[i] > wanted[i, int(key)]).sum() + 1
            assert entry["decoded_token"] == TOKENIZER.decode([int(key)], skip_special_tokens=False)


def test_completions_have_them_in_every_choice(client: openai.OpenAI, llama: tuple[Path, Any]) -> None:
    prompts = ["def add(a, b):\n", "import os\n"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=2, n=2, extra_body={"prompt_logprobs": 2}
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        prompt = TOKENIZER.encode(prompts[choice.index // 2]).ids
        check_document(llama[1], prompt, choice.model_dump()["prompt_logprobs"], 2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(TOKENIZER.encode(text).ids) for text in prompts)
    without = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=2)
    assert "prompt_logprobs" not in without.choices[0].model_dump()


def test_chats_have_them_once(client: openai.OpenAI, llama: tuple[Path, Any]) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        n=2,
        extra_body={"prompt_logprobs": 0},
    )
    prompt = TOKENIZER.encode("user: hi\nassistant:").ids
    check_document(llama[1], prompt, answer.model_dump()["prompt_logprobs"], 0)
    assert all("prompt_logprobs" not in choice.model_dump() for choice in answer.choices)


def test_more_numbers_than_an_answer_may_have_are_refused(
    server: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MOST_PROMPT_LOGPROBS", 2 * 10 * 3)
    body = {"model": MODEL, "prompt": [[1] * 6, [2] * 4], "max_tokens": 1, "n": 2}
    assert server.post("/v1/completions", {**body, "prompt_logprobs": 2})[0] == 200
    status, _, answer = server.post("/v1/completions", {**body, "prompt_logprobs": 3})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    assert "would be 80 numbers" in answer["error"]["message"]
    status, _, answer = server.post("/v1/completions", {**body, "prompt_logprobs": 1, "stream": True})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
