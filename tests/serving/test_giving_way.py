"""How owners that ask for more than others give way in a step, on the scheduler without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.giving_way import MOST_RESTS, MOST_SKIPPED, REST_SHARE
from busbar.workloads.serving.quota import Quota, Quotas
from busbar.workloads.serving.replay import Request, Seen, StepTimes, replay, simulated
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence, Step

PLACES, BUDGET = 16, 64


def request(order: int, prompt: int, output: int, key: str, batch: bool = False) -> Sequence:
    return Sequence(order, [1] * prompt, prompt + output, owner=Owner(key, batch=batch))


def run(scheduler: Scheduler) -> Step:
    """One step; who has all tokens is finished."""
    step = scheduler.plan()
    sampled = {chunk.sequence: 5 for chunk in step.chunks if chunk.samples}
    scheduler.commit(step, sampled)
    for sequence in sampled:
        if len(sequence.tokens) >= sequence.max_total:
            scheduler.finish(sequence)
    return step


def keys_of(step: Step) -> set[str]:
    return {chunk.sequence.owner.tenant for chunk in step.chunks}


def crowd(quotas: Quotas | None = None, output: int = 100) -> Scheduler:
    """All places are taken by answers of an owner that asks for more than another one."""
    scheduler = Scheduler(BlockPool(400), StepLimits(4, BUDGET, PLACES), quotas)
    scheduler.add(request(0, 4, 1, "light"))
    for order in range(1, 60):
        scheduler.add(request(order, 4, output, "heavy"))
    for _ in range(12):
        run(scheduler)
    assert len(scheduler.running) == PLACES
    return scheduler


def test_what_decodes_rests_from_when_prompts_of_others_do_not_fit_until_they_have_ended() -> None:
    scheduler = crowd()
    long = [request(order, 50, 2, "light") for order in (90, 91)]
    for each in long:
        scheduler.add(each)
    steps = [run(scheduler) for _ in range(3)]
    assert [keys_of(step) for step in steps] == [{"light"}, {"light"}, {"heavy", "light"}]
    assert [step.token_count for step in steps[:2]] == [BUDGET, 100 - BUDGET + 1]
    assert not any(step.preempted for step in steps)


def test_what_decodes_goes_on_beside_a_prompt_that_fits() -> None:
    scheduler = crowd()
    scheduler.add(request(90, 40, 2, "light"))
    step = run(scheduler)
    assert sum(chunk.sequence.owner.tenant == "heavy" for chunk in step.chunks) == PLACES - 1


def test_batch_work_gets_nothing_of_a_step_that_was_made_short() -> None:
    scheduler = crowd()
    scheduler.add(request(80, 30, 5, "batch", batch=True))
    scheduler.add(request(90, 70, 2, "light"))
    assert keys_of(run(scheduler)) == {"light"}
    assert keys_of(run(scheduler)) == {"light"}


@pytest.mark.parametrize("prompt", [20, 50, 200])
def test_they_rest_in_a_part_of_the_steps_however_many_prompts_of_others_come(prompt: int) -> None:
    scheduler = crowd(output=500)
    rested, in_a_row, steps = 0, 0, 400
    for order in range(100, 100 + steps):
        if sum(s.owner.tenant == "light" for s in scheduler.waiting) < 4:
            scheduler.add(request(order, prompt, 1, "light"))
        rests = "heavy" not in keys_of(run(scheduler))
        rested += rests
        in_a_row = in_a_row + 1 if rests else 0
        assert in_a_row <= MOST_SKIPPED
    assert rested <= MOST_RESTS + REST_SHARE * steps


def test_nobody_rests_for_requests_that_cannot_begin() -> None:
    scheduler = crowd(Quotas({"light": Quota(0.0, 0.1)}, 400))
    held = request(90, 100, 60, "light")  # all that its tenant may hold
    scheduler.add(held)
    while held.missing > 1:
        run(scheduler)
    scheduler.add(request(91, 100, 60, "light"))
    for _ in range(20):
        step = run(scheduler)
        assert len(step.chunks) == PLACES
        assert keys_of(step) == {"heavy", "light"}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    budget=st.integers(1, 40),
    places=st.integers(1, 8),
    blocks=st.integers(12, 60),
    arrivals=st.lists(
        st.tuples(
            st.sampled_from(["heavy", "heavy", "heavy", "heavy", "light", "other"]),
            st.integers(1, 30),
            st.integers(1, 12),
            st.integers(0, 60),
            st.booleans(),
        ),
        min_size=1,
        max_size=60,
    ),
)
def test_everybody_ends_and_nobody_rests_for_nothing(
    budget: int, places: int, blocks: int, arrivals: list[tuple[str, int, int, int, bool]]
) -> None:
    scheduler = Scheduler(BlockPool(blocks), StepLimits(4, budget, places))
    todo = sorted(enumerate(arrivals), key=lambda each: each[1][3])
    made: list[Sequence] = []
    for tick in range(20_000):
        while todo and todo[0][1][3] <= tick:
            order, (key, prompt, output, _, batch) = todo.pop(0)
            made.append(request(order, prompt, output, key, batch and key == "other"))
            scheduler.add(made[-1])
        if scheduler.idle:
            if not todo:
                break
            continue
        step = run(scheduler)
        assert step.chunks
        assert step.token_count <= budget
        assert len(step.chunks) <= places
        served = {chunk.sequence for chunk in step.chunks}
        left_out = [s for s in scheduler.running if s.missing == 1 and s not in served and not s.owner.batch]
        is_full = step.token_count == budget or len(step.chunks) == places
        assert is_full or scheduler.giving_way.is_short or step.preempted or not left_out
    assert scheduler.idle
    assert all(len(each.tokens) == each.max_total for each in made)


def load(light_s: float, ratio: float, prompts: tuple[int, int] = (200, 600)) -> list[Request]:
    """Fifteen seconds of four owners, and of one that asks `ratio` times as often."""
    rng = random.Random(4)
    found = []
    names = {f"light{i}": light_s for i in range(4)} | {"heavy": light_s / ratio}
    for name, mean_s in names.items():
        at_s = rng.expovariate(1 / mean_s)
        while at_s < 15.0:
            length = rng.randrange(*(prompts if name == "heavy" else (200, 600)))
            found.append(Request(at_s, [1] * length, rng.randrange(50, 150), Owner(name)))
            at_s += rng.expovariate(1 / mean_s)
    return found


def served(requests: Iterable[Request]) -> list[Seen]:
    return replay(
        requests, simulated(StepTimes(0.005, 5e-5, 0.0, 2e-5), blocks=2000, limits=StepLimits(64, 512, 64))
    )


def is_light(seen: Seen) -> bool:
    return seen.request.owner.tenant.startswith("light")


def p99_s(seen: Iterable[Seen]) -> float:
    times = sorted(one.ttft_s for one in seen if is_light(one))
    return times[int(0.99 * len(times))]


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(load(0.15, 3), id="three times as often"),
        pytest.param(load(0.6, 30), id="thirty times as often"),
        pytest.param(load(0.3, 2, prompts=(2000, 4000)), id="long prompts"),
    ],
)
def test_first_tokens_come_almost_as_without_those_who_ask_for_more_and_nothing_is_lost(
    requests: list[Request],
) -> None:
    together = served(requests)
    quiet = served(one for one in requests if one.owner.tenant.startswith("light"))
    first_come = served(replace(one, owner=Owner()) for one in requests)
    assert p99_s(together) <= 1.5 * p99_s(quiet)
    ends = [max(one.times_s[-1] for one in seen) for seen in (together, first_come)]
    assert ends[0] <= ends[1] / 0.92
    assert all(len(one.times_s) == one.request.output_tokens for one in together)
