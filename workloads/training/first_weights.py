"""Where the weights of a model come from when they move to where they stay.

    InModel   from the parameters themselves: the whole model was made in memory
    Drawn     drawn from the seed once more, one parameter at a time (see `drawing`)
    Stored    read from the files of a saved model, as far as they are asked for

With the last two a parameter has no memory of its own: it refers to a number that is not one (`without_memory`), in its
own shape. So a rank that keeps a slice of each weight needs no memory for the whole model when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from busbar.workloads.training.drawing import Drawing
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.plan import READ_BYTES
from busbar.workloads.training.saved_model import FIELD, StoredTensor
from busbar.workloads.training.state_file import is_finite

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class Source(Protocol):
    """Of the weights of a model."""

    def fill(self, target: torch.Tensor, parameter: nn.Parameter, start: int) -> None:
        """Have `target` [elements] hold those of a parameter from `start` on."""

    def done(self) -> None:
        """For now no more is asked for: give memory back that could be filled again."""


class InModel:
    def fill(self, target: torch.Tensor, parameter: nn.Parameter, start: int) -> None:
        target.copy_(parameter.detach().reshape(-1)[start:][: target.numel()])

    def done(self) -> None:
        """The model keeps its weights."""


IN_MODEL = InModel()


class Drawn:
    def __init__(self, drawing: Drawing, model: nn.Module) -> None:
        self._drawing = drawing
        self._content = {each: each.detach() for each in model.parameters()}
        drawing.keep(model.buffers())
        drawing.give_back()
        for parameter in self._content:
            without_memory(parameter)

    def fill(self, target: torch.Tensor, parameter: nn.Parameter, start: int) -> None:
        content = self._content[parameter]
        with self._drawing.content(content):
            target.copy_(content.reshape(-1)[start:][: target.numel()])

    def done(self) -> None:
        self._drawing.give_back()


class Stored:
    def __init__(self, folder: Path, places: Mapping[nn.Parameter, tuple[str, StoredTensor]]) -> None:
        self._folder, self._places = folder, places

    def fill(self, target: torch.Tensor, parameter: nn.Parameter, start: int) -> None:
        """Raises InvalidJob for numbers that are not finite."""
        if parameter not in self._places:  # made beside them, as those of an adapter
            IN_MODEL.fill(target, parameter, start)
            return
        name, place = self._places[parameter]
        for first, numbers in _read(place, start, target.numel()):
            own = target[first:][: numbers.numel()]
            own.copy_(numbers)
            if not is_finite(own):
                raise InvalidJob(
                    FIELD,
                    f"{self._folder} holds numbers that are not finite in {name}",
                    "take an earlier result",
                )

    def done(self) -> None:
        """Nothing is kept of what was read."""

    @contextmanager
    def whole(self, parameter: nn.Parameter) -> Iterator[None]:
        """Have a parameter hold its weights meanwhile."""
        before = parameter.data
        weights = torch.empty(parameter.shape, dtype=parameter.dtype)
        self.fill(weights.view(-1), parameter, 0)
        parameter.data = weights
        yield
        parameter.data = before


def _read(place: StoredTensor, start: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs of a tensor's elements from `start` on, each with its place among them."""
    dtype = DTYPES[place.dtype]
    run = READ_BYTES // dtype.itemsize
    with place.file.open("rb", buffering=0) as file:
        file.seek(place.start + start * dtype.itemsize)
        for first in range(0, count, run):
            room = bytearray(min(run, count - first) * dtype.itemsize)
            view, done = memoryview(room), 0
            while done < len(room):
                read = file.readinto(view[done:])
                if not read:
                    raise InvalidJob(
                        FIELD, f"{place.file} has become shorter", "do not write to it meanwhile"
                    )
                done += read
            yield first, torch.frombuffer(room, dtype=dtype)


def places_of(
    model: nn.Module, stored: Mapping[str, StoredTensor], dtype: torch.dtype
) -> dict[nn.Parameter, tuple[str, StoredTensor]] | None:
    """Where the files have each parameter; None: they are not simply those of the model, and `transformers` has to read them,
    which may rename, convert or refuse them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = {}
    for parameter, own in names.items():
        there = [name for name in own if name in stored]
        if len(there) != 1 or stored[there[0]].shape != tuple(parameter.shape):
            return None
        found[parameter] = there[0], stored[there[0]]
    surplus = set(stored) - {name for own in names.values() for name in own}
    saved_buffers = set(model.state_dict()) - {name for own in names.values() for name in own}
    if surplus or saved_buffers or any(place.dtype not in DTYPES for _, place in found.values()):
        return None
    return None if _changes(model, stored, dtype) else found


def _changes(model: Any, names: Iterable[str], dtype: torch.dtype) -> bool:
    """Whether `transformers` keeps parts in another type, or makes the weights of what the files hold."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if dtype != torch.float32 and model._keep_in_fp32_modules_strict:
        return True
    converters = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
    return any(each.compiled_sources.search(name) for each in converters for name in names)


def without_memory(parameter: nn.Parameter) -> None:
    """Have a parameter refer to no weights: what reads it gets numbers that are none. It keeps its shape."""
    weights = parameter.detach()
    parameter.data = _nothing(weights.dtype, weights.device).expand(weights.shape)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), math.nan, dtype=dtype, device=device)
