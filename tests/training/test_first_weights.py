"""Weights that come in parts have the bits of a model that is made at once, and need no memory for all of it."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.gang import run_gang
from tests.training.small import GPT2, LLAMA, SEQUENCE, VOCABULARY, engine
from tests.training.test_phases import M_MMAP_THRESHOLD
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.machine.limits import PeakMeter
from busbar.workloads.training import trainer as trainer_module
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.first_weights import IN_MODEL, Source
from busbar.workloads.training.groups import release_free_memory
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.meeting import StoreMeeting
from busbar.workloads.training.model import ModelRecipe, measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits, lay_out
from busbar.workloads.training.ranks import Gang
from busbar.workloads.training.saved_model import SINGLE
from busbar.workloads.training.trainer import Trainer

CPU, MIB = torch.device("cpu"), 2**20
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TRUNCATED = {  # draws again what falls outside of bounds, as often as it takes
    "model_type": "modernbert-decoder",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "cls_token_id": 0,
    "sep_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "untied llama": {**LLAMA, "tie_word_embeddings": False},
    "gpt2": GPT2,
    "experts": EXPERTS,
    "truncated normal": TRUNCATED,
}


def recipe_of(
    config: dict[str, Any] | None = None, folder: Path | None = None, **changes: Any
) -> ModelRecipe:
    model: dict[str, Any] = {"uri": "pvc://base"} if folder else {"config": dict(config or LLAMA)}
    given = {**({"tokenizer": {"uri": "pvc://base"}} if folder else {}), **changes}
    return open_model(parse_engine(engine(model=model, **given)), folder, VOCABULARY, 0)


def come(parameter: torch.nn.Parameter, source: Source) -> torch.Tensor:
    """The parameter's weights, in three pieces of which the last comes first."""
    found = torch.full((parameter.numel(),), 7.0, dtype=parameter.dtype)
    third = -(-parameter.numel() // 3)
    for start in reversed(range(0, parameter.numel(), third)):
        source.fill(found[start:][:third], parameter, start)
    return found.view(parameter.shape)


def check(recipe: ModelRecipe) -> None:
    """The same bits in parts, and the generator where it was."""
    whole = recipe.build()
    state = torch.get_rng_state()
    model, source = recipe.build_in_parts()
    assert recipe.folder is not None or torch.equal(state, torch.get_rng_state())
    expected, found = dict(whole.named_parameters()), dict(model.named_parameters())
    assert list(found) == list(expected)
    assert source is not IN_MODEL
    for name in reversed(found):
        assert torch.equal(come(found[name], source), expected[name]), name
        assert found[name].requires_grad is expected[name].requires_grad
    buffers = dict(model.named_buffers())
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_drawn_in_parts_have_the_same_bits(name: str, dtype: str) -> None:
    check(recipe_of(MODELS[name], dtype=dtype, seed=5))


def test_parameters_without_memory_are_numbers_that_are_none() -> None:
    model, _ = recipe_of({**LLAMA, "tie_word_embeddings": False}).build_in_parts()
    large = [each for each in model.parameters() if each.ndim > 1]
    assert all(bool(each.isnan().all()) and each.untyped_storage().nbytes() == 4 for each in large)


def saved(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    torch.manual_seed(3)
    given = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **LLAMA}
    make: Any = AutoModelForCausalLM.from_config
    make(AutoConfig.for_model(given.pop("model_type"), **given), dtype=dtype).save_pretrained(folder, **how)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["40KB", "1GB"])
def test_weights_that_are_read_in_parts_have_the_same_bits(
    shard: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busbar.workloads.training.first_weights.READ_BYTES", 4096)
    for kind in (torch.float32, torch.bfloat16):
        folder = saved(tmp_path / str(kind), kind, max_shard_size=shard)
        check(recipe_of(folder=folder, dtype=dtype, freeze=["model.layers.0.*"]))


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_weights_that_are_read_in_parts_has_the_same_bits(dora: bool, tmp_path: Path) -> None:
    check(recipe_of(folder=saved(tmp_path), adapter={"rank": 4, "dora": dora}))


def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    tensors = load_file(folder / SINGLE)
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[-1] = float("inf")
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    model, source = recipe_of(folder=folder).build_in_parts()
    named = dict(model.named_parameters())
    come(named["model.layers.0.mlp.up_proj.weight"], source)
    with pytest.raises(InvalidJob, match=r"not finite in model\.layers\.1\.mlp\.up_proj\.weight"):
        come(named["model.layers.1.mlp.up_proj.weight"], source)


def test_files_that_only_transformers_can_read_are_read_at_once(tmp_path: Path) -> None:
    """Names without the model's prefix, and a tensor too few, which it refuses."""
    folder = saved(tmp_path)
    tensors = load_file(folder / SINGLE)
    save_file(
        {name.removeprefix("model."): each for name, each in tensors.items()},
        folder / SINGLE,
        {"format": "pt"},
    )
    recipe = recipe_of(folder=folder)
    model, source = recipe.build_in_parts()
    assert source is IN_MODEL
    assert torch.equal(
        dict(model.named_parameters())["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"]
    )
    assert recipe.part_bytes(model) is None
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    with pytest.raises(InvalidJob, match=r"lacks model\.norm\.weight"):
        recipe.build_in_parts()


WIDE = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "vocab_size": 8192}


@dataclass(frozen=True)
class Measured:
    moved: int  # most bytes in memory until weights are in their slices, and gradients have theirs
    started: int  # until the trainer is there
    planned: int
    slices: int
    part: int


def started(gang: Gang, folder: Path | None, config: dict[str, Any]) -> tuple[Trainer, Demand]:
    vocabulary = config.get("vocab_size", VOCABULARY)
    given: dict[str, Any] = {
        "model": {"config": dict(config)},
        "tokenizer": {"train": {"vocabSize": vocabulary}},
    }
    if folder is not None:
        given = {"model": {"uri": "pvc://base"}, "tokenizer": {"uri": "pvc://base"}}
    document = engine(
        **given,
        batch={"sequences": 4, "microBatch": 1},
        parallelism={"sharding": "parameters"},
        mode="resident",
        data={"uri": "pvc://text", "sequenceLength": SEQUENCE},
    )
    spec = parse_engine(document)
    recipe = open_model(spec, folder, vocabulary, 0)
    demand = measure_demand(recipe, spec, CPU, gang.size)
    plan = lay_out(demand, MemoryLimits(None, 0, True), "resident", 0)
    return Trainer(spec, recipe, plan, CPU, ranks=gang), demand


def start(gang: Gang, meeting: StoreMeeting, folder: Path | None) -> Measured:
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    started(gang, None, LLAMA)[0].close()  # what a first use of torch and transformers loads
    bind, moved = getattr(trainer_module, "bind"), list[int]()  # noqa: B009
    release_free_memory()
    meter = PeakMeter()
    meter.reset()

    def binding(*given: Any, **more: Any) -> Any:
        bound = bind(*given, **more)
        moved.append(meter.peak_bytes())
        return bound

    setattr(trainer_module, "bind", binding)  # noqa: B010
    trainer, demand = started(gang, folder, WIDE)
    assert demand.part_bytes is not None
    measured = Measured(
        moved[0],
        meter.peak_bytes(),
        trainer.plan.phases["start"] - trainer.plan.host["checkpoint"],  # nothing is saved here
        trainer.plan.device["parameters"],
        demand.part_bytes,
    )
    trainer.close()
    return measured


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("source", ["seed", "files"])
def test_a_rank_starts_within_the_bytes_of_its_slices(source: str, ranks: int, tmp_path: Path) -> None:
    folder = None
    if source == "files":
        folder = tmp_path / "base"
        make: Any = AutoModelForCausalLM.from_config
        given = {**WIDE, "bos_token_id": 0, "eos_token_id": 0}
        make(AutoConfig.for_model(given.pop("model_type"), **given)).save_pretrained(folder)
    for found in run_gang(ranks, start, folder, tmp_path / "gang"):
        print(json.dumps(found.__dict__))
        moved = found.slices + max(found.part, found.slices)  # gradients, which come after the weights
        assert 0.95 * moved < found.moved < moved + 8 * MIB  # and what the plan's fake model leaves
        assert found.started == pytest.approx(found.planned, rel=0.05)
