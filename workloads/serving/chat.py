"""Chat messages to a prompt, by the model's own Jinja template or a plain default.

Templates come with the model folder and are run in Jinja's immutable sandbox with the names that
transformers gives them. A model without a template gets `PLAIN`, which any text model can follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from busbar.workloads.serving.errors import BadRequest, ModelCorrupt
from busbar.workloads.serving.openai_template import EFFORT, GIVEN, SPECIAL, Rendering
from busbar.workloads.serving.toolformat import ToolFormat, format_of

PLAIN = (
    "{%- for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{%- if add_generation_prompt %}assistant:{% endif %}"
)
MARK = "THE_ANSWER_GOES_ON_HERE "
"""Put behind a message that is to be continued; what the template writes behind it is cut off. The space shows whether
the template trims messages."""
USUAL = Rendering({})
REFUSALS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
"""What a template raises on values that it does not expect."""


class AnswerMarks(Extension):
    """`{% generation %}` … `{% endgeneration %}`: which part is an answer, for those who train on it. Nothing is written."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """Renders messages; `is_default` says that the model brought none."""

    def __init__(self, source: str | None, special: Mapping[str, str]) -> None:
        self.is_default = source is None
        self._special = dict(special)
        environment, text = _environment(), PLAIN if source is None else source
        try:
            self._template = environment.from_string(text)
            names = meta.find_undeclared_variables(environment.parse(text))
        except TemplateError as error:
            raise ModelCorrupt(f"the model's chat template is not valid Jinja: {error}") from error

        self.reads = frozenset(names) - GIVEN
        """What a request may tell it."""
        self.has_tools = "tools" in names
        """It tells the model which tools there are."""
        self.tool_format: ToolFormat | None = format_of(text) if self.has_tools else None

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = USUAL) -> str:
        """The prompt, ending where the assistant is to go on. Raises BadRequest."""
        if rendering.effort is not None:
            self._check_effort()
        if not rendering.continues:
            return self._write(messages, rendering)
        last = messages[-1]
        content: str = last["content"]
        text = self._write([*messages[:-1], {**last, "content": content + MARK}], rendering)
        place = text.find(MARK.strip())
        if text.count(MARK.strip()) != 1 or content.strip() not in text:
            raise BadRequest(
                "the model's chat template leaves out, repeats or changes the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return text[:place] if text.startswith(MARK, place) else text[:place].rstrip()

    def _check_effort(self) -> None:
        if EFFORT not in self.reads:
            others = ", ".join(sorted(self.reads))
            instead = f"; chat_template_kwargs may give it {others}" if others else ""
            kind = "has no chat template" if self.is_default else "has a chat template that does not read it"
            raise BadRequest(f"{EFFORT} is not served, because this model {kind}{instead}", param=EFFORT)

    def _write(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        template: Template = self._template
        effort = {} if rendering.effort is None else {EFFORT: rendering.effort}
        given = {"messages": messages, "add_generation_prompt": rendering.generation_prompt}
        try:
            return template.render({**self._special, **rendering.arguments, **effort, **given})
        except REFUSALS as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def load_chat_template(folder: Path) -> ChatTemplate:
    """From chat_template.jinja, or tokenizer_config.json's `chat_template`, or the default."""
    config: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ModelCorrupt(f"{path} is not JSON: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    file = folder / "chat_template.jinja"
    if file.is_file():
        source = file.read_text()
    special = {name: _content(config[name]) for name in SPECIAL if config.get(name) is not None}
    return _template(source if isinstance(source, str) else None, tuple(special.items()))


@lru_cache(maxsize=2)
def _template(source: str | None, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Processes that are forked from one that has compiled it need not compile it again."""
    return ChatTemplate(source, dict(special))


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AnswerMarks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
