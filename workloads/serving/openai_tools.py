"""Chat messages, and the tools that an answer may call. Pure Python; refuses what it does not serve, by name.

Templates want the arguments of earlier calls as objects; OpenAI's messages hold them as JSON texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from busbar.kube.documents import shown
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.schema import MAX_PARTS, check_schema

MAX_TOOLS = 128
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Calling(StrEnum):
    """Whether an answer may call tools."""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True)
class Tool:
    """A function that an answer may call."""

    name: str
    schema: Mapping[str, Any]
    """Of its arguments."""
    strict: bool
    """Its arguments are to follow the schema, also where the model decides whether it calls."""
    document: Mapping[str, Any]
    """As the template gets it."""


@dataclass(frozen=True)
class Tools:
    """What a request's answer may call."""

    listed: tuple[Tool, ...]
    calling: Calling = Calling.AUTO
    only: str | None = None
    """The one tool that is to be called."""
    parallel: bool = True
    """There may be several calls in an answer."""

    @property
    def needs_grammar(self) -> bool:
        return self.calling is Calling.REQUIRED or any(tool.strict for tool in self.listed)

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.listed if self.only in (None, tool.name))


def parse_tools(fields: Mapping[str, Any]) -> Tools | None:
    """The tools of a request, None where its answer may call none. Raises BadRequest."""
    listed = _tools(fields.get("tools", []))
    choice, parallel = fields.get("tool_choice", "auto"), fields.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise BadRequest(
            f"parallel_tool_calls must be true or false, not {shown(parallel)}", param="parallel_tool_calls"
        )
    calling, only = _choice(choice)
    if not listed:
        if calling is Calling.REQUIRED:
            raise BadRequest("tool_choice asks for a call, but there are no tools", param="tool_choice")
        return None
    if only is not None and only not in {tool.name for tool in listed}:
        raise BadRequest(f"tool_choice names {shown(only)}, which is none of the tools", param="tool_choice")
    return None if calling is None else Tools(listed, calling, only, parallel)


def check_tools(tools: Tools) -> None:
    """Before a grammar is made of them: raises BadRequest for schemas that are too large or have no finite value."""
    parts = 0
    for i, tool in enumerate(tools.listed):
        where = f"tools[{i}].function.parameters"
        parts += check_schema(tool.schema, where)
        if parts > MAX_PARTS:
            raise BadRequest(f"the schemas of the tools have more than {MAX_PARTS} parts", param=where)


def parse_messages(value: object) -> tuple[dict[str, Any], ...]:
    """Raises BadRequest with the field's path; a tool's result follows the call that it belongs to."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    open_calls: set[str] = set()
    return tuple(_message(message, f"messages[{i}]", open_calls) for i, message in enumerate(value))


def mentions_tools(messages: tuple[dict[str, Any], ...]) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


# -- tools ----------------------------------------------------------------------------------------


def _choice(value: object) -> tuple[Calling | None, str | None]:
    """(whether to call, the one tool to call); None: no call."""
    if value == "none":
        return None, None
    if isinstance(value, str) and value in list(Calling):
        return Calling(value), None
    function = value.get("function") if isinstance(value, dict) else None
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(function, dict):
        name = function.get("name")
        if isinstance(name, str) and set(value) == {"type", "function"} and set(function) == {"name"}:
            return Calling.REQUIRED, name
    raise BadRequest(
        f"tool_choice must be none, auto, required, or an object that names a function, not {shown(value)}",
        param="tool_choice",
    )


def _tools(value: object) -> tuple[Tool, ...]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise BadRequest(f"tools must be a list of up to {MAX_TOOLS} functions", param="tools")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(value))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise BadRequest(
                f"tools[{i}] is a second tool with the name {tool.name}; give each its own",
                param=f"tools[{i}].function.name",
            )
        names.add(tool.name)
    return tools


def _tool(value: object, where: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(function, dict):
        raise BadRequest(f"{where} must be an object with the type function and a function", param=where)
    where = f"{where}.function"
    _only(value, {"type", "function"}, where.removesuffix(".function"))
    _only(function, {"name", "description", "parameters", "strict"}, where)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(
            f"{where}.name must be 1 to 64 letters, digits or _ . -, not {shown(name)}", param=f"{where}.name"
        )
    if not isinstance(function.get("description"), str | None):
        raise BadRequest(f"{where}.description must be text", param=f"{where}.description")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise BadRequest(
            f"{where}.strict must be true or false, not {shown(strict)}", param=f"{where}.strict"
        )
    if schema is not None and (not isinstance(schema, dict) or schema.get("type") != "object"):
        raise BadRequest(
            f"{where}.parameters must be a JSON schema of the type object, not {shown(schema)}",
            param=f"{where}.parameters",
        )
    return Tool(name, schema or NO_ARGUMENTS, strict is True, value)


# -- messages -------------------------------------------------------------------------------------


def _message(value: object, where: str, open_calls: set[str]) -> dict[str, Any]:
    """The message for the template; `open_calls` are the ids of earlier calls without a result."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise BadRequest(f"{where} must be an object with a role", param=where)
    content = value.get("content")
    if isinstance(content, list):
        texts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        parts = [text for text in texts if isinstance(text, str)]
        if len(parts) != len(content):
            raise BadRequest(f"{where}.content may hold text parts only", param=f"{where}.content")
        content = "".join(parts)
    if content is None and value["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content must be text", param=f"{where}.content")
    message = {**value, "content": content}
    if value["role"] == "tool":
        called = value.get("tool_call_id")
        if not isinstance(called, str) or called not in open_calls:
            raise BadRequest(
                f"{where}.tool_call_id must be the id of an earlier call without a result, not {shown(called)}",
                param=f"{where}.tool_call_id",
            )
        open_calls.remove(called)
    calls = message.pop("tool_calls", None)
    if calls:
        where = f"{where}.tool_calls"
        if value["role"] != "assistant":
            raise BadRequest(f"{where}: only the assistant calls tools", param=where)
        if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
            raise BadRequest(f"{where} must be a list of up to {MAX_TOOLS} calls", param=where)
        message["tool_calls"] = [_call(call, f"{where}[{i}]", open_calls) for i, call in enumerate(calls)]
    return message


def _call(value: object, where: str, open_calls: set[str]) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or value.get("type", "function") != "function"
        or not isinstance(function, dict)
    ):
        raise BadRequest(f"{where} must be a call of a function", param=where)
    given, name, text = value.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(given, str) or not given or given in open_calls:
        raise BadRequest(
            f"{where}.id must be a text that no other call has, not {shown(given)}", param=f"{where}.id"
        )
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.function.name must be text", param=f"{where}.function.name")
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"{where}.function.arguments must be the text of a JSON object, not {shown(text)}",
            param=f"{where}.function.arguments",
        )
    open_calls.add(given)
    return {"id": given, "type": "function", "function": {"name": name, "arguments": arguments}}


def _only(value: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = next((name for name in value if name not in known), None)
    if unknown is not None:
        raise BadRequest(f"{where} has {shown(unknown)}; it may have {', '.join(sorted(known))}", param=where)
