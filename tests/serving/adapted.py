"""Random LoRA adapters of the tiny models, written as PEFT writes them."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tests.serving.models import greedy, save_model

from busbar.workloads.serving.settings import AdapterSource

ALL_LINEAR = "all-linear"
CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"rank": 8, "use_rslora": True},
    "odd": {"rank": 5, "target_modules": ["o_proj", "down_proj", "k_proj", "up_proj"]},
    "patterns": {
        "rank_pattern": {"q_proj": 9, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 3, "up_proj": 1},
    },
    "one layer": {"layers_to_transform": [1], "target_modules": ["gate_proj", "o_proj"]},
    "regex": {"target_modules": r".*layers\.0\.self_attn\.[qk]_proj"},
}


def save_adapter(model: Any, folder: Path, seed: int, rank: int = 4, **changes: Any) -> Any:
    """Writes an adapter of `model` to `folder`; the model with it, by PEFT."""
    given: dict[str, Any] = {"target_modules": ALL_LINEAR, "lora_alpha": 2 * rank, "task_type": "CAUSAL_LM"}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renames
        config = LoraConfig(r=rank, init_lora_weights=False, **(given | changes))
        adapted: Any = get_peft_model(copy.deepcopy(model), config)
        adapted.save_pretrained(folder)
    return adapted.eval()


def merged(adapted: Any) -> Any:
    """A copy with the adapter added to the weights, by PEFT."""
    return copy.deepcopy(adapted).merge_and_unload()


def adapted_greedy(adapted: Any, prompt: list[int], count: int) -> list[int]:
    """As `greedy`, of a model with an adapter."""
    return greedy(adapted.base_model.model, prompt, count)


@dataclass(frozen=True)
class Family:
    """A saved model with adapters of all the forms above."""

    folder: Path
    model: Any
    adapted: dict[str, Any]
    sources: tuple[AdapterSource, ...]


def make_family(root: Path, family: str, **changes: Any) -> Family:
    torch.set_num_threads(1)
    model = save_model(root / "model", family, **changes)
    adapted, sources = {}, []
    for seed, (name, given) in enumerate(CONFIGS.items()):
        source = AdapterSource(name.replace(" ", "-"), root / name)
        adapted[source.name] = save_adapter(model, source.folder, seed, **given)
        sources.append(source)
    return Family(root / "model", model, adapted, tuple(sources))
