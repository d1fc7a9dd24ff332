"""A draft model on the whole engine: it changes no token, whatever it guesses, and wins steps where it is right."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.inside import serving_inside
from tests.serving.models import VOCAB, greedy, save_model
from tests.serving.processes import OpenStream
from tests.serving.streamed import needs_of, streamed_settings
from tests.serving.test_speculation import (
    ASK,
    FEW,
    LONGEST,
    PROMPTS,
    Answers,
    Ask,
    answers,
    logprobs_of,
    params_of,
)

from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.draft import Draft
from busbar.workloads.serving.drafting import Drafts
from busbar.workloads.serving.errors import (
    MemoryTooSmall,
    ModelCorrupt,
    ModelFileMissing,
    SettingsError,
)
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake

BLOCK = 2 * 2 * 2 * 16 * 16 * 4
"""Bytes of a block of the served model; the weak draft's has half as many."""


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of random weights, of another shape."""
    folder = tmp_path_factory.mktemp("weak")
    save_model(folder, family="qwen3", seed=5, num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def off(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0], deterministic=True, prefix_cache=False)


def drafted(loaded: Loaded) -> tuple[Draft, Drafts]:
    assert loaded.core.draft is not None
    assert loaded.core.speculation is not None
    assert loaded.core.speculation.drafts is not None
    return loaded.core.draft, loaded.core.speculation.drafts


def steps_of(loaded: Loaded, prompts: list[list[int]], count: int, seed: int | None) -> int:
    """Steps until all have their answers."""
    for index, prompt in enumerate(prompts):
        loaded.core.submit(str(index), prompt, params_of(count, seed, logit_bias=()), 0.0)
    steps = 0
    while not loaded.core.idle:
        loaded.core.step()
        steps += 1
    return steps


@pytest.mark.parametrize("seed", [None, 3])
def test_a_draft_that_equals_the_model_is_nearly_always_right(
    llama: tuple[Path, Any], off: Loaded, seed: int | None
) -> None:
    """Greedy, and sampled at a high temperature: both draw with the same random number."""
    loaded = load_engine(llama[0], speculate=4, draft_dir=llama[0])
    prompts = [PROMPTS[2], PROMPTS[0]]
    params = params_of(60, seed, logit_bias=())
    expected = [tokens_of(each) for each in generate(off, prompts, params)]
    assert [tokens_of(each) for each in generate(loaded, prompts, params)] == expected
    draft, drafts = drafted(loaded)
    assert drafts.accepted_total > 0.9 * drafts.proposed_total > 30
    assert steps_of(loaded, prompts, 60, seed) < 0.6 * steps_of(off, prompts, 60, seed)
    assert draft.pool.used == 0


def test_a_weak_draft_changes_nothing_and_is_switched_off(
    llama: tuple[Path, Any], off: Loaded, weak: Path
) -> None:
    loaded = load_engine(llama[0], deterministic=True, speculate=4, draft_dir=weak)
    _, drafts = drafted(loaded)
    params = params_of(100, 9, logit_bias=())
    for _ in range(2):
        before = drafts.proposed_total
        one, other = (generate(engine, PROMPTS, params) for engine in (off, loaded))
        assert [tokens_of(each) for each in one] == [tokens_of(each) for each in other]
        assert [logprobs_of(each) for each in one] == [logprobs_of(each) for each in other]
    assert drafts.proposed_total - before < 30  # of 300 tokens


def test_greedy_tokens_are_those_of_transformers(llama: tuple[Path, Any], weak: Path) -> None:
    folder, model = llama
    for draft in (folder, weak):
        loaded = load_engine(folder, speculate=5, draft_dir=draft)
        for prompt, deltas in zip(PROMPTS, generate(loaded, PROMPTS, greedy_params(40)), strict=True):
            assert tokens_of(deltas) == greedy(model, prompt, 40)


@pytest.fixture(scope="module")
def alone(off: Loaded) -> Answers:
    return Answers(off)


@pytest.fixture(scope="module")
def small(llama: tuple[Path, Any]) -> Loaded:
    """Fourteen blocks of 16 tokens for each model and small steps: chunked prompts, preemptions, evictions, a host tier, and a
    draft that finds no blocks."""
    loaded = load_engine(
        llama[0],
        deterministic=True,
        kv_bytes=2 * 15 * BLOCK,
        host_kv_bytes=6 * BLOCK,
        max_batched_tokens=24,
        max_running=6,
        speculate=5,
        draft_dir=llama[0],
    )
    assert loaded.core.scheduler.pool.total == 14
    return loaded


@settings(max_examples=16, deadline=None, derandomize=True)
@given(asks=st.lists(ASK, min_size=2, max_size=7))
def test_preempted_cancelled_resumed_and_cached_requests_get_the_same_tokens(
    small: Loaded, alone: Answers, asks: list[Ask]
) -> None:
    core = small.core
    found, cancelled = answers(core, alone, asks)
    draft, _ = drafted(small)
    assert core.scheduler.pool.used == draft.pool.used == 0
    for index, ask in enumerate(asks):
        expected, got = alone.of(ask.number, ask.seed), found[index]
        end = ask.had + len(tokens_of(got))
        assert tokens_of(got) == tokens_of(expected)[ask.had : end]
        assert logprobs_of(got) == logprobs_of(expected)[ask.had : end]
        assert index in cancelled or end == ask.count


def test_the_property_above_meets_drafts_preemptions_and_hits(small: Loaded) -> None:
    """Else it shows nothing."""
    scheduler, (draft, drafts) = small.core.scheduler, drafted(small)
    before, preempted, hits = drafts.proposed_total, scheduler.preemption_count, scheduler.cache_hits
    generate(small, PROMPTS * 2, params_of(LONGEST, None))
    assert drafts.proposed_total > before
    assert scheduler.preemption_count > preempted
    assert scheduler.cache_hits > hits
    assert draft.pool.used == 0


def test_a_draft_without_free_blocks_guesses_for_some_and_then_for_the_others(
    llama: tuple[Path, Any], alone: Answers
) -> None:
    loaded = load_engine(llama[0], deterministic=True, speculate=4, draft_dir=llama[0])
    draft, drafts = drafted(loaded)
    draft.pool.take(draft.pool.free - 6)  # prompts and answers take six blocks, six, and four
    found = generate(loaded, PROMPTS, params_of(LONGEST, 7))
    for number, deltas in enumerate(found):
        assert tokens_of(deltas) == tokens_of(alone.of(number, 7))
    assert drafts.accepted_total > 0
    assert draft.pool.free == 6


def test_a_context_that_is_too_long_for_the_draft_is_not_guessed(
    llama: tuple[Path, Any], off: Loaded, tmp_path: Path
) -> None:
    save_model(tmp_path, max_position_embeddings=64)  # the same weights
    loaded = load_engine(llama[0], deterministic=True, speculate=4, draft_dir=tmp_path)
    _, drafts = drafted(loaded)
    params = params_of(60, 3, logit_bias=())
    one, other = (generate(engine, [PROMPTS[2]], params) for engine in (off, loaded))
    assert tokens_of(one[0]) == tokens_of(other[0])
    assert 30 < drafts.accepted_total < 64 - len(PROMPTS[2])
    long = [random.Random(1).randrange(1, VOCAB) for _ in range(70)]
    before = drafts.proposed_total
    assert len(tokens_of(generate(loaded, [long], params)[0])) == 60
    assert drafts.proposed_total == before


@pytest.mark.parametrize(("served", "drafts"), [(VOCAB, VOCAB + 16), (VOCAB + 16, VOCAB)])
def test_vocabularies_that_are_filled_up_differently_fit(tmp_path: Path, served: int, drafts: int) -> None:
    """Of the embeddings; the tokenizer is the same. One request often gets a token that only the larger one has."""
    target, small = tmp_path / "target", tmp_path / "draft"
    save_model(target, vocab_size=served)
    save_model(small, vocab_size=drafts)
    bias = ((served - 1, 20.0),)
    params = [params_of(30, None, logit_bias=()), params_of(30, 5, logit_bias=bias)]
    found = []
    sides: tuple[dict[str, Any], ...] = ({}, {"speculate": 3, "draft_dir": small})
    for more in sides:
        loaded = load_engine(target, deterministic=True, **more)
        found.append([tokens_of(each) for each in generate(loaded, PROMPTS[1:], params)])
    assert found[0] == found[1]
    assert served - 1 in found[0][1]
    assert drafted(loaded)[1].proposed_total > 0


def test_requests_with_and_without_adapters_in_one_batch(tiny: Any) -> None:
    """The draft has no adapters: it guesses as the base model would."""
    found = []
    for more in ({}, {"speculate": 4, "draft_dir": tiny.folder}):
        loaded = load_engine(tiny.folder, deterministic=True, adapters=tiny.sources, **more)
        core = loaded.core
        names = [None, *(source.name for source in tiny.sources[:2])]
        for number, name in enumerate(names):
            adapter = None if name is None else loaded.adapters.held(name)
            core.submit(str(number), PROMPTS[number], params_of(30, None), 0.0, adapter=adapter)
        answers: list[list[Delta]] = [[] for _ in names]
        while not core.idle:
            for delta in core.step():
                answers[int(delta.request_id)].append(delta)
        found.append([(tokens_of(each), logprobs_of(each)) for each in answers])
    assert found[0] == found[1]
    assert drafted(loaded)[1].accepted_total > 0


@pytest.mark.parametrize("level", [SleepLevel.WEIGHTS_KEPT, SleepLevel.WEIGHTS_DROPPED])
def test_a_draft_sleeps_and_wakes_with_the_model(
    llama: tuple[Path, Any], weak: Path, level: SleepLevel
) -> None:
    loaded = load_engine(llama[0], deterministic=True, speculate=4, draft_dir=weak)
    draft, _ = drafted(loaded)
    before = [tokens_of(each) for each in generate(loaded, PROMPTS, params_of(30, 3))]
    fall_asleep(loaded, level)
    assert draft.runner.cache.bytes == 0
    assert (draft.runner.decoder.weights.bytes == 0) == (level is SleepLevel.WEIGHTS_DROPPED)
    wake(loaded)
    assert [tokens_of(each) for each in generate(loaded, PROMPTS, params_of(30, 3))] == before


def answered(loaded: Loaded, prompt: list[int], tenant: str = "team") -> tuple[list[int], int, int, int]:
    """(tokens, guesses checked, guesses that were right, tokens that the draft found) of a greedy answer."""
    draft, drafts = drafted(loaded)
    before = drafts.proposed_total, drafts.accepted_total, draft.cached_total
    loaded.core.submit("a", prompt, greedy_params(24), 0.0, Owner(tenant=tenant))
    deltas: list[Delta] = []
    while not loaded.core.idle:
        deltas += loaded.core.step()
    after = drafts.proposed_total, drafts.accepted_total, draft.cached_total
    proposed, accepted, cached = (now - then for now, then in zip(after, before, strict=True))
    return tokens_of(deltas), proposed, accepted, cached


def test_a_draft_finds_what_it_has_computed_of_a_prompt_that_begins_alike(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], deterministic=True, speculate=4, draft_dir=llama[0])
    draft, _ = drafted(loaded)
    prompt = [random.Random(3).randrange(1, VOCAB) for _ in range(100)]
    first, proposed, accepted, cached = answered(loaded, prompt)
    assert (proposed > 0, accepted, cached) == (True, proposed, 0)
    # The next turn of the conversation: full blocks of the prompt and of the answer, wrong guesses among none of them.
    turn = [*prompt, *first, 5, 6, 7]
    second, proposed, accepted, cached = answered(loaded, turn)
    assert second == greedy(llama[1], turn, 24)
    assert (proposed > 0, accepted) == (True, proposed)
    assert 112 <= cached <= (len(turn) - 1) // 16 * 16
    assert answered(loaded, turn, tenant="other")[3] == 0, "nobody gains by what another tenant has asked"
    assert draft.pool.used == 0
    fall_asleep(loaded, SleepLevel.WEIGHTS_KEPT)
    wake(loaded)
    again, proposed, accepted, cached = answered(loaded, turn)
    assert (again, accepted, cached) == (second, proposed, 0), "asleep it forgets"


def test_without_a_prefix_cache_a_draft_finds_nothing(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], deterministic=True, speculate=4, draft_dir=llama[0], prefix_cache=False)
    prompt = [random.Random(3).randrange(1, VOCAB) for _ in range(100)]
    found = [answered(loaded, prompt) for _ in range(2)]
    assert found[0][0] == found[1][0]
    assert [each[3] for each in found] == [0, 0]


# -- the start -----------------------------------------------------------------------------------------


def test_the_cache_and_the_report_count_the_draft(llama: tuple[Path, Any], weak: Path) -> None:
    loaded = load_engine(llama[0], kv_bytes=30 * BLOCK, speculate=4, draft_dir=weak)
    draft, drafts = drafted(loaded)
    core = loaded.core
    assert core.scheduler.pool.total == draft.pool.total == 19  # 20 blocks of one and a half
    assert core.runner.cache.bytes + draft.runner.cache.bytes == 30 * BLOCK
    generate(loaded, PROMPTS, params_of(40, None))
    report = table_report(loaded, ServerSettings(engine=EngineSettings(llama[0]), model_id="tiny"))
    assert report.kv_bytes == 20 * BLOCK
    assert report.draft_kv_bytes == 10 * BLOCK
    assert report.draft_weight_bytes == draft.runner.decoder.weights.bytes > 0
    assert (report.drafted_tokens, report.drafted_right) == (drafts.proposed_total, drafts.accepted_total)
    assert 0 < report.drafted_tokens <= report.guessed_tokens


def test_a_draft_that_does_not_fit_is_refused_before_anything_is_allocated(
    llama: tuple[Path, Any], weak: Path
) -> None:
    plain = EngineSettings(llama[0], kv_bytes=30 * BLOCK, block_tokens=16, threads=1)
    both = replace(plain, speculate=4, draft_dir=weak)
    alone, needs = needs_of(plain), needs_of(both)
    assert (alone.draft_bytes, needs.fixed_bytes) == (0, alone.fixed_bytes)
    assert needs.draft_bytes > 4 * read_architecture(weak).parameter_count
    assert needs.block_bytes == 1.5 * alone.block_bytes
    asked: dict[str, Any] = {"kv_bytes": 30 * BLOCK, "memory_bytes": alone.resident_bytes}
    load_engine(llama[0], **asked)
    with pytest.raises(MemoryTooSmall, match=r"the draft .* fits without --draft"):
        load_engine(llama[0], **asked, speculate=4, draft_dir=weak)
    asked["memory_bytes"] = alone.least_bytes
    with pytest.raises(MemoryTooSmall, match=r"for the draft model\). It fits with no draft model"):
        load_engine(llama[0], **asked, weights="stream", speculate=4, draft_dir=weak)


def test_a_model_with_streamed_layers_has_a_resident_draft(
    llama: tuple[Path, Any], weak: Path, off: Loaded, tmp_path: Path
) -> None:
    asked = streamed_settings(llama[0], 0, tmp_path, stream_depth=0, speculate=4, draft_dir=llama[0])
    loaded = load_engine(llama[0], **asked)
    assert loaded.streaming is not None
    assert loaded.streaming.plan.pass_bytes > 0
    one, other = (generate(engine, PROMPTS, params_of(30, 3)) for engine in (off, loaded))
    assert [tokens_of(each) for each in one] == [tokens_of(each) for each in other]
    assert drafted(loaded)[1].accepted_total > 0


def test_a_draft_with_other_tokens_is_refused(llama: tuple[Path, Any], weak: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(weak, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    first, second = (next(word for word in words if words[word] == number) for number in (70, 71))
    words[first], words[second] = 71, 70
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelCorrupt, match=r"another vocabulary .* token 70 is .* leave --draft out"):
        load_engine(llama[0], speculate=4, draft_dir=folder)
    with pytest.raises(ModelFileMissing, match="nowhere"):
        load_engine(llama[0], speculate=4, draft_dir=tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="add --speculate 4"):
        load_engine(llama[0], draft_dir=weak)


def test_a_stream_over_http_is_the_same(llama: tuple[Path, Any]) -> None:
    asked = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": 30, "ignore_eos": True, "seed": 4}
    asked |= {"temperature": 1.5, "logit_bias": {str(token): bias / 25 for token, bias in FEW}}
    texts = []
    plain = EngineSettings(llama[0], block_tokens=16, threads=1)
    for engine in (plain, replace(plain, speculate=4, draft_dir=llama[0])):
        with serving_inside(engine, "tiny") as server:
            with OpenStream(server, asked | {"stream": True}) as stream:
                lines = stream.rest().decode().splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            choices = [event["choices"][0] for event in events]
            assert (server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0) == bool(engine.speculate)
        numbers = [choice["token_index"] for choice in choices]  # a chunk may hold several
        assert numbers == sorted(numbers)
        assert numbers[-1] == 30
        texts.append("".join(choice["text"] for choice in choices))
    assert texts[0] == texts[1]
