"""The plain fields of a request's body: known or not, numbers, switches, lists of tokens. Pure Python.

Every reader raises BadRequest with the field's name where a value does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from busbar.kube.documents import LONGEST_SHOWN, shown
from busbar.workloads.serving.errors import BadRequest

WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    }
)
ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
}
"""Not built yet: accepted at these values (or null), else a 400 that names the field."""


def known_fields(body: object, known: frozenset[str] | set[str]) -> dict[str, Any]:
    """The fields that are given; raises BadRequest for one that is not known."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name, value in body.items():
        if name in known or name in WITHOUT_EFFECT or value is None:
            continue
        if name not in ONLY_AT:
            raise BadRequest(
                f"unknown field {shown(name)}; see the engine's README for what it reads",
                param=name[:LONGEST_SHOWN],
            )
        if not any(value == fine and type(value) is type(fine) for fine in ONLY_AT[name]):
            raise BadRequest(
                f"{name}={shown(value)} is not supported by this engine (only {ONLY_AT[name][0]!r})",
                param=name,
            )
    return {name: value for name, value in body.items() if value is not None}


def optional_model(fields: Mapping[str, Any]) -> str | None:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be text", param="model")
    return model


def token_list(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(is_integer(v) and v >= 0 for v in value):
        raise BadRequest(f"{name} must be a list of token ids", param=name)
    return value


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def boolean(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {shown(value)}", param=name)
    return value


def integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(
            f"{name} must be a whole number from {least} to {most}, not {shown(value)}", param=name
        )
    return value


def number(
    fields: Mapping[str, Any], name: str, default: float, least: float, most: float, above: bool = False
) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number, not {shown(value)}", param=name)
    if not least <= value <= most or (above and value == least):
        raise BadRequest(
            f"{name} must be {'above' if above else 'at least'} {least:g} and at most {most:g}, not {shown(value)}",
            param=name,
        )
    return float(value)
