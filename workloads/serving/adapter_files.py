"""Reads a LoRA adapter as PEFT saves it, and refuses everything that would be computed wrongly or cannot belong here.

Served: plain LoRA (also rank-stabilised) on the linear layers of the decoder. What changes the result otherwise (DoRA,
whole modules, biases, initialisations that change the base) is refused by name, and so is every setting that this
reader does not know, unless it is neutral. Shapes are checked from the file's header, before any weight is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from busbar.kube.documents import shown
from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.errors import AdapterInvalid
from busbar.workloads.serving.tensor_names import tensor_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 512
MAX_CONFIG_BYTES = 2**20
MOST_NUMBER = 1e9
MATRICES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The linear layers that each fused matrix of `weights.Layer` is made of, in its order."""
LINEAR = tuple(part for parts in MATRICES.values() for part in parts)
ATTENTION = (*MATRICES["qkv"], *MATRICES["out"])
WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
    }
)
"""Of training, or of PEFT's own bookkeeping."""
READ = frozenset(
    {
        *("alpha_pattern", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform"),
        *("lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "task_type", "use_rslora"),
    }
)
NEUTRAL: tuple[object, ...] = (None, False, "", "none", [], {})
PLAIN_STARTS: tuple[object, ...] = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base's weights as they are."""
_TENSOR = re.compile(r"base_model\.model\.(model\.layers\.([0-9]{1,5})\.(.+))\.lora_([AB])\.weight")
_PATTERN = re.compile(r"[A-Za-z0-9_.]+")

Part = tuple[int, str]
"""A linear layer: number of the decoder layer, and its name in it."""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter in memory, checked."""

    factors: Mapping[Part, tuple[torch.Tensor, torch.Tensor]]
    """A [rank, in] and B [out, rank], B times the adapter's scale; on the CPU."""
    rank: int
    """The greatest of all parts."""
    digest: str
    """Of what is computed with: the factors, in this dtype."""


@dataclass(frozen=True)
class _Config:
    rank: float
    alpha: float
    stabilised: bool
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None
    """What the names of all adapted layers end with; None: the file alone says which they are."""

    def rank_of(self, name: str) -> float:
        return _matching(self.ranks, name, self.rank)

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return _matching(self.alphas, name, self.alpha) / (sqrt(rank) if self.stabilised else rank)


def read_adapter(folder: Path, arch: Architecture, dtype: torch.dtype) -> AdapterFile:
    """The adapter in `folder`, for a model of this architecture. Raises AdapterInvalid."""
    try:
        return _read(folder, arch, dtype)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise AdapterInvalid(f"the adapter folder {shown(str(folder))} cannot be read: {error}") from error


def _read(folder: Path, arch: Architecture, dtype: torch.dtype) -> AdapterFile:
    if not folder.is_dir():
        raise AdapterInvalid(f"the adapter folder {folder} does not exist")
    config_path, weights_path = _inside(folder, CONFIG), _inside(folder, WEIGHTS)
    config = _config(config_path, linear_layers(arch))
    try:
        with safe_open(str(weights_path), framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            parts = _check_names(shapes, config, arch, str(weights_path))
            _check_shapes(parts, shapes, config, arch, str(weights_path))
            factors = {part: _factors(file, part, names, config, dtype) for part, names in parts.items()}
    except SafetensorError as error:
        raise AdapterInvalid(f"{weights_path} cannot be read as safetensors: {error}") from error
    for part, (a, b) in factors.items():
        if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
            raise AdapterInvalid(f"{weights_path}: the weights of {_name(part)} have a NaN or an infinity")
    return AdapterFile(factors, max(a.shape[0] for a, _ in factors.values()), _digest(factors))


def _inside(folder: Path, name: str) -> Path:
    """The file's real path; a link may not lead out of the folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise AdapterInvalid(f"{folder / name} is a link that leads out of the adapter's folder")
    if not path.is_file():
        raise AdapterInvalid(
            f"{folder / name} is missing: the folder of an adapter holds what PEFT's save_pretrained writes "
            f"({CONFIG}, {WEIGHTS})"
        )
    return path


def linear_layers(arch: Architecture) -> tuple[str, ...]:
    """What of a layer takes an adapter: its linear layers, but no experts and not what chooses them."""
    return LINEAR if arch.routing is None else ATTENTION


def _config(path: Path, linear: tuple[str, ...]) -> _Config:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterInvalid(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        given = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise AdapterInvalid(f"{path} is not JSON: {error}") from error
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        kind = given.get("peft_type") if isinstance(given, dict) else None
        raise AdapterInvalid(f"{path}: peft_type is {shown(kind)}; only LORA is served")
    if given.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterInvalid(f"{path}: task_type {shown(given['task_type'])} is not served, only CAUSAL_LM")
    if given.get("init_lora_weights") not in PLAIN_STARTS:
        raise AdapterInvalid(
            f"{path}: init_lora_weights {shown(given['init_lora_weights'])} changes the base's weights; save the "
            "adapter converted to plain LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    for key, value in sorted(given.items()):
        if key not in READ | WITHOUT_EFFECT and value not in NEUTRAL:
            raise AdapterInvalid(f"{path}: {shown(key)} = {shown(value)} is not served, only plain LoRA is")
    rank = _number(given.get("r"), f"{path}: r")
    ranks = _patterns(given.get("rank_pattern"), f"{path}: rank_pattern")
    for each in (rank, *ranks.values()):
        if each != int(each):
            raise AdapterInvalid(f"{path}: a rank must be a whole number, not {each:g}")
    return _Config(
        rank,
        _number(given.get("lora_alpha"), f"{path}: lora_alpha"),
        bool(given.get("use_rslora")),
        ranks,
        _patterns(given.get("alpha_pattern"), f"{path}: alpha_pattern"),
        _targets(given, path, linear),
    )


def _targets(given: Mapping[str, Any], path: Path, linear: tuple[str, ...]) -> tuple[str, ...] | None:
    targets = given.get("target_modules")
    if isinstance(targets, str):
        return linear if targets.lower() == "all-linear" else None
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
        raise AdapterInvalid(f"{path}: target_modules must name layers, not {shown(targets)}")
    limited = any(
        given.get(key) not in NEUTRAL for key in ("exclude_modules", "layers_pattern", "layers_to_transform")
    )
    return None if limited else tuple(targets)


def _patterns(given: object, where: str) -> Mapping[str, float]:
    if given in NEUTRAL:
        return {}
    if not isinstance(given, dict):
        raise AdapterInvalid(f"{where} must map names to numbers, not {shown(given)}")
    for name in given:
        if _PATTERN.fullmatch(name) is None:
            raise AdapterInvalid(
                f"{where}: {shown(name)} is a regular expression; only names of layers are served"
            )
    return {name: _number(value, f"{where}.{name}") for name, value in given.items()}


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST_NUMBER:
        raise AdapterInvalid(
            f"{where} must be a number above 0 and below {MOST_NUMBER:g}, not {shown(value)}"
        )
    return float(value)


def _matching(patterns: Mapping[str, float], name: str, default: float) -> float:
    """PEFT's rule: the first pattern that is the name, or its end behind a dot."""
    return next((v for key, v in patterns.items() if f".{name}".endswith(f".{key}")), default)


def _check_names(
    shapes: Iterable[str], config: _Config, arch: Architecture, where: str
) -> dict[Part, dict[str, str]]:
    """The two tensors of each adapted layer, by A and B."""
    parts: dict[Part, dict[str, str]] = {}
    linear = linear_layers(arch)
    for name in sorted(shapes):
        match = _TENSOR.fullmatch(name)
        if match is None or match[3] not in linear or int(match[2]) >= arch.layers:
            raise AdapterInvalid(
                f"{where}: {shown(name)} is no LoRA weight of a linear layer of this model, which has "
                f"{arch.layers} layers with {', '.join(linear)}"
                f"{'' if arch.routing is None else '; adapters of experts are not served'}"
            )
        parts.setdefault((int(match[2]), match[3]), {})[match[4]] = name
    halves = [_name(part) for part, pair in parts.items() if len(pair) < 2]
    if halves:
        raise AdapterInvalid(f"{where}: of {halves[0]} only one of lora_A and lora_B is there")
    if not parts:
        raise AdapterInvalid(f"{where} holds no weights")
    if config.targets is not None:
        wanted = [
            (layer, part)
            for layer in range(arch.layers)
            for part in linear
            if any(f".{_name((layer, part))}".endswith(f".{target}") for target in config.targets)
        ]
        missing = [_name(part) for part in wanted if part not in parts]
        if missing:
            raise AdapterInvalid(
                f"{where}: {missing[0]} is one of target_modules, but its weights are missing"
            )
        unasked = [_name(part) for part in parts if part not in set(wanted)]
        if unasked:
            raise AdapterInvalid(f"{where}: {unasked[0]} has weights, but target_modules does not name it")
    return parts


def _check_shapes(
    parts: Mapping[Part, Mapping[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    config: _Config,
    arch: Architecture,
    where: str,
) -> None:
    base = tensor_shapes(arch)
    for part, names in parts.items():
        rows, columns = base[f"{_name(part)}.weight"]
        a, b = shapes[names["A"]], shapes[names["B"]]
        rank = int(config.rank_of(_name(part)))
        if rank > MAX_RANK:
            raise AdapterInvalid(f"{where}: {_name(part)} has rank {rank}; up to {MAX_RANK} are served")
        if a != (rank, columns) or b != (rows, rank):
            raise AdapterInvalid(
                f"{where}: the weights of {_name(part)} have shapes {a} and {b}; for this model and rank "
                f"{rank} they must be {(rank, columns)} and {(rows, rank)}. Is it the adapter of another model?"
            )


def _factors(
    file: Any, part: Part, names: Mapping[str, str], config: _Config, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = file.get_tensor(names["A"]), file.get_tensor(names["B"])
    if not (a.is_floating_point() and b.is_floating_point()):
        raise AdapterInvalid(f"the weights of {_name(part)} are {a.dtype} and {b.dtype}, not floating-point")
    return a.to(dtype), (b.float() * config.scale_of(_name(part))).to(dtype)


def _digest(factors: Mapping[Part, tuple[torch.Tensor, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part, pair in sorted(factors.items(), key=lambda item: item[0]):
        digest.update(f"{_name(part)} {tuple(pair[0].shape)} ".encode())
        for tensor in pair:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _name(part: Part) -> str:
    return f"model.layers.{part[0]}.{part[1]}"
