"""What the folder of an adapter may hold."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.serving.adapted import ALL_LINEAR, Family, save_adapter
from tests.serving.models import save_model
from tests.training.small import LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.serving.adapter_files import MAX_RANK, WEIGHTS, read_adapter
from busbar.workloads.serving.architecture import parse_architecture, read_architecture
from busbar.workloads.serving.errors import AdapterInvalid
from busbar.workloads.training import adapter as training
from busbar.workloads.training.settings import Adapter as Trained


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def _pop(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(next(n for n in sorted(tensors) if n.endswith("lora_A.weight")))


def _pop_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if "layers.1." in n]:
        del tensors[name]


def _head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(4, 64)


def _whole(tensors: dict[str, torch.Tensor]) -> None:
    for name, each in list(tensors.items()):
        tensors[name] = each.to(torch.int32)


def _linked(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    shutil.move(folder / WEIGHTS, outside)
    (folder / WEIGHTS).symlink_to(outside)


def _looped(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


def _foldered(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def _truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no weights": (lambda f: os.remove(f / WEIGHTS), "is missing"),
    "no config": (lambda f: os.remove(f / "adapter_config.json"), "is missing"),
    "not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is not JSON"),
    "deep JSON": (lambda f: (f / "adapter_config.json").write_text("[" * 10**5), "is not JSON"),
    "half a file": (_truncated, "cannot be read as safetensors"),
    "a link": (_linked, "leads out of the adapter's folder"),
    "another method": (lambda f: change_config(f, peft_type="IA3"), "only LORA is served"),
    "another task": (lambda f: change_config(f, task_type="SEQ_CLS"), "SEQ_CLS"),
    "DoRA": (lambda f: change_config(f, use_dora=True), "'use_dora' = True is not served"),
    "whole modules": (lambda f: change_config(f, modules_to_save=["lm_head"]), "modules_to_save"),
    "biases": (lambda f: change_config(f, bias="all"), "'bias' = 'all'"),
    "something new": (lambda f: change_config(f, use_next_year=1), "use_next_year"),
    "PiSSA": (lambda f: change_config(f, init_lora_weights="pissa"), "changes the base's weights"),
    "a rank of text": (lambda f: change_config(f, r="4"), "r must be a number above 0"),
    "no rank": (lambda f: change_config(f, r=0), "r must be a number above 0"),
    "half a rank": (lambda f: change_config(f, rank_pattern={"q_proj": 2.5}), "a whole number, not 2.5"),
    "a number without end": (lambda f: change_config(f, lora_alpha=10**400), "below 1e\\+09"),
    "not a number": (lambda f: change_config(f, lora_alpha=float("nan")), "must be a number above 0"),
    "a loop of links": (_looped, "cannot be read"),
    "a folder for a file": (_foldered, "is missing"),
    "no alpha": (lambda f: change_config(f, lora_alpha=None), "lora_alpha must be a number"),
    "another rank": (lambda f: change_config(f, r=8), "adapter of another model"),
    "rank 4096": (lambda f: change_config(f, r=4096), f"up to {MAX_RANK} are served"),
    "a pattern": (lambda f: change_config(f, rank_pattern={"(q|k)+": 2}), "is a regular expression"),
    "no targets": (lambda f: change_config(f, target_modules=[]), "target_modules must name layers"),
    "too many targets": (lambda f: change_config(f, target_modules=ALL_LINEAR), "its weights are missing"),
    "too few targets": (lambda f: change_config(f, target_modules=["q_proj"]), "does not name it"),
    "a NaN": (lambda f: change_weights(f, _nan), "NaN or an infinity"),
    "half a pair": (lambda f: change_weights(f, _pop), "only one of lora_A and lora_B"),
    "a layer less": (lambda f: change_weights(f, _pop_layer), "its weights are missing"),
    "of the head": (lambda f: change_weights(f, _head), "no LoRA weight of a linear layer"),
    "whole numbers": (lambda f: change_weights(f, _whole), "not floating-point"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_folder_is_refused_beside_an_accepted_one(name: str, tiny: Family, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    folder = tmp_path / "adapter"
    shutil.copytree(tiny.sources[0].folder, folder)
    arch = read_architecture(tiny.folder)
    read_adapter(folder, arch, torch.float32)
    change(folder)
    with pytest.raises(AdapterInvalid, match=message):
        read_adapter(folder, arch, torch.float32)


def test_an_adapter_of_another_base_is_refused(tiny: Family, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", hidden_size=32, num_hidden_layers=1)
    save_adapter(other, tmp_path / "adapter", 0)
    save_adapter(save_model(tmp_path / "deeper", num_hidden_layers=3), tmp_path / "deep", 0)
    arch = read_architecture(tiny.folder)
    with pytest.raises(AdapterInvalid, match="Is it the adapter of another model"):
        read_adapter(tmp_path / "adapter", arch, torch.float32)
    with pytest.raises(AdapterInvalid, match="which has 2 layers"):
        read_adapter(tmp_path / "deep", arch, torch.float32)


def test_links_within_the_folder_are_followed(tiny: Family, tmp_path: Path) -> None:
    """As in a mounted ConfigMap."""
    shutil.copytree(tiny.sources[0].folder, tmp_path / "adapter" / "..data")
    for name in ("adapter_config.json", WEIGHTS):
        (tmp_path / "adapter" / name).symlink_to(Path("..data") / name)
    read_adapter(tmp_path / "adapter", read_architecture(tiny.folder), torch.float32)


def test_the_scale_is_part_of_the_digest(tiny: Family, tmp_path: Path) -> None:
    shutil.copytree(tiny.sources[0].folder, tmp_path / "adapter")
    arch = read_architecture(tiny.folder)
    before = read_adapter(tmp_path / "adapter", arch, torch.float32).digest
    change_config(tmp_path / "adapter", lora_alpha=1)
    assert read_adapter(tmp_path / "adapter", arch, torch.float32).digest != before


def test_what_our_training_writes_is_read(tmp_path: Path) -> None:
    """Its `adapter.save`, with every linear layer in the list of targets."""
    config: dict[str, Any] = {"vocab_size": 64, **LLAMA}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))  # type: ignore[no-untyped-call]
    arch = parse_architecture(model.config.to_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = training.attach(
            model, Trained(4, 8.0, 0.0, targets=None, rs_lora=True, dora=False, merge=False), 0
        )
    training.save(adapted, tmp_path)
    assert len(read_adapter(tmp_path, arch, torch.float32).factors) == 7 * arch.layers
