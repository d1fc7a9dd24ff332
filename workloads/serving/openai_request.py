"""Reads the bodies of /v1/completions and /v1/chat/completions, strictly.

Every field is either used, accepted only at the value that changes nothing, accepted because it
cannot change the answer, or refused with its name: an option is never silently dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.sampling import SamplingParams

MAX_STOPS = 16
MAX_PROMPTS = 64
MAX_TOP_LOGPROBS = 20
SAMPLING_FIELDS = frozenset(
    {
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"),
        *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "logprobs"),
    }
)
STREAM_OPTIONS = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
SHARED_FIELDS = SAMPLING_FIELDS | {"model", "stream", "stream_options"}
WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        "parallel_tool_calls",
    }
)
ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
}
"""Not built yet: accepted at these values (or null), else a 400 that names the field."""


@dataclass(frozen=True)
class Wanted:
    """What both bodies share."""

    model: str
    params: SamplingParams
    max_tokens: int | None
    """As asked; None: the route's default, which depends on the prompt."""
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    """Usage so far on every chunk, so that whoever counts knows what a broken stream delivered."""


@dataclass(frozen=True)
class CompletionBody:
    wanted: Wanted
    prompts: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True)
class ChatBody:
    wanted: Wanted
    messages: tuple[dict[str, Any], ...]
    template_arguments: Mapping[str, Any]


def parse_completion(body: object) -> CompletionBody:
    fields = _fields(body, SHARED_FIELDS | {"prompt"})
    logprobs = _integer(fields, "logprobs", 0, MAX_TOP_LOGPROBS)
    return CompletionBody(_wanted(fields, logprobs), _prompts(fields.get("prompt")))


def parse_chat(body: object) -> ChatBody:
    fields = _fields(
        body,
        SHARED_FIELDS | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"},
    )
    if fields.get("max_completion_tokens") is not None:
        fields["max_tokens"] = fields["max_completion_tokens"]
    wants = _boolean(fields, "logprobs", False)
    top = _integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    arguments = fields.get("chat_template_kwargs", {})
    if not isinstance(arguments, dict):
        raise BadRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    return ChatBody(
        _wanted(fields, (top or 0) if wants else None),
        tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages)),
        {k: v for k, v in arguments.items() if k not in ("messages", "add_generation_prompt")},
    )


def _fields(body: object, known: frozenset[str] | set[str]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name, value in body.items():
        if name in known or name in WITHOUT_EFFECT or value is None:
            continue
        if name not in ONLY_AT:
            raise BadRequest(f"unknown field {name!r}; see the engine's README for what it reads", param=name)
        if not any(value == fine and type(value) is type(fine) for fine in ONLY_AT[name]):
            raise BadRequest(
                f"{name}={value!r} is not supported by this engine (only {ONLY_AT[name][0]!r})", param=name
            )
    return {name: value for name, value in body.items() if value is not None}


def _wanted(fields: Mapping[str, Any], logprobs: int | None) -> Wanted:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must name a model; GET /v1/models lists them", param="model")
    stream = _boolean(fields, "stream", False)
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - STREAM_OPTIONS:
        raise BadRequest(
            "stream_options may hold include_usage and continuous_usage_stats only", param="stream_options"
        )
    if options and not stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    max_tokens = _integer(fields, "max_tokens", 1, 2**31)
    params = SamplingParams(
        max_tokens=max_tokens or 1,
        min_tokens=_integer(fields, "min_tokens", 0, 2**31) or 0,
        temperature=_number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(fields, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(0, _integer(fields, "top_k", -1, 2**31) or 0),
        seed=_integer(fields, "seed", -(2**63), 2**63 - 1),
        stop=_stops(fields.get("stop")),
        stop_token_ids=frozenset(_token_list(fields.get("stop_token_ids", []), "stop_token_ids")),
        ignore_eos=_boolean(fields, "ignore_eos", False),
        skip_special_tokens=_boolean(fields, "skip_special_tokens", True),
        include_stop_text=_boolean(fields, "include_stop_str_in_output", False),
        presence_penalty=_number(fields, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(fields, "frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.get("logit_bias", {})),
        logprobs=logprobs,
    )
    include_usage = _boolean(options, "include_usage", False)
    continuous_usage = _boolean(options, "continuous_usage_stats", False)
    return Wanted(model, params, max_tokens, stream, include_usage, continuous_usage)


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(_is_integer(v) for v in value):
            return (tuple(_token_list(value, "prompt")),)
        if len(value) > MAX_PROMPTS:
            raise BadRequest(f"at most {MAX_PROMPTS} prompts in one request", param="prompt")
        if all(isinstance(v, str) for v in value):
            return tuple(value)
        if all(isinstance(v, list) for v in value):
            return tuple(tuple(_token_list(v, "prompt")) for v in value)
    raise BadRequest("prompt must be text, a list of texts, tokens, or a list of token lists", param="prompt")


def _message(value: object, where: str) -> dict[str, Any]:
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
    if value.get("tool_calls"):
        raise BadRequest(f"{where}.tool_calls is not supported by this engine", param=f"{where}.tool_calls")
    return {**value, "content": content}


def _stops(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise BadRequest(f"stop must be a text or up to {MAX_STOPS} texts, none empty", param="stop")
    return tuple(stops)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise BadRequest("logit_bias must be an object of token id to number", param="logit_bias")
    pairs: list[tuple[int, float]] = []
    for token, bias in value.items():
        number = str(token)
        known = number.isascii() and number.isdigit()  # "²" is a digit too, and no number
        if not known or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise BadRequest(
                f"logit_bias: {token!r}: {bias!r} is not a token and a number", param="logit_bias"
            )
        pairs.append((int(token), float(max(-100, min(100, bias)))))  # cut first: 10**400 is no float
    return tuple(pairs)


def _token_list(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(_is_integer(v) and v >= 0 for v in value):
        raise BadRequest(f"{name} must be a list of token ids", param=name)
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _boolean(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {value!r}", param=name)
    return value


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{name} must be a whole number from {least} to {most}, not {value!r}", param=name)
    return value


def _number(
    fields: Mapping[str, Any], name: str, default: float, least: float, most: float, above: bool = False
) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number, not {value!r}", param=name)
    if not least <= value <= most or (above and value == least):
        raise BadRequest(
            f"{name} must be {'above' if above else 'at least'} {least:g} and at most {most:g}, not {value}",
            param=name,
        )
    return float(value)
