"""Chat templates against transformers' own rendering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.serving.models import make_tokenizer
from transformers import PreTrainedTokenizerFast

from busbar.workloads.serving.chat import PLAIN, ChatTemplate, _environment, load_chat_template
from busbar.workloads.serving.errors import BadRequest, ModelCorrupt
from busbar.workloads.serving.openai_template import GIVEN, Rendering

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Hi <there> "you"'},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Größe?"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRICKY = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m['role'] == 'system' %}\n"
    "        {% continue %}\n"
    "    {% endif %}\n"
    "{{ m | tojson }}{{ m.content.strip() if loop.last else '' }}\n"
    "{% endfor %}"
)
MARKED = (  # as one that a model is trained with
    "{% set mark = '-' %}{% for m in messages %}{{ m.role }}:\n"
    "{%- if m.role == 'assistant' %}\n"
    "    {% generation %}\n"
    "    {% set mark = '+' %}\n"
    "{{ loop.index }}{{ mark }}{{ m.content }}<|end|>\n"
    "    {% endgeneration %}\n"
    "{% else %}{{ m.content }}{{ mark }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
COMPACT = "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ messages[-1] | tojson(true, 1) }}"


TRIMMING = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}[eot] \n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
SWAPPED = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CONTINUE = Rendering({}, generation_prompt=False, continues=True)


def folder_with(tmp_path: Path, template: str | None, in_file: bool) -> Path:
    config: dict[str, Any] = {"bos_token": {"content": "<|end|>"}, "eos_token": "<|end|>"}
    if template is not None and in_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    elif template is not None:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    "template", [CHATML, TRICKY, MARKED, COMPACT], ids=["chatml", "tricky", "marked", "compact"]
)
@pytest.mark.parametrize("in_file", [True, False])
def test_a_models_template_renders_as_in_transformers(tmp_path: Path, template: str, in_file: bool) -> None:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=make_tokenizer(), bos_token="<|end|>", eos_token="<|end|>"
    )
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    loaded = load_chat_template(folder_with(tmp_path, template, in_file))
    assert loaded.render(MESSAGES) == expected
    assert not loaded.is_default


@pytest.mark.parametrize("template", [CHATML, TRIMMING, SWAPPED, PLAIN])
@pytest.mark.parametrize("said", ["Yes", "Yes, \n", " half a wo", "", "1 < 2 & Größe"])
def test_a_message_is_continued_as_in_transformers(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=make_tokenizer(), bos_token="<|end|>", eos_token="<|end|>"
    )
    messages = [*MESSAGES, {"role": "assistant", "content": said}]
    expected: Any = tokenizer.apply_chat_template(
        messages, chat_template=template, continue_final_message=True
    )
    text = load_chat_template(folder_with(tmp_path, template, True)).render(messages, CONTINUE)
    assert make_tokenizer().encode(text, add_special_tokens=False).ids == expected["input_ids"]


def test_without_a_generation_prompt_the_last_message_stays_ended(tmp_path: Path) -> None:
    template = load_chat_template(tmp_path)
    assert template.render(MESSAGES[:1], Rendering({}, generation_prompt=False)) == "system: Be brief.\n"


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ messages[-1].content[:3] }}", TRICKY, CHATML + CHATML]
)
def test_a_message_that_the_template_does_not_write_once_cannot_be_continued(
    tmp_path: Path, template: str
) -> None:
    loaded = load_chat_template(folder_with(tmp_path, template, True))
    with pytest.raises(BadRequest, match="so it cannot be continued") as caught:
        loaded.render([*MESSAGES, {"role": "assistant", "content": "Yes, I"}], CONTINUE)
    assert caught.value.param == "continue_final_message"


THINKING = (
    "{% if reasoning_effort is defined %}Reasoning: {{ reasoning_effort }}\n{% endif %}"
    + CHATML
    + "{{ more | tojson }}"
)


def test_a_template_reads_what_a_request_tells_it_as_in_transformers(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=make_tokenizer(), bos_token="<|end|>", eos_token="<|end|>"
    )
    told = {"more": {"a": [1, None, "é"]}, "self": 3}
    expected = tokenizer.apply_chat_template(
        MESSAGES,
        chat_template=THINKING,
        tokenize=False,
        add_generation_prompt=True,
        reasoning_effort="low",
        more=told["more"],
    )
    template = load_chat_template(folder_with(tmp_path, THINKING, True))
    assert template.reads == {"reasoning_effort", "more"}
    assert template.render(MESSAGES, Rendering(told, effort="low")) == expected


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (None, "has no chat template"),
        (CHATML, "does not read it"),
        (CHATML + "{{ enable_thinking }}", "may give it enable_thinking"),
    ],
)
def test_an_effort_that_no_template_reads_is_refused(source: str | None, part: str) -> None:
    with pytest.raises(BadRequest, match=part) as caught:
        ChatTemplate(source, {}).render(MESSAGES, Rendering({}, effort="low"))
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("value", [0, "x", [], {}, [[[[[]]]]]])
def test_a_value_that_a_template_does_not_expect_is_a_refusal(value: object) -> None:
    template = ChatTemplate("{{ (1 / n) ~ n.a.b ~ n[0][1] }}", {})
    with pytest.raises(BadRequest, match="refuses these messages"):
        template.render(MESSAGES, Rendering({"n": value}))


def test_what_a_template_gets_from_us_is_no_name_for_a_request() -> None:
    assert set(_environment().globals) <= GIVEN


def test_a_model_without_a_template_gets_the_plain_one(tmp_path: Path) -> None:
    template = load_chat_template(tmp_path)
    assert template.is_default
    assert template.render(MESSAGES[:2]) == 'system: Be brief.\nuser: Hi <there> "you"\nassistant:'


def test_a_template_may_refuse_and_the_client_reads_why(tmp_path: Path) -> None:
    template = load_chat_template(
        folder_with(tmp_path, "{{ raise_exception('roles must alternate') }}", True)
    )
    with pytest.raises(BadRequest, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    template = load_chat_template(folder_with(tmp_path, escape, True))
    with pytest.raises(BadRequest, match="unsafe"):
        template.render(MESSAGES)


def test_a_broken_template_is_a_broken_model(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match="not valid Jinja"):
        load_chat_template(folder_with(tmp_path, "{% for %}", True))
