"""How memory is divided between slots, work space, KV cache and layers that stay."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busbar.workloads.serving.errors import MemoryTooSmall
from busbar.workloads.serving.stream_plan import (
    LEAST_TOKENS,
    MOST_TOKENS,
    ExpertNeeds,
    Needs,
    fixes_of,
    plan_stream,
    spread,
)

MIB = 2**20
NEEDS = Needs(
    layers=14,
    layer_bytes=100 * MIB,
    fixed_bytes=60 * MIB,
    token_bytes=MIB // 8,
    block_bytes=2 * MIB,
    most_blocks=64,
)
LEAST = 60 * MIB + 2 * 100 * MIB + 2 * 2 * MIB + LEAST_TOKENS * MIB // 8


def test_the_least_is_two_slots_two_blocks_and_a_small_step() -> None:
    plan = plan_stream(NEEDS, LEAST)
    assert NEEDS.least_bytes == LEAST
    assert (plan.streamed, plan.slots, plan.tokens) == (tuple(range(14)), 2, LEAST_TOKENS)
    assert plan.kv_bytes == 4 * MIB
    assert plan.pass_bytes == 1400 * MIB


def test_more_memory_goes_to_larger_steps_then_keys_and_values_then_layers() -> None:
    plan = plan_stream(NEEDS, LEAST + 800 * MIB)
    assert plan.tokens == 1024  # 120 MiB more, at most a quarter; twice as many would be 248
    assert plan.kv_bytes == 4 * MIB + 63 * 2 * MIB  # all that 64 sequences can use, less than half
    assert len(plan.streamed) == 14 - (800 - 120 - 126) // 100
    assert (
        "5 of 14 layers stay in memory, 9 are streamed through 2 slots of 100.0 MiB (1 read ahead)"
        in plan.text
    )


def test_what_was_asked_for_is_kept() -> None:
    plan = plan_stream(replace(NEEDS, tokens=512, kv_bytes=32 * MIB, depth=2), LEAST + 500 * MIB)
    assert (plan.tokens, plan.kv_bytes, plan.slots) == (512, 32 * MIB, 3)


def test_small_layers_are_read_further_ahead() -> None:
    assert replace(NEEDS, layer_bytes=3 * MIB).slots == 3
    assert replace(NEEDS, layer_bytes=MIB // 4).slots == 8
    assert replace(NEEDS, layer_bytes=MIB // 4, depth=0).slots == 1


def test_nothing_is_streamed_where_everything_fits() -> None:
    plan = plan_stream(NEEDS, 4000 * MIB)
    assert plan.streamed == ()
    assert plan.text == "all 14 layers stay in memory; nothing is streamed"


@pytest.mark.parametrize(
    ("changes", "short", "said"),
    [
        ({"tokens": 4096}, 0, "with steps of 64 tokens (--max-batched-tokens 64)"),
        ({"kv_bytes": 500 * MIB}, 0, "with a smaller KV cache (no --kv-memory"),
        ({"depth": 3}, 0, "with one layer read ahead (--stream-depth 1)"),
        ({}, 50 * MIB, "with no layer read ahead, which is slower (--stream-depth 0)"),
        ({}, 200 * MIB, "Give the engine 272 MiB of memory"),
    ],
)
def test_a_refusal_names_the_cheapest_fix(changes: dict[str, Any], short: int, said: str) -> None:
    needs = replace(NEEDS, **changes)
    with pytest.raises(MemoryTooSmall, match="does not fit into") as refused:
        plan_stream(needs, LEAST - short, fixes_of(needs))
    assert said in str(refused.value)


def test_fewer_bits_are_named_before_what_is_slower() -> None:
    coded = replace(NEEDS, layer_bytes=30 * MIB)
    with pytest.raises(MemoryTooSmall, match="It fits with --weights-dtype int8"):
        plan_stream(NEEDS, LEAST - 50 * MIB, [("--weights-dtype int8", coded), *fixes_of(NEEDS)])


WITH_EXPERTS = replace(NEEDS, experts=ExpertNeeds(count=8, per_token=2, bytes=12 * MIB, rest_bytes=4 * MIB))


def test_experts_are_read_one_by_one_where_the_rest_of_all_layers_stays() -> None:
    least = LEAST - 2 * 100 * MIB + 14 * 4 * MIB + 4 * 12 * MIB
    assert WITH_EXPERTS.least_bytes == least
    plan = plan_stream(replace(WITH_EXPERTS, tokens=64, kv_bytes=4 * MIB), least + 500 * MIB)
    assert (plan.streamed, plan.places, plan.all_stay) == ((), 4 + 500 // 12, False)
    assert plan.pass_bytes == (14 * 8 - plan.places) * 12 * MIB
    assert "which have 45 places of 12.0 MiB for 112 (read ahead as the next layer's router" in plan.text
    assert "(none read ahead)" in replace(plan, needs=replace(WITH_EXPERTS, depth=0)).text


def test_never_more_is_read_by_expert_than_by_layer() -> None:
    for memory in range(LEAST, LEAST + 1200 * MIB, 70 * MIB):
        asked = replace(WITH_EXPERTS, tokens=64, kv_bytes=4 * MIB)
        by_expert, by_layer = (plan_stream(replace(asked, unit=unit), memory) for unit in ("auto", "layers"))
        assert by_expert.pass_bytes <= by_layer.pass_bytes


def test_layers_are_read_whole_where_the_rest_of_them_does_not_fit() -> None:
    large = replace(WITH_EXPERTS, experts=replace(WITH_EXPERTS.experts, rest_bytes=20 * MIB))  # type: ignore[type-var]
    assert large.least_bytes == LEAST
    assert len(plan_stream(large, LEAST).streamed) == 14
    assert plan_stream(large, LEAST + 150 * MIB).places > 0


def test_all_stay_where_every_expert_has_a_place() -> None:
    assert plan_stream(WITH_EXPERTS, 4000 * MIB).all_stay


def test_experts_are_what_helps_where_layers_were_asked_for() -> None:
    needs = replace(WITH_EXPERTS, unit="layers")
    with pytest.raises(
        MemoryTooSmall, match=r"with its layers streamed.* fits with experts read one by one \(no"
    ):
        plan_stream(needs, needs.least_bytes - 1, fixes_of(needs))
    with pytest.raises(
        MemoryTooSmall, match=r"its experts streamed.*104 for 14 layers without their experts and 4 of"
    ):
        plan_stream(WITH_EXPERTS, WITH_EXPERTS.least_bytes - 1)


@given(
    layers=st.integers(1, 80),
    layer=st.integers(1, 500),
    fixed=st.integers(0, 500),
    token=st.integers(1, 2000),
    block=st.integers(1, 64),
    more=st.integers(0, 40_000),
)
def test_a_plan_never_takes_more_than_there_is(
    layers: int, layer: int, fixed: int, token: int, block: int, more: int
) -> None:
    needs = Needs(layers, layer * MIB, fixed * MIB, token * 1024, block * MIB, 512)
    memory = needs.least_bytes + more * MIB
    plan = plan_stream(needs, memory)
    held = layers - len(plan.streamed) + plan.slots
    used = needs.fixed_bytes + held * needs.layer_bytes + plan.kv_bytes + plan.tokens * needs.token_bytes
    assert used <= memory
    assert LEAST_TOKENS <= plan.tokens <= MOST_TOKENS
    assert plan.kv_bytes <= 513 * needs.block_bytes
    if plan.streamed:  # less than a layer is left
        assert memory - used < needs.layer_bytes


@given(st.integers(1, 100), st.data())
def test_layers_are_spread_evenly(of: int, data: st.DataObject) -> None:
    some = data.draw(st.integers(0, of))
    chosen = spread(some, of)
    assert len(set(chosen)) == some
    gaps = [b - a for a, b in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1
