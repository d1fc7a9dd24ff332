"""What a request says about its chat template: fields that decide how the conversation becomes a prompt. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_fields import boolean

TEMPLATE_FIELDS = frozenset({"chat_template_kwargs", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True)
class Rendering:
    """How a conversation is written."""

    arguments: Mapping[str, Any]
    """For the template, by name."""
    generation_prompt: bool = True
    """The prompt ends with the beginning of an answer."""
    continues: bool = False
    """The prompt ends with the last message, which the answer goes on with."""


def parse_rendering(fields: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Rendering:
    """Raises BadRequest naming the field."""
    continues = boolean(fields, "continue_final_message", False)
    generation_prompt = boolean(fields, "add_generation_prompt", not continues)
    if continues and generation_prompt:
        raise BadRequest(
            "continue_final_message goes on with the last message, and add_generation_prompt begins a new one; "
            "set one of them",
            param="continue_final_message",
        )
    if continues:
        _check_last(messages)
    return Rendering(_arguments(fields), generation_prompt, continues)


def _check_last(messages: Sequence[Mapping[str, Any]]) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        raise BadRequest(
            "continue_final_message needs messages of which the last is the assistant's",
            param="continue_final_message",
        )
    if last.get("tool_calls"):
        raise BadRequest(
            "continue_final_message cannot go on with a message that calls tools",
            param="continue_final_message",
        )


def _arguments(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    arguments = fields.get(name, {})
    if not isinstance(arguments, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    for taken in ("messages", "add_generation_prompt", "tools"):
        if taken in arguments:
            raise BadRequest(f"{name} may not have {taken}, which the engine gives", param=name)
    return arguments
