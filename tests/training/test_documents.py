"""Documents of a sequence that are kept apart: a plain loop's bits, each document's own losses, memory, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.training import test_adapter as adapters
from tests.training.plain_loop import train_model_plainly, train_plainly
from tests.training.small import (
    GPT2,
    LLAMA,
    SEQUENCE,
    SEQUENCES,
    TEXTS,
    VOCABULARY,
    engine,
    manifest,
    with_text,
)
from tests.training.test_adapter import bases
from tests.training.test_bit_equality import CPU, plan_for
from tests.training.test_continuation import CONSTANT, start, weights
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.scheduler.fit import BatchShape, ModelShape
from busbar.scheduler.fit.memory import activations, mask_bytes
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.documents import IMPLEMENTATION, mask_of
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import BEGINS, NOT_LEARNED, Packed
from busbar.workloads.training.plan_command import plan
from busbar.workloads.training.sizing import batch_shape
from busbar.workloads.training.tiled_loss import token_losses
from busbar.workloads.training.trainer import Trainer

assert bases  # a fixture

STEPS = 3

WINDOWED: dict[str, Any] = {
    **{name: value for name, value in LLAMA.items() if name != "model_type"},
    "model_type": "mistral",
    "sliding_window": 6,
}
DATA = {
    "uri": "pvc://text",
    "sequenceLength": SEQUENCE,
    "holdoutFraction": 0.2,
    "packing": "within-documents",
}


def document(**changes: Any) -> dict[str, Any]:
    return engine(**{"steps": STEPS, "data": DATA, **changes})


def data(*, masked: bool = False) -> Packed:
    """Documents of 1 to 24 tokens."""
    source = np.random.default_rng(3)
    tokens = source.integers(0, VOCABULARY, SEQUENCE * 40).astype(np.uint32)
    starts = np.cumsum(source.integers(1, 25, tokens.size))
    tokens[starts[starts < tokens.size]] |= BEGINS
    if masked:
        tokens[tokens.size // 4 : tokens.size // 2] |= NOT_LEARNED
    return Packed.cut(tokens, SEQUENCE, 0, SEQUENCES)


def train_ours(
    given: dict[str, Any], placement: str, packed: Packed, steps: int = STEPS
) -> tuple[list[float], Trainer]:
    spec = parse_engine(given)
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, placement), CPU)
    losses = [trainer.step(packed).loss for _ in range(steps)]
    trainer.close()
    return losses, trainer


def steps_of(packed: Packed, steps: int = STEPS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tokens, positions) of each step."""
    tokens = [torch.from_numpy(packed.batch(step, SEQUENCES)) for step in range(steps)]
    return tokens, [torch.from_numpy(packed.positions(step, SEQUENCES)) for step in range(steps)]


def assert_equal_to_plain(given: dict[str, Any], placement: str, *, masked: bool = False) -> Trainer:
    packed = data(masked=masked)
    ours, trainer = train_ours(given, placement, packed)
    tokens, positions = steps_of(packed)
    labels = None
    if masked:
        learned = [packed.labels(step, SEQUENCES) for step in range(STEPS)]
        labels = [
            own if found is None else torch.from_numpy(found)
            for own, found in zip(tokens, learned, strict=True)
        ]
    losses, weights = train_plainly(
        given["model"]["config"],
        VOCABULARY,
        tokens,
        given["batch"]["microBatch"],
        given["optimizer"],
        fused=True,
        dtype=torch.bfloat16 if given.get("dtype") == "bfloat16" else torch.float32,
        labels=labels,
        positions=positions,
    )
    assert ours == losses
    different = [
        name for name, own in trainer.model.named_parameters() if not torch.equal(own, weights[name])
    ]
    assert different == []
    return trainer


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def test_positions_begin_anew_at_each_document_and_each_sequence() -> None:
    tokens = np.arange(12, dtype=np.uint32)
    tokens[[0, 3, 9, 10]] |= BEGINS
    packed = Packed.cut(tokens, 6, 0, 2)
    found = dict(zip(packed.indices(0, 2), packed.positions(0, 2).tolist(), strict=True))
    assert found == {0: [0, 1, 2, 0, 1, 2], 1: [0, 1, 2, 0, 0, 1]}
    assert sorted(packed.batch(0, 2).ravel().tolist()) == list(range(12))  # without the bit
    assert packed.labels(0, 2) is None


@pytest.mark.parametrize("placement", ["resident", "half", "parameter-offload"])
def test_every_placement_equals_a_plain_loop(placement: str) -> None:
    trainer = assert_equal_to_plain(document(), placement)
    measured, planned = trainer.device_arena.peak["activations"], trainer.plan.device["activations"]
    assert measured == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({"model": {"config": GPT2}}, "half"),
        ({"dtype": "bfloat16", "schedule": "gated"}, "half"),
        ({"model": {"config": GPT2}, "activations": "recompute"}, "resident"),
        ({"activations": "swap", "dtype": "bfloat16"}, "resident"),
        ({"model": {"config": WINDOWED}}, "resident"),
        ({"model": {"config": GPT2}, "activations": "swap"}, "parameter-offload"),
    ],
    ids=["dropout", "bfloat16, gated", "recomputed", "swapped", "windows", "all on the host, swapped"],
)
def test_so_it_does_with_everything_else(changes: dict[str, Any], placement: str) -> None:
    assert_equal_to_plain(document(**changes), placement)


def test_so_it_does_with_tokens_that_are_not_learned() -> None:
    assert_equal_to_plain(document(), "half", masked=True)


def test_so_does_an_adapter(bases: Path) -> None:
    given = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    asked = adapters.document(given, data=DATA)
    spec = parse_engine(asked)
    recipe = open_model(spec, bases / "llama", VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, "half"), CPU)
    ours = [trainer.step(data()).loss for _ in range(adapters.STEPS)]
    trainer.close()
    tokens, positions = steps_of(data(), adapters.STEPS)
    plain = adapters.plain_adapter(
        bases / "llama", torch.float32, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]
    )
    losses, _ = train_model_plainly(
        plain,
        tokens,
        2,
        asked["optimizer"],
        True,
        torch.float32,
        positions=positions,
    )
    assert ours == losses


@pytest.mark.parametrize("loss", ["whole", "tiled"])
@pytest.mark.parametrize(
    "config", [LLAMA, {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}]
)
def test_a_step_has_the_losses_of_its_documents_alone(config: dict[str, Any], loss: str) -> None:
    """Each document by itself, behind its separator, whose last prediction is the next separator."""
    packed, given = data(), dict(config)
    ours, _ = train_ours(document(model={"config": config}, loss=loss), "resident", packed, 1)
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    model = made(AutoConfig.for_model(given.pop("model_type"), **sizes, **given)).eval()
    tokens, positions = packed.batch(0, SEQUENCES), packed.positions(0, SEQUENCES)
    total = 0.0
    for row, places in zip(tokens, positions, strict=True):
        starts = [*np.flatnonzero(places == 0).tolist(), SEQUENCE]
        for first, behind in pairwise(starts):
            if (own := row[first : behind + 1]).size > 1:
                with torch.no_grad():
                    total += float(token_losses(model, torch.from_numpy(own)[None]).sum())
    assert ours[0] == pytest.approx(total / (SEQUENCES * (SEQUENCE - 1)), rel=1e-5)


def test_sequences_of_one_document_each_fit_into_the_plan() -> None:
    """They have no mask, without which attention keeps more in Phi-3."""
    whole = Packed.cut(np.arange(SEQUENCE * 40, dtype=np.uint32) % VOCABULARY, SEQUENCE, 0, SEQUENCES)
    config = {**LLAMA, "model_type": "phi3", "pad_token_id": 0}
    _, trainer = train_ours(document(model={"config": config}), "resident", whole, 1)
    assert trainer.device_arena.peak["activations"] <= trainer.plan.device["activations"]


def test_only_where_it_is_asked_for() -> None:
    packed = data()
    across, _ = train_ours(document(data={**DATA, "packing": "across-documents"}), "resident", packed, 2)
    within, _ = train_ours(document(), "resident", packed, 2)
    assert across != within
    unsaid, _ = train_ours(engine(steps=STEPS), "resident", packed, 2)
    assert across == unsaid


def test_a_zeroth_order_run_keeps_them_apart_too() -> None:
    given = {"optimizer": {"name": "ZerothOrder", "learningRate": 1e-4}, "mode": "resident", "loss": "tiled"}
    within, _ = train_ours(document(**given), "resident", data(), 2)
    streamed, _ = train_ours(document(**given), "parameter-offload", data(), 2)
    across, _ = train_ours(engine(steps=STEPS, **given), "resident", data(), 2)
    assert within == streamed != across


def test_sequences_that_are_short_at_first_have_the_positions_of_their_tokens() -> None:
    given = document(lengthWarmup={"start": 8, "steps": STEPS})
    packed = data()
    ours, trainer = train_ours(given, "half", packed)
    assert trainer.spec.length_warmup is not None
    lengths = [trainer.spec.length_warmup.length(step, SEQUENCE) for step in range(STEPS)]
    tokens, positions = (
        [whole[:, :length].contiguous() for whole, length in zip(each, lengths, strict=True)]
        for each in steps_of(packed)
    )
    losses, _ = train_plainly(
        LLAMA, VOCABULARY, tokens, 2, given["optimizer"], fused=True, positions=positions
    )
    assert ours == losses


def test_the_blocks_share_one_mask() -> None:
    spec = parse_engine(document())
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, "resident"), CPU)
    config: Any = trainer.model.config
    assert config._attn_implementation == IMPLEMENTATION
    given: list[torch.Tensor] = []
    for module in trainer.model.modules():
        if type(module).__name__ == "LlamaAttention":
            module.register_forward_pre_hook(
                lambda module, args, named: given.append(named["attention_mask"]), with_kwargs=True
            )
    trainer.step(data())
    trainer.close()
    (first, second), dtype = given[:2], torch.float32
    assert first.data_ptr() == second.data_ptr()
    expected = mask_of(torch.from_numpy(data().positions(0, SEQUENCES))[:2], dtype)
    assert expected is not None
    assert torch.equal(first, expected)
    assert set(first.flatten().tolist()) == {0.0, float("-inf")}


def test_a_mask_is_of_its_own_document_and_of_nothing_later() -> None:
    mask = mask_of(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]]), torch.float32)
    assert mask is not None
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert (mask[1, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert mask_of(torch.arange(5)[None].expand(2, -1), torch.float32) is None


BLOOM: dict[str, Any] = {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 4}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("config", [BLOOM, MAMBA])
def test_a_model_without_positions_is_refused_before_anything_is_made(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="takes no positions") as refused:
        open_model(parse_engine(document(model={"config": config})), None, VOCABULARY, 0)
    assert refused.value.field == "spec.engine.data.packing"
    across = document(model={"config": config}, data={**DATA, "packing": "across-documents"})
    open_model(parse_engine(across), None, VOCABULARY, 0)


def test_a_model_that_sees_the_document_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busbar.workloads.training.documents._additive", lambda *args, **rest: None)
    with pytest.raises(InvalidJob, match="a document sees the document before in LlamaForCausalLM"):
        train_ours(document(), "resident", data())


def test_it_is_a_part_of_a_runs_identity_where_it_is_asked_for() -> None:
    plain, across, within = (
        parse_engine(
            engine(
                data={**DATA, "packing": each} if each else {k: v for k, v in DATA.items() if k != "packing"}
            )
        )
        for each in (None, "across-documents", "within-documents")
    )
    assert plain.identity == across.identity != within.identity


@pytest.mark.parametrize("way", ["keep", "recompute"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_scheduler_knows_the_bytes_of_the_mask(way: str, ranks: int) -> None:
    length = 1024
    model = {"config": {**LLAMA, "max_position_embeddings": length}}
    long = {**DATA, "sequenceLength": length}
    spec = parse_engine(document(model=model, data=long, parallelism={"sequence": ranks}, dtype="bfloat16"))
    recipe = open_model(spec, None, VOCABULARY, 0)
    needed = measure_demand(recipe, spec, CPU, ranks).training_bytes(way)
    shape = ModelShape.from_config({"vocab_size": VOCABULARY, **model["config"]})
    batch = replace(batch_shape(spec), activations=way)
    assert mask_bytes(batch)[0] == 2 * length**2 * 2  # of a micro-batch of two
    assert activations(shape, batch) == pytest.approx(needed, rel=0.08)
    assert activations(shape, replace(batch, packing="across-documents")) < 0.85 * activations(shape, batch)


def test_a_mask_that_is_larger_than_all_else_is_made_of_a_boolean_one() -> None:
    shape = ModelShape.from_config({"vocab_size": VOCABULARY, **LLAMA, "num_hidden_layers": 1})
    batch = BatchShape(
        2, 16384, 1, "bfloat16", "recompute", loss="tiled", mlp="tiled", packing="within-documents"
    )
    assert activations(shape, batch) > 3 * 16384**2
    assert activations(shape, replace(batch, dtype="float32")) > 5 * 16384**2


def test_a_plan_says_what_the_mask_takes(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    said = {}
    for packing in ("across-documents", "within-documents"):
        config = {**LLAMA, "max_position_embeddings": 2048}
        given = manifest(
            model={"config": config},
            data={**DATA, "sequenceLength": 2048, "packing": packing},
            mode="resident",
        )
        file.write_text(json.dumps(given))
        said[packing] = CliRunner().invoke(plan, [str(file)]).output
        answer = json.loads(CliRunner().invoke(plan, [str(file), "--json"]).output)
        assert answer["packing"] == {"asked": packing, "maskBytes": 2 * 2048**2 * 4}
    assert "kept apart by a mask, which takes 32.0 MiB of them" in said["within-documents"]
    assert "kept apart" not in said["across-documents"]


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole, claims = with_text(tmp_path / "whole"), with_text(tmp_path / "claims")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS["part-00.txt"].splitlines())
    for claim in (whole, claims):
        (claim / "text" / "rows.jsonl").write_text(rows)
    assert start(whole, steps=6, optimizer=CONSTANT, data=DATA)[0] == 0
    assert start(claims, steps=3, optimizer=CONSTANT, data=DATA)[0] == 0
    code, status, _ = start(claims, steps=6, optimizer=CONSTANT, data=DATA)
    assert (code, status["resumedFromStep"], status["replayMismatches"]) == (0, 3, 0)
    ours, theirs = weights(claims), weights(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    code, status, _ = start(claims, adopt=True, steps=9, optimizer=CONSTANT)
    assert code == 2
    assert "data.packing 'within-documents' (now None)" in status["message"]
