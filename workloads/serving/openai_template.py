"""What a request says about its chat template: fields that decide how the conversation becomes a prompt. Pure Python."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from busbar.kube.documents import shown
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_fields import boolean
from busbar.workloads.serving.openai_format import is_unicode

EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TEMPLATE_FIELDS = frozenset(
    {"chat_template_kwargs", EFFORT, "add_generation_prompt", "continue_final_message"}
)
MAX_ARGUMENTS_CHARACTERS = 16_384
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
GIVEN = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", *SPECIAL),
        *("raise_exception", "strftime_now"),
        *("cycler", "dict", "joiner", "lipsum", "namespace", "range"),
    }
)
"""Names that a template gets from the engine, or from Jinja."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Rendering:
    """How a conversation is written."""

    arguments: Mapping[str, Any]
    """For the template, by name."""
    generation_prompt: bool = True
    """The prompt ends with the beginning of an answer."""
    continues: bool = False
    """The prompt ends with the last message, which the answer goes on with."""
    effort: str | None = None
    """How much the model is to think, for templates that read it."""


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
    arguments, effort = _arguments(fields), _effort(fields)
    if effort is not None and EFFORT in arguments:
        raise BadRequest(f"{EFFORT} is in chat_template_kwargs too; give it once", param=EFFORT)
    return Rendering(arguments, generation_prompt, continues, effort)


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


def _effort(fields: Mapping[str, Any]) -> str | None:
    effort = fields.get(EFFORT)
    if effort is not None and effort not in EFFORTS:
        raise BadRequest(f"{EFFORT} must be one of {', '.join(EFFORTS)}, not {shown(effort)}", param=EFFORT)
    return effort


def _arguments(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    arguments = fields.get(name, {})
    if not isinstance(arguments, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    for key in arguments:
        if not _NAME.fullmatch(key):
            raise BadRequest(
                f"{name} has {shown(key)}, which is no name that a template could read", param=name
            )
        if key in GIVEN:
            raise BadRequest(f"{name} may not have {key}, which the engine gives", param=name)
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{name} must hold plain JSON: {error}", param=name) from error
    if len(text) > MAX_ARGUMENTS_CHARACTERS or not is_unicode(text):
        raise BadRequest(
            f"{name} must be valid Unicode of up to {MAX_ARGUMENTS_CHARACTERS} characters as JSON; it has {len(text)}",
            param=name,
        )
    return arguments
