"""Reads the part of PromQL that our alerts use, and refuses the rest.

`promtool` is not among what the tests' set-up installs. This grammar (pyparsing) is stricter than its check: besides
the syntax it tells scalars, instant vectors and ranges apart, and knows only the functions listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import pyparsing as pp


class Kind(StrEnum):
    SCALAR = "scalar"
    VECTOR = "instant vector"
    RANGE = "range"


@dataclass(frozen=True)
class Part:
    """A part of an expression: what it evaluates to, and what is read for it."""

    kind: Kind
    metrics: frozenset[str] = frozenset()
    matched: frozenset[tuple[str, str]] = frozenset()
    """(metric, label) of every matcher."""
    kept: frozenset[str] | None = None
    """Labels that an aggregation keeps; None: those of the series."""
    plain: bool = False
    """A metric with its matchers and nothing else."""


FUNCTIONS = {
    "abs": (Kind.VECTOR,),
    "absent": (Kind.VECTOR,),
    "changes": (Kind.RANGE,),
    "histogram_quantile": (Kind.SCALAR, Kind.VECTOR),
    "increase": (Kind.RANGE,),
    "max_over_time": (Kind.RANGE,),
    "min_over_time": (Kind.RANGE,),
    "rate": (Kind.RANGE,),
}
"""The kinds of their arguments. Each evaluates to an instant vector."""
AGGREGATIONS = ("sum", "min", "max", "avg", "count")


def parse(text: str) -> Part:
    """The parts of an expression.

    Raises:
        ValueError: it is not one, or uses what this grammar does not know; says where.
    """
    try:
        return cast("Part", _grammar().parse_string(text, parse_all=True)[0])
    except pp.ParseBaseException as error:
        raise ValueError(f"{text!r}, character {error.loc}: {error.msg}") from None


def _selector(tokens: pp.ParseResults) -> Part:
    name = str(tokens["name"])
    labels = tokens.get("labels", ())  # type: ignore[no-untyped-call]
    matched = frozenset((name, str(label)) for label in labels)
    return Part(Kind.VECTOR, frozenset({name}), matched, plain=True)


def _ranged(text: str, at: int, tokens: pp.ParseResults) -> Part:
    part = cast("Part", tokens[0])
    if len(tokens) == 1:
        return part
    if part.kind is not Kind.VECTOR or (not part.plain and ":" not in list(tokens)):
        raise pp.ParseFatalException(
            text, at, "a range of something else than a series; [1h:5m] is a subquery"
        )
    return Part(Kind.RANGE, part.metrics, part.matched, part.kept)


def _call(text: str, at: int, tokens: pp.ParseResults) -> Part:
    name, arguments = str(tokens["function"]), [cast("Part", part) for part in tokens["arguments"]]
    kinds = tuple(part.kind for part in arguments)
    if kinds != FUNCTIONS[name]:
        raise pp.ParseFatalException(text, at, f"{name} takes {FUNCTIONS[name]}, not {kinds}")
    kept = frozenset[str]() if name == "absent" else arguments[-1].kept
    if name == "histogram_quantile":
        if kept is not None and "le" not in kept:
            raise pp.ParseFatalException(text, at, "histogram_quantile needs the label le")
        kept = None if kept is None else kept - {"le"}
    return _joined(arguments, kept)


def _aggregation(text: str, at: int, tokens: pp.ParseResults) -> Part:
    inner = cast("Part", tokens["inner"])
    if inner.kind is not Kind.VECTOR:
        raise pp.ParseFatalException(text, at, f"an aggregation of a {inner.kind}")
    return _joined([inner], frozenset(map(str, tokens.get("by", ()))))  # type: ignore[no-untyped-call]


def _operation(text: str, at: int, tokens: pp.ParseResults) -> Part:
    """A chain of operators of one precedence, left to right."""
    parts = [token for token in tokens[0] if isinstance(token, Part)]
    operators = {str(token) for token in tokens[0] if not isinstance(token, Part)}
    if any(part.kind is Kind.RANGE for part in parts):
        raise pp.ParseFatalException(text, at, "an operator on a range")
    if operators & {"and", "or", "unless"} and any(part.kind is Kind.SCALAR for part in parts):
        raise pp.ParseFatalException(text, at, f"{operators} on a scalar")
    vectors = [part for part in parts if part.kind is Kind.VECTOR]
    if len(vectors) > 1 and "on" not in operators and len({part.kept for part in vectors}) > 1:
        raise pp.ParseFatalException(text, at, "the two sides never have the same labels; say on (…)")
    joined = _joined(parts, vectors[0].kept if vectors else None)
    return joined if vectors else Part(Kind.SCALAR)


def _joined(parts: list[Part], kept: frozenset[str] | None) -> Part:
    metrics = frozenset[str]().union(*(part.metrics for part in parts))
    matched = frozenset[tuple[str, str]]().union(*(part.matched for part in parts))
    return Part(Kind.VECTOR, metrics, matched, kept)


def _grammar() -> pp.ParserElement:
    expression = pp.Forward()
    open_, close = (pp.Suppress(mark) for mark in "()")
    label = pp.Regex(r"[a-zA-Z_]\w*")
    labels = open_ + pp.Optional(pp.DelimitedList(label)) + close
    number = pp.Regex(r"\d+(\.\d+)?").set_parse_action(lambda: Part(Kind.SCALAR))
    duration = pp.Regex(r"(\d+(ms|[smhdwy]))+")
    matcher = label + pp.Suppress(pp.one_of("=~ !~ != =") + pp.QuotedString('"', esc_char="\\"))
    series = pp.Regex(r"[a-zA-Z_:][\w:]*")("name") + pp.Optional(
        pp.Suppress("{") + pp.DelimitedList(matcher)("labels") + pp.Suppress("}")
    )
    call = pp.one_of(list(FUNCTIONS), as_keyword=True)("function") + open_
    call += pp.Group(pp.DelimitedList(expression))("arguments") + close
    by = pp.Suppress(pp.Keyword("by")) + pp.Group(labels)("by")
    aggregation = (
        pp.one_of(AGGREGATIONS, as_keyword=True) + pp.Optional(by) + open_ + expression("inner") + close
    )
    atom = (
        number
        | call.set_parse_action(_call)
        | aggregation.set_parse_action(_aggregation)
        | (open_ + expression + close)
        | series.set_parse_action(_selector)
    )
    window = "[" + duration + pp.Optional(":" + pp.Optional(duration)) + "]"
    operand = (atom + pp.Optional(window)).set_parse_action(_ranged)
    on = pp.Optional(pp.Keyword("on") + pp.Suppress(labels))
    expression <<= pp.infix_notation(  # type: ignore[no-untyped-call]
        operand,
        [
            (operator + on, 2, pp.OpAssoc.LEFT, _operation)
            for operator in (
                pp.one_of("* / %"),
                pp.one_of("+ -"),
                pp.one_of("== != >= <= > <"),
                pp.one_of("and unless", as_keyword=True),
                pp.Keyword("or"),
            )
        ],
    )
    return expression
