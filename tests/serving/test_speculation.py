"""Guessed tokens on the whole engine: they change no token and no log-probability, whatever happens to a request."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.crowd import answer
from tests.serving.engines import Said, generate, greedy_params, load_engine, text_of, tokens_of
from tests.serving.inside import serving_inside
from tests.serving.models import VOCAB, greedy
from tests.serving.processes import OpenStream

from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.history import History
from busbar.workloads.serving.live import Live
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.sampling import Randomness, SamplingParams, TokenLogprob
from busbar.workloads.serving.sequence import Sequence
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.speculation import Guesser, Rate, Speculation

if TYPE_CHECKING:
    from tests.serving.adapted import Family

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
LONGEST = 40
FEW = ((5, 50.0), (6, 50.0), (7, 50.0))
"""Leaves the model three tokens, so that most places have come before and guesses are right and wrong."""


def params_of(count: int, seed: int | None, **changes: Any) -> SamplingParams:
    temperature = 0.0 if seed is None else 2.0
    more: dict[str, Any] = {"ignore_eos": True, "logprobs": 2, "logit_bias": FEW} | changes
    return SamplingParams(max_tokens=count, temperature=temperature, seed=seed, **more)


def logprobs_of(deltas: Iterable[Delta]) -> list[TokenLogprob]:
    return [each for delta in deltas for each in delta.logprobs]


def random_prompts() -> list[list[int]]:
    rng = random.Random(2)
    beginning = [rng.randrange(1, VOCAB) for _ in range(20)]
    return [
        beginning + [rng.choice((5, 6, 7)) for _ in range(30)],
        beginning + [5, 6, 7] * 3,
        [rng.randrange(1, VOCAB) for _ in range(9)],
    ]


PROMPTS = random_prompts()


@pytest.fixture(scope="module")
def off(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0], deterministic=True, prefix_cache=False)


@pytest.fixture(scope="module")
def on(llama: tuple[Path, Any]) -> Loaded:
    """Its clock stands still, so every likely guess is checked."""
    return load_engine(llama[0], deterministic=True, speculate=7)


@dataclass
class Answers:
    """What requests get alone, without guesses; each is computed once."""

    engine: Loaded
    known: dict[tuple[int, int | None], list[Said]] = field(default_factory=dict)

    def of(self, number: int, seed: int | None) -> list[Said]:
        key = (number, seed)
        if key not in self.known:
            self.known[key] = generate(self.engine, [PROMPTS[number]], params_of(LONGEST, seed))[0]
        return self.known[key]


@pytest.fixture(scope="module")
def alone(off: Loaded) -> Answers:
    return Answers(off)


@pytest.fixture(scope="module")
def small(llama: tuple[Path, Any]) -> Loaded:
    """Fourteen blocks of 16 tokens and small steps: chunked prompts, preemptions, evictions."""
    loaded = load_engine(
        llama[0],
        deterministic=True,
        kv_bytes=15 * BLOCK_BYTES,
        max_batched_tokens=24,
        max_running=6,
        speculate=5,
    )
    assert loaded.core.scheduler.pool.total == 14
    return loaded


@dataclass(frozen=True)
class Ask:
    """A request of the property below."""

    number: int
    count: int
    delay: int
    had: int
    """Tokens that another replica has sampled before."""
    seed: int | None
    cancelled_at: int | None


ASK = st.builds(
    Ask,
    number=st.integers(0, 2),
    count=st.integers(12, LONGEST),
    delay=st.integers(0, 12),
    had=st.sampled_from([0, 0, 9]),
    seed=st.sampled_from([None, 7]),
    cancelled_at=st.sampled_from([None, None, None, 8]),
)


def answers(core: EngineCore, alone: Answers, asks: list[Ask]) -> tuple[list[list[Delta]], set[int]]:
    """What a crowd of these requests gets, and which were cancelled."""

    def submit(name: str, ask: Ask) -> None:
        params = params_of(ask.count, ask.seed)
        had = tokens_of(alone.of(ask.number, ask.seed))[: ask.had]
        history = core.replay(PROMPTS[ask.number], params, had) if had else None
        core.submit(name, PROMPTS[ask.number], params, 0.0, Owner(), "", history)

    return answer(core, asks, submit)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(asks=st.lists(ASK, min_size=2, max_size=7))
def test_preempted_cancelled_resumed_and_cached_requests_get_the_same_tokens(
    small: Loaded, alone: Answers, asks: list[Ask]
) -> None:
    core = small.core
    found, cancelled = answers(core, alone, asks)
    assert core.scheduler.pool.used == 0
    for index, ask in enumerate(asks):
        expected, got = alone.of(ask.number, ask.seed), found[index]
        end = ask.had + len(tokens_of(got))
        assert tokens_of(got) == tokens_of(expected)[ask.had : end]
        assert logprobs_of(got) == logprobs_of(expected)[ask.had : end]
        assert [delta.index for delta in got] == list(range(ask.had + 1, end + 1))
        assert index in cancelled or end == ask.count


def test_the_property_above_meets_right_and_wrong_guesses_preemptions_and_hits(small: Loaded) -> None:
    """Else it shows nothing."""
    scheduler, speculation = small.core.scheduler, small.core.speculation
    assert speculation is not None
    before = (speculation.proposed_total, speculation.accepted_total, scheduler.preemption_count)
    hits = scheduler.cache_hits
    generate(small, PROMPTS * 2, params_of(LONGEST, None))
    proposed, accepted, preempted = (
        now - then
        for now, then in zip(
            (speculation.proposed_total, speculation.accepted_total, scheduler.preemption_count),
            before,
            strict=True,
        )
    )
    assert 0 < accepted < proposed
    assert preempted > 0
    assert scheduler.cache_hits > hits


def test_greedy_tokens_are_those_of_transformers_where_a_loop_is_guessed(llama: tuple[Path, Any]) -> None:
    """Not in the fixed order: logits are equal up to rounding, tokens are equal."""
    folder, model = llama
    loaded = load_engine(folder, speculate=7)
    # The model's own answer stands in the prompt twice, so that it is found there.
    head = PROMPTS[2]
    tail = greedy(model, head, 12)
    prompts = [head, head + tail + head + tail[:3], [11, 12, 13] * 20]
    for prompt, deltas in zip(prompts, generate(loaded, prompts, greedy_params(60)), strict=True):
        assert tokens_of(deltas) == greedy(model, prompt, 60)


ENDS: dict[str, Callable[[list[Said]], dict[str, Any]]] = {
    "stop string": lambda whole: {"stop": (text_of(whole[20:22]),)},
    "stop token": lambda whole: {"stop_token_ids": frozenset({whole[25].tokens[0]}), "min_tokens": 10},
    "length": lambda whole: {"max_tokens": 23},
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_in_the_middle_of_right_guesses_is_the_same_end(off: Loaded, on: Loaded, name: str) -> None:
    whole = generate(off, [PROMPTS[1]], params_of(LONGEST, 3))[0]
    changes = ENDS[name](whole)
    params = params_of(changes.pop("max_tokens", LONGEST), 3, **changes)
    one, other = (generate(engine, [PROMPTS[1]], params)[0] for engine in (off, on))
    assert (tokens_of(one), text_of(one), one[-1].finish) == (
        tokens_of(other),
        text_of(other),
        other[-1].finish,
    )
    assert on.core.scheduler.pool.used == 0
    assert on.core.live == 0


@pytest.mark.parametrize(
    "changes",
    [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"frequency_penalty": -0.5}],
    ids=["presence", "repetition", "frequency"],
)
def test_requests_whose_tokens_depend_on_their_count_are_not_guessed(
    off: Loaded, on: Loaded, changes: dict[str, float]
) -> None:
    speculation = on.core.speculation
    assert speculation is not None
    before = speculation.proposed_total
    params = params_of(30, None, **changes)
    one, other = (generate(engine, [PROMPTS[1]], params)[0] for engine in (off, on))
    assert tokens_of(one) == tokens_of(other)
    assert speculation.proposed_total == before


def test_requests_under_a_constraint_are_not_guessed(off: Loaded, on: Loaded) -> None:
    speculation = on.core.speculation
    assert speculation is not None
    before = speculation.proposed_total
    found = []
    for engine in (off, on):
        params = engine.core.rules.constrained(params_of(30, 4), {5, 6, 7, 8}, [])
        found.append(tokens_of(generate(engine, [PROMPTS[1]], params)[0]))
    assert found[0] == found[1]
    assert speculation.proposed_total == before


def test_no_guess_is_made_before_min_tokens(on: Loaded) -> None:
    speculation = on.core.speculation
    assert speculation is not None
    before = speculation.proposed_total
    generate(on, [PROMPTS[1]], params_of(30, None, min_tokens=30))
    assert speculation.proposed_total == before


def test_requests_with_and_without_adapters_in_one_batch(tiny: Family) -> None:
    sides = [
        load_engine(tiny.folder, deterministic=True, adapters=tiny.sources, speculate=most) for most in (0, 6)
    ]
    found = []
    for loaded in sides:
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
    speculation = sides[1].core.speculation
    assert speculation is not None
    assert speculation.accepted_total > 0


def test_metrics_and_report_count_guesses_and_only_tokens_that_came(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], speculate=4)
    generate(loaded, [PROMPTS[1]], params_of(30, None))
    core, speculation = loaded.core, loaded.core.speculation
    assert speculation is not None
    labels = {"model_name": "tiny", "engine": "0"}

    def value(name: str) -> float | None:
        return core.metrics.registry.get_sample_value(name, labels)

    assert value("vllm:spec_decode_num_drafts_total") == speculation.drafts_total > 0
    assert value("vllm:spec_decode_num_draft_tokens_total") == speculation.proposed_total
    assert value("vllm:spec_decode_num_accepted_tokens_total") == speculation.accepted_total
    assert value("vllm:generation_tokens_total") == 30
    assert core.speed.decode_tokens == 29
    report = table_report(loaded, ServerSettings(engine=EngineSettings(llama[0]), model_id="tiny"))
    assert (report.guessed_tokens, report.guessed_right) == (
        speculation.proposed_total,
        speculation.accepted_total,
    )


def guesser_of(rate: float) -> Guesser:
    return Guesser(Rate(rate, 1.0, 0.9), Rate(rate, 1.0, 0.9))


def live_of(guesser: Guesser, number: int, tokens: list[int]) -> Live:
    params = SamplingParams(max_tokens=20)
    history = History((), None, None)
    sequence = Sequence(number, list(tokens), len(tokens) + 20)
    return Live(str(number), params, sequence, history, Randomness(0), 0.0, guesser=guesser)


def test_where_nobody_waits_most_of_the_batch_must_have_good_guesses() -> None:
    speculation, copied = Speculation(3), [1, 2, 3, 4, 5, 1, 2, 3]
    for good, bad, others_wait, expected in ((3, 1, False, 3), (2, 2, False, 0), (2, 2, True, 2)):
        lives = [live_of(guesser_of(0.9), i, copied) for i in range(good)]
        lives += [live_of(guesser_of(0.1), good + i, copied) for i in range(bad)]
        found = speculation.propose(lives, others_wait)
        assert [s.order for s in found] == list(range(expected))
        assert all(guesses == [4, 5, 1] for guesses in found.values())


# -- over HTTP ----------------------------------------------------------------------------------------


def test_a_stream_numbers_the_tokens_of_one_step_and_a_grammar_is_not_guessed(
    llama: tuple[Path, Any],
) -> None:
    asked = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    biased = {"logit_bias": {str(token): bias for token, bias in FEW}}
    drafts, texts = "vllm:spec_decode_num_draft_tokens_total", []
    for most in (0, 7):
        settings = EngineSettings(llama[0], block_tokens=16, threads=1, speculate=most)
        with serving_inside(settings, "tiny") as server:
            with OpenStream(server, asked | biased | {"stream": True}) as stream:
                lines = stream.rest().decode().splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            choices = [event["choices"][0] for event in events]
            checked = server.metric(drafts)
            assert (checked > 0) == (most > 0)
            status, _, body = server.post("/v1/completions", asked | {"guided_regex": "(ab){12}"})
            assert (status, body["choices"][0]["text"]) == (200, "ab" * 12)
            assert server.metric(drafts) == checked
        assert [choice["token_index"] for choice in choices] == list(range(1, 31))
        texts.append("".join(choice["text"] for choice in choices))
    assert texts[0] == texts[1]
