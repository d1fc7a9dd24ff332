"""A row of a JSONL file or a table as something to train on: a text, a prompt with its completion, or a conversation.

    {"text": "..."}                               everything is learned
    {"prompt": "...", "completion": "..."}        the completion, and the separator that ends it
    {"messages": [{"role": ..., "content": ...}]} the assistant's answers, as the tokenizer's chat template marks them

What is not learned is read by the model and has no loss.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from busbar.workloads.training.settings import Fields


@dataclass(frozen=True)
class Part:
    text: str
    learned: bool = True


@dataclass(frozen=True)
class Row:
    """One document. Its parts are tokenized one by one, or `joined`."""

    parts: tuple[Part, ...]
    joined: bool = False
    ends: bool = True  # the separator after it is learned; a chat template has an end of its own

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def plain(self) -> bool:
        """Whether everything in it is learned."""
        return all(part.learned for part in self.parts)


@dataclass(frozen=True)
class Piece:
    """A whole row, or a piece of a long text, of which only the first one `begins` the document."""

    begins: bool
    row: Row


def text_row(text: str) -> Row:
    return Row((Part(text),))


class BadRow(Exception):
    """A row that cannot be trained on: what is wrong with it, and what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(problem)


class Renderer(Protocol):
    """Makes a conversation a row (`chat.ChatTemplate`)."""

    def row(self, messages: Sequence[Any]) -> Row: ...


@dataclass(frozen=True)
class RowReader:
    """How the rows of a file are read."""

    fields: Fields = field(default_factory=Fields)
    chat: Renderer | None = None
    skips: bool = False  # bad rows are left out; else they end the run

    def read(self, line: bytes) -> Row:
        """Raises BadRow."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:  # the latter: nested a thousand times
            raise BadRow(f"is not JSON: {problem}", "correct it") from problem
        if not isinstance(record, dict):
            raise self._lacks(type(record).__name__)
        return self.of(record)

    @property
    def names(self) -> set[str]:
        """Of all fields that are read."""
        known = (self.fields.text, self.fields.prompt, self.fields.completion, self.fields.messages)
        return {name for name in known if name is not None}

    def of(self, record: dict[str, Any]) -> Row:
        """Raises BadRow."""
        names = self.fields
        kinds = {
            name: kind
            for kind, name in (
                ("text", names.text),
                ("completion", names.completion),
                ("messages", names.messages),
            )
            if name is not None and record.get(name) is not None  # tables write null where a row has none
        }
        if not kinds:
            raise self._lacks(", ".join(name for name in record if record[name] is not None) or "nothing")
        if len(kinds) > 1:
            raise BadRow(
                f"has the fields {_quoted(kinds)}, each of which could be trained on",
                "name the one that is meant in data.fields",
            )
        name, kind = next(iter(kinds.items()))
        if kind == "messages":
            return self._conversation(record[name], name)
        if kind == "text":
            return text_row(_string(record, name))
        return Row((Part(_string(record, names.prompt or ""), learned=False), Part(_string(record, name))))

    def _lacks(self, instead: str) -> BadRow:
        names = [
            name
            for name in (self.fields.text, self.fields.completion, self.fields.messages)
            if name is not None
        ]
        return BadRow(
            f"has no field {_quoted(names, ' or ')}, but {instead:.200}",
            "write one of them, or name the file's own in data.fields",
        )

    def _conversation(self, messages: Any, name: str) -> Row:
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise BadRow(
                f"has a field `{name}` that is not a list of objects with `role` and `content`", "correct it"
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise BadRow(
                f"has no message of the role assistant in `{name}`", "remove it: nothing is learned from it"
            )
        if self.chat is None:
            raise BadRow(f"has `{name}`, and there is no chat template", "name a tokenizer that has one")
        return self.chat.row(_without_surrogates(messages))


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str | list) or "tool_calls" in message


def _string(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        shown = "but no such field" if name not in record else f"but {type(value).__name__}"
        raise BadRow(f"has no field `{name}` of type string, {shown}", "write the text there")
    return str(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    """JSON may hold half of a surrogate pair, which no tokenizer takes."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode()
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    return value


def _quoted(names: Any, between: str = " and ") -> str:
    return between.join(f"`{name}`" for name in names)
