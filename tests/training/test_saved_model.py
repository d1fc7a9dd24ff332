"""A folder of weights that is not whole, or not its config's, is refused; none of it is made up at random."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.small import LLAMA, VOCABULARY, engine
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import ModelRecipe, open_model
from busbar.workloads.training.saved_model import INDEX, SINGLE, check_files

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model, saved as one file (`single`) and as several (`sharded`)."""
    folder = tmp_path_factory.mktemp("models")
    settings = {**LLAMA, "vocab_size": VOCABULARY}
    make: Any = AutoModelForCausalLM.from_config
    model = make(AutoConfig.for_model(settings.pop("model_type"), **settings))
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="40KB")
    assert len(shards(folder / "sharded")) > 2
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def opened(folder: Path) -> ModelRecipe:
    spec = parse_engine(engine(model={"uri": "pvc://model"}, tokenizer={"uri": "pvc://tokenizer"}))
    return open_model(spec, folder, VOCABULARY, 0)


def config(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, {"format": "pt"})

    return rewrite


def shorten(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def index(change: Callable[[dict[str, str]], object]) -> Damage:
    def rewrite(folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text())
        change(document["weight_map"])
        (folder / INDEX).write_text(json.dumps(document))

    return rewrite


BROKEN_FILES: list[tuple[str, Damage, str]] = [
    ("single", lambda folder: (folder / SINGLE).unlink(), "no weights: neither model.safetensors nor"),
    ("single", pickled, "its weights as pytorch_model.bin, which may run code"),
    ("single", lambda folder: shorten(folder / SINGLE, 5), "not a whole safetensors file"),
    ("single", lambda folder: shorten(folder / SINGLE, 300), "its header is cut off"),
    ("single", lambda folder: shorten(folder / SINGLE, -64), "not a whole safetensors file: it has"),
    ("sharded", lambda folder: (folder / INDEX).unlink(), "without model.safetensors.index.json"),
    ("sharded", lambda folder: (folder / INDEX).write_text("[]"), "is not an index of weights"),
    ("sharded", lambda folder: shards(folder)[1].unlink(), "lacks model-00002-of-"),
    ("sharded", lambda folder: shorten(shards(folder)[1], -4), "model-00002-of-.* is not a whole"),
    ("sharded", lambda folder: shutil.copy(shards(folder)[0], shards(folder)[1]), "model-00002-of-.* lacks"),
    ("sharded", index(lambda places: places.update(x="../model.safetensors")), "not a file beside it"),
    ("single", config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized weights"),
]
OTHER_WEIGHTS: list[tuple[Damage, str]] = [
    (weights(lambda tensors: tensors.pop("model.norm.weight")), r"lacks model\.norm\.weight:"),
    (config(num_hidden_layers=4), r"lacks model\.layers\.2\..* more: .* of the LlamaForCausalLM"),
    (config(model_type="gpt2", architectures=["GPT2LMHeadModel"]), r"lacks .*GPT2LMHeadModel"),
    (config(intermediate_size=80), "in another shape"),
    (config(num_hidden_layers=1), r"holds model\.layers\.1\..*, for which this model has no place"),
    (weights(lambda tensors: tensors["model.norm.weight"].fill_(math.nan)), r"not finite in model\.norm"),
]


def test_constants_that_old_versions_saved_are_left_unread(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved / "single", folder)
    weights(lambda tensors: tensors.update({"model.layers.0.masked_bias": torch.tensor(-1e4)}))(folder)
    assert isinstance(opened(folder).build(), torch.nn.Module)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_whole_folder_is_read(kind: str, saved: Path) -> None:
    recipe = opened(saved / kind)
    ours, theirs = recipe.build(), load_file(saved / "single" / SINGLE)
    assert all(torch.equal(dict(ours.named_parameters())[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(("kind", "damage", "said"), BROKEN_FILES, ids=[said for *_, said in BROKEN_FILES])
def test_broken_files_are_refused_before_anything_is_made(
    kind: str, damage: Damage, said: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved / kind, folder)
    damage(folder)
    with pytest.raises(InvalidJob, match=said) as refusal:
        opened(folder)
    assert refusal.value.field == "spec.engine.model.uri"


@pytest.mark.parametrize(("damage", "said"), OTHER_WEIGHTS, ids=[said for _, said in OTHER_WEIGHTS])
def test_weights_that_are_not_the_models_are_refused_by_name(
    damage: Damage, said: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved / "single", folder)
    damage(folder)
    recipe = opened(folder)
    with pytest.raises(InvalidJob, match=said):
        recipe.build()


def test_the_check_of_files_needs_no_config(saved: Path) -> None:
    check_files(saved / "single")
    check_files(saved / "sharded")
