"""Loads the safetensors of a model folder into fused, ready-to-run matrices.

Query, key and value projections become one matrix, gate and up another: fewer, larger products. The
file's tensors must be exactly the ones the architecture names, each with its shape; a surplus or a
missing tensor is an error, because either means that we would compute another model. Experts are separate tensors in the
file, and parts of `gate_up` and `down`, each below the one before it.

A tensor is read when its matrix is built and dropped at once, so that loading never holds the model twice. With a form
(`weightcodes.py`) the matrices of the layers are kept in codes; each is made in float first, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from busbar.workloads.serving.architecture import Architecture, Routing
from busbar.workloads.serving.checkpoint import Checkpoint
from busbar.workloads.serving.errors import ModelCorrupt
from busbar.workloads.serving.experts import (
    DenseMlp,
    EachExpert,
    ExpertMlp,
    Experts,
    Mlp,
    StackedExperts,
    can_stack,
)
from busbar.workloads.serving.integer_linear import kept_coded_linear
from busbar.workloads.serving.linear import (
    Keep,
    Linear,
    Move,
    PlainLinear,
    can_pack,
    keep_below,
    keep_nothing,
    kept_linear,
)
from busbar.workloads.serving.tensor_names import ROUTER, fused_names, of_experts, tensor_shapes
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
    mlp: Mlp

    def moved(self, move: Move) -> Layer:
        return Layer(
            input_norm=move(self.input_norm),
            qkv=self.qkv.moved(move),
            q_norm=None if self.q_norm is None else move(self.q_norm),
            k_norm=None if self.k_norm is None else move(self.k_norm),
            out=self.out.moved(move),
            mlp_norm=move(self.mlp_norm),
            mlp=self.mlp.moved(move),
        )

    @property
    def bytes(self) -> int:
        """Of the matrices."""
        return sum(matrix.bytes for matrix in (self.qkv, self.out, self.mlp))


class Layers(Protocol):
    """The decoder's layers in their order."""

    bytes: int
    """Of the matrices of all layers, wherever they are."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Layer]:
        """A layer may be used until the next one is asked for."""
        ...

    def moved(self, move: Move) -> Layers:
        """The same with the tensors that stay in memory moved."""
        ...

    def rest(self) -> None:
        """Gives back the memory that only a pass needs; the next pass takes it again."""
        ...

    def close(self) -> None:
        """They are used no more."""
        ...


class ResidentLayers:
    """All of them in memory."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._layers = tuple(layers)
        self.bytes = sum(layer.bytes for layer in self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def moved(self, move: Move) -> ResidentLayers:
        return ResidentLayers(layer.moved(move) for layer in self._layers)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Weights:
    embedding: torch.Tensor
    layers: Layers
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
        return self.layers.bytes

    def moved(self, move: Move) -> Weights:
        """The same with its tensors moved, each once, also where two matrices share one."""
        found: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in found:
                found[id(tensor)] = move(tensor)
            return found[id(tensor)]

        layers = self.layers.moved(once)
        return Weights(once(self.embedding), layers, once(self.norm), self.head.moved(once))

    def dropped(self) -> Weights:
        """Nothing, in the place of these, which are used no more."""
        self.layers.close()
        nothing = self.embedding.new_empty((0, 0))
        return Weights(nothing, ResidentLayers(()), nothing, PlainLinear(nothing, None))


Parts = Mapping[str, torch.Tensor]
"""The tensors of a layer: `input_norm`, `mlp_norm`, `q_norm` and `k_norm` where there are such norms; of a matrix M `M.bias`
where it has one, and `M.weight`, or `M.codes`, `M.scale` and (int4) `M.factors`."""
MakeLinear = Callable[[str, int | None], Linear]
"""A matrix by its name; of experts, which are below each other in one part, that of the expert with this number."""


def layer_of(
    parts: Parts, routing: Routing | None, linear: MakeLinear, stack: bool, experts: Experts | None = None
) -> Layer:
    """A layer of its parts; `linear` makes a matrix. Each part is read once. `stack`: all experts' matrices at once.
    `experts`: where they are not among the parts."""
    mlp: Mlp
    if routing is None:
        mlp = DenseMlp(linear("gate_up", None), linear("down", None))
    else:
        if experts is not None:
            pass
        elif stack:
            gate_up, down = (parts[f"{name}.weight"] for name in ("gate_up", "down"))
            experts = StackedExperts(
                *(each.view(routing.experts, -1, each.shape[1]) for each in (gate_up, down))
            )
        else:
            numbers = range(routing.experts)
            experts = EachExpert([DenseMlp(linear("gate_up", i), linear("down", i)) for i in numbers])
        mlp = ExpertMlp(routing, parts[f"{ROUTER}.weight"], experts)
    return Layer(
        input_norm=parts["input_norm"],
        qkv=linear("qkv", None),
        q_norm=parts.get("q_norm"),
        k_norm=parts.get("k_norm"),
        out=linear("out", None),
        mlp_norm=parts["mlp_norm"],
        mlp=mlp,
    )


def load_weights(
    folder: Path,
    arch: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm | None = None,
    keep: Keep = keep_nothing,
) -> Weights:
    """Reads the tensors of `folder` one by one and fuses what belongs together, but for what is kept."""
    return fuse_weights(Checkpoint(folder), arch, device, dtype, form, str(folder), keep)


def fuse_weights(
    tensors: Mapping[str, torch.Tensor],
    arch: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm | None = None,
    where: str = "the checkpoint",
    keep: Keep = keep_nothing,
) -> Weights:
    """Checks names and shapes against the architecture and builds the fused matrices; those of the layers in codes if a
    form is given. Embedding, head and norms stay in `dtype`. A tensor that is kept is not read."""
    fused = FusedModel(tensors, arch, device, dtype, where)
    pack = can_pack(device, dtype)
    stack = form is None and can_stack(device, dtype, (arch.hidden, arch.intermediate))

    def layer(index: int) -> Layer:
        parts = fused.layer(index)
        kept = KeptParts(parts, keep_below(keep, f"layers.{index}"))

        def linear(name: str, expert: int | None) -> Linear:
            part, bias = f"{name}.weight", kept.get(f"{name}.bias")
            here = keep_below(kept.keep, name if expert is None else f"{name}.{expert}")

            def weight() -> torch.Tensor:
                return parts[part] if expert is None else parts.of_expert(part, expert)

            if form is None:
                return kept_linear(weight, bias, pack, here)
            return kept_coded_linear(weight, bias, form, parts.width(part), device, here)

        return layer_of(kept, arch.routing, linear, stack)

    return fused.around(ResidentLayers(layer(i) for i in range(arch.layers)), pack, keep)


class FusedModel:
    """The tensors of a checkpoint as the engine computes with them. Nothing is read before it is asked for.

    Raises ModelCorrupt where names or shapes are not those of the architecture.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        arch: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        where: str = "the checkpoint",
    ) -> None:
        self._tensors, self._arch, self._device, self._dtype = tensors, arch, device, dtype
        self.shapes = tensor_shapes(arch)
        self._parts = fused_names(arch)
        _check(tensors, arch, self.shapes, where)

    def layer(self, index: int) -> FusedLayer:
        prefix = f"model.layers.{index}."
        names = {
            part: found
            for part, below in self._parts.items()
            if (found := [f"{prefix}{name}" for name in below if f"{prefix}{name}" in self.shapes])
        }
        return FusedLayer(self, names, 1 if self._arch.routing is None else self._arch.routing.experts)

    def around(self, layers: Layers, pack: bool, keep: Keep = keep_nothing) -> Weights:
        """The model with these layers; embedding, norm and head are read."""
        embedding = keep("embedding", lambda: self.joined(["model.embed_tokens.weight"]))
        norm = keep("norm", lambda: self.joined(["model.norm.weight"]))
        if not self._arch.tied:
            head = kept_linear(lambda: self.joined(["lm_head.weight"]), None, pack, keep_below(keep, "head"))
        else:  # what is not packed is the embedding itself
            head = kept_linear(
                lambda: embedding, None, pack, keep_below(keep, "head") if pack else keep_nothing
            )
        return Weights(embedding, layers, norm, head)

    def joined(self, names: list[str]) -> torch.Tensor:
        """One below the other."""
        rows = sum(self.shapes[name][0] for name in names)
        shape = (rows, *self.shapes[names[0]][1:])
        whole = torch.empty(shape, device=self._device, dtype=self._dtype)
        first = 0
        for name in names:
            whole[first : first + self.shapes[name][0]].copy_(self._tensors[name])
            first += self.shapes[name][0]
        return whole


class FusedLayer(Mapping[str, torch.Tensor]):
    """The parts of a layer in float, each read anew at every look."""

    def __init__(self, model: FusedModel, names: Mapping[str, list[str]], experts: int) -> None:
        self._model, self._names, self._experts = model, names, experts

    def __getitem__(self, part: str) -> torch.Tensor:
        return self._model.joined(self._names[part])

    def of_expert(self, part: str, index: int) -> torch.Tensor:
        """Of a part that holds those of all experts, those of one."""
        count = len(self._names[part]) // self._experts
        return self._model.joined(self._names[part][index * count : (index + 1) * count])

    def width(self, part: str) -> int:
        """Inputs of a matrix."""
        return self._model.shapes[self._names[part][0]][1]

    def expert(self, index: int) -> FusedLayer:
        """The parts of one expert."""
        names = {part: found for part, found in self._names.items() if of_experts(part)}
        counts = {part: len(found) // self._experts for part, found in names.items()}
        one = {part: found[index * counts[part] :][: counts[part]] for part, found in names.items()}
        return FusedLayer(self._model, one, 1)

    @property
    def without_experts(self) -> FusedLayer:
        names = {part: found for part, found in self._names.items() if not of_experts(part)}
        return FusedLayer(self._model, names, 1)

    def pieces(self, part: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows, their numbers), so that no more than one tensor of the checkpoint is in memory."""
        first = 0
        for name in self._names[part]:
            piece = self._model.joined([name])
            yield slice(first, first + len(piece)), piece
            first += len(piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class KeptParts(Mapping[str, torch.Tensor]):
    """The parts of a layer in float, each kept when it is looked at."""

    def __init__(self, parts: FusedLayer, keep: Keep) -> None:
        self._parts, self.keep = parts, keep

    def __getitem__(self, part: str) -> torch.Tensor:
        return self.keep(part, lambda: self._parts[part])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _check(
    tensors: Mapping[str, torch.Tensor], arch: Architecture, shapes: dict[str, tuple[int, ...]], where: str
) -> None:
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
