"""Divided gradients and weights on one of two ranks, beside another one that has the same slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.small import LLAMA, SEQUENCE, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.division import Round, divide
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.gradient_shards import GradientShards
from busbar.workloads.training.groups import FlatGroup, bind, blocks, make_groups
from busbar.workloads.training.peer_slots import PeerSlots
from busbar.workloads.training.ranks import Alone

CPU, MANY = torch.device("cpu"), 2**30
TOKENS = torch.arange(SEQUENCE)[None] % VOCABULARY


class Mirrored(Alone):
    """Rank 0 of two, of which the other one always brings what this one brings."""

    size = 2

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        whole.copy_(torch.cat([own, own]))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        own.copy_(whole[: own.numel()] * 2)


def model_and_groups(sharding: str) -> tuple[torch.nn.Module, tuple[FlatGroup, ...], Arena]:
    torch.manual_seed(3)
    given = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **LLAMA}
    make: Any = AutoModelForCausalLM.from_config
    model: torch.nn.Module = make(AutoConfig.for_model(given.pop("model_type"), **given))
    arena = Arena("device", dict.fromkeys(("parameters", "gradients", "exchange", "slots"), MANY // 64), CPU)
    groups = bind(make_groups(model, 2), arena, torch.float32, 0, 2, sharding)
    return model, groups, arena


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return loss


def shards_of(model: torch.nn.Module, groups: tuple[FlatGroup, ...], arena: Arena) -> GradientShards:
    return GradientShards(Mirrored(), divide(4, 1, 2, "fast"), groups, arena, model)


def test_micro_batches_are_added_up_in_the_slices() -> None:
    model, groups, arena = model_and_groups("gradients")
    expected = torch.autograd.grad(loss_of(model), next(blocks(model)[1].parameters()))[0]
    shards = shards_of(model, groups, arena)
    for times in (1, 2):
        shards.begin(Round(None))
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        shards.finish()
        own = groups[2].gradients[: min(expected.numel(), groups[2].length)]
        assert torch.allclose(own, expected.view(-1)[: own.numel()] * 2 * times)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_come_before_their_group_are_taken_when_it_comes() -> None:
    """As those of a norm that the model registers before its blocks and uses behind them."""
    model, groups, arena = model_and_groups("gradients")
    shards = shards_of(model, groups, arena)
    table = groups[0].group.members[0].parameter
    shards.begin(Round(None))
    table.grad = torch.ones_like(table)
    shards.finish()
    assert bool((groups[0].gradients[: groups[0].length // 2] == 2).all())


def test_gradients_that_come_after_their_group_are_refused() -> None:
    model, groups, arena = model_and_groups("gradients")
    shards = shards_of(model, groups, arena)
    norm = groups[-1].group.members[0].parameter
    shards.begin(Round(None))
    shards.reached(0)
    norm.grad = torch.ones_like(norm)
    with pytest.raises(
        InvalidJob, match=r"model\.norm\.weight of this model gets its gradient after those of head"
    ):
        shards.finish()


def test_a_weight_that_is_in_no_slot_cannot_be_used_unnoticed() -> None:
    model, groups, arena = model_and_groups("parameters")
    peers = PeerSlots(model, groups, Mirrored(), arena, recomputes=False)
    inner = [parameter for block in blocks(model) for parameter in block.parameters()]
    assert all(bool(parameter.isnan().all()) for parameter in inner)
    loss = loss_of(model)
    assert bool(loss.isfinite())
    assert all(bool(parameter.isnan().all()) for parameter in inner)
    peers.whole(CPU)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert inner[0].shape == (LLAMA["hidden_size"], LLAMA["hidden_size"])


def test_a_pass_that_leaves_a_block_out_is_refused() -> None:
    model, groups, arena = model_and_groups("parameters")
    PeerSlots(model, groups, Mirrored(), arena, recomputes=False)
    with pytest.raises(InvalidJob, match="this model computed block 1 where block 0 is next"):
        blocks(model)[1](torch.zeros(1, SEQUENCE, LLAMA["hidden_size"]))
