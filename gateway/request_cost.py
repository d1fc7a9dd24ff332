"""How many tokens a request may use at most, before anybody has computed one.

The gateway has no tokenizer. A prompt of token ids is counted; of text, the bytes are multiplied by the tokens per byte
that the service's last requests had. The output is what the request allows. Both are replaced by what the engine
counts when the request ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

PROMPT_FIELDS = ("messages", "prompt", "input", "instructions", "tools", "suffix")
OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
UNSTATED_OUTPUT = 1024
"""Output tokens reserved for a request that states no most; a service's context length bounds it."""
FIRST_GUESS = 0.3
"""Tokens per byte of text, as long as a service has not answered anything: usual vocabularies have 0.2 to 0.3."""
MOST_TOKENS = 10**9
"""No request has more; a client may write any number."""
WEIGHT = 0.1
"""Of a new request in the mean."""
NO_OUTPUT = frozenset({"/v1/embeddings"})
UNCOUNTED = frozenset({"/tokenize", "/detokenize"})


@dataclass(frozen=True)
class Estimate:
    """What a request may use at most."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    text_bytes: int = 0
    """Of the prompt, by which the service's ratio is learned."""
    output_field: str | None = None
    """The field that allows the output; None: none does."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class PromptRatio:
    """Tokens per byte of the prompts of each service."""

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    def of(self, service: str) -> float:
        return self._ratios.get(service, FIRST_GUESS)

    def learn(self, service: str, text_bytes: int, prompt_tokens: int) -> None:
        """Take in a request whose prompt the engine has counted."""
        if text_bytes > 0 and prompt_tokens > 0:
            old = self.of(service)
            self._ratios[service] = old + WEIGHT * (min(prompt_tokens / text_bytes, 4.0) - old)

    def keep_only(self, services: set[str]) -> None:
        for gone in self._ratios.keys() - services:
            del self._ratios[gone]


def estimate(path: str, document: dict[str, Any], tokens_per_byte: float, longest: int | None) -> Estimate:
    """The estimate of a request; `longest` is the service's context length in tokens, None where it is not known."""
    if path in UNCOUNTED:
        return Estimate()
    ids, text = 0, 0
    for name in PROMPT_FIELDS:
        value = document.get(name)
        if value is not None:
            more_ids, more_text = _size(value)
            ids, text = ids + more_ids, text + more_text
    prompt = ids + round(text * tokens_per_byte)
    if path in NO_OUTPUT:
        return Estimate(prompt, 0, 0 if ids else text)
    answers, prompts = _count(document.get("n")), _prompts(document.get("prompt"))
    field = next((name for name in OUTPUT_FIELDS if _is_count(document.get(name))), None)
    most = min(document[field], MOST_TOKENS) if field is not None else UNSTATED_OUTPUT
    if longest is not None:
        most = min(most, max(1, longest - prompt // prompts))
    return Estimate(prompt, min(most * answers * prompts, MOST_TOKENS), 0 if ids else text, field)


def _size(value: object) -> tuple[int, int]:
    """(token ids, bytes of text) of a prompt's value."""
    if isinstance(value, str):
        return 0, len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, list):
        if value and all(isinstance(item, int) for item in value):
            return len(value), 0
        sizes = [_size(item) for item in value]
        return sum(ids for ids, _ in sizes), sum(text for _, text in sizes)
    if isinstance(value, dict):
        # As the template will render it, about: names and punctuation too.
        return 0, len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace"))
    return 0, 0


def _prompts(prompt: object) -> int:
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if many and isinstance(prompt, list) else 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
