"""Sampling parameters as a JSON document, for the engine's process. What is the default is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from busbar.workloads.serving.constraint import Constraint
from busbar.workloads.serving.openai_format import GrammarKind, GrammarSpec
from busbar.workloads.serving.sampling import SamplingParams

DEFAULT = SamplingParams()


def to_document(params: SamplingParams) -> dict[str, Any]:
    found = {each.name: getattr(params, each.name) for each in fields(SamplingParams)}
    return {
        name: _WRITERS.get(name, lambda it: it)(value)
        for name, value in found.items()
        if value != getattr(DEFAULT, name)
    }


def from_document(document: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        **{name: _READERS.get(name, lambda it: it)(value) for name, value in document.items()}
    )


def _constraint(it: Constraint) -> dict[str, Any]:
    return {
        "width": it.width,
        "allowed": None if it.allowed is None else sorted(it.allowed),
        "banned": sorted(it.banned),
        "endings": [[token, found] for token, found in it.endings.items()],
    }


def _constraint_of(it: Mapping[str, Any]) -> Constraint:
    endings = {token: tuple((list(tokens), last) for tokens, last in found) for token, found in it["endings"]}
    allowed = None if it["allowed"] is None else frozenset(it["allowed"])
    return Constraint(it["width"], allowed, frozenset(it["banned"]), endings)


def grammar_document(it: GrammarSpec) -> dict[str, str]:
    return {"kind": it.kind.value, "text": it.text, "param": it.param}


def grammar_of(it: Mapping[str, str]) -> GrammarSpec:
    return GrammarSpec(GrammarKind(it["kind"]), it["text"], it["param"])


_WRITERS: Mapping[str, Callable[[Any], Any]] = {
    "stop_token_ids": sorted,
    "visible": sorted,
    "constraint": _constraint,
    "grammar": grammar_document,
}
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "stop": tuple,
    "stop_token_ids": frozenset,
    "visible": frozenset,
    "logit_bias": lambda it: tuple((token, bias) for token, bias in it),
    "constraint": _constraint_of,
    "grammar": grammar_of,
}
