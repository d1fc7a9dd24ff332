"""No silent fields: some module reads every field of a spec, or the API server refuses the field with a sentence.

`spec_readers.txt` names the reader of each field of each spec. A line is

    path  module  expression     the module reads the field: `engine.optimizer.name` as an attribute of a model,
                                 `["displayName"]` as a key of plain JSON
    path  module  whole EXPR     the module passes EXPR, which contains the field, on unchanged: a pod's part, a variable
    path  chart  TEMPLATE        an admission rule of the chart's TEMPLATE reads it: spec.onDelete
    path  refused                the API server refuses the field: nothing reads it yet
    path  only VALUE             the schema allows only this value, and the code does that

A field without a line fails the test, and so does a line without a field or with a module that does not read it.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from busbar.kube.types import KINDS
from busbar.kube.types.rules import refusal_of

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("spec_readers.txt")


@dataclass(frozen=True)
class Written:
    """One field that a person can write."""

    path: str
    name: str
    """The field's name in Python."""
    info: FieldInfo
    above: tuple[str, ...]
    """Python names of the enclosing fields, outermost first."""


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def fields_of(model: type[BaseModel], path: str, above: tuple[str, ...] = ()) -> Iterator[Written]:
    for name, info in model.model_fields.items():
        here = f"{path}.{info.alias or name}"
        yield Written(here, name, info, above)
        if refusal_of(info.json_schema_extra) is None:  # the fields inside a refused field need no reader
            for part in models_in(info.annotation):
                yield from fields_of(part, here, (*above, name))


FIELDS = {
    field.path: field
    for kind, model in KINDS.items()
    for part in models_in(model.model_fields["spec"].annotation)
    for field in fields_of(part, f"{kind}.spec")
}
ROWS = {
    words[0]: words[1:]
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if (words := line.split()) and not line.startswith("#")
}


@cache
def module(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def reads_attribute(tree: ast.AST, expression: str) -> bool:
    """Whether the code has this chain of attributes, alone or at the end of a longer one."""
    found = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return any(text == expression or text.endswith(f".{expression}") for text in found)


def reads_key(tree: ast.AST, key: str) -> bool:
    """Whether the code reads this key of a dict."""
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            keys.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            keys += node.args[:1]
    return any(isinstance(node, ast.Constant) and node.value == key for node in keys)


def hands_on(tree: ast.AST, expression: str) -> bool:
    """Whether one function has both the expression and a dump of a model."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return any(reads_attribute(f, expression) and _dumps(f) for f in functions)


def _dumps(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "model_dump" for node in ast.walk(function))


def test_every_field_has_a_line_and_no_line_is_stale() -> None:
    assert sorted(FIELDS.keys() - ROWS.keys()) == [], "who reads these? Add a line to spec_readers.txt"
    assert sorted(ROWS.keys() - FIELDS.keys()) == [], "these are no fields any more"


@pytest.mark.parametrize("path", sorted(FIELDS.keys() & ROWS.keys()))
def test_the_field_is_read_where_its_line_says(path: str) -> None:
    field, row = FIELDS[path], ROWS[path]
    match row:
        case ["refused"]:
            assert refusal_of(field.info.json_schema_extra) is not None, "the schema does not refuse it"
        case ["only", value]:
            assert allowed(field.info) == [value]
        case ["chart", template]:
            rules = (ROOT / "charts/busbar/templates" / template).read_text()
            assert re.search(re.escape(path.partition(".")[2]) + r"\b", rules)
        case [where, "whole", expression]:
            assert expression.rpartition(".")[2] in field.above
            assert hands_on(module(where), expression), f"{where} does not hand {expression} on"
        case [where, expression] if expression.startswith('["'):
            assert expression == f'["{field.info.alias}"]'
            assert reads_key(module(where), field.info.alias or field.name)
        case [where, expression]:
            assert expression.rpartition(".")[2] == field.name
            assert reads_attribute(module(where), expression), f"{where} has no {expression}"
        case _:
            pytest.fail(f"cannot read the line of {path}: {row}")
    assert row == ["refused"] or refusal_of(field.info.json_schema_extra) is None


def allowed(info: FieldInfo) -> list[str]:
    """The values of an enumeration."""
    assert isinstance(info.annotation, type)
    assert issubclass(info.annotation, StrEnum)
    return [member.value for member in info.annotation]


def test_the_check_sees_a_reader_that_does_not_read() -> None:
    code = ast.parse("def f(job):\n    return job.spec.steps, job.spec['seed'], job.get('mode')\n")
    assert reads_attribute(code, "spec.steps")
    assert not reads_attribute(code, "engine.steps")
    assert not reads_attribute(code, "teps")
    assert reads_key(code, "seed")
    assert reads_key(code, "mode")
    assert not reads_key(code, "steps")
    assert not hands_on(code, "spec.steps")
