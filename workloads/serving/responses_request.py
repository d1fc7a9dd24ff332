"""Reads the body of /v1/responses by translating it into that of a chat. Pure Python.

Whatever both routes have is read by the chat's own code, so it means the same; an error about it gets this route's
name of the field (`own_names`). Nothing is stored: what needs an earlier or a later answer is refused with a sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from busbar.kube.documents import shown
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_fields import known_fields
from busbar.workloads.serving.openai_format import FORMAT_FIELDS, is_unicode
from busbar.workloads.serving.openai_request import SAMPLING_FIELDS, ChatBody, parse_chat

PATH = "/v1/responses"
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512
SAME_AS_CHAT = (
    (SAMPLING_FIELDS - {"max_tokens", "logprobs", "prompt_logprobs"})
    | (FORMAT_FIELDS - {"response_format"})
    | {"model", "stream", "parallel_tool_calls", "cache_salt", "priority", "chat_template_kwargs"}
)
TRANSLATED = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "reasoning"),
        *("metadata", "stream_options"),
    }
)
NOT_STORED = "nothing is stored here; send the earlier items again in `input`"
HOSTED = "there are no hosted tools; leave it out"
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "store": ((False,), "nothing is stored here; leave it out, or make it false"),
    "previous_response_id": ((), NOT_STORED),
    "conversation": ((), NOT_STORED),
    "prompt": ((), "no prompts are stored here; send the text in `input` and `instructions`"),
    "background": ((False,), "an answer comes in the call that asks for it; leave it out, or make it false"),
    "truncation": (("disabled",), "an input that is too long is refused; leave it out, and shorten `input`"),
    "include": (([],), "an answer holds all that there is; leave it out"),
    "max_tool_calls": ((), HOSTED),
    "top_logprobs": ((0,), "for log-probabilities use /v1/chat/completions"),
    "logprobs": ((False,), "for log-probabilities use /v1/chat/completions"),
    "prompt_logprobs": ((), "for log-probabilities use /v1/chat/completions"),
    "n": ((1,), "this route gives one answer; send the request several times"),
    "messages": ((), "this route takes them as `input`"),
    "max_tokens": ((), "this route calls it `max_output_tokens`"),
    "max_completion_tokens": ((), "this route calls it `max_output_tokens`"),
    "response_format": ((), "this route takes it as `text.format`"),
    "reasoning_effort": ((), "this route takes it as `reasoning.effort`"),
}
"""Fields that are not built here: the values beside null that change nothing, and what to do instead."""
RENAMED: tuple[tuple[str, str], ...] = (
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r"\bmax_(completion_)?tokens\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bmessages\[\d+\][\w.\[\]]*", "input"),
)
"""Names of a chat's fields in sentences, by pattern, and what these fields are called here."""
WHOLE_NAMES = {"messages": "input", "prompt": "input"}
"""Fields whose names are plain words of sentences."""
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Templates know no developer."""
_TEXT_PARTS = ("input_text", "output_text")


@dataclass(frozen=True)
class Echo:
    """What an answer repeats of its request, as the client wrote it."""

    metadata: Mapping[str, str]
    instructions: str | None
    form: Mapping[str, Any]
    """`text.format`."""
    tools: list[Any]
    tool_choice: object
    parallel: bool
    effort: str | None
    max_output_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class ResponsesBody(ChatBody):
    """A chat that is answered in this route's form."""

    echo: Echo


def parse_responses(body: object) -> ResponsesBody:
    """Raises BadRequest with the field's name."""
    fields = known_fields(body, SAME_AS_CHAT | TRANSLATED | REFUSED.keys())
    for name, (fine, why) in REFUSED.items():
        value = fields.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in fine):
            raise BadRequest(f"{name}={shown(value)} is not served: {why}", param=name)
    _options(fields.get("stream_options", {}))
    given = {name: fields[name] for name in SAME_AS_CHAT if name in fields}
    chat: dict[str, Any] = {**given, "messages": _messages(fields)}
    if "max_output_tokens" in fields:
        chat["max_tokens"] = fields["max_output_tokens"]
    form = _text_format(fields.get("text", {}))
    if form is not None:
        chat["response_format"] = form
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    if "tool_choice" in fields:
        chat["tool_choice"] = _tool_choice(fields["tool_choice"])
    effort = _effort(fields.get("reasoning", {}))
    if effort is not None:
        chat["reasoning_effort"] = effort
    echo = Echo(
        metadata=_metadata(fields.get("metadata", {})),
        instructions=fields.get("instructions"),
        form={"type": "text"} if form is None else fields["text"]["format"],
        tools=fields.get("tools", []),
        tool_choice=fields.get("tool_choice", "auto"),
        parallel=fields.get("parallel_tool_calls", True),
        effort=effort,
        max_output_tokens=fields.get("max_output_tokens"),
    )
    with own_names():
        read = parse_chat(chat)
    return ResponsesBody(read.wanted, read.messages, read.rendering, read.tools, echo=echo)


@contextmanager
def own_names() -> Iterator[None]:
    """Around what speaks of a chat's fields: its errors name the field as this route's client wrote it."""
    try:
        yield
    except BadRequest as error:
        name = None if error.param is None else WHOLE_NAMES.get(error.param) or _own(error.param)
        raise BadRequest(_own(str(error)), param=name) from error


def _own(text: str) -> str:
    for pattern, own in RENAMED:
        text = re.sub(pattern, own, text)
    return text


def names_of(body: object) -> AbstractContextManager[None]:
    """`own_names` around work on a body of this route; nothing for those of others."""
    return own_names() if isinstance(body, ResponsesBody) else nullcontext()


# -- input ----------------------------------------------------------------------------------------


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as a chat has it."""
    asked, instructions = fields.get("input"), fields.get("instructions")
    if not isinstance(instructions, str | None):
        raise BadRequest(f"instructions must be text, not {shown(instructions)}", param="instructions")
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(asked, str):
        return [*messages, {"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise BadRequest("input must be a text, or a list with at least one item", param="input")
    calls: dict[str, bool] = {}
    for i, item in enumerate(asked):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        read = _ITEMS.get(kind) if isinstance(kind, str) else None
        if not isinstance(item, dict) or read is None:
            raise BadRequest(
                f"{where} must be an object of the type {', '.join(_ITEMS)}; {shown(kind)} is not served",
                param=where,
            )
        read(item, where, messages, calls)
    return messages


def _message(
    item: dict[str, Any], where: str, messages: list[dict[str, Any]], calls: dict[str, bool]
) -> None:
    _only(item, {"type", "role", "content", "id", "status", "phase"}, where)
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(
            f"{where}.role must be {', '.join(_ROLES)}, not {shown(role)}", param=f"{where}.role"
        )
    messages.append({"role": _ROLES[role], "content": _content(item.get("content"), f"{where}.content")})


def _call(item: dict[str, Any], where: str, messages: list[dict[str, Any]], calls: dict[str, bool]) -> None:
    """A call belongs to the assistant's message before it, as the engine's own answers have it."""
    _only(item, {"type", "call_id", "name", "arguments", "id", "status"}, where)
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id or call_id in calls:
        raise BadRequest(
            f"{where}.call_id must be a text that no other call has, not {shown(call_id)}",
            param=f"{where}.call_id",
        )
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name must be text, not {shown(name)}", param=f"{where}.name")
    if not _is_object(arguments):
        raise BadRequest(
            f"{where}.arguments must be the text of a JSON object, not {shown(arguments)}",
            param=f"{where}.arguments",
        )
    calls[call_id] = True
    function = {"name": name, "arguments": arguments}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    said = messages[-1].setdefault("tool_calls", [])
    said.append({"id": call_id, "type": "function", "function": function})


def _result(item: dict[str, Any], where: str, messages: list[dict[str, Any]], calls: dict[str, bool]) -> None:
    _only(item, {"type", "call_id", "output", "id", "status"}, where)
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not calls.get(call_id):
        raise BadRequest(
            f"{where}.call_id must be the id of an earlier call without a result, not {shown(call_id)}",
            param=f"{where}.call_id",
        )
    calls[call_id] = False
    content = _content(item.get("output"), f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _is_object(text: object) -> bool:
    """Whether a text is that of a JSON object."""
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


_ITEMS: Mapping[str, Callable[[dict[str, Any], str, list[dict[str, Any]], dict[str, bool]], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
}


def _content(value: object, where: str) -> str:
    """Text, or the joined texts of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a text or a list of parts, not {shown(value)}", param=where)
    texts = []
    for i, part in enumerate(value):
        inside = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in _TEXT_PARTS or not isinstance(text, str):
            raise BadRequest(
                f"{inside} must be a part of the type {' or '.join(_TEXT_PARTS)} with a text; "
                f"{shown(kind)} is not served",
                param=inside,
            )
        _only(part, {"type", "text", *(("annotations", "logprobs") if kind == "output_text" else ())}, inside)
        if part.get("annotations"):
            raise BadRequest(
                f"{inside}.annotations are not served: there are no hosted tools to refer to",
                param=f"{inside}.annotations",
            )
        texts.append(text)
    return "".join(texts)


# -- the other fields -----------------------------------------------------------------------------


def _options(value: object) -> None:
    if not isinstance(value, dict) or set(value) - {"include_obfuscation"}:
        raise BadRequest(
            "stream_options may hold include_obfuscation only; the last event always has the usage",
            param="stream_options",
        )


def _text_format(value: object) -> dict[str, Any] | None:
    """The chat's `response_format`, None where the answer is plain text."""
    if not isinstance(value, dict):
        raise BadRequest(f"text must be an object with a format, not {shown(value)}", param="text")
    _only(value, {"format"}, "text")
    form = value.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise BadRequest(
            f"text.format must be an object with the type text, json_object or json_schema, not {shown(form)}",
            param="text.format",
        )
    kind, rest = form["type"], {name: each for name, each in form.items() if name != "type"}
    if kind == "json_schema":
        return {"type": kind, "json_schema": rest}
    _only(form, {"type"}, "text.format")
    return None if kind == "text" else {"type": kind}


def _tools(value: object) -> object:
    """Functions as a chat has them; its reader checks them."""
    if not isinstance(value, list):
        return value
    tools = []
    for i, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or kind != "function":
            raise BadRequest(
                f"tools[{i}] must be an object of the type function; {shown(kind)} is not served",
                param=f"tools[{i}]",
            )
        tools.append(
            {"type": kind, "function": {name: each for name, each in tool.items() if name != "type"}}
        )
    return tools


def _tool_choice(value: object) -> object:
    if isinstance(value, dict) and set(value) == {"type", "name"} and value["type"] == "function":
        return {"type": "function", "function": {"name": value["name"]}}
    if isinstance(value, dict):
        raise BadRequest(
            f"tool_choice must be none, auto, required, or an object with the type function and its name, not {shown(value)}",
            param="tool_choice",
        )
    return value


def _effort(value: object) -> str | None:
    if not isinstance(value, dict):
        raise BadRequest(f"reasoning must be an object with an effort, not {shown(value)}", param="reasoning")
    _only(value, {"effort"}, "reasoning")
    effort = value.get("effort")
    if not isinstance(effort, str | None):
        raise BadRequest(f"reasoning.effort must be text, not {shown(effort)}", param="reasoning.effort")
    return effort


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise BadRequest(
            f"metadata must be an object of up to {MAX_METADATA} texts, not {shown(value)}", param="metadata"
        )
    for name, text in value.items():
        if (
            len(name) > MAX_METADATA_NAME
            or not isinstance(text, str)
            or len(text) > MAX_METADATA_TEXT
            or not is_unicode(name + text)
        ):
            raise BadRequest(
                f"metadata: {shown(name)}: {shown(text)} is not a name of up to {MAX_METADATA_NAME} characters with a "
                f"text of up to {MAX_METADATA_TEXT}, both valid Unicode",
                param="metadata",
            )
    return value


def _only(value: Mapping[str, object], known: set[str], where: str) -> None:
    """Null is what a client writes for a field that it leaves out."""
    unknown = next((name for name, each in value.items() if name not in known and each is not None), None)
    if unknown is not None:
        raise BadRequest(
            f"{where} has {shown(unknown)}, which is not served; it may have {', '.join(sorted(known))}",
            param=where,
        )
