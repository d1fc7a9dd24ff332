"""Gradients are exchanged while those of the groups before them are computed, and never before they are complete."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.test_shards import loss_of, model_and_groups
from torch import nn

from busbar.workloads.training.early_exchange import EarlyExchange
from busbar.workloads.training.groups import FlatGroup, blocks
from busbar.workloads.training.ranks import Alone, Done, Pending


class Recorded(Alone):
    """Rank 0 of two, which has seen what the other one has; and what happened on it, in order."""

    size = 2

    def __init__(self, others: list[int] | None = None) -> None:
        self.log: list[str] = []
        self._others = others

    def most(self, values: list[int]) -> list[int]:
        return [max(pair) for pair in zip(values, self._others or values, strict=True)]

    def start(self, flat: FlatGroup) -> Pending:
        self.log.append(f"begin {flat.group.name}")
        return Done()

    def settle(self, flat: FlatGroup, pending: Pending) -> None:
        self.log.append(f"end {flat.group.name}")


def opened(others: list[int] | None = None) -> tuple[nn.Module, Recorded, EarlyExchange]:
    model, groups, _ = model_and_groups("optimizer")
    ranks = Recorded(others)
    early = EarlyExchange(model, groups, ranks, ranks.start, ranks.settle)
    for flat in groups:
        for member in flat.group.members:
            note = f"gradient {flat.group.name}"
            member.parameter.register_post_accumulate_grad_hook(lambda _, note=note: ranks.log.append(note))  # type: ignore[no-untyped-call]
    return model, ranks, early


def step(model: nn.Module, ranks: Recorded, early: EarlyExchange) -> list[str]:
    """What happened in a step; gradients of a group in a row are one."""
    ranks.log.clear()
    early.begin()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    early.finish()
    return [each for i, each in enumerate(ranks.log) if i == 0 or ranks.log[i - 1] != each]


FIRST = [
    "gradient head", "gradient block-1", "gradient block-0", "gradient embedding",
    "begin head", "end head", "begin block-1", "end block-1", "begin block-0", "end block-0",
    "begin embedding", "end embedding",
]  # fmt: skip
THEN = [
    "gradient head", "begin head", "gradient block-1", "end head", "begin block-1", "gradient block-0",
    "end block-1", "begin block-0", "gradient embedding", "end block-0", "begin embedding", "end embedding",
]  # fmt: skip


def test_an_exchange_runs_beside_the_pass_from_the_second_step_on() -> None:
    opened_ = opened()
    assert step(*opened_) == FIRST
    assert step(*opened_) == THEN
    assert step(*opened_) == THEN


def test_a_rank_without_a_pass_takes_part_in_the_same_order() -> None:
    model, ranks, early = opened()
    early.finish()
    exchanges = [each for each in FIRST if not each.startswith("gradient")]
    assert ranks.log == exchanges
    assert step(model, ranks, early) == FIRST, "nothing was known before"
    ranks.log.clear()
    early.finish()
    assert ranks.log == exchanges
    assert step(model, ranks, early) == THEN


def turned(model: Any) -> None:
    """Have the second block computed before the first."""
    model.model.layers = nn.ModuleList(reversed(list(blocks(model))))


@pytest.mark.parametrize("here", [True, False], ids=["on this rank", "on another rank"])
def test_a_group_whose_gradients_come_late_is_exchanged_last(here: bool) -> None:
    others = [0, 0, 1, 0, 1]  # of embedding, block-0, block-1 and head; and that it has seen a pass
    model, ranks, early = opened(None if here else others)
    if here:
        turned(model)
    step(model, ranks, early)
    log = step(model, ranks, early)
    assert log.index("begin head") < log.index("gradient block-0")
    assert log[-2:] == ["begin block-1", "end block-1"]
    assert log.index("gradient block-1") < log.index("begin block-1")


def test_a_gradient_that_comes_late_for_once_ends_the_run() -> None:
    model, ranks, early = opened()
    step(model, ranks, early)
    turned(model)
    with pytest.raises(RuntimeError, match="gets its gradient after those of block-1 were exchanged"):
        step(model, ranks, early)


def test_passes_before_the_last_one_exchange_nothing() -> None:
    model, ranks, early = opened()
    step(model, ranks, early)
    ranks.log.clear()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    assert not [each for each in ranks.log if not each.startswith("gradient")]
    with torch.no_grad():
        loss_of(model)
    assert step(model, ranks, early) == THEN
