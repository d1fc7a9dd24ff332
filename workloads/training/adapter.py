"""LoRA and DoRA on a saved model, by `peft`: the base is frozen, and only the adapter is trained, saved and written.

The adapter has the type of the base (peft would make it fp32 beside a bfloat16 base): under bfloat16 its fp32 master
weights are those of the optimizer, as in full training.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.first_weights import Stored
from busbar.workloads.training.settings import Adapter

FIELD = "spec.engine.adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # peft's own


def attach(model: nn.Module, adapter: Adapter, seed: int) -> nn.Module:
    """`model` frozen, with a new adapter whose weights are drawn from the seed. Raises InvalidJob."""
    from peft import LoraConfig, get_peft_model

    layers = _layers(model)
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=_whole(adapter.alpha),
        lora_dropout=adapter.dropout,
        target_modules=_targets(layers, adapter),
        use_rslora=adapter.rs_lora,
        use_dora=adapter.dora,
        fan_in_fan_out=not any(isinstance(layer, nn.Linear) for layer in layers.values()),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    make: Any = get_peft_model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renames
        try:
            adapted: nn.Module = make(model, config, autocast_adapter_dtype=False)
        except ValueError as problem:
            raise InvalidJob(FIELD, f"is refused by peft: {problem!s:.300}", "correct it") from problem
    return adapted


def _whole(alpha: float) -> Any:
    """As an integer where it is one: peft takes any number, and not all who read its files do."""
    return int(alpha) if alpha == int(alpha) else alpha


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can be adapted, by name: linear ones but the output's, which may share its weights."""
    from transformers.pytorch_utils import Conv1D  # a linear layer with transposed weights

    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _targets(layers: dict[str, nn.Module], adapter: Adapter) -> list[str]:
    """Names as peft matches them: whole ones, or what a name ends with behind a dot."""
    exist = sorted({name.rpartition(".")[2] for name in layers})
    if adapter.targets is None:
        return exist
    for target in adapter.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise InvalidJob(
                f"{FIELD}.targets",
                f"{target} matches no linear layer of this model",
                f"name some of {', '.join(exist)}, or leave it out for all of them",
            )
    return list(adapter.targets)


def measure_magnitudes(model: nn.Module, stored: Stored) -> None:
    """Make the magnitudes of a DoRA that was attached to a base without memory, matrix by matrix."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if not isinstance(module, LoraLayer) or _NAME not in module.lora_magnitude_vector:
            continue
        layer: Any = module
        base, magnitudes = layer.get_base_layer(), layer.lora_magnitude_vector[_NAME]
        with stored.whole(base.weight):
            magnitudes.update_layer(
                base_layer=base,
                lora_A=layer.lora_A[_NAME].weight,
                lora_B=layer.lora_B[_NAME].weight,
                scaling=layer.scaling[_NAME],
            )


def merge_bytes(model: nn.Module) -> int:
    """What merging needs beside the weights: a few copies of the largest adapted matrix, one after another."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper  # of all experts' matrices in one parameter

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    weights = [
        layer.get_param()  # type: ignore[no-untyped-call]
        if isinstance(layer, ParamWrapper)
        else layer.get_base_layer().weight
        for layer in layers
    ]
    return 4 * max((weight.numel() * weight.itemsize for weight in weights), default=0)


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """A model of meta tensors with its shapes on `device`: under fake tensors, what training would see.

    Fake tensors cannot be given to peft, which moves its layers from one device to another.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return model


def save(model: nn.Module, folder: Path) -> None:
    """Write the adapter as `PeftModel.from_pretrained` reads it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    read: Any = get_peft_model_state_dict
    weights = read(model, save_embedding_layers=False)
    whole = {name: from_dlpack(value.detach()).contiguous().cpu() for name, value in weights.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    config: Any = copy.copy(model.peft_config[_NAME])  # type: ignore[index]
    config.inference_mode = True
    # A set has another order in each process.
    document = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
    (folder / CONFIG).write_text(document + "\n")


def merged(model: nn.Module) -> nn.Module:
    """The base with the adapter added to its weights, in place."""
    merge: Any = model.merge_and_unload
    base: nn.Module = merge()
    return base


def remove_old(output: Path, subfolder: str) -> None:
    """Remove an earlier result's adapter from `output`."""
    if (output / subfolder / CONFIG).is_file():
        shutil.rmtree(output / subfolder)
