"""How a family of models writes its tool calls, and the grammar of such an answer. Pure Python.

    Hermes    <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>, again for each call      (Qwen2.5, Qwen3)
    Llama     {"name": "f", "parameters": {…}}, calls separated by ";", and nothing else in the answer   (Llama 3)
    Mistral   [TOOL_CALLS][{"name": "f", "arguments": {…}}, …], or [TOOL_CALLS]f[ARGS]{…} for each call

The format is read off the chat template, because the template tells the model how to write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

from busbar.workloads.serving.openai_format import JSON_OPTIONS

if TYPE_CHECKING:
    from busbar.workloads.serving.openai_tools import Tool

ANY_TEXT = r"TEXT: /(.|\n)*/"
MAX_CALLS = 16
"""In an answer that has to call."""


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral-args"

    @property
    def opening(self) -> str:
        """What begins a call in the middle of an answer; empty where calls stand at its beginning only."""
        return _OPENINGS[self]

    @property
    def argument_key(self) -> str:
        return "parameters" if self is ToolFormat.LLAMA else "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the reader needs, also where they are special tokens."""
        if self is ToolFormat.HERMES:
            return ("<tool_call>", "</tool_call>")
        return ("[TOOL_CALLS]", "[ARGS]") if self is not ToolFormat.LLAMA else ()


_OPENINGS = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.LLAMA: "",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
    ToolFormat.MISTRAL_ARGS: "[TOOL_CALLS]",
}


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it is none of these."""
    if "<tool_call>" in template:
        return None if "<function=" in template else ToolFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in template else ToolFormat.MISTRAL
    if '"parameters"' in template and "ipython" in template:
        return ToolFormat.LLAMA
    return None


def call_grammar(
    form: ToolFormat,
    tools: Iterable[Tool],
    *,
    must_call: bool,
    parallel: bool,
    special: Callable[[str], int | None],
) -> str:
    """A Lark grammar of the answers that call `tools`; without `must_call`, of those with text as well.

    `special`: the id of a text that is a special token, which no plain text of a grammar stands for.
    """
    listed = list(tools)

    def mark(text: str) -> str:
        token = special(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    def again(separator: str, rule: str) -> str:
        return f"({separator} {rule}){{0,{MAX_CALLS - 1}}}" if parallel else ""

    opening = mark(form.opening)
    rules = [f"args{i}: %json {_schema(tool, must_call)}" for i, tool in enumerate(listed)]
    if form is ToolFormat.MISTRAL_ARGS:
        bodies = [f"{_quoted(tool.name)} {mark('[ARGS]')} args{i}" for i, tool in enumerate(listed)]
    else:
        key = form.argument_key
        bodies = [_object(tool.name, key) + f' args{i} "}}"' for i, tool in enumerate(listed)]
    rules.append("body: " + " | ".join(bodies))
    calls = {
        ToolFormat.HERMES: f"{opening} call {again(_quoted(chr(10)) + ' ' + opening, 'call')}",
        ToolFormat.LLAMA: f"body {again(_quoted('; '), 'body')}",
        ToolFormat.MISTRAL: f"{opening} call",
        ToolFormat.MISTRAL_ARGS: f"{opening} call {again(opening, 'call')}",
    }[form]
    call = {
        ToolFormat.HERMES: f'"\\n" body "\\n" {mark("</tool_call>")}',
        ToolFormat.MISTRAL: f'"[" body {again(_quoted(", "), "body")} "]"',
    }.get(form, "body")
    rules.append(f"call: {call}")
    if must_call:
        rules.append(f"start: {calls}")
    elif form is ToolFormat.LLAMA:
        rules.append(f"start: {calls} | TEXT\nTEXT: /[^{{\\s](.|\\n)*/")
    elif opening.startswith("<["):
        rules.append(f"start: TEXT ({opening} call TEXT)*\n{ANY_TEXT}")
    else:
        rules.append(f"start: whole* TEXT\nwhole: head call\nhead[lazy]: TEXT {opening}\n{ANY_TEXT}")
    return "\n".join(rules) + "\n"


def _object(name: str, key_of_arguments: str) -> str:
    """A call's object up to its arguments."""
    return _quoted(f'{{"name": {_quoted(name)}, "{key_of_arguments}": ')


def _schema(tool: Tool, must_call: bool) -> str:
    schema = tool.schema if must_call or tool.strict else {"type": "object"}
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
