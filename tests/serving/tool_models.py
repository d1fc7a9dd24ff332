"""Tiny models whose chat templates know tools, each in one family's format."""

from __future__ import annotations

from pathlib import Path

from tests.serving.models import make_tokenizer, save_model

HERMES = """{%- if tools %}system: tools:
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}assistant: """
LLAMA = """{%- if tools %}Environment: ipython
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Respond with {"name": ..., {{ '"parameters"' }}: ...}
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}
{% endfor %}assistant: """
MISTRAL = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}
{% endfor %}"""
MISTRAL_ARGS = MISTRAL.replace("[TOOL_CALLS]{{ m.tool_calls | tojson }}", "[TOOL_CALLS]f[ARGS]{}")
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral-args": MISTRAL_ARGS}


def save_tool_model(folder: Path, form: str) -> Path:
    """A model of the format; Mistral's marks are special tokens, as in its own tokenizers."""
    save_model(folder, vocab_size=400, max_position_embeddings=2048)
    if form.startswith("mistral"):
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[form])
    return folder
