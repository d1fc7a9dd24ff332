"""Loads the safetensors of a model folder into fused, ready-to-run matrices.

Query, key and value projections become one matrix, gate and up another: fewer, larger products. The
file's tensors must be exactly the ones the architecture names, each with its shape; a surplus or a
missing tensor is an error, because either means that we would compute another model.

A tensor is read when its matrix is built and dropped at once, so that loading never holds the model twice. With a form
(`weightcodes.py`) the matrices of the layers are kept in codes; each is made in float first, and dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.errors import ModelCorrupt, ModelFileMissing
from busbar.workloads.serving.integer_linear import make_coded_linear
from busbar.workloads.serving.linear import Linear, Move, PlainLinear, can_pack, make_linear
from busbar.workloads.serving.weightcodes import WeightForm


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def moved(self, move: Move) -> Layer:
        return Layer(
            input_norm=move(self.input_norm),
            qkv=self.qkv.moved(move),
            q_norm=None if self.q_norm is None else move(self.q_norm),
            k_norm=None if self.k_norm is None else move(self.k_norm),
            out=self.out.moved(move),
            mlp_norm=move(self.mlp_norm),
            gate_up=self.gate_up.moved(move),
            down=self.down.moved(move),
        )


@dataclass(frozen=True)
class Weights:
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear

    @property
    def bytes(self) -> int:
        """Of the matrices; the norms' vectors do not count."""
        embedding = self.embedding.numel() * self.embedding.element_size()
        return embedding + self.head.bytes + self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Of the layers' matrices, which may be in codes."""
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(m.bytes for m in matrices)

    def moved(self, move: Move) -> Weights:
        """The same with its tensors moved, each once, also where two matrices share one."""
        found: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in found:
                found[id(tensor)] = move(tensor)
            return found[id(tensor)]

        layers = tuple(layer.moved(once) for layer in self.layers)
        return Weights(once(self.embedding), layers, once(self.norm), self.head.moved(once))

    def dropped(self) -> Weights:
        """Nothing, in the place of these."""
        nothing = self.embedding.new_empty((0, 0))
        return Weights(nothing, (), nothing, PlainLinear(nothing, None))


def load_weights(
    folder: Path,
    arch: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm | None = None,
) -> Weights:
    """Reads the tensors of `folder` one by one and fuses what belongs together."""
    return fuse_weights(Checkpoint(folder), arch, device, dtype, form, where=str(folder))


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a folder's shards, each read anew at every look.

    A file is mapped anew for each tensor: a mapping that stays keeps every page that was read in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._shard: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for shard in _shards(folder):
            try:
                with safe_open(str(shard), framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (not a dict)
                        self._shard[name] = shard
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise ModelCorrupt(f"{shard} cannot be read as safetensors: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(str(self._shard[name]), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard)

    def __len__(self) -> int:
        return len(self._shard)


def fuse_weights(
    tensors: Mapping[str, torch.Tensor],
    arch: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm | None = None,
    where: str = "the checkpoint",
) -> Weights:
    """Checks names and shapes against the architecture and builds the fused matrices; those of the layers in codes if a
    form is given. Embedding, head and norms stay in `dtype`."""
    shapes = tensor_shapes(arch)
    allowed = set(shapes) | ({"lm_head.weight"} if arch.tied else set())
    surplus = sorted(n for n in tensors if n not in allowed and not n.endswith("rotary_emb.inv_freq"))
    missing = sorted(n for n in shapes if n not in tensors)
    if surplus or missing:
        raise ModelCorrupt(
            f"{where}: the tensors are not those of a {arch.family} model with {arch.layers} layers"
            + (f"; missing {_some(missing)}" if missing else "")
            + (f"; unexpected {_some(surplus)}" if surplus else "")
        )
    found = (
        tensors.shapes if isinstance(tensors, Checkpoint) else {n: tuple(tensors[n].shape) for n in shapes}
    )
    for name, shape in shapes.items():
        if found[name] != shape:
            raise ModelCorrupt(f"{where}: {name} has shape {found[name]}, config.json implies {shape}")

    pack = can_pack(device, dtype)

    def joined(prefix: str, names: tuple[str, ...], kind: str) -> torch.Tensor | None:
        parts = [full for n in names if (full := f"{prefix}{n}.{kind}") in shapes]
        if not parts:
            return None
        rows = sum(shapes[name][0] for name in parts)
        whole = torch.empty((rows, *shapes[parts[0]][1:]), device=device, dtype=dtype)
        first = 0
        for name in parts:
            whole[first : first + shapes[name][0]].copy_(tensors[name])
            first += shapes[name][0]
        return whole

    def needed(prefix: str, *names: str) -> torch.Tensor:
        matrix = joined(prefix, names, "weight")
        assert matrix is not None  # `missing` above is empty
        return matrix

    def linear(prefix: str, *names: str) -> Linear:
        weight, bias = needed(prefix, *names), joined(prefix, names, "bias")
        return make_linear(weight, bias, pack) if form is None else make_coded_linear(weight, bias, form)

    def layer(index: int) -> Layer:
        top = f"model.layers.{index}."
        attention, mlp = f"{top}self_attn.", f"{top}mlp."
        return Layer(
            input_norm=needed(top, "input_layernorm"),
            qkv=linear(attention, "q_proj", "k_proj", "v_proj"),
            q_norm=joined(attention, ("q_norm",), "weight"),
            k_norm=joined(attention, ("k_norm",), "weight"),
            out=linear(attention, "o_proj"),
            mlp_norm=needed(top, "post_attention_layernorm"),
            gate_up=linear(mlp, "gate_proj", "up_proj"),
            down=linear(mlp, "down_proj"),
        )

    embedding = needed("model.", "embed_tokens")
    return Weights(
        embedding=embedding,
        layers=tuple(layer(i) for i in range(arch.layers)),
        norm=needed("model.", "norm"),
        head=make_linear(embedding if arch.tied else needed("", "lm_head"), None, pack),
    )


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor the checkpoint must hold."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, arch.hidden),
        "model.norm.weight": (arch.hidden,),
    }
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden)
    for index in range(arch.layers):
        top = f"model.layers.{index}."
        linear = {
            "self_attn.q_proj": (q, arch.hidden, arch.qkv_bias),
            "self_attn.k_proj": (kv, arch.hidden, arch.qkv_bias),
            "self_attn.v_proj": (kv, arch.hidden, arch.qkv_bias),
            "self_attn.o_proj": (arch.hidden, q, arch.o_bias),
            "mlp.gate_proj": (arch.intermediate, arch.hidden, arch.mlp_bias),
            "mlp.up_proj": (arch.intermediate, arch.hidden, arch.mlp_bias),
            "mlp.down_proj": (arch.hidden, arch.intermediate, arch.mlp_bias),
        }
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{top}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{top}{name}.bias"] = (rows,)
        shapes[f"{top}input_layernorm.weight"] = (arch.hidden,)
        shapes[f"{top}post_attention_layernorm.weight"] = (arch.hidden,)
        if arch.qk_norm:
            shapes[f"{top}self_attn.q_norm.weight"] = (arch.head_dim,)
            shapes[f"{top}self_attn.k_norm.weight"] = (arch.head_dim,)
    return shapes


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelCorrupt(f"{index} is not a shard index: {error!r}") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelFileMissing(
                f"{folder / name} is missing: the engine reads weights from safetensors files only"
            )
    return [folder / name for name in names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
