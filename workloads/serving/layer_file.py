"""The layers of a model as page-aligned records, and the file that holds them.

A record has the parts of a layer (`weights.Parts`) as the engine computes with them: fused, in its dtype or in codes, each
at a multiple of 64 bytes. So a record is read with one direct read into the memory in which the layer computes. The file
is made once from the checkpoint, one layer after the other, and found again by later starts of the same model:

    HEADER_BYTES   JSON: format, identity of the model, layout, CRC-32 of each record
    records        of each layer, `LayerLayout.size` bytes
    records        of each expert of each layer, where experts are read one by one and are no part of the layers' records

It gets its name when it is complete, so that a crash leaves no half of one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch

from busbar.workloads.machine.checksum import crc32
from busbar.workloads.machine.direct_file import PAGE, DirectFile, DirectReader, NoRoom, page_memory
from busbar.workloads.serving.architecture import Architecture, Routing
from busbar.workloads.serving.errors import DiskTooSmall, ModelCorrupt, ModelFileMissing
from busbar.workloads.serving.experts import DenseMlp, Experts, can_stack
from busbar.workloads.serving.integer_linear import coded_linear
from busbar.workloads.serving.linear import Linear, PlainLinear
from busbar.workloads.serving.tensor_names import MATRICES, ROUTER, fused_names, of_experts, tensor_shapes
from busbar.workloads.serving.weightcodes import INT8, CodedWeight, WeightForm, code, group_of
from busbar.workloads.serving.weights import FusedLayer, FusedModel, Layer, MakeLinear, Parts, layer_of

FORMAT = 1
ALIGNMENT = 64


@dataclass(frozen=True)
class Part:
    """A tensor in a record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LayerLayout:
    """Where the parts are; the same for all layers, or for all experts."""

    parts: tuple[Part, ...]
    size: int
    """Bytes of a record, whole pages."""
    routing: Routing | None = None

    @classmethod
    def of(cls, arch: Architecture, dtype: torch.dtype, form: WeightForm | None) -> LayerLayout:
        """Of whole layers. Raises ModelUnsupported where int4 does not fit the model's matrices."""
        return cls._of(_tensors(arch, dtype, form), arch.routing)

    @classmethod
    def without_experts(cls, arch: Architecture, dtype: torch.dtype, form: WeightForm | None) -> LayerLayout:
        """Of layers but for their experts."""
        return cls._of(
            (each for each in _tensors(arch, dtype, form) if not of_experts(each[0])), arch.routing
        )

    @classmethod
    def of_expert(cls, arch: Architecture, dtype: torch.dtype, form: WeightForm | None) -> LayerLayout:
        """Of one expert."""
        assert arch.routing is not None
        count = arch.routing.experts
        parts = (
            (name, kind, (shape[0] // count, *shape[1:]))
            for name, kind, shape in _tensors(arch, dtype, form)
            if of_experts(name)
        )
        return cls._of(parts, None)

    @classmethod
    def _of(
        cls, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], routing: Routing | None
    ) -> LayerLayout:
        parts: list[Part] = []
        end = 0
        for name, kind, shape in tensors:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            parts.append(Part(name, str(kind).removeprefix("torch."), shape, offset))
            end = offset + parts[-1].bytes
        return cls(tuple(parts), -(-end // PAGE) * PAGE, routing)

    @property
    def matrix_bytes(self) -> int:
        """Of a record's matrices."""
        return sum(part.bytes for part in self.parts if part.name.partition(".")[0] in (*MATRICES, ROUTER))

    def views(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a record, uint8, as tensors on its memory."""
        return {
            part.name: record[part.offset : part.offset + part.bytes]
            .view(getattr(torch, part.dtype))
            .view(part.shape)
            for part in self.parts
        }

    def layer(self, record: torch.Tensor, experts: Experts | None = None) -> Layer:
        """The layer that computes with what is in the record at the time; `experts`, where they are not in it."""
        parts = self.views(record)
        plain = [parts[name] for name in ("gate_up.weight", "down.weight") if name in parts]
        stack = bool(plain) and can_stack(record.device, plain[0].dtype, (each.shape[1] for each in plain))
        return layer_of(parts, self.routing, self._maker(parts), stack, experts)

    def expert(self, record: torch.Tensor) -> DenseMlp:
        """The expert that computes with what is in the record at the time."""
        linear = self._maker(self.views(record))
        return DenseMlp(linear("gate_up", None), linear("down", None))

    def _maker(self, parts: Parts) -> MakeLinear:
        def linear(name: str, expert: int | None) -> Linear:
            bias = parts.get(f"{name}.bias")
            if (weight := parts.get(f"{name}.weight")) is not None:
                return PlainLinear(weight[self._rows(weight, expert)], bias)
            coded = CodedWeight(parts[f"{name}.codes"], parts.get(f"{name}.factors"), parts[f"{name}.scale"])
            return coded_linear(coded.part(self._rows(coded.codes, expert)), bias, pack=False)

        return linear

    def _rows(self, whole: torch.Tensor, expert: int | None) -> slice:
        if expert is None or self.routing is None:
            return slice(None)
        count = len(whole) // self.routing.experts
        return slice(expert * count, (expert + 1) * count)

    def store(self, parts: FusedLayer, record: torch.Tensor, form: WeightForm | None) -> None:
        """Writes the parts of a layer in float into a record, one tensor of the checkpoint after the other, matrices in
        codes if a form is given."""
        views = self.views(record)
        for name in parts:
            matrix = name.removesuffix(".weight")
            for rows, piece in parts.pieces(name):
                if form is None or matrix not in MATRICES or matrix == name:
                    views[name][rows].copy_(piece)
                    continue
                coded = code(piece, form)
                views[f"{matrix}.codes"][rows].copy_(coded.codes)
                views[f"{matrix}.scale"][rows].copy_(coded.scale)
                if coded.factors is not None:
                    views[f"{matrix}.factors"][rows].copy_(coded.factors)


def _tensors(
    arch: Architecture, dtype: torch.dtype, form: WeightForm | None
) -> Iterable[tuple[str, torch.dtype, tuple[int, ...]]]:
    shapes = tensor_shapes(arch)
    for name, below in fused_names(arch).items():
        found = [shapes[full] for each in below if (full := f"model.layers.0.{each}") in shapes]
        if not found:
            continue
        shape = (sum(each[0] for each in found), *found[0][1:])
        matrix = name.removesuffix(".weight")
        if form is None or matrix not in MATRICES or matrix == name:
            yield name, dtype, shape
            continue
        rows, width = shape
        yield f"{matrix}.codes", *((torch.int8, shape) if form is INT8 else (torch.uint8, (rows, width // 2)))
        yield f"{matrix}.scale", torch.float32, (rows,)
        if form is not INT8:
            yield f"{matrix}.factors", torch.int8, (rows, width // group_of(width), 1)


@dataclass(frozen=True)
class FileLayout:
    """The records of a file by their numbers: first those of the layers, then those of the first layer's experts, and so on."""

    layers: int
    layer: LayerLayout
    experts: int = 0
    """With records of their own, in a layer."""
    expert: LayerLayout | None = None

    @classmethod
    def by_expert(cls, arch: Architecture, dtype: torch.dtype, form: WeightForm | None) -> FileLayout:
        """With a record for each expert. Raises ModelUnsupported as `LayerLayout.of`."""
        assert arch.routing is not None
        layouts = (of(arch, dtype, form) for of in (LayerLayout.without_experts, LayerLayout.of_expert))
        layer, expert = layouts
        return cls(arch.layers, layer, arch.routing.experts, expert)

    @property
    def records(self) -> int:
        return self.layers * (1 + self.experts)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offset(self.layers) + self.layers * self.experts * self._expert_size

    def layout(self, number: int) -> LayerLayout:
        if number < self.layers:
            return self.layer
        assert self.expert is not None
        return self.expert

    def offset(self, number: int) -> int:
        first = header_bytes(self.records) + min(number, self.layers) * self.layer.size
        return first + max(0, number - self.layers) * self._expert_size

    def number(self, layer: int, expert: int) -> int:
        """Of an expert's record."""
        return self.layers + layer * self.experts + expert

    def name(self, number: int) -> str:
        """For people."""
        if number < self.layers:
            return f"layer {number}"
        layer, expert = divmod(number - self.layers, self.experts)
        return f"expert {expert} of layer {layer}"

    def store(self, model: FusedModel, number: int, record: torch.Tensor, form: WeightForm | None) -> None:
        """Writes the tensors of a record into it."""
        if number >= self.layers:
            layer, expert = divmod(number - self.layers, self.experts)
            parts = model.layer(layer).expert(expert)
        else:
            parts = model.layer(number)
            if self.expert is not None:
                parts = parts.without_experts
        self.layout(number).store(parts, record, form)

    @property
    def _expert_size(self) -> int:
        return 0 if self.expert is None else self.expert.size


class LayerFile:
    """The file, open for reading. Raises ModelCorrupt where its content is not what was written."""

    def __init__(self, path: Path, reader: DirectReader, layout: FileLayout, sums: list[int]) -> None:
        self.path, self.layout = path, layout
        self._reader, self._sums = reader, sums
        self._checked: set[int] = set()

    def read(self, number: int, record: torch.Tensor) -> None:
        """Fills a record, uint8 on the host that begins at a page. Its checksum is compared when it is read first."""
        try:
            count = self._reader.read(record, self.layout.offset(number))
            changed = self._reader.changed
        except OSError as error:
            raise ModelFileMissing(
                f"{self.layout.name(number)} of {self.path} cannot be read: {error.strerror or error}"
            ) from error
        if count < self.layout.layout(number).size or changed:
            raise ModelCorrupt(
                f"{self.path} was cut or changed while its layers are streamed from it; delete it and start anew: it is "
                "made again from the checkpoint"
            )
        if number not in self._checked:
            if crc32(record.numpy().data) != self._sums[number]:
                raise ModelCorrupt(
                    f"{self.layout.name(number)} of {self.path} is not what was written; delete the file and start anew"
                )
            self._checked.add(number)

    def close(self) -> None:
        self._reader.close()


def header_bytes(records: int) -> int:
    return -(-(8192 + 16 * records) // PAGE) * PAGE


def open_layers(
    folder: Path,
    identity: str,
    model: FusedModel,
    layout: FileLayout,
    form: WeightForm | None,
    note: Callable[[str], object],
) -> LayerFile:
    """The file of this model in `folder`, made if it is not there from `model`, on the host.

    Raises DiskTooSmall where the disk has no room for it, ModelFileMissing where the folder cannot be used.
    """
    first = layout.layer.parts[0]
    ending = "layers" if layout.expert is None else "experts"
    name = f"{identity[:16]}-{first.dtype if form is None else f'{first.dtype}-{form.name}'}.{ending}"
    path = folder / name
    expected: dict[str, object] = {
        "format": FORMAT,
        "identity": identity,
        "layers": layout.layers,
        "parts": _described(layout.layer),
    }
    if layout.expert is not None:
        expected |= {"experts": layout.experts, "expertParts": _described(layout.expert)}
    try:
        found = _opened(path, expected, layout, note)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(path):  # another replica on this node may be writing it
                found = _opened(path, expected, layout, note)
                if found is None:
                    note(f"writing the layers of the model to {path}, once")
                    _write(path, expected, model, layout, form, note)
                    found = _opened(path, expected, layout, note)
    except OSError as error:
        if isinstance(error, NoRoom) or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskTooSmall(
                f"{folder} has no room for the {layout.size / 2**20:.0f} MiB of layers that are streamed from there; free some, or "
                "name a folder with room (--stream-dir)"
            ) from error
        raise ModelFileMissing(
            f"layers cannot be streamed from {folder}: {error.strerror or error}; name a folder that can be written to "
            "(--stream-dir)"
        ) from error
    if found is None:
        raise ModelCorrupt(f"{path} was changed while it was written; start anew")
    return found


def _described(layout: LayerLayout) -> list[dict[str, object]]:
    return [asdict(part) | {"shape": list(part.shape)} for part in layout.parts]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the lock of a process that was killed is free."""
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(
    path: Path, expected: dict[str, object], layout: FileLayout, note: Callable[[str], object]
) -> LayerFile | None:
    """None where it is absent, or another file than expected."""
    try:
        reader = DirectReader(path, note)
    except FileNotFoundError:
        return None
    try:
        header = page_memory(header_bytes(layout.records))
        reader.read(header, 0)
        document = json.loads(header.numpy().tobytes().rstrip(b"\0"))
        sums = document.pop("sums")
        if document == expected and reader.size == layout.size:
            return LayerFile(path, reader, layout, sums)
    except (ValueError, KeyError, AttributeError):
        pass
    reader.close()
    return None


def _write(
    path: Path,
    header: dict[str, object],
    model: FusedModel,
    layout: FileLayout,
    form: WeightForm | None,
    note: Callable[[str], object],
) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        with DirectFile(temporary, layout.size, note) as file:
            record, sums = page_memory(max(layout.layout(n).size for n in (0, layout.records - 1))), []
            for number in range(layout.records):
                own = record[: layout.layout(number).size]
                layout.store(model, number, own, form)
                sums.append(crc32(own.numpy().data))
                file.write(own, layout.offset(number))
            text = json.dumps(header | {"sums": sums}).encode()
            page = page_memory(header_bytes(layout.records))
            page[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            file.write(page, 0)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
