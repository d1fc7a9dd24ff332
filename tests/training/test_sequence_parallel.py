"""Ranks that share each sequence: the losses and weights of one rank up to rounding, bytes, memory, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from tests.training.gang import run_gang
from tests.training.small import GPT2, LLAMA, SEQUENCE, VOCABULARY, engine
from tests.training.test_bit_equality import CPU, STEPS
from tests.training.test_ranks import APART, base, make_trainer, packed
from transformers import AutoConfig

from busbar.scheduler.fit import BatchShape, ModelShape
from busbar.scheduler.fit.cells import workload_class
from busbar.scheduler.fit.exchange import Link, of_sequences
from busbar.scheduler.fit.memory import activations
from busbar.workloads.training.division import divide, micro_batch_seed
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.meeting import StoreMeeting
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan_command import plan
from busbar.workloads.training.ranks import Alone, Gang, Ranks
from busbar.workloads.training.sequence_parallel import IMPLEMENTATION, refuse
from busbar.workloads.training.tiled_loss import token_losses

assert base  # a fixture

FOUR_HEADS = {**LLAMA, "num_key_value_heads": 4}
BLOOM: dict[str, Any] = {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 4}
NO_DROPOUT = {**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 64,
}
FOUR = {"sequences": 4, "microBatch": 1}


def job(sequence: int = 2, sharding: str = "optimizer", **changes: Any) -> dict[str, Any]:
    parallelism = {"sequence": sequence, "sharding": sharding}
    return engine(
        **{"steps": STEPS, "mode": "resident", "batch": FOUR, "parallelism": parallelism, **changes}
    )


CASES: dict[str, dict[str, Any]] = {
    "grouped heads": job(),
    "divided gradients, offloaded state": job(sharding="gradients", mode="optimizer-offload"),
    "divided weights, kept": job(sharding="parameters", activations="keep"),
    "divided weights, tiles, swapped": job(
        sharding="parameters", activations="swap", loss="tiled", mlp="tiled"
    ),
    "learned positions, recomputed": job(model={"config": NO_DROPOUT}, activations="recompute"),
    "rows with nothing to learn": job(sharding="gradients"),
    "divided weights, documents kept apart, recomputed": job(
        sharding="parameters", data=APART, activations="recompute"
    ),
    "larger micro-batches": job(batch={"sequences": 4, "microBatch": 2}),
}
BFLOAT16 = job(dtype="bfloat16")
ADAPTER = job(
    model={"uri": "pvc://base"},
    tokenizer={"uri": "pvc://base"},
    adapter={"rank": 4, "targets": ["q_proj", "up_proj"]},
)
DROPOUT = job(model={"config": GPT2})
FOUR_RANKS = {
    "all of one sequence": job(4, model={"config": FOUR_HEADS}),
    "two of each sequence, divided weights": job(2, sharding="parameters"),
    "two of each sequence, one group without the last": job(
        2, sharding="parameters", batch={"sequences": 3, "microBatch": 1}
    ),
}


def train(ranks: Ranks, documents: dict[str, dict[str, Any]], base: Path) -> dict[str, Any]:
    found = {}
    for name, document in documents.items():
        trainer = make_trainer(document, ranks, base if "uri" in document["model"] else None)
        data = packed(document, masked="rows" in name)
        losses = [trainer.step(data).loss for _ in range(STEPS)]
        trainer.drain()
        said: dict[str, float] = {
            "activations": trainer.device_arena.peak["activations"],
            "planned": trainer.plan.device["activations"],
            "sent": 0 if trainer.sequence is None else trainer.sequence.sent_bytes,
        }
        if ranks.rank == 0 or trainer.peers is not None:  # of which each has whole sequences, as in a session
            tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % VOCABULARY
            with torch.no_grad():
                said["evaluation"] = float(token_losses(trainer.model.eval(), tokens).mean())
        trainer.gather_whole()
        weights = {key: whole.clone() for key, _, whole in trainer.weights()}
        found[name] = losses, weights, said
        trainer.close()
    return found


def in_gang(gang: Gang, meeting: StoreMeeting, given: tuple[dict[str, Any], Path]) -> dict[str, Any]:
    return train(gang, *given)


def alone(name: str, document: dict[str, Any], base: Path) -> Any:
    """The same job on one rank."""
    return train(Alone(), {name: {**document, "parallelism": {}}}, base)[name]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[Any]:
    documents = {**CASES, "bfloat16": BFLOAT16, "adapter": ADAPTER, "dropout": DROPOUT}
    return run_gang(2, in_gang, (documents, base), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[Any]:
    return run_gang(4, in_gang, (FOUR_RANKS, base), tmp_path_factory.mktemp("four"))


def assert_alike(name: str, document: dict[str, Any], world: list[Any], base: Path, close: float) -> None:
    losses, weights, said = alone(name, document, base)
    divided = document["parallelism"]["sharding"] == "parameters"
    for rank, found in enumerate(world):
        assert found[name][0] == pytest.approx(losses, rel=close)
        assert found[name][0] == world[0][name][0]  # to the bit
        if rank and divided:  # rank 0 alone has gathered them
            continue
        assert found[name][1].keys() == weights.keys()
        for key, each in weights.items():
            torch.testing.assert_close(found[name][1][key], each, rtol=100 * close, atol=10 * close)
    assert world[0][name][2]["evaluation"] == pytest.approx(said["evaluation"], rel=close)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_does(name: str, two: list[Any], base: Path) -> None:
    assert_alike(name, CASES[name], two, base, 1e-5)


def test_so_they_do_in_bfloat16_and_with_an_adapter(two: list[Any], base: Path) -> None:
    assert_alike("bfloat16", BFLOAT16, two, base, 3e-3)
    assert_alike("adapter", ADAPTER, two, base, 1e-5)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_share_one_sequence_or_two(name: str, four: list[Any], base: Path) -> None:
    assert_alike(name, FOUR_RANKS[name], four, base, 1e-5)


def test_parts_of_a_micro_batch_have_dropout_of_their_own(two: list[Any], base: Path) -> None:
    losses, _, _ = alone("dropout", DROPOUT, base)
    assert two[0]["dropout"][0] == two[1]["dropout"][0] != losses
    assert two[0]["dropout"][0] == pytest.approx(losses, rel=0.1)
    assert micro_batch_seed(1, 2, 3) == micro_batch_seed(1, 2, 3, 0) != micro_batch_seed(1, 2, 3, 1)


def test_activations_are_as_planned_and_of_the_part_alone(two: list[Any], base: Path) -> None:
    for name, document in CASES.items():
        for found in two:
            said = found[name][2]
            assert said["activations"] == pytest.approx(said["planned"], rel=0.05), name
        if "weights" not in name:
            assert two[0][name][2]["activations"] < 0.7 * alone(name, document, base)[2]["activations"], name


def test_what_a_rank_hands_over_is_its_part_of_queries_keys_values_and_results(
    two: list[Any], four: list[Any]
) -> None:
    """Forward and backward; a block that is computed again exchanges again."""
    width, blocks, tokens = LLAMA["hidden_size"], LLAMA["num_hidden_layers"], SEQUENCE * FOUR["sequences"]
    elements = 2 * width + 2 * width // 2  # half as many heads of keys and values
    once = tokens // 2 * elements * 4 * blocks // 2  # half of a part stays
    assert two[0]["grouped heads"][2]["sent"] == 2 * once * STEPS
    of_four = tokens // 4 * 4 * width * 4 * blocks * 3 // 4
    assert four[0]["all of one sequence"][2]["sent"] == 2 * of_four * STEPS
    for config, ranks, sent in (
        (LLAMA, 2, 2 * once),
        (FOUR_HEADS, 4, 2 * of_four),
    ):
        shape = ModelShape.from_config({"vocab_size": VOCABULARY, **config})
        batch = BatchShape(
            FOUR["sequences"], SEQUENCE, FOUR["sequences"], activations="keep", sequence_parallel=ranks
        )
        found = of_sequences(shape, batch, Link(0.0, 1.0))
        assert blocks * (found.forward_bytes + found.backward_bytes) == sent
        again = of_sequences(shape, replace(batch, activations="recompute"), Link(0.0, 1.0))
        assert again.backward_s == 2 * again.forward_s == 2 * found.forward_s


def mixed(gang: Gang, meeting: StoreMeeting, document: dict[str, Any]) -> str:
    try:
        make_trainer(document, gang)
    except InvalidJob as refused:
        return str(refused)
    return "taken"


def test_a_model_that_mixes_tokens_by_itself_is_refused_on_all_ranks(tmp_path: Path) -> None:
    found = run_gang(2, mixed, job(model={"config": BLOOM}), tmp_path)
    assert found[0] == found[1]
    assert found[0].startswith("spec.engine.parallelism.sequence: is not possible: BloomForCausalLM")


def config(**changes: Any) -> Any:
    given = {**LLAMA, **changes}
    return AutoConfig.for_model(given.pop("model_type"), **given)


@pytest.mark.parametrize(
    ("given", "length", "size", "words"),
    [
        (config(), 32, 3, "does not divide data.sequenceLength 32"),
        (config(), 32, 4, "this model's 4 heads of queries and 2 of keys and values"),
        (config(model_type="mistral", sliding_window=16), 32, 2, "a sliding window of 16 tokens"),
        (
            config(model_type="gemma3_text", layer_types=["sliding_attention", "full_attention"]),
            32,
            2,
            "layers of sliding_attention",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(given: Any, length: int, size: int, words: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        refuse(given, length, size)
    assert refused.value.field == "spec.engine.parallelism.sequence"
    assert words in str(refused.value)


def test_what_can_be_shared_is_not() -> None:
    refuse(config(), 32, 2)
    refuse(config(model_type="mistral", sliding_window=64), 32, 2)
    refuse(config(model_type="qwen2", sliding_window=16, use_sliding_window=False), 32, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: divide(4, 1, 3, "fast", 2), "3 processes make no groups of so many"),
        (lambda: divide(4, 1, 2, "fixed", 2), "fixed does not hold for sequences that processes share"),
        (lambda: divide(2, 1, 6, "fast", 2), "not enough for 3 groups of 2 processes"),
    ],
)
def test_pods_that_make_no_groups_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidJob, match=words):
        call()


def test_an_attention_that_does_more_than_the_shared_one_is_refused(tmp_path: Path) -> None:
    """gpt-oss has sinks, which the kernel that is used for shared sequences knows nothing of."""
    found = run_gang(2, mixed, job(model={"config": GPT_OSS}), tmp_path)
    assert found[0] == found[1]
    assert "is not possible: GptOssForCausalLM" in found[0]


def demand_of(tokens: int, sequence: int) -> tuple[int, int, int]:
    given = {**FOUR_HEADS, "max_position_embeddings": tokens}
    document = job(
        sequence,
        data={"uri": "pvc://text", "sequenceLength": tokens, "holdoutFraction": 0.2},
        model={"config": given},
        activations="recompute",
    )
    spec = parse_engine(document)
    recipe = open_model(spec, None, VOCABULARY, 0)
    demand = measure_demand(recipe, spec, CPU, sequence)
    assert recipe.config._attn_implementation != IMPLEMENTATION  # of a model that is made from it later
    assert demand.recompute_bytes is not None
    shape = ModelShape.from_config({"vocab_size": VOCABULARY, **given})
    batch = BatchShape(4, tokens, 1, activations="recompute", sequence_parallel=sequence)
    return demand.activation_bytes, demand.recompute_bytes, activations(shape, batch)


def test_the_plan_and_the_formulas_have_a_part_of_the_tokens() -> None:
    whole, halves, longer = demand_of(4096, 1), demand_of(4096, 2), demand_of(8192, 4)
    assert halves[0] == pytest.approx(whole[0] / 2, rel=0.05)
    assert halves[1] == pytest.approx(whole[1] / 2, rel=0.1)
    assert longer[1] == pytest.approx(halves[1], rel=0.1)  # ranks and sequence have grown together
    assert halves[2] == pytest.approx(whole[2] / 2, rel=0.01)


def test_it_is_a_part_of_a_runs_identity_and_of_its_class_where_it_is_asked_for() -> None:
    whole, named, parts = (
        parse_engine(engine(parallelism=each)) for each in ({}, {"sequence": 1}, {"sequence": 2})
    )
    assert whole.identity == named.identity != parts.identity
    shape, batch = ModelShape.from_config({"vocab_size": VOCABULARY, **LLAMA}), BatchShape(4, 32, 2)
    assert workload_class(shape, batch) != workload_class(shape, replace(batch, sequence_parallel=2))


def test_a_plan_says_how_many_pods_share_a_sequence_and_how_long_it_may_be(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "train-python-stdlib.yaml"
    document = next(each for each in yaml.safe_load_all(example.read_text()) if each["kind"] == "TrainingJob")
    file = tmp_path / "job.yaml"
    longest = {}
    for pods in (1, 2):
        document["spec"]["engine"]["parallelism"] = {"sequence": pods}
        document["spec"]["shape"] |= {"minPods": pods, "maxPods": pods}
        file.write_text(yaml.safe_dump(document))
        arguments = [str(file), "--gpu", "H100", "--pods", str(pods), "--longest"]
        longest[pods] = json.loads(CliRunner().invoke(plan, [*arguments, "--json"]).output)["longest"]
        said = CliRunner().invoke(plan, arguments).output
        assert ("2 processes share each sequence" in said) == (pods == 2)
    one, shared = (longest[pods]["resident"]["recompute"] for pods in (1, 2))
    assert shared == pytest.approx(2 * one, rel=0.02)
    assert shared % 2 == 0
    refused = CliRunner().invoke(plan, [str(file), "--gpu", "H100", "--pods", "3"])
    assert refused.exit_code != 0
    assert "3 processes make no groups" in refused.output
