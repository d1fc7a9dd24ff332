"""Steps that are launched before the last one's tokens have been turned into text, as on a GPU (`test_graphs.py`)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.serving.engines import generate, greedy_params, load_engine, text_of, tokens_of
from tests.serving.graphed import PROMPTS, with_graphs
from tests.serving.models import VOCAB, greedy

from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.handover import Handover
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Step
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake

pytestmark = pytest.mark.usefixtures("paged")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every step that the runner has computed."""
    steps: list[Step] = []
    run = Runner.run

    def counted(runner: Runner, step: Step) -> Any:
        steps.append(step)
        return run(runner, step)

    monkeypatch.setattr(Runner, "run", counted)
    return steps


def test_a_step_is_launched_before_the_last_ones_text_is_made(
    llama: tuple[Path, Any], launched: list[Step]
) -> None:
    loaded, _ = with_graphs(llama[0])
    core = loaded.core
    core.submit("0", PROMPTS[0], greedy_params(6), 0.0)
    assert [len(core.step()) for _ in range(3)] == [1, 1, 1]
    assert len(launched) == 4
    for _ in range(3):
        core.step()
    assert core.idle
    assert len(launched) == 6  # none behind the last token, which the length tells


def test_none_is_launched_ahead_where_the_next_one_computes_a_prompt(
    llama: tuple[Path, Any], launched: list[Step]
) -> None:
    folder, model = llama
    loaded, _ = with_graphs(folder)
    core, found = loaded.core, dict[str, list[int]]()
    core.submit("0", PROMPTS[0], greedy_params(20), 0.0)
    core.step()
    core.submit("1", PROMPTS[2], greedy_params(20), 0.0)
    take(core, found, 1)  # of "0", launched before "1" came
    assert [len(step.chunks) for step in launched] == [1, 1]
    take(core, found, 1)
    assert [chunk.sequence.order for chunk in launched[2].chunks] == [0, 1]
    while not core.idle:
        take(core, found, 1)
    assert found["1"] == greedy(model, PROMPTS[2], 20)


def take(core: EngineCore, found: dict[str, list[int]], steps: int) -> list[Delta]:
    deltas = [delta for _ in range(steps) for delta in core.step()]
    for delta in deltas:
        found.setdefault(delta.request_id, []).extend(delta.tokens)
    return deltas


@pytest.mark.parametrize("pool", [None, 22])
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_leave_at_any_time_get_their_tokens(
    llama: tuple[Path, Any], seed: int, pool: int | None
) -> None:
    folder, model = llama
    block = load_engine(folder).core.runner.cache.shape.block_bytes
    smaller: dict[str, Any] = {} if pool is None else {"kv_bytes": pool * block}
    loaded, _ = with_graphs(folder, max_running=4, **smaller)
    core, rng, found = loaded.core, random.Random(seed), dict[str, list[int]]()
    asked: dict[str, tuple[list[int], int]] = {}
    cancelled: set[str] = set()
    while len(asked) < 14 or not core.idle:
        if len(asked) < 14 and (core.idle or rng.random() < 0.3):
            prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 70))]
            name = str(len(asked))
            asked[name] = prompt, rng.randrange(1, 30)
            core.submit(name, prompt, greedy_params(asked[name][1], ignore_eos=True), 0.0)
        if rng.random() < 0.05:
            leaver = rng.choice(list(asked))
            if core.cancel(leaver):
                cancelled.add(leaver)
        take(core, found, 1)
    for name, (prompt, count) in asked.items():
        exact = greedy(model, prompt, count)
        got = found.get(name, [])
        assert got == (exact[: len(got)] if name in cancelled else exact)
    assert core.tally.tokens_total == sum(map(len, found.values()))
    assert core.scheduler.pool.used == 0


def test_a_request_that_ends_in_its_text_ends_there(llama: tuple[Path, Any], launched: list[Step]) -> None:
    """The step that was launched ahead for it is dropped."""
    folder, _ = llama
    plain = load_engine(folder)
    params = greedy_params(24, ignore_eos=True)
    whole = text_of(generate(plain, PROMPTS[:1], params)[0])
    stop = next(whole[i : i + 2] for i in range(4, len(whole)) if whole.index(whole[i : i + 2]) == i)
    stopped = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, stop=(stop,))
    asked = [stopped, params, params]
    expected = generate(load_engine(folder), PROMPTS[:3], asked)
    before = len(launched)
    loaded, _ = with_graphs(folder)
    found = generate(loaded, PROMPTS[:3], asked)
    assert [tokens_of(d) for d in found] == [tokens_of(d) for d in expected]
    assert [text_of(d) for d in found] == [text_of(d) for d in expected]
    assert stop not in text_of(found[0])
    assert loaded.core.tally.tokens_total == sum(len(tokens_of(d)) for d in expected)
    computed = [chunk for step in launched[before:] for chunk in step.chunks if chunk.sequence.order == 0]
    assert len(computed) == len(tokens_of(found[0])) + 1
    assert loaded.core.scheduler.pool.used == 0


def test_seeds_and_rules_draw_the_same_tokens(llama: tuple[Path, Any]) -> None:
    asked = [
        SamplingParams(max_tokens=15, temperature=0.9, seed=1),
        SamplingParams(max_tokens=15, temperature=0.9, seed=2, top_p=0.8),
        SamplingParams(max_tokens=15, temperature=0.9, seed=3, repetition_penalty=1.3, min_tokens=15),
        SamplingParams(max_tokens=15, temperature=0.0, logprobs=2, frequency_penalty=0.5),
    ]
    expected = generate(load_engine(llama[0]), PROMPTS[:4], asked)
    found = generate(with_graphs(llama[0])[0], PROMPTS[:4], asked)
    assert [tokens_of(d) for d in found] == [tokens_of(d) for d in expected]


def test_what_is_held_meanwhile_goes_on_where_it_was(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    loaded, _ = with_graphs(folder)
    core, found = loaded.core, dict[str, list[int]]()
    for index in (0, 1):
        core.submit(str(index), PROMPTS[index], greedy_params(20, ignore_eos=True), 0.0)
    take(core, found, 6)
    handover = Handover(core)
    stage = handover.stage({"0": 0}, most=4)
    assert stage is not None
    assert stage.held
    handover.unpin(stage.blocks)
    count = len(found["0"])
    assert {delta.request_id for delta in take(core, found, 4)} == {"1"}
    assert len(found["0"]) == count == len(stage.seen["0"].tokens) - len(PROMPTS[0])
    handover.let_go(["0"])
    while not core.idle:
        take(core, found, 1)
    for index in (0, 1):
        assert found[str(index)] == greedy(model, PROMPTS[index], 20)
    assert core.scheduler.pool.used == 0


@pytest.mark.parametrize("end", [EngineCore.abandon, lambda core: core.cancel("0")])
def test_an_engine_whose_last_request_has_left_sleeps_and_goes_on(llama: tuple[Path, Any], end: Any) -> None:
    folder, model = llama
    loaded, _ = with_graphs(folder)
    core = loaded.core
    core.submit("0", PROMPTS[0], greedy_params(20), 0.0)
    core.step()
    end(core)
    assert core.idle
    fall_asleep(loaded, SleepLevel.WEIGHTS_KEPT)
    wake(loaded)
    (found,) = generate(loaded, PROMPTS[1:2], greedy_params(4))
    assert tokens_of(found) == greedy(model, PROMPTS[1], 4)


def test_guesses_and_a_host_tier_are_not_launched_ahead(
    llama: tuple[Path, Any], launched: list[Step]
) -> None:
    each: list[dict[str, Any]] = [{"speculate": 2}, {"host_kv_bytes": 2**20}]
    for changes in each:
        loaded, _ = with_graphs(llama[0], **changes)
        launched.clear()
        loaded.core.submit("0", PROMPTS[0], greedy_params(20), 0.0)
        loaded.core.step()
        assert len(launched) == 1
