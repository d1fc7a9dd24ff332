"""`values.yaml`, with every setting explained, and `values.schema.json` of the platform's chart."""

from __future__ import annotations

import json
from typing import Any

import yaml
from pydantic import BaseModel
from tools.chart_values import Values

CHART = "charts/busbar"
HEADER = """\
# Settings of the Busbar platform, with their defaults.
# Generated from tools/chart_values.py by `python -m tools.generate`; do not edit. Unknown keys are refused.
"""


def values_yaml(model: BaseModel, indent: str = "") -> list[str]:
    """One section as YAML lines, each setting below a comment that describes it."""
    lines: list[str] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        key = field.alias or name
        if field.description:
            lines.append(f"{indent}# {field.description}")
        if isinstance(value, BaseModel):
            lines += [f"{indent}{key}:", *values_yaml(value, indent + "  ")]
        else:
            plain = value.value if hasattr(value, "value") else value
            text = yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
            lines.append(f"{indent}{key}: {text}")
        if not indent:
            lines.append("")
    return lines


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that Helm checks values against."""
    generated = Values.model_json_schema(by_alias=True)
    generated["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    generated["title"] = "Values of charts/busbar"
    # Helm itself adds `global` to the values of every chart.
    generated["properties"]["global"] = {"type": "object"}
    return generated


def generate() -> dict[str, str]:
    """Both files."""
    return {
        f"{CHART}/values.yaml": HEADER + "\n" + "\n".join(values_yaml(Values())).rstrip() + "\n",
        f"{CHART}/values.schema.json": json.dumps(schema(), indent=2, ensure_ascii=False) + "\n",
    }
