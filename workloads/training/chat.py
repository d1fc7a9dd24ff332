"""Conversations as the tokenizer's own chat template renders them, and which characters of that are answers.

A template that marks answers itself (`{% generation %}`) is believed. Of another one an answer is what rendering one
message more adds to the conversation before it with the prompt for an answer, so the marks of an answer's end are
learned and those of its beginning are not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer
from tokenizers.models import BPE

from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.rows import BadRow, Part, Row
from busbar.workloads.training.tokenizer import END_OF_TEXT

FIELD = "spec.engine.data.uri"
TEMPLATE = "chat_template.jinja"  # of the files of a tokenizer the one that counts
FILES = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE)
OWN_FIELD = "spec.engine.data.chatTemplate"
MAX_CHARACTERS = 2**20  # of a rendered conversation, which is tokenized as a whole
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Spans = list[tuple[int, int]]


class ChatTemplate:
    """The template of the tokenizer in `folder` (None: of one that is trained here, which has none), or one of the job's `own`."""

    def __init__(self, folder: Path | None, own: str | None = None) -> None:
        self._folder, self._own = folder, own
        self._marks_answers = False

    @property
    def digest(self) -> str | None:
        """Of the files that decide how a conversation is rendered."""
        if self._folder is None and self._own is None:
            return None
        digest = hashlib.sha256(b"" if self._own is None else self._own.encode() + b"\0")
        for name in FILES:
            path = None if self._folder is None else self._folder / name
            digest.update(name.encode() + b"\0" + (path.read_bytes() if path and path.is_file() else b""))
        return digest.hexdigest()

    def row(self, messages: Sequence[Any]) -> Row:
        """The conversation's text in parts. Raises BadRow for one that the template refuses, and InvalidJob."""
        tokenizer = self._tokenizer
        try:
            text, spans = (_marked if self._marks_answers else _render)(tokenizer, list(messages))
        except BadRow:
            raise
        except TemplateSyntaxError as problem:
            raise InvalidJob(
                FIELD if self._own is None else OWN_FIELD,
                f"the chat template is no template: {problem!s:.200}",
                "correct it",
            ) from problem
        except Exception as problem:  # templates are programs, and say no in any way they like
            raise BadRow(f"is refused by the chat template: {problem!s:.200}", "correct it") from problem
        if len(text) > MAX_CHARACTERS:
            raise BadRow(
                f"is a conversation of {len(text)} characters, more than {MAX_CHARACTERS}", "split it"
            )
        parts, end = [], 0
        for first, last in spans:
            parts += [Part(text[end:first], learned=False), Part(text[first:last])]
            end = last
        parts.append(Part(text[end:], learned=False))
        return Row(tuple(part for part in parts if part.text), joined=True, ends=False)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if self._folder is None:
            if self._own is None:
                raise InvalidJob(
                    FIELD,
                    "holds conversations, and a tokenizer that is trained here has no chat template",
                    "write one in data.chatTemplate, name a tokenizer that has it in tokenizer.uri or model.uri, or write prompt "
                    "and completion",
                )
            self._marks_answers = _GENERATION.search(self._own) is not None
            made: Any = PreTrainedTokenizerFast
            return made(
                tokenizer_object=Tokenizer(BPE()),
                bos_token=END_OF_TEXT,
                eos_token=END_OF_TEXT,
                chat_template=self._own,
            )
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(self._folder), local_files_only=True, trust_remote_code=False
            )
            if self._own is not None:
                tokenizer.chat_template = self._own
            template = tokenizer.get_chat_template()
        except Exception as problem:  # of the library, or of a file that it reads
            raise InvalidJob(
                FIELD,
                f"holds conversations, and the tokenizer in {self._folder} has no chat template: {problem!s:.200}",
                "write one in data.chatTemplate, add its chat_template.jinja, or write prompt and completion",
            ) from problem
        self._marks_answers = _GENERATION.search(template) is not None
        return tokenizer


def _render(tokenizer: Any, messages: list[Any]) -> tuple[str, Spans]:
    whole: str = tokenizer.apply_chat_template(messages, tokenize=False)
    spans: Spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before: str = tokenizer.apply_chat_template(
                messages[:index], tokenize=False, add_generation_prompt=True
            )
            until: str = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
            spans.append((len(before), _end(whole, before, until, message.get("content"))))
    return whole, spans


def _end(whole: str, before: str, until: str, content: object) -> int:
    """Where the answer that begins behind `before` ends in `whole`, if `until` ends with it.

    Some templates add something to the last answer alone, such as an empty thought: then it ends where the longest
    end of `until` does with which `whole` goes on.
    """
    start = len(before)
    if whole.startswith(until) and until.startswith(before):
        return len(until)
    said = content.strip() if isinstance(content, str) else ""
    if said and whole.startswith(before) and until.startswith(before):
        for first in range(start, len(until) - len(said) + 1):
            if whole.startswith(until[first:], start) and said in until[first:]:
                return start + len(until) - first
    raise BadRow(
        "has an answer that the chat template renders in another way when more follows",
        "mark the answers in the template with {% generation %} and {% endgeneration %}",
    )


def _marked(tokenizer: Any, messages: list[Any]) -> tuple[str, Spans]:
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    texts, spans = render(
        conversations=[messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return str(texts[0]), [(int(first), int(last)) for first, last in spans[0]]
