"""Several ranks, each a process, equal a plain loop bit for bit in fixed order, and hold a share of the state each."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.gang import run_gang
from tests.training.plain_loop import train_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, VOCABULARY, engine
from tests.training.test_layer_drop import scales_of
from tests.training.test_moments import reduce_moments
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.scheduler.fit.exchange import Part, Sharing, sent_bytes
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training import tiled_loss, tiled_mlp
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.division import divide, micro_batch_seed
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.meeting import StoreMeeting
from busbar.workloads.training.model import demand_of, measure_demand, measure_peaks, open_model
from busbar.workloads.training.packing import BEGINS, NOT_LEARNED, Packed
from busbar.workloads.training.plan import MemoryLimits, lay_out
from busbar.workloads.training.prediction import most_micro_batches
from busbar.workloads.training.ranks import Alone, Gang, Ranks
from busbar.workloads.training.settings import EXACT
from busbar.workloads.training.trainer import MicroBatch, Trainer

STEPS, CPU = 4, torch.device("cpu")
SHARDINGS = ("gradients", "parameters")
FIXED = {"order": "fixed"}
EIGHT = {"sequences": 8, "microBatch": 1}


def case(**changes: Any) -> dict[str, Any]:
    return engine(steps=STEPS, **{"batch": EIGHT, "parallelism": FIXED, **changes})


APART = {"uri": "pvc://text", "sequenceLength": SEQUENCE, "packing": "within-documents"}
LEFT_OUT: dict[str, Any] = {  # with this seed other ones in each step but the first, and all in one
    "model": {"config": {**LLAMA, "num_hidden_layers": 3}},
    "layerDrop": {"keep": 0.2, "rate": 1.0},
    "seed": 155,
}
CASES: dict[str, dict[str, Any]] = {
    "a clip that bites": case(optimizer={"learningRate": 1e-3, "gradientClip": 0.01, "schedule": "linear"}),
    "no clipping, two micro-batches a leaf": case(
        batch={"sequences": 16, "microBatch": 1},
        optimizer={"learningRate": 1e-3, "gradientClip": None, "schedule": "cosine"},
    ),
    "four leaves of three": case(batch={"sequences": 24, "microBatch": 2}),
    "dropout": case(model={"config": GPT2}),
    "dropout, recomputed activations": case(model={"config": GPT2}, activations="recompute"),
    "bfloat16 with fp32 masters, resident": case(dtype="bfloat16", mode="resident"),
    "untied head, half of the state on the host": case(
        model={"config": {**LLAMA, "tie_word_embeddings": False}}, mode="auto"
    ),
    "rows with nothing to learn": case(seed=11),
    "gradients in float32": case(dtype="bfloat16", gradientSums="float32"),
    "rows with nothing to learn, gated": case(seed=11, schedule="gated"),
    "dropout, gated": case(model={"config": GPT2}, schedule="gated"),
    "a step that is not finite on one rank": case(),
    "frozen first block and, by the head's name, the table": case(freeze=["lm_head.*", "model.layers.0.*"]),
    "blocks that are left out, two micro-batches a leaf": case(
        batch={"sequences": 16, "microBatch": 1}, **LEFT_OUT
    ),
}
DIVIDED: dict[str, dict[str, Any]] = {  # what the ranks divide beside the optimizer's state
    "gradients, a clip that bites": case(
        optimizer={"learningRate": 1e-3, "gradientClip": 0.01, "schedule": "linear"},
        parallelism={**FIXED, "sharding": "gradients"},
    ),
    "gradients, four leaves of three, untied head, bfloat16, gated": case(
        batch={"sequences": 24, "microBatch": 2},
        model={"config": {**LLAMA, "tie_word_embeddings": False}},
        dtype="bfloat16",
        mode="auto",
        schedule="gated",
        parallelism={**FIXED, "sharding": "gradients"},
    ),
    "gradients, recomputed dropout, rows with nothing to learn": case(
        model={"config": GPT2},
        activations="recompute",
        seed=11,
        parallelism={**FIXED, "sharding": "gradients"},
    ),
    "gradients, blocks that are left out, gated": case(
        schedule="gated",
        dtype="bfloat16",
        mode="auto",
        parallelism={**FIXED, "sharding": "gradients"},
        **LEFT_OUT,
    ),
    "parameters, a clip that bites": case(
        optimizer={"learningRate": 1e-3, "gradientClip": 0.01, "schedule": "linear"},
        parallelism={**FIXED, "sharding": "parameters"},
    ),
    "parameters, four leaves of three, untied head, bfloat16, gated": case(
        batch={"sequences": 24, "microBatch": 2},
        model={"config": {**LLAMA, "tie_word_embeddings": False}},
        dtype="bfloat16",
        mode="auto",
        schedule="gated",
        parallelism={**FIXED, "sharding": "parameters"},
    ),
    "parameters, recomputed dropout, rows with nothing to learn": case(
        model={"config": GPT2},
        activations="recompute",
        seed=11,
        parallelism={**FIXED, "sharding": "parameters"},
    ),
    "moments of eight bits, half of the state on the host": case(
        state="int8",
        dtype="bfloat16",
        model={"config": {**LLAMA, "tie_word_embeddings": False}},
        mode="auto",
        parallelism={**FIXED, "sharding": "gradients"},
    ),
    "gradients in float32, state half on the host": case(
        batch={"sequences": 16, "microBatch": 1},
        dtype="bfloat16",
        gradientSums="float32",
        mode="auto",
        parallelism={**FIXED, "sharding": "gradients"},
    ),
    "parameters, gradients in float32": case(
        dtype="bfloat16", gradientSums="float32", parallelism={**FIXED, "sharding": "parameters"}
    ),
    "parameters, swapped dropout": case(
        model={"config": {**GPT2, "n_layer": 3}},
        activations="swap",
        parallelism={**FIXED, "sharding": "parameters"},
    ),
    "parameters, documents kept apart, recomputed, rows with nothing to learn": case(
        seed=11, activations="recompute", data=APART, parallelism={**FIXED, "sharding": "parameters"}
    ),
    "parameters, frozen first block and table": case(
        freeze=["lm_head.*", "model.layers.0.*"], parallelism={**FIXED, "sharding": "parameters"}
    ),
    "parameters, frozen matrices and end, bfloat16, recomputed, rows with nothing to learn": case(
        freeze=["*.q_proj.*", "model.layers.2.*", "model.norm.*", "lm_head.*"],
        model={"config": {**LLAMA, "num_hidden_layers": 3, "tie_word_embeddings": False}},
        seed=11,
        dtype="bfloat16",
        activations="recompute",
        parallelism={**FIXED, "sharding": "parameters"},
    ),
    "parameters, frozen middle, two micro-batches a leaf, rows with nothing to learn": case(
        freeze=["model.layers.1.*"],
        model={"config": {**LLAMA, "num_hidden_layers": 3}},
        batch={"sequences": 16, "microBatch": 1},
        seed=11,
        parallelism={**FIXED, "sharding": "parameters"},
    ),
}
TILES: dict[str, dict[str, Any]] = {
    f"{sharding}, tiles, rows with nothing to learn": case(
        loss="tiled", mlp="tiled", seed=11, parallelism={**FIXED, "sharding": sharding}
    )
    for sharding in ("optimizer", "parameters")
}
ADAPTER = case(
    model={"uri": "pvc://base"},
    tokenizer={"uri": "pvc://base"},
    adapter={"rank": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj"]},
)
DIVIDED_BASES: dict[str, dict[str, Any]] = {  # adapters of a base of which each rank has a slice
    "LoRA": {**ADAPTER, "parallelism": {**FIXED, "sharding": "parameters"}},
    "DoRA, recomputed, rows with nothing to learn": {
        **ADAPTER,
        "adapter": {"rank": 4, "dropout": 0.1, "dora": True, "targets": ["o_proj", "down_proj"]},
        "activations": "recompute",
        "seed": 11,
        "parallelism": {**FIXED, "sharding": "parameters"},
    },
}
FAST = {"batch": EIGHT, "parallelism": {"order": "fast"}, "mode": "resident"}
FAST_DIVIDED = {"batch": {"sequences": 7, "microBatch": 1}, "mode": "resident"}  # one rank has fewer


def packed(document: dict[str, Any], *, masked: bool = False) -> Packed:
    count = document["batch"]["sequences"]
    source = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCE * count * 5,), generator=source).numpy().astype("uint32")
    if masked:
        tokens[: tokens.size // 2] |= NOT_LEARNED
        tokens[::97] &= ~NOT_LEARNED
        tokens[: 3 * SEQUENCE] |= NOT_LEARNED  # whole micro-batches without a token to learn
    tokens[::11] |= BEGINS
    return Packed.cut(tokens, SEQUENCE, 0, count)


RANKS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys([*CASES, *DIVIDED, *TILES, *DIVIDED_BASES, "adapter"], (1, 2, 4)),
    **dict.fromkeys(["fast", *(f"fast, {sharding}" for sharding in SHARDINGS)], (2,)),
}
"""How many train each document."""
DOCUMENTS: dict[str, dict[str, Any]] = {
    **CASES,
    **DIVIDED,
    **TILES,
    **DIVIDED_BASES,
    "adapter": ADAPTER,
    "fast": engine(steps=STEPS, **FAST),
    **{
        f"fast, {sharding}": engine(steps=STEPS, parallelism={"sharding": sharding}, **FAST_DIVIDED)
        for sharding in SHARDINGS
    },
}
Demands = dict[tuple[str, int], Demand]
"""By the document's name and the number of ranks."""


def make_trainer(
    document: dict[str, Any], ranks: Ranks, base: Path | None = None, demand: Demand | None = None
) -> Trainer:
    spec = parse_engine(document)
    recipe = open_model(spec, base, VOCABULARY, 0)
    demand = demand or measure_demand(recipe, spec, CPU, ranks.size)
    limits = MemoryLimits(None, None, True)
    half = spec.mode == "auto"
    plan = lay_out(demand, limits, "optimizer-offload", 2) if half else make_plan(demand, limits, spec.mode)
    return Trainer(spec, recipe, plan, CPU, ranks=ranks)


def make_tiles_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tiled_loss, "TILE", 20)
    patch.setattr(tiled_mlp, "mlp_tile_rows", lambda tokens: 20)


def train_in_gang(
    gang: Gang, meeting: StoreMeeting, given: tuple[dict[str, dict[str, Any]], Demands, Path]
) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        make_tiles_small(patch)
        return train(gang, *given)


def train(
    ranks: Ranks, documents: dict[str, dict[str, Any]], demands: Demands, base: Path | None = None
) -> dict[str, Any]:
    """Losses, weights and memory of each case; what has no entry in `demands` is measured."""
    demand_module.MIN_CHUNK = 4096
    found = {}
    for name, document in documents.items():
        of = base if "uri" in document["model"] else None
        trainer = make_trainer(document, ranks, of, demands.get((name, ranks.size)))
        if "not finite" in name and ranks.rank == ranks.size - 1:
            spoil_second_step(trainer)
        data = packed(document, masked="rows" in name)
        steps = [trainer.step(data) for _ in range(STEPS)]
        trainer.drain()
        said = facts(trainer)
        trainer.gather_whole()
        weights = {key: whole.clone() for key, _, whole in trainer.weights()}
        losses = [step.loss for step in steps]
        found[name] = losses, weights, said, [step.gradient_norm for step in steps]
        trainer.close()
    return found


def spoil(step: int, model: torch.nn.Module) -> None:
    if step == 1:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[5] = math.nan


def spoil_second_step(trainer: Trainer) -> None:
    measured = trainer._measured

    def spoiling(part: MicroBatch) -> torch.Tensor:
        loss = measured(part)
        spoil(trainer.done, trainer.model)
        return loss

    setattr(trainer, "_measured", spoiling)  # noqa: B010


def facts(trainer: Trainer) -> dict[str, int]:
    assert trainer.spread is not None
    groups, plan = trainer.groups, trainer.plan
    sharing = Sharing(
        plan.ranks,
        plan.sharding,
        most_micro_batches(trainer.spread._division),
        gradient_bytes=groups[0].gradients.itemsize,
        weight_bytes=groups[0].weights.itemsize,
        gradients_beside=False,
        weights_beside=False,
    )
    parts = [Part(flat.group.elements, flat.group.size.is_block) for flat in groups]
    return {
        "formula": sent_bytes(parts, sharing),
        "state": sum(chunk.state.numel() * 4 for chunk in trainer.optimizer.chunks),
        "parameters": sum(flat.group.elements for flat in trainer.groups),
        "block": trainer.groups[1].group.elements,
        "sent": trainer.spread.sent_bytes + (0 if trainer.peers is None else trainer.peers.sent_bytes),
        "gradients": trainer.device_arena.peak["gradients"],
        "weights": trainer.device_arena.peak["parameters"],
        "device": trainer.device_arena.capacity_bytes,
        "host": trainer.host_arena.capacity_bytes,
        "peak": trainer.device_arena.peak_bytes,
        "base": trainer.device_arena.peak.get("base", 0),
        "planned base": plan.device.get("base", 0),
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model for an adapter."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(5)
    given = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **LLAMA}
    make: Any = AutoModelForCausalLM.from_config
    make(AutoConfig.for_model(given.pop("model_type"), **given)).save_pretrained(folder)
    return folder


def is_frozen(document: dict[str, Any], key: str) -> bool:
    tied = document["model"]["config"].get("tie_word_embeddings", True)
    names = [key, "lm_head.weight"] if tied and key == "model.embed_tokens.weight" else [key]
    return any(fnmatchcase(each, pattern) for each in names for pattern in document.get("freeze", ()))


def plainly(name: str, document: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    batch, data = document["batch"], packed(document, masked="rows" in name)
    parts = batch["sequences"] // batch["microBatch"]
    labels = [data.labels(step, batch["sequences"]) for step in range(STEPS)]

    def begin(step: int, index: int) -> None:
        torch.manual_seed(micro_batch_seed(document.get("seed", 0), step, index))

    return train_plainly(
        document["model"]["config"],
        VOCABULARY,
        [torch.from_numpy(data.batch(step, batch["sequences"])) for step in range(STEPS)],
        batch["microBatch"],
        document["optimizer"],
        seed=document.get("seed", 0),
        fused=True,
        dtype=torch.bfloat16 if document.get("dtype") == "bfloat16" else torch.float32,
        labels=[torch.from_numpy(each) for each in labels if each is not None] or None,
        leaves=min(8, parts & -parts),
        begin=begin,
        updated=lambda optimizer: reduce_moments(optimizer, document.get("state", EXACT)),
        frozen=partial(is_frozen, document),
        wide=document.get("gradientSums") == "float32",
        scales=scales_of(document),
        spoil=spoil if "not finite" in name else lambda step, model: None,
        positions=[torch.from_numpy(data.positions(step, batch["sequences"])) for step in range(STEPS)]
        if "apart" in name
        else None,
    )


@pytest.fixture(scope="module")
def demands(base: Path) -> Demands:
    """The peaks of activations do not depend on the number of ranks: each document's are measured once."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        make_tiles_small(patch)
        for name, document in DOCUMENTS.items():
            spec = parse_engine(document)
            recipe = open_model(spec, base if "uri" in document["model"] else None, VOCABULARY, 0)
            measured = measure_peaks(recipe, spec, CPU)
            found.update({(name, ranks): demand_of(recipe, spec, *measured, ranks) for ranks in RANKS[name]})
    return found


def in_gang(ranks: int, demands: Demands, base: Path, folder: Path) -> list[Any]:
    documents = {name: document for name, document in DOCUMENTS.items() if ranks in RANKS[name]}
    return run_gang(ranks, train_in_gang, (documents, demands, base), folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, demands: Demands, base: Path) -> list[Any]:
    return in_gang(2, demands, base, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, demands: Demands, base: Path) -> list[Any]:
    return in_gang(4, demands, base, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", [*CASES, *DIVIDED])
def test_one_two_and_four_ranks_equal_a_plain_loop_in_fixed_order(
    name: str, two: list[Any], four: list[Any], demands: Demands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)
    document = {**CASES, **DIVIDED}[name]
    losses, weights = plainly(name, document)
    alone = train(Alone(), {name: document}, demands)
    for world in ([alone], two, four):
        for found in world:
            assert found[name][0] == losses
            assert [key for key in weights if not torch.equal(found[name][1][key], weights[key])] == []
            assert list(map(repr, found[name][3])) == list(map(repr, alone[name][3]))  # nan is nan


@pytest.mark.parametrize("name", TILES)
def test_tiles_have_the_same_bits_on_one_two_and_four_ranks(
    name: str, two: list[Any], four: list[Any], demands: Demands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)
    make_tiles_small(monkeypatch)
    alone = train(Alone(), {name: TILES[name]}, demands)[name]
    for world in (two, four):
        for found in world:
            assert found[name][0] == alone[0]
            assert all(torch.equal(found[name][1][key], alone[1][key]) for key in alone[1])


@pytest.mark.parametrize("name", DIVIDED_BASES)
def test_an_adapter_of_a_divided_base_has_the_bits_of_one_process(
    name: str,
    two: list[Any],
    four: list[Any],
    demands: Demands,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks train what one does, and of the base each has its slices of the blocks, and what is around them."""
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)
    alone = train(Alone(), {name: DIVIDED_BASES[name]}, demands, base)[name]
    around = 4 * (VOCABULARY + 1) * LLAMA["hidden_size"]
    for ranks, world in ((2, two), (4, four)):
        for rank, found in enumerate(world):
            losses, weights, said, norms = found[name]
            assert (losses, norms) == (alone[0], alone[3])
            trained = [key for key in weights if "lora" in key]
            assert trained
            if rank == 0:  # which has gathered them
                assert all(torch.equal(weights[key], alone[1][key]) for key in trained)
            assert said["base"] - around == pytest.approx((alone[2]["base"] - around) / ranks, rel=0.01)
            assert said["base"] == said["planned base"]


def test_an_adapter_has_the_same_bits_on_one_two_and_four_ranks(
    two: list[Any], four: list[Any], demands: Demands, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)
    alone = train(Alone(), {"adapter": ADAPTER}, demands, base)["adapter"]
    for found in [*two, *four]:
        assert found["adapter"][0] == alone[0]
        assert all(torch.equal(found["adapter"][1][key], each) for key, each in alone[1].items())


def test_the_fast_order_is_near_the_fixed_one(two: list[Any]) -> None:
    """And its ranks agree with each other bit for bit."""
    first, second = (found["fast"] for found in two)
    assert first[0] == second[0]
    assert first[3] == second[3]
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])
    alone = train(Alone(), {"fast": engine(steps=STEPS, **{**FAST, "parallelism": FIXED})}, {})
    assert first[0] == pytest.approx(alone["fast"][0], rel=1e-4)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_in_fast_order_ranks_may_have_different_numbers_of_micro_batches(
    sharding: str, two: list[Any]
) -> None:
    first, second = (found[f"fast, {sharding}"] for found in two)
    assert first[0] == second[0]
    assert first[3] == second[3]
    if sharding != "parameters":
        assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])
    alone = train(Alone(), {"alone": engine(steps=STEPS, **FAST_DIVIDED, parallelism=FIXED)}, {})
    assert first[0] == pytest.approx(alone["alone"][0], rel=1e-4)


def test_the_state_of_a_rank_follows_zeros_formula(two: list[Any], four: list[Any]) -> None:
    for ranks, world in ((2, two), (4, four)):
        for name, document in CASES.items():
            each = 10 if document.get("dtype") == "bfloat16" else 8
            for found in world:
                said = found[name][2]
                assert said["state"] == said["parameters"] * each // ranks


def test_the_gradients_of_a_rank_follow_zeros_formula(two: list[Any], four: list[Any]) -> None:
    """With the sums that a fixed order keeps, each of which is a slice as well."""
    for ranks, world in ((2, two), (4, four)):
        sums = 1 + (8 // ranks).bit_length() - 1
        for name in (
            "gradients, a clip that bites",
            "gradients, recomputed dropout, rows with nothing to learn",
        ):
            for found in world:
                said = found[name][2]
                assert said["gradients"] == said["parameters"] * 4 * sums // ranks
    for found in two:  # fast order has none
        for sharding in SHARDINGS:
            said = found[f"fast, {sharding}"][2]
            assert said["gradients"] == said["parameters"] * 4 // 2


def test_the_weights_of_a_rank_follow_zeros_formula(two: list[Any], four: list[Any]) -> None:
    for ranks, world in ((2, two), (4, four)):
        for found in world:
            said = found["parameters, a clip that bites"][2]
            assert said["weights"] == said["parameters"] * 4 // ranks


def test_a_block_is_gathered_for_forward_and_for_backward(two: list[Any], four: list[Any]) -> None:
    """As the formula says, which has one of the two blocks in the slot still when a pass turns round, until an update makes it
    old; and to see whether the model is causal, once three blocks, of which the first step finds one, and the rest."""
    for ranks, world in ((2, two), (4, four)):
        said = world[0]["parameters, a clip that bites"][2]
        outer = said["parameters"] - 2 * said["block"]
        once = (2 * said["block"] + outer) * 4 * (ranks - 1) // ranks
        assert said["sent"] == STEPS * said["formula"] + once


def test_ranks_hand_over_what_the_formula_says(two: list[Any]) -> None:
    """Per step the gradients and the weights of the other ranks' slices, in either order."""
    for name in ("fast", "a clip that bites"):
        said = two[0][name][2]
        assert said["sent"] == STEPS * said["formula"] == STEPS * 2 * said["parameters"] * 4 // 2
    divided = two[0]["fast, gradients"][2]
    assert divided["sent"] == STEPS * divided["formula"] == STEPS * (4 + 1) * divided["parameters"] * 4 // 2


def test_no_rank_has_more_than_its_plan(four: list[Any]) -> None:
    assert all(
        found[name][2]["peak"] <= found[name][2]["device"]
        for found in four
        for name in [*CASES, *DIVIDED, *DIVIDED_BASES]
    )


def test_a_fixed_order_alone_keeps_partial_sums_in_the_plan() -> None:
    document = CASES["a clip that bites"]
    trainer = make_trainer(document, Alone())
    assert trainer.plan.device["gradients"] == 4 * trainer.plan.device["parameters"]
    assert trainer.device_arena.used["gradients"] == trainer.plan.device["gradients"]
    trainer.close()


def _divided(sequences: int, micro_batch: int, ranks: int, order: str) -> list[list[range]]:
    division = divide(sequences, micro_batch, ranks, order)
    return [division.own(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("order", ["fast", "fixed"])
def test_every_micro_batch_is_computed_once(ranks: int, order: str) -> None:
    if order == "fixed" and 8 % ranks:
        with pytest.raises(InvalidJob, match=f"8 parts, which {ranks} processes cannot share evenly"):
            _divided(16, 1, ranks, order)
        return
    runs = _divided(16, 1, ranks, order)
    assert [index for own in runs for run in own for index in run] == list(range(16))


def test_more_pods_than_micro_batches_are_refused() -> None:
    with pytest.raises(InvalidJob, match="2 micro-batches a step, which are not enough for 3 processes"):
        divide(8, 4, 3, "fast")


def test_an_order_that_is_left_out_is_the_fast_one() -> None:
    """So checkpoints of runs that do not name it stay theirs."""
    named = parse_engine(engine(parallelism={"order": "fast"}))
    assert (
        named.identity == parse_engine(engine()).identity != parse_engine(engine(parallelism=FIXED)).identity
    )
