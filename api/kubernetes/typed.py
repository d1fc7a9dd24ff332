"""Parses the JSON of the API server into the models of `busbar.kube.types`. Plain dicts end here.

Objects were validated against the CRD when they were written, so a mismatch means that another version of
Busbar wrote them. Parts of the *status* that do not match are left out, so that the rest can still be shown.
An object whose *spec* does not match has no model; the operator ignores it too.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from busbar.api.kubernetes.client import Object
from busbar.kube.types.meta import Resource

M = TypeVar("M", bound=Resource)

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

log = logging.getLogger(__name__)


def read(model: type[M], obj: Object) -> M | None:
    """The object as its model; None when its spec does not match."""
    try:
        return model.model_validate(obj)
    except ValidationError as error:
        faults = _faults(error)
    known = _without(obj, [fault["loc"] for fault in faults])
    try:
        found = model.model_validate(known)
    except ValidationError as error:
        log.warning("%s does not match this version's schema: %s", _name(obj), _faults(error)[:3])
        return None
    log.warning("%s: parts of its status do not match this version's schema: %s", _name(obj), faults[:3])
    return found


def _faults(error: ValidationError) -> list[ErrorDetails]:
    """What does not match and where, without the values: a spec may contain secrets, which must not be
    logged."""
    return error.errors(include_url=False, include_input=False, include_context=False)


def _without(obj: Object, places: Sequence[Sequence[int | str]]) -> Object:
    """A copy without the named parts of the status."""
    found = copy.deepcopy(obj)
    for path in {_path(obj, place) for place in places if place[0] == "status"}:
        _take_out(found, path)
    _drop_none(found.get("status"))
    return found


def _path(obj: Object, place: Sequence[int | str]) -> tuple[int | str, ...]:
    """The part of an error's location that exists. Where a required field is missing, that is its parent."""
    path: list[int | str] = []
    inside: Any = obj
    for step in place:
        try:
            inside = inside[step]
        except (KeyError, IndexError, TypeError):
            break
        path.append(step)
    return tuple(path)


def _take_out(obj: Object, path: tuple[int | str, ...]) -> None:
    holder: Any = obj
    for step in path[:-1]:
        holder = holder.get(step) if isinstance(holder, dict) else holder and holder[step]
    if isinstance(holder, dict):
        holder.pop(path[-1], None)
    elif isinstance(holder, list):
        holder[int(path[-1])] = None  # keeps the places of the items after it until all are removed


def _drop_none(value: Any) -> None:
    """Remove the placeholders of deleted list items."""
    if isinstance(value, dict):
        for inner in value.values():
            _drop_none(inner)
    elif isinstance(value, list):
        value[:] = [item for item in value if item is not None]
        for item in value:
            _drop_none(item)


def _name(obj: Object) -> str:
    meta = obj.get("metadata") or {}
    return f"{obj.get('kind', 'object')} {meta.get('namespace', '')}/{meta.get('name', '')}"


def tidy(obj: Object) -> Object:
    """The object without the metadata that only kubectl and the API server use."""
    obj["metadata"].pop("managedFields", None)
    (obj["metadata"].get("annotations") or {}).pop(LAST_APPLIED, None)
    return obj
