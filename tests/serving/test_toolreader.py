"""Tool calls out of text, in every format, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.toolformat import ToolFormat
from busbar.workloads.serving.toolreader import LONGEST_HEAD, Pieces, ToolReader, call_id

HERMES, LLAMA, MISTRAL, ARGS = (
    ToolFormat.HERMES,
    ToolFormat.LLAMA,
    ToolFormat.MISTRAL,
    ToolFormat.MISTRAL_ARGS,
)
Call = tuple[str, str]


def read(form: ToolFormat, pieces: list[str], parallel: bool = True) -> tuple[str, list[Call]]:
    """(content, calls), as a client would put the pieces together."""
    reader = ToolReader(form, {"f", "g"}, parallel=parallel)
    found = Pieces()
    for piece in [*map(reader.feed, pieces), reader.end()]:
        found.content += piece.content
        found.calls += piece.calls
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in found.calls:
        if call.name is not None:
            assert call.index not in names
            assert call.id
            names[call.index] = call.name
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert list(names) == list(range(len(names)))
    return found.content, [(names[i], arguments[i]) for i in names]


TRICKY = '{"a": "}]\\"{ </tool_call>", "b": [1, {"c": null}]}'
ROWS: list[tuple[ToolFormat, str, str, list[Call]]] = [
    (HERMES, "Hello.", "Hello.", []),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [("f", '{"x": 1}')]),
    (HERMES, f'<tool_call>{{"name":"f","arguments":{TRICKY}}}</tool_call>', "", [("f", TRICKY)]),
    (
        HERMES,
        'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"y": 2}, "name": "g"}\n</tool_call>',
        "I look.",
        [("f", "{}"), ("g", '{"y": 2}')],
    ),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": [1', "", [("f", '{"x": [1')]),
    (
        HERMES,
        'x <tool_call>{"name": "h", "arguments": {}}</tool_call>',
        'x <tool_call>{"name": "h", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": 3}', '<tool_call>{"name": "f", "arguments": 3}', []),
    (HERMES, "<tool_call> none", "<tool_call> none", []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done.', "Done.", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        LLAMA,
        ' {"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": ";"}}',
        "",
        [("f", "{}"), ("g", '{"y": ";"}')],
    ),
    (LLAMA, 'Call {"name": "f", "parameters": {}}', 'Call {"name": "f", "parameters": {}}', []),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, "{not json", "{not json", []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}, "id": "123"}]',
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    (MISTRAL, "No [TOOL", "No [TOOL", []),
    (MISTRAL, "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    (ARGS, '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', "", [("f", '{"x": 1}'), ("g", "{}")]),
    (ARGS, "So: [TOOL_CALLS]f[CALL_ID]abc[ARGS]{}", "So:", [("f", "{}")]),
    (ARGS, "[TOOL_CALLS]h[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ROWS, ids=[row[1][:30] for row in ROWS])
def test_calls_are_read_and_the_rest_is_content(
    form: ToolFormat, text: str, content: str, calls: list[Call]
) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    form=st.sampled_from(ToolFormat),
    parts=st.lists(
        st.sampled_from(
            [
                *(
                    "<tool_call>",
                    "</tool_call>",
                    "[TOOL_CALLS]",
                    "[ARGS]",
                    "[",
                    "]",
                    ", ",
                    "; ",
                    "\n",
                    " ",
                    "f",
                ),
                *(
                    '{"name": "f", ',
                    '"arguments": {"a": "}"}}',
                    '"parameters": {}}',
                    '{"name": "h"',
                    "text",
                    '"',
                ),
                *("\\", "{", "}", "é🙂"),
            ]
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_what_comes_out_at_any_point_depends_on_the_text_only(
    form: ToolFormat, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    slow, quick = ToolReader(form, {"f"}), ToolReader(form, {"f"})
    for first, last in itertools.pairwise(places):
        one_by_one = [slow.feed(character) for character in text[first:last]]
        at_once = quick.feed(text[first:last])
        assert "".join(p.content for p in one_by_one) == at_once.content
        assert "".join(c.arguments for p in one_by_one for c in p.calls) == "".join(
            c.arguments for c in at_once.calls
        )
        assert slow.calls == quick.calls
    assert slow.end() == quick.end()


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    form=st.sampled_from(ToolFormat),
    values=st.lists(
        st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=8), st.integers()), max_size=3),
        min_size=1,
        max_size=3,
    ),
    ascii_only=st.booleans(),
)
def test_arguments_come_back_as_they_were_written(
    form: ToolFormat, values: list[dict[str, object]], ascii_only: bool
) -> None:
    texts = [json.dumps(value, ensure_ascii=ascii_only) for value in values]
    objects = [f'{{"name": "f", "{form.argument_key}": {text}}}' for text in texts]
    answer = {
        HERMES: "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        LLAMA: "; ".join(objects),
        MISTRAL: "[TOOL_CALLS][" + ", ".join(objects) + "]",
        ARGS: "".join(f"[TOOL_CALLS]f[ARGS]{text}" for text in texts),
    }[form]
    assert read(form, [answer]) == ("", [("f", text) for text in texts])


def test_without_parallel_calls_only_the_first_one_is_told() -> None:
    two = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    assert read(HERMES, [two], parallel=False) == ("", [("f", "{}")])
    assert len(read(HERMES, [two])[1]) == 2


@pytest.mark.parametrize("form", ToolFormat)
def test_without_parallel_calls_an_answer_is_over_with_the_first_one(form: ToolFormat) -> None:
    call = f'{{"name": "f", "{form.argument_key}": {TRICKY}}}'
    opening = {HERMES: "<tool_call>", LLAMA: "", MISTRAL: "[TOOL_CALLS][", ARGS: "[TOOL_CALLS]f[ARGS]"}[form]
    for parallel in (True, False):
        reader = ToolReader(form, {"f"}, parallel=parallel)
        text = opening + (TRICKY if form is ARGS else call)
        for character in text[:-1]:
            reader.feed(character)
            assert not reader.over
        reader.feed(text[-1])
        assert reader.over is not parallel


def test_what_never_becomes_a_call_is_not_held_back_for_ever() -> None:
    reader = ToolReader(HERMES, {"f"})
    shown = reader.feed('<tool_call>{"x": "' + "y" * LONGEST_HEAD)
    assert shown.content.startswith("<tool_call>")


def test_ids_have_the_form_that_templates_take_and_are_the_same_on_every_replica() -> None:
    short, long = call_id(MISTRAL, "req/0", 0), call_id(HERMES, "req/0", 0)
    assert len(short) == 9
    assert short.isalnum()
    assert long.startswith("call_")
    assert long == call_id(LLAMA, "req/0", 0)
    assert len({call_id(HERMES, answer, i) for answer in ("req/0", "req/1") for i in range(3)}) == 6
