"""Reads the bodies of /v1/completions and /v1/chat/completions, strictly.

Every field is either used, accepted only at the value that changes nothing, accepted because it
cannot change the answer, or refused with its name: an option is never silently dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from busbar.kube.documents import shown
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_fields import (
    boolean,
    integer,
    is_integer,
    known_fields,
    number,
    optional_model,
    token_list,
)
from busbar.workloads.serving.openai_format import FORMAT_FIELDS, GrammarSpec, is_unicode, parse_format
from busbar.workloads.serving.openai_template import TEMPLATE_FIELDS, Rendering, parse_rendering
from busbar.workloads.serving.openai_tools import TOOL_FIELDS, Tools, parse_messages, parse_tools
from busbar.workloads.serving.sampling import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
"""Of one stop string: the time in which a text is searched for its beginnings grows with its square."""
MAX_PROMPTS = 64
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 20
MAX_PRIORITY = 1_000_000
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 300
MAX_BAD_WORD_CHARACTERS = 256
SAMPLING_FIELDS = frozenset(
    {
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"),
        *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "min_p", "logit_bias", "logprobs"),
        *("allowed_token_ids", "bad_words", "prompt_logprobs"),
    }
)
STREAM_OPTIONS = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
SHARED_FIELDS = (
    SAMPLING_FIELDS | FORMAT_FIELDS | {"cache_salt", "priority", "n", "model", "stream", "stream_options"}
)
CHAT_FIELDS = TEMPLATE_FIELDS | {"messages", "max_completion_tokens", "top_logprobs"}


@dataclass(frozen=True)
class Wanted:
    """What both bodies share."""

    model: str
    params: SamplingParams
    max_tokens: int | None
    """As asked; None: the route's default, which depends on the prompt."""
    stream: bool
    include_usage: bool
    n: int = 1
    """Answers to each prompt."""
    cache_salt: str = ""
    """Only requests with the same salt share cached beginnings."""
    continuous_usage: bool = False
    """Usage so far on every chunk, so that whoever counts knows what a broken stream delivered."""
    allowed_token_ids: frozenset[int] | None = None
    """Only these may be generated; None: any."""
    bad_words: tuple[str, ...] = ()
    """Their token sequences are never generated."""
    grammar: GrammarSpec | None = None
    """The answer follows it."""
    priority: int = 0
    """Among the waiting requests of the same key: smaller starts first."""


@dataclass(frozen=True)
class CompletionBody:
    wanted: Wanted
    prompts: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True)
class ChatBody:
    wanted: Wanted
    messages: tuple[dict[str, Any], ...]
    rendering: Rendering
    tools: Tools | None = None


def parse_completion(body: object) -> CompletionBody:
    fields = known_fields(body, SHARED_FIELDS | {"prompt"})
    logprobs = integer(fields, "logprobs", 0, MAX_TOP_LOGPROBS)
    return CompletionBody(
        _wanted(fields, logprobs), parse_prompts(fields.get("prompt"), "prompt", MAX_PROMPTS)
    )


def parse_chat(body: object) -> ChatBody:
    fields = known_fields(body, SHARED_FIELDS | CHAT_FIELDS | TOOL_FIELDS)
    if fields.get("max_completion_tokens") is not None:
        fields["max_tokens"] = fields["max_completion_tokens"]
    wants = boolean(fields, "logprobs", False)
    top = integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    messages = parse_messages(fields.get("messages"))
    rendering = parse_rendering(fields, messages)
    wanted, tools = _wanted(fields, (top or 0) if wants else None), parse_tools(fields)
    if tools is not None:
        given = {"response_format": wanted.grammar, "allowed_token_ids": wanted.allowed_token_ids}
        for name, value in {**given, "bad_words": wanted.bad_words}.items():
            if value:
                field = wanted.grammar.param if name == "response_format" and wanted.grammar else name
                raise BadRequest(
                    f"{field} cannot be combined with tools, except with the tool_choice none", param=field
                )
    return ChatBody(wanted, messages, rendering, tools)


PARSERS: Mapping[str, Callable[[object], CompletionBody | ChatBody]] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
}


@dataclass(frozen=True)
class TokenizeBody:
    """A prompt, or messages that the chat template makes one of."""

    model: str | None
    prompt: str | None
    messages: tuple[dict[str, Any], ...]
    rendering: Rendering
    special: bool | None
    """Whether the tokenizer adds its special tokens; None: as a request of that kind does."""
    with_texts: bool
    tools: Tools | None = None


def parse_tokenize(body: object) -> TokenizeBody:
    known = {"model", "prompt", "messages", "tools", "add_special_tokens", "return_token_strs"}
    fields = known_fields(body, known | TEMPLATE_FIELDS)
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) is (messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise BadRequest("prompt must be text", param="prompt")
    conversation = () if messages is None else parse_messages(messages)
    return TokenizeBody(
        optional_model(fields),
        prompt,
        conversation,
        parse_rendering(fields, conversation),
        boolean(fields, "add_special_tokens", True) if "add_special_tokens" in fields else None,
        boolean(fields, "return_token_strs", False),
        parse_tools(fields),
    )


def parse_detokenize(body: object) -> tuple[str | None, list[int]]:
    """(model, tokens)."""
    fields = known_fields(body, {"model", "tokens"})
    return optional_model(fields), token_list(fields.get("tokens"), "tokens")


def _wanted(fields: Mapping[str, Any], logprobs: int | None) -> Wanted:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must name a model; GET /v1/models lists them", param="model")
    stream = boolean(fields, "stream", False)
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - STREAM_OPTIONS:
        raise BadRequest(
            "stream_options may hold include_usage and continuous_usage_stats only", param="stream_options"
        )
    if options and not stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    max_tokens = integer(fields, "max_tokens", 1, 2**31)
    params = SamplingParams(
        max_tokens=max_tokens or 1,
        min_tokens=integer(fields, "min_tokens", 0, 2**31) or 0,
        temperature=number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=number(fields, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, integer(fields, "top_k", -1, 2**31) or 0),
        seed=integer(fields, "seed", -(2**63), 2**63 - 1),
        stop=_stops(fields.get("stop")),
        stop_token_ids=frozenset(token_list(fields.get("stop_token_ids", []), "stop_token_ids")),
        ignore_eos=boolean(fields, "ignore_eos", False),
        skip_special_tokens=boolean(fields, "skip_special_tokens", True),
        include_stop_text=boolean(fields, "include_stop_str_in_output", False),
        presence_penalty=number(fields, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number(fields, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=number(fields, "repetition_penalty", 1.0, 0.0, 2.0, above=True),
        min_p=number(fields, "min_p", 0.0, 0.0, 1.0),
        logit_bias=_logit_bias(fields.get("logit_bias", {})),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(fields, stream),
    )
    include_usage = boolean(options, "include_usage", False)
    continuous_usage = boolean(options, "continuous_usage_stats", False)
    n = integer(fields, "n", 1, MAX_CHOICES) or 1
    return Wanted(
        model,
        params,
        max_tokens,
        stream,
        include_usage,
        n,
        parse_salt(fields),
        continuous_usage,
        _allowed_tokens(fields.get("allowed_token_ids")),
        _bad_words(fields.get("bad_words", [])),
        parse_format(fields),
        integer(fields, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
    )


def _prompt_logprobs(fields: Mapping[str, Any], stream: bool) -> int | None:
    count = integer(fields, "prompt_logprobs", 0, MAX_PROMPT_LOGPROBS)
    if count is not None and stream:
        raise BadRequest(
            "prompt_logprobs come with a whole answer only; leave out stream", param="prompt_logprobs"
        )
    return count


def parse_salt(fields: Mapping[str, Any]) -> str:
    salt = fields.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > 256 or not is_unicode(salt):
        raise BadRequest(
            "cache_salt must be a text of up to 256 characters of valid Unicode", param="cache_salt"
        )
    return salt


def parse_prompts(value: object, name: str, most: int) -> tuple[str | tuple[int, ...], ...]:
    """Texts, or the tokens of texts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(is_integer(v) for v in value):
            return (tuple(token_list(value, name)),)
        if len(value) > most:
            raise BadRequest(f"{name} has {len(value)} texts; at most {most} are served", param=name)
        if all(isinstance(v, str) for v in value):
            return tuple(value)
        if all(isinstance(v, list) for v in value):
            return tuple(tuple(token_list(v, name)) for v in value)
    raise BadRequest(f"{name} must be text, a list of texts, tokens, or a list of token lists", param=name)


def _stops(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_CHARACTERS for s in stops)
    ):
        raise BadRequest(
            f"stop must be a text or up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters",
            param="stop",
        )
    return tuple(stops)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise BadRequest("logit_bias must be an object of token id to number", param="logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequest(
            f"logit_bias has {len(value)} tokens; at most {MAX_LOGIT_BIAS} are served", param="logit_bias"
        )
    pairs: list[tuple[int, float]] = []
    for token, bias in value.items():
        # One spelling per token ("007" and "7" would be two biases on one), and "²" is a digit but no number.
        known = re.fullmatch(r"0|[1-9][0-9]{0,9}", str(token), re.ASCII)
        if not known or isinstance(bias, bool) or not isinstance(bias, int | float) or bias != bias:
            raise BadRequest(
                f"logit_bias: {shown(token)}: {shown(bias)} is not a token id and a number",
                param="logit_bias",
            )
        pairs.append((int(token), float(max(-100, min(100, bias)))))  # cut first: 10**400 is no float
    return tuple(pairs)


def _allowed_tokens(value: object) -> frozenset[int] | None:
    if value is None:
        return None
    name = "allowed_token_ids"
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} must be a list of at least one token id, not {shown(value)}", param=name)
    for place, token in enumerate(value):
        if not is_integer(token) or token < 0:
            raise BadRequest(
                f"{name}[{place}] is {shown(token)}; a token id is a whole number from 0", param=name
            )
    return frozenset(value)


def _bad_words(value: object) -> tuple[str, ...]:
    name = "bad_words"
    if not isinstance(value, list):
        raise BadRequest(
            f"{name} must be a list of up to {MAX_BAD_WORDS} texts, not {shown(value)}", param=name
        )
    if len(value) > MAX_BAD_WORDS:
        raise BadRequest(f"{name} has {len(value)} texts; at most {MAX_BAD_WORDS} are served", param=name)
    for place, word in enumerate(value):
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS or not is_unicode(word):
            raise BadRequest(
                f"{name}[{place}] is {shown(word)}; a bad word is a text of 1 to "
                f"{MAX_BAD_WORD_CHARACTERS} characters of valid Unicode",
                param=name,
            )
    return tuple(value)
