"""Which grammar a request's answer is to follow: `response_format` and vLLM's `guided_*`. Pure Python.

This module reads the fields and names the grammar; `grammar` compiles it. A request has one grammar at most, and no
`allowed_token_ids` or `bad_words` beside it: together they could leave no token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from busbar.kube.documents import shown
from busbar.workloads.serving.errors import BadRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES = 1_000
MAX_NAME = 64
FORMAT_FIELDS = frozenset(
    {"response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
JSON_OPTIONS: JsonCompileOptions = {"lenient": False, "whitespace_pattern": r"( |\n[ \t]{0,32})"}
"""Of the compiler: no keyword is ignored; and white space between the parts of a JSON text as models write it, never
without end."""
ANY_OBJECT = '{"type": "object"}'


class GrammarKind(StrEnum):
    """What a grammar's text is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """Or GBNF."""


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as a request gives it."""

    kind: GrammarKind
    text: str
    param: str
    """The request's field, for error messages."""


def parse_format(fields: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar of a request's fields, None where it asks for none. Raises BadRequest."""
    found = [spec for name in sorted(FORMAT_FIELDS & set(fields)) if (spec := _READERS[name](fields[name]))]
    if len(found) > 1:
        first, second = (spec.param.partition(".")[0] for spec in found[:2])
        raise BadRequest(f"{second} beside {first}: an answer follows one of them only", param=second)
    if not found:
        return None
    for name in ("allowed_token_ids", "bad_words"):
        if fields.get(name):
            raise BadRequest(
                f"{name} cannot be combined with {found[0].param}, which already says which tokens may come",
                param=name,
            )
    return found[0]


def _response_format(value: object) -> GrammarSpec | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(
            f"{name} must be an object with the type text, json_object or json_schema, not {shown(value)}",
            param=name,
        )
    _only(value, {"type", "json_schema"} if kind == "json_schema" else {"type"}, name)
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT, name)
    inner, where = value.get("json_schema"), f"{name}.json_schema"
    if not isinstance(inner, dict):
        raise BadRequest(f"{where} must be an object with a name and a schema", param=where)
    _only(inner, {"name", "schema", "strict", "description"}, where)
    if not isinstance(inner.get("name"), str) or not 1 <= len(inner["name"]) <= MAX_NAME:
        raise BadRequest(f"{where}.name must be a text of 1 to {MAX_NAME} characters", param=f"{where}.name")
    if not isinstance(inner.get("strict"), bool | None):
        raise BadRequest(f"{where}.strict must be true or false", param=f"{where}.strict")
    if not isinstance(inner.get("description"), str | None):
        raise BadRequest(f"{where}.description must be text", param=f"{where}.description")
    return schema_spec(inner.get("schema"), f"{where}.schema")


def schema_spec(schema: object, param: str) -> GrammarSpec:
    """Raises BadRequest where it is no JSON schema at all; the rest is found when it is compiled."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{param} must be a JSON schema: an object, not {shown(schema)}", param=param)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, _json(schema), param)


def _guided_json(value: object) -> GrammarSpec:
    name = "guided_json"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{name} is a text that is not JSON: {error}", param=name) from error
    return schema_spec(value, name)


def _guided_regex(value: object) -> GrammarSpec:
    return GrammarSpec(
        GrammarKind.REGEX, _text(value, "guided_regex", "a regular expression"), "guided_regex"
    )


def _guided_grammar(value: object) -> GrammarSpec:
    name = "guided_grammar"
    return GrammarSpec(GrammarKind.LARK, _text(value, name, "a grammar in Lark or GBNF syntax"), name)


def _guided_choice(value: object) -> GrammarSpec:
    name = "guided_choice"
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise BadRequest(f"{name} must be a list of 1 to {MAX_CHOICES} texts", param=name)
    choices = [_json(_text(choice, f"{name}[{i}]", "an answer")) for i, choice in enumerate(value)]
    return GrammarSpec(GrammarKind.LARK, "start: " + " | ".join(choices), name)


_READERS: Mapping[str, Callable[[object], GrammarSpec | None]] = {
    "response_format": _response_format,
    "guided_json": _guided_json,
    "guided_regex": _guided_regex,
    "guided_choice": _guided_choice,
    "guided_grammar": _guided_grammar,
}


def _only(value: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = next((name for name in value if name not in known), None)
    if unknown is not None:
        raise BadRequest(f"{where} has {shown(unknown)}; it may have {', '.join(sorted(known))}", param=where)


def _text(value: object, name: str, what: str) -> str:
    if not isinstance(value, str) or not value or not is_unicode(value):
        raise BadRequest(f"{name} must be {what}: a text of valid Unicode, not {shown(value)}", param=name)
    return value


def _json(value: object) -> str:
    """JSON in valid Unicode: half a surrogate pair, which UTF-8 lacks, stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
