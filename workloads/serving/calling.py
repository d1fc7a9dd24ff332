"""What a request's tools mean for its prompt, its grammar and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_format import GrammarKind, GrammarSpec
from busbar.workloads.serving.openai_request import ChatBody, TokenizeBody
from busbar.workloads.serving.openai_tools import Calling, Tools, check_tools, mentions_tools
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.text_model import TextModel
from busbar.workloads.serving.toolformat import ToolFormat, call_grammar
from busbar.workloads.serving.toolreader import ToolReader


def render(body: ChatBody | TokenizeBody, model: TextModel) -> str:
    """The prompt of a conversation. Raises BadRequest where the template knows no tools and there are some."""
    template, rendering = model.template, body.rendering
    if not template.has_tools and (body.tools is not None or mentions_tools(body.messages)):
        kind = "has no chat template" if template.is_default else "has a chat template that knows no tools"
        raise BadRequest(
            f"this model {kind}, so it cannot call any", param="tools" if body.tools else "messages"
        )
    if body.tools is not None:
        tools = {"tools": [tool.document for tool in body.tools.listed]}
        rendering = replace(rendering, arguments={**rendering.arguments, **tools})
    return template.render(body.messages, rendering)


async def with_tools(params: SamplingParams, tools: Tools, model: TextModel) -> SamplingParams:
    """The parameters of an answer that may, or must, call tools."""
    form = _form(model)

    def special(text: str) -> int | None:
        token: int | None = model.tokenizer.token_to_id(text)
        return token if token in model.special else None

    marks = (special(mark) for mark in form.marks)
    params = replace(params, visible=frozenset(token for token in marks if token is not None))
    if not tools.needs_grammar:
        return params
    await asyncio.to_thread(check_tools, tools)
    text = call_grammar(
        form,
        tools.callable,
        must_call=tools.calling is Calling.REQUIRED,
        parallel=_is_parallel(tools),
        special=special,
    )
    grammar = GrammarSpec(GrammarKind.LARK, text, "tools")
    await model.check_grammar(grammar)
    return replace(params, grammar=grammar)


def reader_of(tools: Tools, model: TextModel, answer: str) -> ToolReader:
    """A new reader for one answer, which has this name."""
    names = {tool.name for tool in tools.callable}
    return ToolReader(_form(model), names, parallel=_is_parallel(tools), answer=answer)


def _is_parallel(tools: Tools) -> bool:
    return tools.parallel and tools.only is None


def _form(model: TextModel) -> ToolFormat:
    form = model.template.tool_format
    if form is None:
        raise BadRequest(
            "this model writes tool calls in a format that the engine does not read; it reads those of Llama 3, "
            "Qwen (Hermes) and Mistral",
            param="tools",
        )
    return form
