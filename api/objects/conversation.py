"""What a person asks a model service from its page, as an OpenAI request. Pure Python.

The browser keeps the conversation and sends all of it each time; nothing is stored. What is checked here is what the
form itself can get wrong: texts that are not JSON, and sizes. Whether messages, tools and a schema fit is the engine's to
say, whose sentence is then shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from busbar.api.errors import Invalid

MAX_PROMPT_CHARS = 8_000
MAX_CONVERSATION_CHARS = 100_000
"""Of all messages as JSON."""
MAX_JSON_CHARS = 50_000
"""Of the tools, and of the schema."""
MAX_TOKENS = 4_096


class ToolChoice(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"
    REQUIRED = "required"
    NONE = "none"


@dataclass(frozen=True)
class Target:
    """Who is asked, and how the answer is sampled."""

    namespace: str
    service: str
    adapter: str = ""
    """One of the service's; empty: the model alone."""
    max_tokens: int = 256
    temperature: float = 0.8

    def fields(self) -> dict[str, Any]:
        """Of the request, for both routes. Raises Invalid."""
        if not 1 <= self.max_tokens <= MAX_TOKENS:
            raise Invalid(f"max tokens must be 1 to {MAX_TOKENS}", field="max_tokens")
        if not 0 <= self.temperature <= 2:
            raise Invalid("temperature must be 0 to 2", field="temperature")
        name = f"{self.namespace}/{self.service}"
        return {
            "model": f"{name}:{self.adapter}" if self.adapter else name,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True)
class Question:
    """An OpenAI request and its route at the gateway."""

    path: str
    body: dict[str, Any]


def prompted(target: Target, prompt: str) -> Question:
    """A prompt to complete. Raises Invalid where it is empty or too long, or the target's numbers are out of range."""
    if not prompt.strip() or len(prompt) > MAX_PROMPT_CHARS:
        raise Invalid(f"the prompt needs 1 to {MAX_PROMPT_CHARS} characters", field="prompt")
    return Question("/v1/completions", {**target.fields(), "prompt": prompt})


def chatted(
    target: Target, messages: str, tools: str = "", choice: ToolChoice = ToolChoice.AUTO, schema: str = ""
) -> Question:
    """The next turn of a conversation.

    Args:
        messages: JSON list of OpenAI messages.
        tools: JSON list of OpenAI tools; empty: none.
        schema: JSON schema of the answer; empty: free text.

    Raises:
        Invalid: a text is not JSON of its kind or too long, or the target's numbers are out of range.
    """
    said = _read(messages, "messages", MAX_CONVERSATION_CHARS, _objects, "a list of messages")
    if not said:
        raise Invalid("the conversation has no message yet", field="messages")
    body = {**target.fields(), "messages": said}
    if tools.strip():
        body["tools"] = _read(tools, "tools", MAX_JSON_CHARS, _objects, "a list of tools: [{…}, …]")
        body["tool_choice"] = choice.value
    if schema.strip():
        wanted = _read(schema, "schema", MAX_JSON_CHARS, _is_object, "a JSON schema: an object, {…}")
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": wanted, "strict": True},
        }
    return Question("/v1/chat/completions", body)


def _read(text: str, field: str, most: int, fits: Callable[[object], bool], what: str) -> Any:
    """The JSON value of a form's text. Raises Invalid."""
    if len(text) > most:
        advice = "begin a new conversation" if field == "messages" else "shorten it"
        raise Invalid(
            f"{field}: {len(text)} characters; at most {most} are sent from here, {advice}", field=field
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise Invalid(f"{field} must be JSON; {place}: {error.msg}", field=field) from error
    except (ValueError, RecursionError) as error:
        raise Invalid(
            f"{field}: a number is too long, or the JSON is nested too deeply", field=field
        ) from error
    if not fits(value):
        raise Invalid(f"{field} must be {what}", field=field)
    return value


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_object, value))
